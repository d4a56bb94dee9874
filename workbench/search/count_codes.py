"""Counts as codes of 8 bits, for quantised tries.

A code stands for one count. Codes 0..23 stand for themselves, so these counts are exact; from there on neighbouring
codes lie ever further apart, by about a twelfth of their count, as far as a relative error of 1/24 allows. Code 255
stands for 6,241,639,607 (over 2^32), and for every larger count too: only beyond that the error is unbounded. A larger
count never gets a smaller code, so an n-gram's count stays at most that of its prefix. The ratio of two counts, and
hence a probability, is off by a factor of at most (1 + 1/24) / (1 - 1/24) = 25/23.
"""

from __future__ import annotations

import numpy as np

NUM_CODES = 256
#: A decoded count differs from the exact one by at most this share of the exact one (up to the largest count).
MAX_COUNT_ERROR = 1 / 24

# With count v of a code, h = v // 23 is the largest h for which v + h, taken for v, is wrong by at most 1/24 of itself.
_ERROR_STEP = 23


def code_counts() -> np.ndarray:
    """[256] int64, the count that each code stands for, ascending; code 0 stands for 0."""
    counts = [0]
    while len(counts) < NUM_CODES:
        counts.append(counts[-1] + 1 + 2 * (counts[-1] // _ERROR_STEP))
    return np.array(counts, np.int64)


def encode_counts(counts: np.ndarray) -> np.ndarray:
    """The codes whose counts are nearest.

    Args:
        counts: integers of any shape, at least 0; those over the largest code's count get that code.

    Returns:
        uint8, same shape. No two codes are equally near: neighbours are an odd number apart.

    Raises:
        ValueError: a count is negative.
    """
    if counts.size and counts.min() < 0:
        raise ValueError(f"counts holds {counts.min()}, allowed 0 or more")
    stands_for = code_counts()
    least = stands_for[1:] - np.diff(stands_for) // 2  # least count that is nearer to code 1.. than to the one before
    return np.searchsorted(least, counts, side="right").astype(np.uint8)


def decode_counts(codes: np.ndarray) -> np.ndarray:
    """The counts, int64, that codes (uint8, any shape) stand for."""
    return code_counts()[codes]
