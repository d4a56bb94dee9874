"""Import and export of the `.trie` files that DART publishes (arXiv 2601.19278), in bounded memory.

The published file is a native dump without padding or magic number, little-endian:

    order u64, number of nodes N u64
    of every node, in the order of their numbers, 0 is the root:
        token i32, parent u64, frequency i32, number of children u64, then of every child: token i32, node u64

A parent's number is below its children's, and children come in any order. A file has 36 N + 4 bytes.

The import reads the file once. It checks every field, assigns levels, and sets the nodes of each level aside. Level by
level, nodes then get the new number of their parent, are distributed to parts that fit into memory (ranges of
parents), and every part is sorted and written. That parents list exactly the nodes that name them as parents is
compared through sums of hashes; only when these differ, further passes find the node. The export is in
`published_export.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from workbench.search import _published_jit as jit
from workbench.search.ngram_count import Level
from workbench.search.published_read import PublishedFile
from workbench.search.trie_format import MAX_VOCAB, TrieHeader
from workbench.search.trie_stream import Spill, SpillFolder, TrieWriter, spill_folder

_CHUNK = 1 << 17
# Bytes a node takes while its part is sorted: row, key, order, sorted key, and slack.
_SORT_BYTES = 64
_FIXED_BYTES = 32 << 20
_MIN_PART = 1 << 16
_MAX_PARTS = 256


def import_published(
    path: str | Path,
    out_path: str | Path,
    vocab_size: int | None = None,
    fingerprint: str = "",
    low_counts: str = "refuse",
    memory_mb: int = 4096,
    folder: str | Path | None = None,
    progress: bool = False,
) -> TrieHeader:
    """Converts a published `.trie` file. The result equals, byte for byte, what counting the same n-grams saves.

    The root's frequency may be anything, since the published builder lets it overflow and makes it negative by
    thresholding. If it can be the number of tokens counted (modulo 2^32), that is, if it is at least the sum of the
    counts of single tokens, it is taken as that; else the sum is.

    Args:
        path: the published file.
        out_path: trie file to write.
        vocab_size: ids must be below it; the largest id + 1 when None.
        fingerprint: which tokenizer the ids belong to, see `vocabulary_fingerprint`.
        low_counts: frequencies below 1, which the published builder's thresholding leaves: "refuse", or "raise" to 1.
        memory_mb: MiB for the arrays of the conversion, beside what Python and its libraries take.
        folder: where temporary files go, at order 3 about as large as `path`, at most 1.5 times that; beside
            `out_path` when None. They are gone afterwards, also on errors.
        progress: show a bar.

    Returns:
        The header of the written file.

    Raises:
        ValueError: the file is truncated, foreign or contradicts itself (the message names file, node, field, value and
            what is allowed), or memory_mb is too small for it.
    """
    if low_counts not in ("refuse", "raise"):
        raise ValueError(f"low_counts is {low_counts!r}, allowed: 'refuse', 'raise'")
    if vocab_size is not None and not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size is {vocab_size}, allowed 1..{MAX_VOCAB}")
    path, out_path = Path(path), Path(out_path)
    published = PublishedFile(path, vocab_size or MAX_VOCAB, low_counts == "raise")
    memory = memory_mb << 20
    _check_memory(path, memory, published.num_nodes * 17 // 16, [0])
    with (
        spill_folder(out_path, folder) as spills,
        tqdm(
            total=path.stat().st_size, desc=f"read {path.name}", unit="B", unit_scale=True, disable=not progress
        ) as bar,
    ):
        levels = published.split_levels(spills, memory, bar)
        bar.close()
        writer = TrieWriter(spills, published.order, vocab_size or published.largest_token + 1, fingerprint)
        placement = _Placement(published, levels, spills, writer, memory)
        total = 0
        for level in tqdm(range(1, published.order + 1), desc="sort", unit="level", disable=not progress):
            total += placement.place(level)
        return writer.finish(out_path, _total_tokens(published.root_frequency, total))


class _Placement:
    """Sorts the nodes of one level after the other into trie order."""

    def __init__(
        self, published: PublishedFile, levels: list[Spill], spills: SpillFolder, writer: TrieWriter, memory: int
    ) -> None:
        self._published, self._levels, self._spills, self._writer = published, levels, spills, writer
        sizes = [1, *(spill.size // published.row_width(i) for i, spill in enumerate(levels, 1))]
        maps = max(4 * (sizes[i] + sizes[i + 1]) for i in range(published.order - 1))
        self._most = _check_memory(published.path, memory, published.num_nodes * 17 // 16 + maps, sizes[1:])
        self._sizes = sizes
        self._new_index = np.zeros(1, np.uint32)  # by rank, of the level above the present one
        self._blocks = np.zeros(1, np.uint32)  # of the level above, see `level_blocks`
        self._cuts = np.zeros(0, np.int64)  # where in the level above a new part of the present one begins

    def place(self, level: int) -> int:
        """Writes one level, after all shorter ones; returns the sum of its counts if it is the first, else 0."""
        inner = level < self._published.order
        new_index = np.empty(self._sizes[level] if inner else 0, np.uint32)
        total, children, part, cuts = 0, 0, 0, []
        for rows in self._parts(level):
            keys = rows[:, 0].astype(np.uint64) << np.uint64(32) | rows[:, 1]
            order = np.argsort(keys)
            keys = keys[order]
            self._check_siblings(keys, level)
            for low in range(0, len(rows), _CHUNK):
                chunk, places = keys[low : low + _CHUNK], order[low : low + _CHUNK]
                first = self._writer.level_size
                if inner:
                    new_index[rows[places, 4]] = first + np.arange(len(places))
                    ends = children + np.cumsum(rows[places, 3], dtype=np.int64)
                    number = np.concatenate([[children], ends[:-1]]) // self._most
                    cuts.append(first + np.flatnonzero(np.diff(number, prepend=part)))
                    children, part = int(ends[-1]), number[-1]
                counts = rows[places, 2].astype(np.int64)
                total += int(counts.sum()) if level == 1 else 0
                parents, tokens = chunk >> np.uint64(32), chunk & np.uint64(2**32 - 1)
                self._writer.append(Level(tokens.astype(np.int64), counts, parents.astype(np.int64)))
        self._writer.end_level()
        self._new_index = new_index
        self._cuts = np.concatenate([np.zeros(0, np.int64), *cuts])
        return total

    def _parts(self, level: int) -> Iterator[np.ndarray]:
        """Rows of a level with new parents, in parts by ranges of parents."""
        spill, width = self._levels[level - 1], self._published.row_width(level)
        self._blocks = jit.level_blocks(self._published.depth, level - 1)
        if not len(self._cuts):
            rows = self._renumbered(spill, width, 0, spill.size, level)
            spill.drop()
            yield rows
            return
        parts = [self._spills.new("<u4") for _ in range(len(self._cuts) + 1)]
        for low in range(0, spill.size, _CHUNK * width):
            rows = self._renumbered(spill, width, low, min(low + _CHUNK * width, spill.size), level)
            number = np.searchsorted(self._cuts, rows[:, 0], side="right")
            order = np.argsort(number, kind="stable")
            bounds = np.searchsorted(number[order], np.arange(len(parts) + 1))
            for part, begin, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
                part.append(rows[order[begin:end]])
        spill.drop()
        for part in parts:
            rows = part.read(0, part.size).reshape(-1, width)
            part.drop()
            yield rows

    def _renumbered(self, spill: Spill, width: int, low: int, high: int, level: int) -> np.ndarray:
        rows = spill.read(low, high).reshape(-1, width)
        jit.renumber(rows[:, 0], self._published.depth, level - 1, self._blocks, self._new_index)
        return rows

    def _check_siblings(self, keys: np.ndarray, level: int) -> None:
        same = np.flatnonzero(keys[1:] == keys[:-1])
        if same.size:
            parent, token = divmod(int(keys[same[0]]), 2**32)
            rank = int(np.flatnonzero(self._new_index == parent)[0])
            block = int(np.searchsorted(self._blocks, rank, side="right")) - 1
            depth = self._published.depth[block * jit.BLOCK :]
            node = block * jit.BLOCK + int(np.flatnonzero(depth == level - 1)[rank - int(self._blocks[block])])
            raise ValueError(
                f"published trie {self._published.path}: node {node}: child_token {token} is there twice, allowed once"
            )


def _check_memory(path: Path, memory: int, arrays: int, level_sizes: list[int]) -> int:
    """How many nodes a part is cut at; it may have as many more as one node has children, at most as the root.

    Raises:
        ValueError: there is too little memory beside `arrays` bytes.
    """
    most = (memory - arrays - _FIXED_BYTES) // _SORT_BYTES - level_sizes[0]
    least = max(_MIN_PART, -(-max(level_sizes) // _MAX_PARTS))
    if most < least:
        needed = memory + (least - most) * _SORT_BYTES
        raise ValueError(f"memory_mb is {memory >> 20}, allowed for {path}: at least {-(-needed // 2**20)}")
    return most


def _total_tokens(root_frequency: int, total: int) -> int:
    """Tokens counted, from the root's frequency (32 bits, wrapped) and the sum of the counts of single tokens."""
    if root_frequency >= total or total >= 2**31:
        return total + (root_frequency - total) % 2**32
    return total
