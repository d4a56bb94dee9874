"""Merging saved tries and thresholding them: equal to counting, byte for byte, and damaged files are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_search import count_ngrams

from workbench.search.trie import NgramTrie
from workbench.search.trie_format import HEADER_BYTES
from workbench.search.trie_merge import merge_tries, threshold_trie

corpora = st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("merge")


def saved(path: Path, *args, **options) -> Path:
    NgramTrie.count(*args, **options).save(path)
    return path


@settings(max_examples=60, deadline=None)
@given(st.lists(corpora, min_size=1, max_size=4), st.integers(2, 5), st.integers(1, 9))
def test_merging_equals_counting_everything(folder, parts, order, chunk):
    paths = [saved(folder / str(i), part, order, fingerprint="f") for i, part in enumerate(parts)]
    header = merge_tries(paths, folder / "merged", chunk=chunk)
    everything = [sequence for part in parts for sequence in part]
    expected = saved(folder / "expected", everything, order, fingerprint="f")
    assert (folder / "merged").read_bytes() == expected.read_bytes()
    counts = sum((count_ngrams(part, order) for part in parts), Counter())
    trie = NgramTrie.open(folder / "merged", verify=True)
    assert trie.header == header and trie.num_nodes == len(counts)
    assert all(trie.frequency(gram) == count for gram, count in counts.items())
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@settings(max_examples=60, deadline=None)
@given(corpora, st.integers(2, 5), st.data(), st.integers(1, 9))
def test_threshold_equals_counting_with_it(folder, corpus, order, data, chunk):
    least = data.draw(st.one_of(st.integers(1, 4), st.tuples(*[st.integers(1, 4)] * order)))
    full = saved(folder / "full", corpus, order)
    expected = saved(folder / "expected", corpus, order, min_count=least)
    threshold_trie(full, folder / "kept", least, chunk=chunk)
    assert (folder / "kept").read_bytes() == expected.read_bytes()


def test_large_counts_are_added_exactly_and_a_file_may_be_replaced(folder):
    part = [np.zeros(40_000, np.int64), [0, 1] * 3]
    first, second = saved(folder / "first", part), saved(folder / "second", part)
    expected = saved(folder / "expected", part * 3)
    merge_tries([first, second, second], first)
    assert first.read_bytes() == expected.read_bytes()
    trie = NgramTrie.open(first)
    assert trie.frequency([0]) == 3 * 40_003 and trie.frequency([0, 0]) == 3 * 39_999
    threshold_trie(first, first, 100)
    assert NgramTrie.open(first).info()["nodes_per_level"] == [1, 1, 1]
    assert NgramTrie.open(first).frequency([0, 0, 0]) == 3 * 39_998


def test_what_does_not_fit_together_is_refused(folder):
    first = saved(folder / "first", [[1, 2, 3]], fingerprint="a")
    kept = first.read_bytes()
    for options, message in (
        ({"order": 2, "fingerprint": "a"}, r"other: order is 2, allowed 3 as in trie file .*first"),
        ({"fingerprint": "b"}, r"other: fingerprint is 'b', allowed 'a'"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_tries([first, saved(folder / "other", [[1]], **options)], first)
    with pytest.raises(ValueError, match="paths has 0 entries"):
        merge_tries([], first)
    with pytest.raises(ValueError, match="chunk is 0"):
        merge_tries([first], first, chunk=0)
    with pytest.raises(ValueError, match="chunk is 0"):
        threshold_trie(first, first, 2, chunk=0)
    for least in (0, (1, 2), (1, 1, 0)):
        with pytest.raises(ValueError, match="min_count is"):
            threshold_trie(first, first, least)
    assert first.read_bytes() == kept


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_siblings_out_of_order_are_refused_in_and_across_chunks(folder, chunk):
    path = saved(folder / "good", [[1, 2], [1, 3], [1, 4]], order=2)
    trie = NgramTrie.open(path)
    offset = trie.header.layout()[0][0][2]
    data = bytearray(path.read_bytes())
    data[offset + 2 * 4 : offset + 2 * 7] = np.array([2, 4, 3], "<u2").tobytes()
    (folder / "swapped").write_bytes(data)
    with pytest.raises(ValueError, match="swapped: token of node 6 is 3, allowed over its sibling's 4"):
        merge_tries([folder / "swapped"], folder / "out", chunk=chunk)


HOSTILE = """
import sys
from pathlib import Path
import numpy as np
from workbench.search.trie import NgramTrie
from workbench.search.trie_format import HEADER_BYTES
from workbench.search.trie_merge import merge_tries, threshold_trie

folder = Path(sys.argv[1])
good = np.fromfile(folder / "good", np.uint8)
rng = np.random.default_rng(0)
refused = 0
for trial in range(150):
    bad = good.copy()
    tail = bad[HEADER_BYTES:]
    if trial % 2:
        where = rng.random(tail.size) < (0.01, 0.2, 1.0)[trial % 3]
        tail[where] = rng.integers(0, 256, where.sum())
    else:
        tail[trial * 7919 % tail.size] ^= 1 << trial % 8
    bad.tofile(folder / "bad")
    for work in (
        lambda: merge_tries([folder / "good", folder / "bad"], folder / "out", chunk=1 + trial % 40),
        lambda: threshold_trie(folder / "bad", folder / "out", 2, chunk=1 + trial % 40),
    ):
        try:
            work()
            NgramTrie.open(folder / "out", verify=True)
        except ValueError as error:
            refused += 1
            assert "bad" in str(error), error
    try:
        NgramTrie.open(folder / "bad").export_dart(folder / "published")
        NgramTrie.import_dart(folder / "published", folder / "out", memory_mb=64)
    except ValueError as error:
        assert "bad" in str(error), error
print(refused)
"""


def test_damaged_files_never_crash(folder):
    """What slips through is only what a checksum could tell: tokens and counts that are possible."""
    rng = np.random.default_rng(5)
    saved(folder / "good", [rng.integers(0, 9, 60) for _ in range(5)] + [np.zeros(66_000, np.int64)])
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, str(folder)], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150
    assert (folder / "good").stat().st_size > HEADER_BYTES
