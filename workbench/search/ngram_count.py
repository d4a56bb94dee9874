"""Counting n-grams: windows packed into integer keys, one sort, run lengths.

With sequences laid behind each other and separated by zeros (tokens are stored plus one), the window of `order` digits
at every position packs into one 64-bit key. Sorting the keys puts n-grams with a common prefix side by side, so the
runs of ever shorter prefixes are the levels of the trie, already in trie order. When a window does not fit into 63
bits, its first digits are counted first, replaced by their rank, and the rest follows in further passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_KEY_BITS = 63


@dataclass(frozen=True)
class Level:
    """All n-grams of one length, in trie order.

    Attributes:
        tokens: [n] int64, last token of each.
        counts: [n] int64, occurrences.
        parents: [n] int64, index of its prefix in the level above, ascending; 0 in the first level.
    """

    tokens: np.ndarray
    counts: np.ndarray
    parents: np.ndarray


def flatten(sequences: Iterable[Sequence[int] | np.ndarray], vocab_size: int | None) -> list[np.ndarray]:
    """The sequences as integer arrays, empty ones dropped.

    Raises:
        ValueError: a sequence is not one-dimensional and integer, or an id is outside [0, vocab_size) (2^31 if None).
    """
    limit = 2**31 if vocab_size is None else vocab_size
    arrays = []
    for index, sequence in enumerate(sequences):
        array = np.asarray(sequence)
        if array.size == 0:
            continue
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"sequences[{index}] has {array.ndim} axes of {array.dtype}, allowed: one, of integers")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= limit:
            raise ValueError(f"sequences[{index}] has the id {low if low < 0 else high}, allowed 0..{limit - 1}")
        arrays.append(array)
    return arrays


def count_levels(sequences: Sequence[np.ndarray], order: int) -> list[Level]:
    """Counts of all n-grams of length 1..order that lie inside one sequence.

    An n-gram counts wherever it occurs, at the end of a sequence too.

    Args:
        sequences: non-empty 1-D arrays of ids in [0, 2^31).
        order: longest n-gram.

    Raises:
        ValueError: more than 2^31 tokens and separators; keys of the widest vocabulary would not fit.
    """
    digits = _separated_digits(sequences, order)
    if digits.size >= 2**31:
        raise ValueError(f"sequences hold {digits.size} tokens and separators, allowed up to {2**31 - 1} at once")
    bits = max(1, int(digits.max()).bit_length())
    size = digits.size - order
    starts = digits[:size] != 0  # windows to count; only those that are long enough stay for a next pass
    ranks = np.zeros(size, np.int64)
    num_ranks = 1
    levels: list[Level] = []
    while len(levels) < order:
        done = len(levels)
        fresh = min(order - done, (_KEY_BITS - num_ranks.bit_length()) // bits)
        keys = ranks
        for step in range(done, done + fresh):
            keys <<= bits
            keys |= digits[step : step + size]
        levels += _levels_of_keys(np.sort(keys[starts]), fresh, bits)
        if len(levels) < order:
            starts &= digits[len(levels) - 1 : len(levels) - 1 + size] != 0
            ranks = np.zeros(size, np.int64)
            ranks[starts] = np.unique(keys[starts], return_inverse=True)[1]
            num_ranks = levels[-1].tokens.size
    return levels


def drop_rare(levels: list[Level], min_counts: Sequence[int]) -> list[Level]:
    """Keeps the n-grams of length k with at least min_counts[k-1] occurrences whose prefix is kept too.

    What stays keeps its original count: conditional probabilities of the rest do not change.
    """
    kept_levels: list[Level] = []
    new_index = np.zeros(1, np.int64)
    parent_kept = np.ones(1, bool)
    for level, least in zip(levels, min_counts, strict=True):
        keep = (level.counts >= least) & parent_kept[level.parents]
        kept_levels.append(Level(level.tokens[keep], level.counts[keep], new_index[level.parents[keep]]))
        new_index, parent_kept = np.cumsum(keep) - 1, keep
    return kept_levels


def _separated_digits(sequences: Sequence[np.ndarray], order: int) -> np.ndarray:
    """All tokens plus one, int64, with `order` zeros behind every sequence and at the end."""
    digits = np.zeros(sum(array.size + order for array in sequences) + order, np.int64)
    place = 0
    for array in sequences:
        np.add(array, 1, out=digits[place : place + array.size], casting="unsafe", dtype=np.int64)
        place += array.size + order
    return digits


def _levels_of_keys(keys: np.ndarray, num_levels: int, bits: int) -> list[Level]:
    """The levels of the last `num_levels` digits of the sorted `keys`; a digit 0 lies past the end of a sequence."""
    first = _run_starts(keys)
    counts = np.diff(first, append=keys.size)
    keys = keys[first]
    runs = []  # (keys, counts) of the n-grams of every level, longest first
    for _ in range(num_levels):
        real = (keys & ((1 << bits) - 1)) != 0
        runs.append((keys[real], counts[real]))
        keys = keys >> bits
        first = _run_starts(keys)
        counts = np.add.reduceat(counts, first) if first.size else counts
        keys = keys[first]
    levels: list[Level] = []
    shorter = None
    for level_keys, level_counts in reversed(runs):
        prefixes = level_keys >> bits  # for the first of these levels: the rank of the prefix counted before
        parents = prefixes if shorter is None else np.searchsorted(shorter, prefixes)
        levels.append(Level((level_keys & ((1 << bits) - 1)) - 1, level_counts, parents))
        shorter = level_keys
    return levels


def _run_starts(keys: np.ndarray) -> np.ndarray:
    """Where each run of equal neighbours begins."""
    if keys.size == 0:
        return np.zeros(0, np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.flatnonzero(keys[1:] != keys[:-1]) + 1])
