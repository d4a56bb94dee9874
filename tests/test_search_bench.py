"""The search benchmarks: corpora, texts and figures."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.measure.generated_trie import write_generated_trie
from workbench.measure.search_bench import corpus_speed, count_speed, search_checks, source_tokens, walk_text
from workbench.search.trie import NgramTrie


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n    x")
    (tmp_path / "b.py").write_text("")
    (tmp_path / "sub" / "c.py").write_text("y = x")
    return tmp_path


def test_words_of_source_are_numbered_by_first_occurrence(folder):
    sequences, vocab_size = source_tokens(100, [folder, folder / "sub"])
    assert [ids.tolist() for ids in sequences] == [[0, 1, 2, 3, 0], [4, 1, 0]]
    assert vocab_size == 5
    assert len(source_tokens(3, [folder])[0]) == 1
    with pytest.raises(ValueError, match=r"hold \.py files"):
        source_tokens(3, [folder / "none"])


def test_the_machine_has_source_to_count():
    sequences, vocab_size = source_tokens(20_000)
    assert sum(map(len, sequences)) >= 20_000
    assert max(int(ids.max()) for ids in sequences) == vocab_size - 1


def test_figures_belong_to_what_was_counted():
    sequences = [np.array([1, 2, 1, 2]), np.array([3])]
    speed = count_speed(sequences, order=2, repeats=3)
    assert (speed["tokens"], speed["nodes"]) == (5, 5)
    assert 0 < speed["seconds"] <= speed["median_seconds"]
    assert speed["count_mtok_s"] == pytest.approx(5e-6 / speed["seconds"])
    files = corpus_speed(sequences, order=2, repeats=1, files=3)
    assert (files["tokens"], files["spilled"]) == (5, 1)
    with pytest.raises(ValueError, match="repeats is 0"):
        count_speed(sequences, repeats=0)


@pytest.mark.parametrize("quantised", [False, True])
def test_walks_stay_in_the_trie(tmp_path, quantised):
    write_generated_trie(tmp_path / "a", 0.3, 2_000, quantised=quantised)
    trie = NgramTrie.open(tmp_path / "a")
    text = walk_text(trie, 3_000, walk=12, seed=1)
    assert text.shape == (3_000,) and text.dtype == np.int64
    known = "".join("-x"[trie.frequency(text[i : i + 3]) > 0] for i in range(text.size - 2))
    # Only the two windows that cross from one walk into the next may be unknown.
    assert "--" in known and "---" not in known
    assert max(map(len, known.split("-"))) >= 5
    assert np.array_equal(text, walk_text(trie, 3_000, walk=12, seed=1))
    assert not np.array_equal(text, walk_text(trie, 3_000, walk=12, seed=2))


def test_walks_of_any_order_follow_the_text():
    trie = NgramTrie.count([[5, 1, 4, 2, 9, 7, 3]], order=4)
    text = walk_text(trie, 200, walk=7, seed=3).tolist()
    follows = {5: 1, 1: 4, 4: 2, 2: 9, 9: 7, 7: 3}
    ends = [place for place, token in enumerate(text[:-1]) if token == 3]
    assert ends and all(text[i + 1] == follows[text[i]] for i in range(len(text) - 1) if i not in ends)
    with pytest.raises(ValueError, match="the last one above 0"):
        walk_text(NgramTrie.count([[1, 2]], order=3), 10)


def test_checks_pick_their_rows():
    exact, quantised = {"trie": "source", "counts": "exact"}, {"trie": "source", "counts": "quantised"}
    large = {"trie": "generated", "counts": "exact"}
    rows = [
        {"table": "tree", **exact, "requests": 1, "threads": 1, "ms": 0.19},
        {"table": "tree", **exact, "requests": 8, "threads": 1, "ms": 9.0},
        {"table": "tree", **quantised, "requests": 1, "threads": 1, "ms": 9.0},
        {"table": "tree", **large, "requests": 1, "threads": 1, "ms": 0.5},
        {"table": "query", **exact, "what": "batch", "us": 0.8},
        {"table": "query", **exact, "what": "small batch", "us": 0.71},
        {"table": "query", **exact, "what": "one a call", "us": 9.0},
        {"table": "count", "what": "memory", "count_mtok_s": 21.0},
        {"table": "count", "what": "files", "count_mtok_s": 1.0},
        {"table": "size", **exact, "bytes_per_node": 7.0},
        {"table": "size", **large, "bytes_per_node": 8.0},
        {"table": "size", **quantised, "bytes_per_node": 5.0},
        {"table": "open", **exact, "ms": 0.1},
        {"table": "open", **large, "ms": 60.0},
    ]
    checks = search_checks(rows)
    assert {name: (check.value, check.ok) for name, check in checks.items()} == {
        "tree_ms": (0.19, True),
        "query_us": (0.71, False),
        "query_us_spread": (0.8, None),
        "count_mtok_s": (21.0, True),
        "bytes_per_node": (8.0, True),
        "bytes_per_node_quantised": (5.0, True),
        "open_ms": (60.0, False),
        "tree_ms_large": (0.5, None),
        "query_us_large": (None, None),
    }
    assert all(check.value is None and not check.ok for check in search_checks([]).values())
