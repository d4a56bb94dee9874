"""Counting n-grams in memory: windows packed into integer keys, one radix sort, run lengths.

The window of `order` tokens at every position packs into a key of one to three 64-bit words (tokens are stored plus
one, zeros lie past the end of a sequence). Sorting the keys puts n-grams with a common prefix side by side, so the runs
of ever shorter prefixes are the levels of the trie, already in trie order. Corpora that do not fit into memory are
counted chunk by chunk and merged, see `count_corpus.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.search import _count_jit
from workbench.search.trie_format import MAX_ORDER, MIN_ORDER

_WORD_BITS = 64


@dataclass(frozen=True)
class Level:
    """All n-grams of one length, in trie order.

    Attributes:
        tokens: [n] integers, last token of each.
        counts: [n] int64, occurrences.
        parents: [n] integers, index of its prefix in the level above, ascending; 0 in the first level.
    """

    tokens: np.ndarray
    counts: np.ndarray
    parents: np.ndarray


@dataclass(frozen=True)
class TokenChunk:
    """Token sequences laid behind each other.

    Attributes:
        tokens: [T] int32 ids in [0, 2^31).
        bounds: [S + 1] int64, sequence s is tokens[bounds[s]:bounds[s + 1]].
        counted: [S] int64, n-grams that begin at the first counted[s] tokens are counted; what follows them is only
            there to complete the last of these. The lengths of the sequences when all are counted.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    counted: np.ndarray

    @property
    def largest(self) -> int:
        """Largest id, -1 when there is none."""
        return int(self.tokens.max(initial=-1))


def check_order(order: int, min_count: int | Sequence[int]) -> tuple[int, ...]:
    """The least number of occurrences for each length.

    Raises:
        ValueError: `order` or `min_count` is out of range.
    """
    if not MIN_ORDER <= order <= MAX_ORDER:
        raise ValueError(f"order is {order}, allowed {MIN_ORDER}..{MAX_ORDER}")
    min_counts = (min_count,) * order if np.ndim(min_count) == 0 else tuple(min_count)
    if len(min_counts) != order or min(min_counts) < 1:
        raise ValueError(f"min_count is {min_count}, allowed: an integer >= 1, or one for each length 1..{order}")
    return min_counts


def flatten(sequences: Iterable[Sequence[int] | np.ndarray], vocab_size: int | None) -> TokenChunk:
    """All sequences in one chunk; empty ones are dropped.

    Raises:
        ValueError: a sequence is not one-dimensional and integer, or an id is outside [0, vocab_size) (2^31 if None),
            or there are 2^31 tokens or more.
    """
    arrays, numbers = [], []
    for number, sequence in enumerate(sequences):
        array = np.asarray(sequence)
        if array.size == 0:
            continue
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"sequences[{number}] has {array.ndim} axes of {array.dtype}, allowed: one, of integers")
        arrays.append(array)
        numbers.append(number)
    sizes = np.array([array.size for array in arrays], np.int64)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    if bounds[-1] >= 2**31:
        raise ValueError(f"sequences hold {bounds[-1]} tokens, allowed up to {2**31 - 1} at once")
    if len({array.dtype for array in arrays}) > 1:  # signed and unsigned ones have no common integer type
        for number, array in zip(numbers, arrays, strict=True):
            check_ids(array, vocab_size, f"sequences[{number}]")
        arrays = [array.astype(np.int32) for array in arrays]
    tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.int32)
    bad = first_bad_id(tokens, vocab_size)
    if bad is not None:
        number = numbers[int(np.searchsorted(bounds, bad, side="right")) - 1]
        check_ids(tokens[bad : bad + 1], vocab_size, f"sequences[{number}]")
    return TokenChunk(tokens.astype(np.int32, copy=False), bounds, sizes)


