"""The 8-bit codes of counts: nearest, ascending, within the stated error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.search.count_codes import MAX_COUNT_ERROR, NUM_CODES, code_counts, decode_counts, encode_counts

LARGEST = 6_241_639_607


def nearest(count: int) -> int:
    """Code of the nearest count, by looking at all of them."""
    return min(range(NUM_CODES), key=lambda code: abs(int(code_counts()[code]) - count))


def test_table():
    table = code_counts()
    assert table.shape == (256,) and table.dtype == np.int64
    assert table[:24].tolist() == list(range(24)) and table[24] == 26 and table[-1] == LARGEST > 2**32
    gaps = np.diff(table)
    assert (gaps % 2 == 1).all() and (np.diff(gaps) >= 0).all()
    np.testing.assert_array_equal(encode_counts(table), np.arange(256))
    np.testing.assert_array_equal(decode_counts(np.arange(256, dtype=np.uint8)), table)


def test_every_count_up_to_a_million_and_the_worst_of_every_gap():
    """The error peaks at the two counts in the middle of a gap, and the bound is reached, so it is the least one."""
    table = code_counts()
    middle = table[:-1] + np.diff(table) // 2
    counts = np.concatenate([np.arange(1, 10**6), middle[middle > 0], middle + 1])
    decoded = decode_counts(encode_counts(counts))
    errors = np.abs(decoded - counts) / counts
    assert errors.max() == MAX_COUNT_ERROR
    assert not errors[counts < 24].any()
    assert (np.diff(decoded[: 10**6 - 1]) >= 0).all()


@given(st.integers(0, 2**63 - 1))
def test_nearest_code_at_any_size(count):
    code = encode_counts(np.array([count]))[0]
    assert code == nearest(count)
    if 0 < count <= LARGEST:
        assert abs(int(decode_counts(code)) - count) <= MAX_COUNT_ERROR * count


def test_counts_over_the_largest_get_the_last_code():
    assert encode_counts(np.array([LARGEST, LARGEST + 1, 2**40, 2**63 - 1])).tolist() == [255] * 4
    assert encode_counts(np.array([2**64 - 1], np.uint64)).tolist() == [255]


def test_shapes_and_refusal():
    assert encode_counts(np.zeros((2, 3), np.uint16)).shape == (2, 3)
    assert encode_counts(np.zeros(0, np.int64)).dtype == np.uint8
    with pytest.raises(ValueError, match="counts holds -1"):
        encode_counts(np.array([3, -1]))
