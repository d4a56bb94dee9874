"""Inputs of search benchmarks: shapes, what the candidates are, and how steep their probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.measure.search_cases import search_cases
from workbench.search.trie import NgramTrie


@pytest.fixture(scope="module")
def text():
    rng = np.random.default_rng(1)
    return (rng.zipf(1.3, 30_000) % 500).astype(np.int32)


@pytest.fixture(scope="module")
def trie(text):
    return NgramTrie.count([text[:25_000]], 3, vocab_size=600)


def test_candidates_stand_at_places_of_the_text(trie, text):
    held_out = text[25_000:]
    cases = search_cases(trie, held_out, 300, levels=4, width=20, seed=3)
    assert [array.shape for array in cases] == [(300, 2), (300, 4, 20), (300, 4, 20)]
    assert [array.dtype for array in cases] == [np.int64, np.int64, np.float32]
    assert all(len(set(row)) == 20 for row in cases.ids.reshape(-1, 20).tolist())
    windows = np.lib.stride_tricks.sliding_window_view(held_out, 6)
    for context, levels in zip(cases.contexts, cases.ids, strict=True):
        followed = windows[(windows[:, :2] == context).all(axis=1)][:, 2:]
        assert any(all(t in level for t, level in zip(row, levels, strict=True)) for row in followed)


def test_likely_continuations_are_among_the_candidates(trie, text):
    cases = search_cases(trie, text, 100, levels=1, width=25)
    for context, (candidates,) in zip(cases.contexts, cases.ids, strict=True):
        assert set(trie.continuations(context[-1:], 12)[0].tolist()) <= set(candidates.tolist())


def test_probabilities_fall_and_tell_how_often_the_true_token_is_where(trie, text):
    constant = np.full(3_000, 7, np.int32)  # every true token is 7
    cases = search_cases(trie, constant, 2_000, levels=3)
    assert (np.diff(cases.probs, axis=2) <= 0).all() and (cases.probs > 0).all()
    np.testing.assert_allclose(cases.probs.sum(axis=2), 1, rtol=1e-5)
    first = cases.probs[:, :, 0].mean(axis=0)
    assert 0.65 < first[0] < 0.8 and (np.diff(first) < -0.05).all()
    hits = (cases.ids == 7).mean(axis=0)
    np.testing.assert_allclose(hits.sum(axis=1), 1)
    np.testing.assert_allclose(hits, cases.probs.mean(axis=0), atol=0.04)


def test_the_seed_decides(trie, text):
    one, same, other = (search_cases(trie, text, 5, seed=seed) for seed in (4, 4, 5))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert (one.ids != other.ids).any() and (one.contexts != other.contexts).any()


def test_shortest_text_and_smallest_vocabulary():
    trie = NgramTrie.count([[0, 1, 2, 0, 1]], 3)
    cases = search_cases(trie, np.array([0, 1, 2, 0]), 9, levels=2, width=3)
    assert (cases.contexts == [0, 1]).all()
    assert (np.sort(cases.ids, axis=2) == [0, 1, 2]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_cases": 0}, "num_cases is 0, allowed 1"),
        ({"levels": 65}, "levels is 65, allowed 1..64"),
        ({"width": 601}, "width is 601, allowed 1..600"),
        ({"tokens": np.arange(8)}, "allowed: one axis of 9 integers or more"),
        ({"tokens": np.zeros(50)}, "tokens are float64"),
        ({"tokens": np.arange(50) - 1}, r"tokens are -1\.\.48, allowed 0\.\.599"),
        ({"tokens": np.arange(601)}, r"tokens are 0\.\.600, allowed 0\.\.599"),
    ],
)
def test_wrong_arguments_are_refused(trie, text, change, message):
    with pytest.raises(ValueError, match=message):
        search_cases(trie, **({"tokens": text, "num_cases": 2} | change))