def first_bad_id(tokens: np.ndarray, vocab_size: int | None) -> int | None:
    """Place of the first id outside [0, vocab_size) (2^31 if None), None when all are fine."""
    limit = 2**31 if vocab_size is None else vocab_size
    if tokens.size == 0 or (int(tokens.min()) >= 0 and int(tokens.max()) < limit):
        return None
    return int(np.argmax((tokens < 0) | (tokens >= limit)))


def check_ids(tokens: np.ndarray, vocab_size: int | None, where: str) -> None:
    """Raises a ValueError that names `where` and the first id outside [0, vocab_size) (2^31 if None)."""
    bad = first_bad_id(tokens, vocab_size)
    if bad is not None:
        limit = 2**31 if vocab_size is None else vocab_size
        raise ValueError(f"{where} has the id {int(tokens[bad])}, allowed 0..{limit - 1}")


def key_words(largest: int, order: int) -> tuple[int, int, int]:
    """(words, bits of a digit, digits in a word) of keys for ids up to `largest`."""
    bits = max(1, (largest + 1).bit_length())
    per = min(order, _WORD_BITS // bits)
    return -(-order // per), bits, per


def count_levels(chunk: TokenChunk, order: int) -> list[Level]:
    """Counts of all n-grams of length 1..order that begin at a counted token and lie inside one sequence.

    An n-gram counts wherever it occurs, at the end of a sequence too. Needs 4 + 16 * words bytes a token while sorting
    (see `key_words`), then 9 + 8 * words, and 16 bytes an n-gram for the result.

    Args:
        chunk: the token sequences.
        order: longest n-gram, 1..5.
    """
    words, bits, per = key_words(chunk.largest, order)
    keys = np.empty((int(chunk.counted.sum()), words), np.uint64)
    if keys.size == 0:
        return [Level(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)) for _ in range(order)]
    _count_jit.pack_keys(chunk.tokens, chunk.bounds, chunk.counted, order, bits, per, keys)
    keys = _sorted_rows(keys, bits * per)
    node, changed = np.zeros(len(keys), np.int32), np.zeros(len(keys), np.uint8)
    levels = []
    for length in range(order):
        word, digit = divmod(length, per)
        if digit == 0 and word:
            _count_jit.mark_changes(keys, word - 1, changed)
        place = (keys, changed, word, bits * (per - 1 - digit), (1 << bits) - 1)
        size = _count_jit.count_new(*place) + 1
        tokens, counts, parents = (np.empty(size, dtype) for dtype in (np.int32, np.int64, np.int32))
        _count_jit.fill_level(*place, node, tokens, counts, parents)
        levels.append(Level(tokens[1:], counts[1:], parents[1:]))
    return levels


def _sorted_rows(keys: np.ndarray, used_bits: int) -> np.ndarray:
    """The rows of keys [n, words] in ascending order; `keys` itself is used up."""
    digits = -(-used_bits // _count_jit.RADIX_BITS)
    spare = np.empty_like(keys)
    for word in range(keys.shape[1] - 1, -1, -1):
        for digit, histogram in enumerate(_count_jit.radix_histograms(keys, word, digits)):
            if histogram.max() < len(keys):  # else this digit is the same everywhere
                _count_jit.radix_pass(keys, spare, word, digit * _count_jit.RADIX_BITS, histogram)
                keys, spare = spare, keys
    return keys


def drop_rare(levels: list[Level], min_counts: Sequence[int]) -> list[Level]:
    """Keeps the n-grams of length k with at least min_counts[k-1] occurrences whose prefix is kept too.

    What stays keeps its original count: conditional probabilities of the rest do not change.
    """
    if max(min_counts) <= 1:
        return levels
    kept_levels: list[Level] = []
    new_index = np.zeros(1, np.int64)
    parent_kept = np.ones(1, bool)
    for level, least in zip(levels, min_counts, strict=True):
        keep = (level.counts >= least) & parent_kept[level.parents]
        kept_levels.append(Level(level.tokens[keep], level.counts[keep], new_index[level.parents[keep]]))
        new_index, parent_kept = np.cumsum(keep) - 1, keep
    return kept_levels
