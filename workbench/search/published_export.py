"""Export to the `.trie` files that DART publishes; the format is described in `published_trie.py`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from workbench.search._published_jit import CHILD_WORDS, NODE_WORDS
from workbench.search.ngram_count import Level
from workbench.search.trie_reader import TrieReader
from workbench.search.trie_stream import atomic_file

_CHUNK = 1 << 16
_MAX_FREQUENCY = 2**31 - 1


def export_published(source: TrieReader, path: str | Path, progress: bool = False) -> None:
    """Writes a published `.trie` file, nodes numbered breadth first, in memory that does not depend on its size.

    The root gets the number of tokens counted, wrapped to 32 bits as in the published builder.

    Args:
        source: the trie.
        path: file to write, atomically: an older one stays whole until the new one is complete.
        progress: show a bar.

    Raises:
        ValueError: a count is over 2^31 - 1, which that format cannot hold, or the trie's file is damaged.
    """
    header = source.header
    with (
        atomic_file(Path(path)) as file,
        tqdm(total=header.num_nodes, desc="export", unit="node", unit_scale=True, disable=not progress) as bar,
    ):
        file.write(struct.pack("<QQ", header.order, header.num_nodes + 1))
        _write_root(source, file)
        first, above = 0, 0  # node numbers in the trie at which the level and the one above begin
        for level in range(1, header.order + 1):
            for chunk, low in _numbered(source, level):
                if chunk.counts.max() > _MAX_FREQUENCY:
                    place = int(np.argmax(chunk.counts))
                    raise ValueError(
                        f"{source.name}: count of node {first + low + place} is {chunk.counts[place]}, allowed up to "
                        f"{_MAX_FREQUENCY} in the published format"
                    )
                parents = np.zeros_like(chunk.parents) if level == 1 else 1 + above + chunk.parents
                _write_nodes(source, file, level, low, chunk.tokens, parents, chunk.counts)
                bar.update(chunk.tokens.size)
            above, first = first, first + header.level_sizes[level - 1]


def _numbered(source: TrieReader, level: int) -> Iterator[tuple[Level, int]]:
    """Chunks of a level with the index of their first node within the level."""
    low = 0
    for chunk in source.chunks(level, _CHUNK):
        yield chunk, low
        low += chunk.tokens.size


def _write_root(source: TrieReader, file: object) -> None:
    num_roots, total = source.header.level_sizes[0], source.header.total_tokens
    wrapped = (total + 2**31) % 2**32 - 2**31
    file.write(struct.pack("<iQiQ", 0, 0, wrapped, num_roots))
    for low in range(0, num_roots, _CHUNK):
        high = min(low + _CHUNK, num_roots)
        file.write(_child_words(source.tokens(low, high), low).tobytes())


def _write_nodes(
    source: TrieReader, file: object, level: int, low: int, tokens: np.ndarray, parents: np.ndarray, counts: np.ndarray
) -> None:
    """Writes nodes low.. of a level, as many at a time as have about a chunk of children."""
    size = tokens.size
    starts = np.zeros(size + 1, np.int64) if level == source.header.order else source.starts(level, low, low + size)
    begin = 0
    while begin < size:
        end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + _CHUNK, side="right")) - 1)
        part = slice(begin, end)
        file.write(_node_words(source, starts[begin : end + 1], tokens[part], parents[part], counts[part]).tobytes())
        begin = end


def _node_words(
    source: TrieReader, starts: np.ndarray, tokens: np.ndarray, parents: np.ndarray, counts: np.ndarray
) -> np.ndarray:
    """Records of nodes whose children are starts[0]..starts[-1]-1, as words of 4 bytes."""
    num_children = np.diff(starts)
    places = NODE_WORDS * np.arange(tokens.size) + CHILD_WORDS * (starts[:-1] - starts[0])
    words = np.zeros(NODE_WORDS * tokens.size + CHILD_WORDS * int(starts[-1] - starts[0]), "<u4")
    for offset, values in enumerate((tokens, parents, None, counts, num_children)):
        if values is not None:  # the upper halves of 64-bit fields stay 0: there are fewer than 2^32 nodes
            words[places + offset] = values
    if starts[-1] > starts[0]:
        inside = np.ones(words.size, bool)
        inside[(places[:, None] + np.arange(NODE_WORDS)).reshape(-1)] = False
        words[inside] = _child_words(source.tokens(int(starts[0]), int(starts[-1])), int(starts[0])).reshape(-1)
    return words


def _child_words(tokens: np.ndarray, low: int) -> np.ndarray:
    """[n, 3] entries of the lists of children for the trie's nodes low.."""
    words = np.zeros((tokens.size, CHILD_WORDS), "<u4")
    words[:, 0] = tokens
    words[:, 1] = low + 1 + np.arange(tokens.size)
    return words
