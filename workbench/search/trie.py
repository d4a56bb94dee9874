"""N-gram trie in flat sorted arrays: built from token sequences, saved as one file, opened by memory-mapping it.

Probabilities are the per-token back-off of DART (arXiv 2601.19278): the longest suffix of the context after which a
token was seen decides, there is neither a discount nor a unigram level. The layout is described in `trie_format.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from workbench.search import _jit
from workbench.search.count_codes import MAX_COUNT_ERROR, NUM_CODES, code_counts, encode_counts
from workbench.search.ngram_count import Level, check_order, count_levels, drop_rare, flatten
from workbench.search.published_export import export_published
from workbench.search.published_trie import import_published
from workbench.search.trie_format import HEADER_BYTES, MAX_VOCAB, TrieHeader, pack_header, read_header
from workbench.search.trie_reader import TrieReader
from workbench.search.trie_stream import atomic_file

Ids = Sequence[int] | np.ndarray

_PIECE = 1 << 20


class NgramTrie:
    """Counts of n-grams of length 1..order over token ids below `vocab_size`. Immutable; safe to share by threads.

    Make one with `count` or `open`.

    Attributes:
        header: order, vocabulary, nodes of every length, tokens counted, tokenizer fingerprint.
        path: the file it is mapped from, None for one in memory.
    """

    def __init__(self, header: TrieHeader, arrays: Sequence[np.ndarray], path: Path | None = None) -> None:
        self.header = header
        self.path = path
        self._arrays = tuple(arrays)
        self._code_counts = code_counts().astype(np.float64) if header.quantised else np.empty(0)
        for array in (*self._arrays, self._code_counts):
            array.flags.writeable = False

    @classmethod
    def count(
        cls,
        sequences: Iterable[Ids],
        order: int = 3,
        min_count: int | Sequence[int] = 1,
        vocab_size: int | None = None,
        fingerprint: str = "",
    ) -> NgramTrie:
        """Counts every n-gram of length 1..order that lies inside one sequence, also those at its end.

        Args:
            sequences: token ids, one sequence each; empty ones are allowed.
            order: longest n-gram, 2..5; contexts have up to order - 1 tokens.
            min_count: least number of occurrences that is kept, for all lengths or one for each length. An n-gram goes
                with its prefix; what stays keeps its original count. With a tuple that asks less of longer n-grams, a
                kept n-gram's suffix may be gone, then back-off goes on to a shorter one.
            vocab_size: ids are below it; the largest id + 1 when None.
            fingerprint: which tokenizer the ids belong to, see `vocabulary_fingerprint`.

        Raises:
            ValueError: an argument or an id is out of range.
        """
        min_counts = check_order(order, min_count)
        chunk = flatten(sequences, vocab_size)
        levels = drop_rare(count_levels(chunk, order), min_counts)
        if vocab_size is None:
            vocab_size = max(chunk.largest, 0) + 1
        return cls._from_levels(levels, vocab_size, chunk.tokens.size, fingerprint)

    def quantise(self) -> NgramTrie:
        """The same n-grams with counts of 8 bits, wrong by at most 1/24 of themselves; see `count_codes.py`.

        A file of any size is quantised by `quantise_trie`.

        Raises:
            ValueError: the counts are quantised already, the vocabulary is over 2^24, or a mapped file is damaged.
        """
        if self.header.quantised:
            raise ValueError("counts of the trie are quantised, allowed: a trie with exact counts")
        header = replace(self.header, num_overflow=0, data_crc=0, quantised=True)
        tokens, reader = self._arrays[0].astype("<u4") << _jit.CODE_BITS, self._reader()
        for low in range(0, tokens.size, _PIECE):
            tokens[low : low + _PIECE] |= encode_counts(reader.counts(low, min(low + _PIECE, tokens.size)))
        empty = (np.empty(0, dtype) for dtype in ("<u1", "<u4", "<u8"))
        return NgramTrie(header, (tokens, next(empty), self._arrays[2], *empty))

    @classmethod
    def _from_levels(cls, levels: list[Level], vocab_size: int, total_tokens: int, fingerprint: str) -> NgramTrie:
        sizes = tuple(level.tokens.size for level in levels)
        counts = np.concatenate([level.counts for level in levels])
        overflow = np.flatnonzero(counts >= _jit.COUNT_OVERFLOW)
        header = TrieHeader(len(levels), vocab_size, sizes, overflow.size, total_tokens, fingerprint)
        num_children = [
            np.bincount(lower.parents, minlength=upper.tokens.size) for upper, lower in itertools.pairwise(levels)
        ]
        starts = sizes[0] + np.concatenate([[0], np.cumsum(np.concatenate(num_children))])
        stored = np.minimum(counts, _jit.COUNT_OVERFLOW)
        values = (np.concatenate([level.tokens for level in levels]), stored, starts, overflow, counts[overflow])
        dtypes = [dtype for dtype, _, _ in header.layout()[0]]
        return cls(header, [np.ascontiguousarray(v, dtype) for v, dtype in zip(values, dtypes, strict=True)])

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> NgramTrie:
        """Maps a saved trie; only its header is read.

        Args:
            path: a file written by `save`.
            verify: also read everything once and compare its checksum.

        Raises:
            ValueError: the file is foreign, newer, truncated or damaged.
        """
        path = Path(path)
        header = read_header(path)
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if verify and (crc := zlib.crc32(memoryview(data)[HEADER_BYTES:])) != header.data_crc:
            raise ValueError(f"trie file {path}: checksum of the arrays is {crc:#x}, allowed {header.data_crc:#x}")
        places, _ = header.layout()
        return cls(header, [np.frombuffer(data, dtype, length, offset) for dtype, length, offset in places], path)

    def save(self, path: str | Path) -> None:
        """Writes the trie as one file, atomically: an older file stays whole until the new one is complete."""
        path = Path(path)
        places, end = self.header.layout()
        body = np.zeros(end - HEADER_BYTES, np.uint8)
        for array, (dtype, length, offset) in zip(self._arrays, places, strict=True):
            start = offset - HEADER_BYTES
            body[start : start + length * dtype.itemsize] = array.view(np.uint8)
        header = replace(self.header, data_crc=zlib.crc32(body))
        with atomic_file(path) as file:
            file.write(pack_header(header))
            file.write(body)

    @classmethod
    def import_dart(
        cls,
        path: str | Path,
        out_path: str | Path,
        vocab_size: int | None = None,
        fingerprint: str = "",
        low_counts: str = "refuse",
        memory_mb: int = 4096,
        folder: str | Path | None = None,
        progress: bool = False,
    ) -> NgramTrie:
        """Converts a `.trie` file as DART publishes it and opens the result; see `import_published`."""
        import_published(path, out_path, vocab_size, fingerprint, low_counts, memory_mb, folder, progress)
        return cls.open(out_path)

    def export_dart(self, path: str | Path, progress: bool = False) -> None:
        """Writes a `.trie` file as DART publishes it; see `export_published`. Codes become what they stand for."""
        if self.path is not None:
            with TrieReader.open(self.path, allow_quantised=True) as reader:
                export_published(reader, path, progress)
        else:
            export_published(self._reader(), path, progress)

    def _reader(self) -> TrieReader:
        name = "trie" if self.path is None else f"trie file {self.path}"
        return TrieReader(self.header, lambda i, low, high: self._arrays[i][low:high], name)

    @property
    def order(self) -> int:
        """Longest n-gram."""
        return self.header.order

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.header.vocab_size

    @property
    def num_nodes(self) -> int:
        """Stored n-grams of all lengths."""
        return self.header.num_nodes

    @property
    def fingerprint(self) -> str:
        """Which tokenizer the ids belong to, "" when unknown."""
        return self.header.fingerprint

    def arrays(self) -> tuple:
        """What compiled code takes.

        Tokens, counts, starts, overflow nodes and counts, nodes of level 1, order - 1, counts that codes stand for.
        """
        return (*self._arrays, self.header.level_sizes[0], self.order - 1, self._code_counts)

    def probability(self, context: Ids, tokens: Ids) -> tuple[np.ndarray, np.ndarray]:
        """P(token | context) with back-off for each token.

        Args:
            context: ids before the tokens; the last order - 1 of them count.
            tokens: [K] ids. An id that no sequence holds, in either argument, is simply unseen.

        Returns:
            [K] float32 probabilities (0 when the token was seen after no suffix) and [K] int32 matched suffix lengths.

        Raises:
            ValueError: an argument is not one axis of integers.
        """
        context, tokens = _ids("context", context)[1 - self.order :], _ids("tokens", tokens)
        padded = np.full((1, self.order - 1), -1)
        padded[0, padded.size - context.size :] = context
        probs, lengths = self.probabilities(padded, tokens[None])
        return probs[0], lengths[0]

    def probabilities(
        self,
        contexts: np.ndarray,
        tokens: np.ndarray,
        probs: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """`probability` of many contexts, in one compiled call that does not hold the interpreter lock.

        Args:
            contexts: [Q, G] int64, G >= order - 1, right-aligned behind -1; the last order - 1 columns count.
            tokens: [Q, C] integer ids; int32 is taken as it is. Ids that no sequence holds are simply unseen.
            probs: [Q, C] float32 to write into; new when None.
            lengths: [Q, C] int32 to write into; new when None.

        Returns:
            `probs` and `lengths`.

        Raises:
            ValueError: shapes or types disagree.
        """
        width = self.order - 1
        if contexts.ndim != 2 or contexts.shape[1] < width or contexts.dtype != np.int64:
            raise ValueError(f"contexts is {contexts.dtype} {contexts.shape}, allowed: int64 [Q, {width} or more]")
        if tokens.ndim != 2 or len(tokens) != len(contexts) or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens is {tokens.dtype} {tokens.shape}, allowed: integers [{len(contexts)}, C]")
        if tokens.dtype != np.int32:
            tokens = np.where((tokens >= 0) & (tokens < MAX_VOCAB), tokens, -1).astype(np.int32)
        probs = np.empty(tokens.shape, np.float32) if probs is None else probs
        lengths = np.empty(tokens.shape, np.int32) if lengths is None else lengths
        for name, array, dtype in (("probs", probs, np.float32), ("lengths", lengths, np.int32)):
            if array.shape != tokens.shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype} {array.shape}, allowed: {np.dtype(dtype)} {tokens.shape}")
            if not array.flags.writeable:
                raise ValueError(f"{name} is read-only, allowed: an array to write into")
        _jit.query_batch(self.arrays(), contexts[:, contexts.shape[1] - width :], tokens, probs, lengths)
        return probs, lengths

    def continuations(self, context: Ids, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """The most probable tokens behind the longest suffix of `context` that has any, without back-off further on.

        Args:
            context: ids before the tokens; the last order - 1 of them count.
            limit: most tokens wanted, at least 1.

        Returns:
            [n] int64 tokens and [n] float64 probabilities, n <= limit, most probable first, the lower id on ties.
        """
        if limit < 1:
            raise ValueError(f"limit is {limit}, allowed 1 or more")
        arrays, nodes = self.arrays(), np.empty(self.order - 1, np.int64)
        _jit.suffix_nodes(arrays, _ids("context", context), nodes)
        for node in nodes[::-1]:
            low, high = _jit.children_of(arrays, node)
            if low < high:
                counts = self._counts(low, high)
                best = np.argsort(-counts, kind="stable")[:limit]
                tokens = self._arrays[0][low + best].astype(np.int64) >> _jit.shift_of(arrays)
                return tokens, counts[best] / max(_jit.count_of(arrays, node), 1)
        return np.empty(0, np.int64), np.empty(0)

    def _counts(self, low: int, high: int) -> np.ndarray:
        """Counts of nodes low..high-1, float64."""
        if self.header.quantised:
            return self._code_counts[self._arrays[0][low:high] % NUM_CODES]
        counts, arrays = self._arrays[1][low:high].astype(np.float64), self.arrays()
        for child in np.flatnonzero(counts == _jit.COUNT_OVERFLOW):
            counts[child] = _jit.count_of(arrays, low + child)
        return counts

    def frequency(self, ngram: Ids) -> int:
        """Occurrences of an n-gram (as its code says, in a quantised trie), 0 when it is not stored or empty."""
        path = _ids("ngram", ngram)
        return int(_jit.frequency(self.arrays(), path)) if path.size else 0

    def info(self) -> dict[str, object]:
        """Order, vocabulary, nodes and bytes, for tables."""
        _, file_bytes = self.header.layout()
        return {
            "order": self.order,
            "vocab_size": self.vocab_size,
            "fingerprint": self.fingerprint,
            "total_tokens": self.header.total_tokens,
            "nodes_per_level": list(self.header.level_sizes),
            "num_nodes": self.num_nodes,
            "counts": "quantised" if self.header.quantised else "exact",
            "max_count_error": MAX_COUNT_ERROR if self.header.quantised else 0.0,
            "bytes": file_bytes,
            "bytes_per_node": file_bytes / max(1, self.num_nodes),
            "path": None if self.path is None else str(self.path),
        }


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Hex sha256 of a tokenizer's token texts and ids (`tokenizer.get_vocab()`), whatever their order."""
    digest = hashlib.sha256()
    for token_id, text in sorted((token_id, text) for text, token_id in vocabulary.items()):
        digest.update(f"{token_id} {len(text)} {text}\n".encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def _ids(name: str, values: Ids) -> np.ndarray:
    """`values` as int64; ids beyond int64 wrap to negative ones, which are as unseen as they were."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} has {array.ndim} axes of {array.dtype}, allowed: one axis of integers")
    return array.astype(np.int64, copy=False)
