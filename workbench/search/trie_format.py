"""The file of an n-gram trie: a fixed header followed by five flat arrays, little-endian, nothing to parse.

A trie of order G is stored level by level (breadth first): first the distinct tokens that begin an n-gram, then the
children of each of them, and so on down to the n-grams of length G. Siblings are neighbours, ascending by token.

    tokens          [N] uint16 (vocabularies up to 65,536) or int32
    counts          [N] uint16; 65535 means that the exact count is in the overflow table
    starts          [I+1] uint32, node i < I (all levels but the last) has the children starts[i] .. starts[i+1]-1
    overflow_nodes  [E] uint32, ascending node numbers
    overflow_counts [E] uint64, their exact counts

So counts are exact whatever their size, and a leaf costs 4 or 6 bytes. A quantised trie (0 as its header's bytes a
count) has counts of 8 bits, which `count_codes.py` describes, in the low bits of its tokens:

    tokens          [N] uint32, token << 8 | code (vocabularies up to 2^24)
    starts          as above; counts, overflow_nodes and overflow_counts are empty

There a leaf costs 4 bytes, so quantising makes files smaller only for vocabularies over 65,536.

Arrays begin at multiples of 64 bytes and follow each other in this order, hence their places follow from the sizes; the
header states them all the same and `read_header` compares.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"DBTRIE\r\n"
VERSION = 1
MIN_ORDER, MAX_ORDER = 2, 5
MAX_VOCAB = 2**31
MAX_QUANTISED_VOCAB = 2**24
MAX_NODES = 2**32 - 1
FINGERPRINT_LEN = 64
ALIGNMENT = 64
ARRAY_NAMES = ("tokens", "counts", "starts", "overflow_nodes", "overflow_counts")

# magic, version, header bytes, order, bytes a token / a count (0 says quantised) / a start, 0, vocabulary, tokens
# counted, level sizes, overflow entries, array offsets, file bytes, crc32 of the arrays, fingerprint; zeros and the
# header's crc32 follow.
_FIELDS = struct.Struct(f"<8s7IQQ{MAX_ORDER}QQ5QQI{FINGERPRINT_LEN}s")
HEADER_BYTES = 256
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class TrieHeader:
    """What a trie file says about itself.

    Attributes:
        order: longest n-gram.
        vocab_size: token ids are below it.
        level_sizes: nodes of every length 1..order.
        num_overflow: counts kept in the overflow table.
        total_tokens: tokens that were counted.
        fingerprint: which tokenizer the ids belong to, "" when unknown.
        data_crc: crc32 of everything behind the header.
        quantised: counts are kept as codes of 8 bits.
    """

    order: int
    vocab_size: int
    level_sizes: tuple[int, ...]
    num_overflow: int
    total_tokens: int
    fingerprint: str
    data_crc: int = 0
    quantised: bool = False

    def __post_init__(self) -> None:
        _check("order", self.order, MIN_ORDER, MAX_ORDER)
        _check("vocab_size", self.vocab_size, 1, MAX_VOCAB)
        if self.quantised:
            _check("vocab_size of a quantised trie", self.vocab_size, 1, MAX_QUANTISED_VOCAB)
        if len(self.level_sizes) != self.order:
            raise ValueError(f"level_sizes has {len(self.level_sizes)} entries, allowed is one a length: {self.order}")
        _check("number of nodes", sum(self.level_sizes), 0, MAX_NODES)
        _check("level_sizes[0]", self.level_sizes[0], 0, self.vocab_size)
        _check("num_overflow", self.num_overflow, 0, 0 if self.quantised else sum(self.level_sizes))
        if not self.fingerprint.isascii() or len(self.fingerprint) > FINGERPRINT_LEN:
            raise ValueError(f"fingerprint {self.fingerprint!r}, allowed: up to {FINGERPRINT_LEN} ASCII characters")

    @property
    def num_nodes(self) -> int:
        """Nodes of all levels, the root not counted."""
        return sum(self.level_sizes)

    def layout(self) -> tuple[list[tuple[np.dtype, int, int]], int]:
        """(dtype, length, byte offset) of the five arrays in file order, and the size of the whole file."""
        if self.quantised:
            first_types, num_counts = ("<u4", "<u1"), 0
        else:
            first_types, num_counts = ("<u2" if self.vocab_size <= 2**16 else "<i4", "<u2"), self.num_nodes
        types = [np.dtype(t) for t in (*first_types, "<u4", "<u4", "<u8")]
        inner = self.num_nodes - self.level_sizes[-1]
        lengths = (self.num_nodes, num_counts, inner + 1, self.num_overflow, self.num_overflow)
        places, end = [], HEADER_BYTES
        for dtype, length in zip(types, lengths, strict=True):
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            places.append((dtype, length, offset))
            end = offset + length * dtype.itemsize
        return places, end

    def widths(self) -> list[int]:
        """Bytes of an entry of tokens, counts and starts as the header states them."""
        tokens, counts, starts = (dtype.itemsize for dtype, _, _ in self.layout()[0][:3])
        return [tokens, 0 if self.quantised else counts, starts]


def pack_header(header: TrieHeader) -> bytes:
    """The first 256 bytes of the file."""
    places, file_bytes = header.layout()
    sizes = [*header.level_sizes, *[0] * (MAX_ORDER - header.order)]
    offsets = [offset for _, _, offset in places]
    fields = _FIELDS.pack(
        MAGIC, VERSION, HEADER_BYTES, header.order, *header.widths(), 0, header.vocab_size, header.total_tokens, *sizes,
        header.num_overflow, *offsets, file_bytes, header.data_crc, header.fingerprint.encode(),
    )  # fmt: skip
    body = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def read_header(path: Path) -> TrieHeader:
    """Reads and checks the header and the file's size.

    Raises:
        ValueError: the file is foreign, newer, truncated or longer than it says, or a header field is damaged; the
            message names the file, the field, its value and what is allowed.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
    try:
        return _parse_header(data, file_bytes)
    except ValueError as error:
        raise ValueError(f"trie file {path}: {error}") from None


