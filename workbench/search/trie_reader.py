"""Reading tries larger than memory level by level, in chunks.

Files are read with ordinary reads instead of memory maps, so that what a conversion holds in memory is what its
arrays take, whatever the operating system does with mapped pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from workbench.search._jit import CODE_BITS
from workbench.search.count_codes import NUM_CODES, decode_counts
from workbench.search.ngram_count import Level
from workbench.search.trie_format import TrieHeader, read_header


class TrieReader:
    """Reads a trie in chunks and checks what it reads, so that a damaged file ends in an error.

    Args:
        header: of the trie.
        read: gives entries low..high-1 of array number i of the file.
        name: what errors call it.
    """

    def __init__(self, header: TrieHeader, read: Callable[[int, int, int], np.ndarray], name: str) -> None:
        self.header = header
        self.name = name
        self._read = read
        self._overflow = tuple(read(i, 0, header.num_overflow) for i in (3, 4))

    @classmethod
    @contextmanager
    def open(cls, path: str | Path, allow_quantised: bool = False) -> Iterator[TrieReader]:
        """Reads a saved trie.

        Args:
            path: the file.
            allow_quantised: inexact counts will do. What is made of a trie would else look as if they were exact.

        Raises:
            ValueError: the file is foreign, newer, truncated, or its header is damaged, or its counts are inexact.
        """
        path = Path(path)
        header = read_header(path)
        if header.quantised and not allow_quantised:
            raise ValueError(f"trie file {path}: counts are quantised, allowed: a trie with exact counts")
        places, _ = header.layout()
        with path.open("rb", buffering=0) as file:

            def read(index: int, low: int, high: int) -> np.ndarray:
                dtype, _, offset = places[index]
                file.seek(offset + low * dtype.itemsize)
                return np.fromfile(file, dtype, high - low)

            yield cls(header, read, f"trie file {path}")

    def tokens(self, low: int, high: int) -> np.ndarray:
        """Tokens of nodes low..high-1, int64.

        Raises:
            ValueError: one is out of range.
        """
        tokens = self._read(0, low, high).astype(np.int64)
        if self.header.quantised:
            tokens >>= CODE_BITS
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.header.vocab_size))
        if bad.size:
            raise self._damaged("token", low + bad[0], tokens[bad[0]], f"0..{self.header.vocab_size - 1}")
        return tokens

    def counts(self, low: int, high: int) -> np.ndarray:
        """Counts of nodes low..high-1, int64; exact, or what their codes stand for.

        Raises:
            ValueError: one is 0 or beyond 2^63 - 1.
        """
        counts = self._stored_counts(low, high)
        bad = np.flatnonzero(counts < 1)
        if bad.size:
            raise self._damaged("count", low + bad[0], counts[bad[0]], "1 or more")
        return counts

    def _stored_counts(self, low: int, high: int) -> np.ndarray:
        if self.header.quantised:
            return decode_counts(self._read(0, low, high) % NUM_CODES)
        counts = self._read(1, low, high).astype(np.int64)
        nodes, large = self._overflow
        first, last = np.searchsorted(nodes, [low, high])
        inside = nodes[first:last].astype(np.int64) - low
        if ((inside < 0) | (inside >= high - low)).any():
            raise ValueError(f"{self.name}: overflow_nodes are not ascending: the file is damaged")
        counts[inside] = large[first:last].astype(np.int64)
        return counts

    def starts(self, level: int, low: int, high: int) -> np.ndarray:
        """Where the children of nodes low..high-1 of `level` (1 = n-grams of one token) begin, and the last ones end.

        Args:
            level: 1..order - 1.
            low: index within the level.
            high: likewise.

        Returns:
            [high - low + 1] int64 node numbers.

        Raises:
            ValueError: they are not ascending, or leave the level below.
        """
        sizes = self.header.level_sizes
        first, below = sum(sizes[: level - 1]), sum(sizes[:level])
        starts = self._read(2, first + low, first + high + 1).astype(np.int64)
        begin, end = below, below + sizes[level]
        right = starts[0] == begin if low == 0 else starts[0] >= begin
        right = right and (starts[-1] == end if high == sizes[level - 1] else starts[-1] <= end)
        if not right or (np.diff(starts) < 0).any():
            raise ValueError(
                f"{self.name}: starts of nodes {first + low}..{first + high} are not ascending within {begin}..{end}: "
                "the file is damaged"
            )
        return starts

    def chunks(self, level: int, size: int) -> Iterator[Level]:
        """The n-grams of length `level` in trie order, up to `size` at a time.

        Raises:
            ValueError: the file is damaged.
        """
        last = (-1, -1)
        for low, high, parents in self._ranges(level, size):
            chunk = self._chunk(low, high, parents)
            if chunk.parents[0] == last[0] and chunk.tokens[0] <= last[1]:
                raise self._damaged("token", low, chunk.tokens[0], f"over its sibling's {last[1]}")
            last = (chunk.parents[-1], chunk.tokens[-1])
            yield chunk

    def _ranges(self, level: int, size: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """Node numbers low and high, and the parents of the nodes, of up to `size` nodes at a time."""
        if level == 1:
            for low in range(0, self.header.level_sizes[0], size):
                high = min(low + size, self.header.level_sizes[0])
                yield low, high, np.zeros(high - low, np.int64)
            return
        above = self.header.level_sizes[level - 2]
        for parent in range(0, above, size):
            starts = self.starts(level - 1, parent, min(parent + size, above))
            for low in range(int(starts[0]), int(starts[-1]), size):
                high = min(low + size, int(starts[-1]))
                yield low, high, parent + np.searchsorted(starts, np.arange(low, high), side="right") - 1

    def _chunk(self, low: int, high: int, parents: np.ndarray) -> Level:
        tokens = self.tokens(low, high)
        same = parents[1:] == parents[:-1]
        bad = np.flatnonzero(same & (tokens[1:] <= tokens[:-1]))
        if bad.size:
            place = bad[0] + 1
            raise self._damaged("token", low + place, tokens[place], f"over its sibling's {tokens[place - 1]}")
        return Level(tokens, self.counts(low, high), parents)

    def _damaged(self, field: str, node: int, value: int, allowed: str) -> ValueError:
        return ValueError(f"{self.name}: {field} of node {node} is {value}, allowed {allowed}: the file is damaged")
