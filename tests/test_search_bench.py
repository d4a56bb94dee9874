"""The counting benchmark: its corpus and its figures."""

from __future__ import annotations

import numpy as np
import pytest

from workbench.measure.search_bench import corpus_speed, count_speed, source_tokens


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