def _parse_header(data: bytes, file_bytes: int) -> TrieHeader:
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"magic is {data[: len(MAGIC)]!r}, allowed {MAGIC!r}: not an n-gram trie of this project")
    if len(data) < HEADER_BYTES:
        raise ValueError(f"file size is {file_bytes}, allowed at least {HEADER_BYTES}: truncated in the header")
    _, version, header_bytes, order, *rest = _FIELDS.unpack_from(data)
    if not 1 <= version <= VERSION:
        raise ValueError(f"version is {version}, allowed 1..{VERSION}: written by another release")
    stored_crc, crc = _CRC.unpack(data[-_CRC.size :])[0], zlib.crc32(data[: -_CRC.size])
    if stored_crc != crc:
        raise ValueError(f"header checksum is {stored_crc:#010x}, allowed {crc:#010x}: the header is damaged")
    _check("order", order, MIN_ORDER, MAX_ORDER)
    _check("header size", header_bytes, HEADER_BYTES, HEADER_BYTES)
    widths, (zero, vocab_size, total_tokens), sizes = rest[:3], rest[3:6], rest[6 : 6 + MAX_ORDER]
    num_overflow, *offsets, stated_bytes, data_crc, name = rest[6 + MAX_ORDER :]
    if zero or any(sizes[order:]) or any(data[_FIELDS.size : -_CRC.size]):
        raise ValueError("a reserved header field is not 0")
    text = name.rstrip(b"\0").decode("ascii", errors="replace")
    quantised = widths[ARRAY_NAMES.index("counts")] == 0
    header = TrieHeader(order, vocab_size, tuple(sizes[:order]), num_overflow, total_tokens, text, data_crc, quantised)
    places, expected_bytes = header.layout()
    for array, width, expected in zip(ARRAY_NAMES, widths, header.widths(), strict=False):
        _check(f"bytes of an entry of {array}", width, expected, expected)
    for array, offset, (_, _, expected) in zip(ARRAY_NAMES, offsets, places, strict=True):
        _check(f"offset of {array}", offset, expected, expected)
    _check("stated file size", stated_bytes, expected_bytes, expected_bytes)
    if file_bytes != expected_bytes:
        state = "truncated" if file_bytes < expected_bytes else "bytes were appended"
        raise ValueError(f"file size is {file_bytes}, allowed {expected_bytes}: {state}")
    return header


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, allowed {low if low == high else f'{low}..{high}'}")
