"""Coverage and counts of a trie against direct counting."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from workbench.measure.trie_quality import backoff_rows, level_rows, positions_of
from workbench.search.trie import NgramTrie


@pytest.fixture
def opened(tmp_path):
    def make(sequences, quantised=False, **options):
        path = tmp_path / "a.trie"
        trie = NgramTrie.count(sequences, **options)
        (trie.quantise() if quantised else trie).save(path)
        return NgramTrie.open(path)

    return make


def test_levels_equal_a_dict_of_counts(opened, monkeypatch):
    monkeypatch.setattr("workbench.measure.trie_quality._CHUNK", 7)
    rng = np.random.default_rng(0)
    sequences = [(rng.zipf(1.5, size) % 9).tolist() for size in (40, 1, 90, 0, 33)] + [[3] * 12]
    for row in level_rows(opened(sequences, order=3)):
        n = row["length"]
        counts = Counter(tuple(s[i : i + n]) for s in sequences for i in range(len(s) - n + 1))
        assert row["ngrams"] == len(counts) and row["occurrences"] == sum(counts.values())
        assert row["singletons"] == pytest.approx(sum(c == 1 for c in counts.values()) / len(counts))
        assert row["ten_or_more"] == pytest.approx(sum(c >= 10 for c in counts.values()) / len(counts))
        assert row["mean_count"] == pytest.approx(sum(counts.values()) / len(counts))


def test_levels_of_a_quantised_or_empty_trie(opened):
    assert level_rows(opened([[1, 2, 1]], quantised=True, order=2))[0]["occurrences"] == 3
    empty = level_rows(opened([], order=3, vocab_size=5))
    assert [(row["ngrams"], row["singletons"], row["mean_count"]) for row in empty] == [(0, 0, 0)] * 3
    with pytest.raises(ValueError, match="lies in no file"):
        level_rows(NgramTrie.count([[1, 2]], 2))


def test_backoff_by_hand():
    trie = NgramTrie.count([[1, 2, 3], [1, 2, 4], [5, 2, 3]], 3)
    # 2 behind 1: one token of context, 1/1. 3 behind (1, 2): 1/2. 9 behind (2, 3): never. 2 behind (9, 1): 1/1. 3: 1/2.
    rows = {row["matched"]: row for row in backoff_rows(trie, [np.array([1, 2, 3, 9]), np.array([9, 1, 2, 3])])}
    assert list(rows) == ["2", "1", "0", "all"]
    assert [rows[name]["positions"] for name in rows] == [2, 2, 2, 6]
    assert rows["2"]["share"] == pytest.approx(1 / 3)
    assert (rows["2"]["mean_p"], rows["1"]["mean_p"], rows["0"]["mean_p"]) == (0.5, 1.0, 0.0)
    assert rows["0"]["mean_ln_p"] == pytest.approx(math.log(1e-10))
    mean = (2 * math.log(0.5) + 2 * math.log(1e-10)) / 6
    assert rows["all"]["mean_ln_p"] == pytest.approx(mean)


def test_a_match_that_never_happens_has_no_mean():
    rows = backoff_rows(NgramTrie.count([[1, 2, 1, 2]], 2), [np.array([1, 2])])
    assert [(row["share"], row["mean_p"]) for row in rows] == [(1.0, 1.0), (0.0, None), (1.0, 1.0)]


def test_contexts_stay_inside_their_document():
    documents = [np.array([7]), np.array([], np.int32), np.array([1, 2, 3, 4]), np.array([5, 6])]
    contexts, tokens = positions_of(documents, 2, 100)
    assert tokens.tolist() == [2, 3, 4, 6]
    assert contexts.tolist() == [[-1, 1], [1, 2], [2, 3], [-1, 5]]
    assert contexts.dtype == tokens.dtype == np.int64


def test_a_limit_spreads_positions_over_the_whole_text():
    _, tokens = positions_of([np.arange(1001)], 1, 11)
    assert tokens.tolist() == [1, *(1 + np.linspace(0, 999, 11).astype(int)[1:-1]).tolist(), 1000]


@pytest.mark.parametrize("documents", [[], [np.array([1])]])
def test_a_text_without_contexts_is_refused(documents):
    with pytest.raises(ValueError, match="allowed: one with two or more"):
        positions_of(documents, 2, 5)
    with pytest.raises(ValueError, match="limit is 0"):
        positions_of([np.array([1, 2])], 2, 0)
