"""Merging saved tries and dropping rare n-grams from a saved one, in memory that does not depend on their size.

Both read level by level in trie order. New indices of a level's nodes ascend with the old ones, so they are written to
a temporary file and read along with the parents of the next level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from workbench.search.ngram_count import Level
from workbench.search.trie_format import TrieHeader
from workbench.search.trie_reader import TrieReader
from workbench.search.trie_stream import Spill, TrieWriter, spill_folder

_CHUNK = 1 << 18
_DROPPED = 2**32 - 1
_TOKEN_BITS = np.uint64(32)


def merge_tries(
    paths: Sequence[str | Path],
    out_path: str | Path,
    folder: str | Path | None = None,
    chunk: int = _CHUNK,
    progress: bool = False,
) -> TrieHeader:
    """Adds up saved tries; of complete ones that gives, byte for byte, what counting all their sequences gives.

    Args:
        paths: one or more files; orders and fingerprints must be equal. The largest vocabulary counts.
        out_path: trie file to write; may be one of `paths`.
        folder: where temporary files go, about as large as the result; beside `out_path` when None.
        chunk: n-grams of each trie that are in memory at once, about 200 bytes each.
        progress: show a bar.

    Returns:
        The header of the written file.

    Raises:
        ValueError: the tries do not fit together, or a file is damaged.
    """
    if not paths:
        raise ValueError("paths has 0 entries, allowed 1 or more")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, allowed 1 or more")
    out_path = Path(out_path)
    with ExitStack() as stack:
        readers = [stack.enter_context(TrieReader.open(path)) for path in paths]
        first = readers[0].header
        for reader in readers[1:]:
            for field in ("order", "fingerprint"):
                value, allowed = getattr(reader.header, field), getattr(first, field)
                if value != allowed:
                    raise ValueError(
                        f"{reader.name}: {field} is {value!r}, allowed {allowed!r} as in {readers[0].name}"
                    )
        spills = stack.enter_context(spill_folder(out_path, folder))
        writer = TrieWriter(spills, first.order, max(r.header.vocab_size for r in readers), first.fingerprint)
        above: list[Spill | None] = [None] * len(readers)
        for level in tqdm(range(1, first.order + 1), desc="merge", unit="level", disable=not progress):
            below = [spills.new("<u4") if level < first.order else None for _ in readers]
            runs = [_keyed(reader, level, old, chunk) for reader, old in zip(readers, above, strict=True)]
            _merge_level(runs, below, writer)
            writer.end_level()
            for spill in above:
                if spill is not None:
                    spill.drop()
            above = below
        return writer.finish(out_path, sum(reader.header.total_tokens for reader in readers))


def threshold_trie(
    path: str | Path,
    out_path: str | Path,
    min_count: int | Sequence[int],
    folder: str | Path | None = None,
    chunk: int = _CHUNK,
    progress: bool = False,
) -> TrieHeader:
    """Drops rare n-grams from a saved trie. What stays keeps its original count, as in `NgramTrie.count`.

    Args:
        path: the trie.
        out_path: trie file to write; may be `path`.
        min_count: least number of occurrences that is kept, for all lengths or one for each length. An n-gram goes
            with its prefix.
        folder: where temporary files go, about as large as the result; beside `out_path` when None.
        chunk: n-grams that are in memory at once, about 200 bytes each.
        progress: show a bar.

    Returns:
        The header of the written file.

    Raises:
        ValueError: an argument is out of range, or the file is damaged.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, allowed 1 or more")
    out_path = Path(out_path)
    with TrieReader.open(path) as reader:
        header = reader.header
        least = (min_count,) * header.order if np.ndim(min_count) == 0 else tuple(min_count)
        if len(least) != header.order or min(least) < 1:
            raise ValueError(
                f"min_count is {min_count}, allowed: an integer >= 1, or one for each length 1..{header.order}"
            )
        with spill_folder(out_path, folder) as spills:
            writer = TrieWriter(spills, header.order, header.vocab_size, header.fingerprint)
            above = None
            for level in tqdm(range(1, header.order + 1), desc="threshold", unit="level", disable=not progress):
                below = spills.new("<u4")
                for part in reader.chunks(level, chunk):
                    parents = _new_parents(part.parents, above)
                    keep = (part.counts >= least[level - 1]) & (parents != _DROPPED)
                    index = writer.level_size + np.cumsum(keep) - 1
                    below.append(np.where(keep, index, _DROPPED))
                    writer.append(Level(part.tokens[keep], part.counts[keep], parents[keep]))
                writer.end_level()
                if above is not None:
                    above.drop()
                above = below
            return writer.finish(out_path, header.total_tokens)


def _new_parents(parents: np.ndarray, above: Spill | None) -> np.ndarray:
    """New indices of ascending parents, int64."""
    if above is None or not parents.size:
        return parents
    low = int(parents[0])
    return above.read(low, int(parents[-1]) + 1)[parents - low].astype(np.int64)


def _keyed(reader: TrieReader, level: int, above: Spill | None, chunk: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ascending keys (new parent, token) uint64 and counts int64 of one trie's level."""
    for part in reader.chunks(level, chunk):
        parents = _new_parents(part.parents, above).astype(np.uint64)
        yield parents << _TOKEN_BITS | part.tokens.astype(np.uint64), part.counts


def _merge_level(
    runs: list[Iterator[tuple[np.ndarray, np.ndarray]]], below: list[Spill | None], writer: TrieWriter
) -> None:
    """Merges one level; notes in `below` the new index of every old node."""
    nothing = (np.zeros(0, np.uint64), np.zeros(0, np.int64))
    heads = [next(run, nothing) for run in runs]
    while any(keys.size for keys, _ in heads):
        # Nothing up to the smallest of the last keys at hand can come later in any run.
        limit = min(keys[-1] for keys, _ in heads if keys.size)
        sizes = [int(np.searchsorted(keys, limit, side="right")) for keys, _ in heads]
        keys = np.concatenate([head[0][:size] for head, size in zip(heads, sizes, strict=True)])
        counts = np.concatenate([head[1][:size] for head, size in zip(heads, sizes, strict=True)])
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
        fresh = np.concatenate([[True], keys[1:] != keys[:-1]])
        index = np.empty(keys.size, np.int64)
        index[order] = writer.level_size + np.cumsum(fresh) - 1
        for spill, part in zip(below, np.split(index, np.cumsum(sizes)[:-1]), strict=True):
            if spill is not None:
                spill.append(part)
        unique = keys[fresh]
        parents, tokens = unique >> _TOKEN_BITS, unique & np.uint64(2**32 - 1)
        summed = np.add.reduceat(counts, np.flatnonzero(fresh))
        writer.append(Level(tokens.astype(np.int64), summed, parents.astype(np.int64)))
        for i, size in enumerate(sizes):
            rest = (heads[i][0][size:], heads[i][1][size:])
            heads[i] = rest if rest[0].size else next(runs[i], nothing)
