"""Times of look-ups and searches: what is looked up, what is cold, which rows come out."""

from __future__ import annotations

import os

import numpy as np
import pytest

from workbench.measure import search_times
from workbench.measure.search_cases import search_cases
from workbench.measure.search_times import forget_pages, in_memory, prune_rows, query_rows, query_us, spread_queries
from workbench.search.trie import NgramTrie


@pytest.fixture(scope="module")
def text():
    return (np.random.default_rng(2).zipf(1.3, 20_000) % 400).astype(np.int32)


@pytest.fixture(scope="module")
def trie(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("trie") / "a.trie"
    NgramTrie.count([text], 3, vocab_size=400).save(path)
    return NgramTrie.open(path)


@pytest.fixture(scope="module")
def cases(trie, text):
    return search_cases(trie, text, 70, levels=3, width=12)


def test_query_rows(trie, cases):
    rows = query_rows(trie, cases, queries=50, per_call=8, repeats=3)
    assert [(row["what"], row["state"]) for row in rows] == [("spread", "cold"), ("spread", "warm"), ("text", "warm")]
    assert [len(row["samples_us"]) for row in rows] == [6, 18, 18], "full calls only"
    for row in rows:
        assert 0 < row["median_us"] <= row["p95_us"] <= row["p99_us"] and row["empty_us"] > 0
        assert row["median_us"] == pytest.approx(np.median(row["samples_us"]), abs=1e-3)
    assert rows[1]["in_memory"] is None or rows[0]["in_memory"] <= rows[1]["in_memory"]
    assert [path.name for path in trie.path.parent.iterdir()] == ["a.trie"], "the copy is gone"
    for queries, per_call in ((7, 8), (7, 0)):
        with pytest.raises(ValueError, match="allowed: a file, 1 or more"):
            query_rows(trie, cases, queries, per_call)
    with pytest.raises(ValueError, match=r"path=None"):
        query_rows(NgramTrie.count([[1, 2]], 2), cases, 8)


def test_queries_are_looked_up_and_timed_call_by_call(monkeypatch):
    clock, seen = iter(range(0, 100, 5)), []
    monkeypatch.setattr(search_times, "perf_counter", lambda: next(clock) * 1e-6)

    class Trie:
        def probabilities(self, contexts, tokens, probs, lengths):
            assert tokens.shape == probs.shape == lengths.shape
            seen.extend(contexts[:, 0].tolist())

    contexts = np.arange(7)[:, None]
    samples = search_times.query_samples(Trie(), contexts, np.zeros((7, 4), np.int32), per_call=3)
    assert seen == [0, 1, 2, 3, 4, 5] and samples == pytest.approx([5 / 3, 5 / 3])


def test_one_large_call(trie, cases, monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 17.0, 20.0, 22.1, 30.0, 31.4])
    monkeypatch.setattr(search_times, "perf_counter", lambda: next(clock))
    assert query_us(trie, cases, repeats=3) == pytest.approx(2.1e6 / 70), "without the first pass, the median"


@pytest.mark.parametrize("order", [2, 3, 4])
def test_spread_contexts_are_ngrams_with_what_follows_them(order):
    rng = np.random.default_rng(5)
    sequences = [(rng.zipf(1.4, 300) % 30).tolist() for _ in range(3)]
    trie = NgramTrie.count(sequences, order, vocab_size=1000)
    contexts, tokens = spread_queries(trie, 200, 20, seed=1)
    assert contexts.shape == (200, order - 1) and tokens.shape == (200, 20)
    assert all(trie.frequency(context) > 0 for context in contexts)
    size = trie.header.level_sizes[order - 2]
    assert len(np.unique(contexts, axis=0)) > 0.8 * size * (1 - np.exp(-200 / size)), "not the frequent ones only"
    for context, row in zip(contexts, tokens, strict=True):
        assert set(trie.continuations(context, 12)[0].tolist()) <= set(row.tolist())
    again = spread_queries(trie, 200, 20, seed=1)
    assert (again[0] == contexts).all() and (again[1] == tokens).all()
    with pytest.raises(ValueError, match="allowed: one or more"):
        spread_queries(NgramTrie.count([], order, vocab_size=4), 5, 2)


def test_pages_are_written_first_and_then_forgotten(tmp_path, monkeypatch):
    path, told = tmp_path / "file", []
    path.write_bytes(bytes(5 * 4096 + 1))
    assert in_memory(path) in (None, 1.0)
    forget_pages(path)  # what comes of it is up to the file system
    assert in_memory(path) in (None, *(pages / 6 for pages in range(7)))
    path.read_bytes()
    assert in_memory(path) in (None, 1.0)
    monkeypatch.setattr(os, "fsync", lambda _: told.append("sync"))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *span: told.append(span), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    forget_pages(path)
    assert told == ["sync", (0, 0, 4)], "all of the file"


@pytest.mark.parametrize("with_trie", [True, False])
def test_prune_rows(trie, cases, with_trie):
    rows = prune_rows(trie if with_trie else None, cases, [5, 9], [2, 20], repeats=1)
    assert [(row["beam_width"], row["num_nodes"]) for row in rows] == [(2, 5), (2, 9), (20, 5), (20, 9)]
    assert all(0 < row["ms"] <= row["p95_ms"] and row["batch_ms"] > 0 and row["cases"] == 70 for row in rows)
    assert all(1 <= row["mean_depth"] <= 3 for row in rows)
    few = cases._replace(ids=cases.ids[:3], probs=cases.probs[:3], contexts=cases.contexts[:3])
    assert prune_rows(trie, few, [5], [2], repeats=1)[0]["batch_ms"] is None
