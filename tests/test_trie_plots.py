"""Figures of an n-gram trie, without a front end."""

import json

import numpy as np
import pytest

from workbench.show import trie_plots

LEVELS = [{"length": 1, "ngrams": 10, "singletons": 0.2}, {"length": 2, "ngrams": 50, "singletons": 0.5}]
BACKOFF = [
    {"matched": "2", "share": 0.5, "mean_p": 0.4},
    {"matched": "1", "share": 0.3, "mean_p": None},
    {"matched": "0", "share": 0.2, "mean_p": 0.0},
    {"matched": "all", "share": 1.0, "mean_p": 0.3},
]
QUERIES = [
    {"what": "spread", "state": "cold", "samples_us": [10.0, 1000.0, 100.0]},
    {"what": "spread", "state": "warm", "samples_us": [1.0, 1.0]},
    {"what": "text", "state": "warm", "samples_us": []},
]
PRUNED = [{"beam_width": beam, "num_nodes": nodes, "ms": beam * nodes / 1000} for beam in (5, 20) for nodes in (59, 10)]
WORTH = [
    {"prompt_set": name, "ngram_weight": weight, "tau": base + (weight or 0)}
    for name, base in (("maths", 3.0), ("all", 2.0))
    for weight in (None, 0.5, 0.0)
]


def test_figures_have_titles_and_are_json():
    figures = [
        trie_plots.nodes_by_length(LEVELS),
        trie_plots.backoff_shares(BACKOFF),
        trie_plots.query_histogram(QUERIES),
        trie_plots.prune_times(PRUNED, 0.2),
        trie_plots.tau_by_weight(WORTH),
    ]
    for figure in figures:
        assert figure.layout.title.text and figure.layout.yaxis.title.text and figure.data
        json.loads(figure.to_json())


def test_nodes_are_split_into_singletons_and_others():
    often, once = trie_plots.nodes_by_length(LEVELS).data
    assert list(often.y) == [8, 25] and list(once.y) == [2, 25] and list(once.text) == ["20%", "50%"]


def test_backoff_leaves_the_pooled_row_out():
    bars = trie_plots.backoff_shares(BACKOFF).data
    assert [bar.y[0] for bar in bars] == [0.5, 0.3, 0.2]
    assert bars[0].text[0] == "50.0%, mean p 0.40" and bars[1].text[0] == "30.0%"
    assert bars[2].name == "none" and bars[2].x[0] == "never seen behind it"


def test_histograms_share_their_bins_and_hold_every_sample():
    figure = trie_plots.query_histogram(QUERIES)
    cold, warm = figure.data
    assert (cold.name, warm.name) == ("spread, cold", "spread, warm") and list(cold.x) == list(warm.x)
    assert sum(cold.y) == pytest.approx(1) and max(cold.y) == pytest.approx(1 / 3) and max(warm.y) == 1
    assert cold.x[int(np.flatnonzero(cold.y)[-1])] == pytest.approx(1000, rel=0.1)
    assert [shape.x0 for shape in figure.layout.shapes] == pytest.approx([100, 1])
    assert figure.layout.xaxis.type == "log"
    with pytest.raises(ValueError, match="1 rows without samples_us"):
        trie_plots.query_histogram(QUERIES[2:])


def test_one_line_a_beam_in_order_of_size():
    figure = trie_plots.prune_times(PRUNED, 0.2)
    assert [line.name for line in figure.data] == ["beam 5", "beam 20"]
    assert list(figure.data[1].x) == [10, 59] and list(figure.data[1].y) == pytest.approx([0.2, 1.18])
    assert figure.layout.shapes[0].y0 == 0.2 and not trie_plots.prune_times(PRUNED).layout.shapes


def test_weights_beside_no_trie():
    lines = {line.name: line for line in trie_plots.tau_by_weight(WORTH).data}
    assert list(lines) == ["maths", "maths, no trie", "all", "all, no trie"]
    assert list(lines["maths"].x) == [0.0, 0.5] and list(lines["maths"].y) == [3.0, 3.5]
    assert list(lines["all, no trie"].y) == [2.0, 2.0] and list(lines["all, no trie"].x) == [0.0, 0.5]
