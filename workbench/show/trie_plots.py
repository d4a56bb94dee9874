"""Figures of an n-gram trie: rows in, a plotly `Figure` out.

Rows are those of `measure.trie_quality`, `search_times` and `trie_ablation`; any mapping with the named fields does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.show.plots import METHOD_COLOURS, _finish

Row = Mapping[str, Any]

#: From the longest match to none.
_MATCH_COLOURS = ("#1b7fbd", "#76b7b2", "#edc948", "#f28e2b")
_NONE_COLOUR = "#bab0ac"
_SAMPLE_COLOURS = {"spread, cold": "#4e79a7", "spread, warm": "#f28e2b", "text, warm": "#59a14f"}
_LINE_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#9c755f")
_BINS = 60


def nodes_by_length(rows: Sequence[Row]) -> go.Figure:
    """Stacked bars of the distinct n-grams by length: those that occur once, and the others.

    Args:
        rows: of `level_rows`.
    """
    lengths = [str(row["length"]) for row in rows]
    once = [round(row["ngrams"] * row["singletons"]) for row in rows]
    figure = go.Figure()
    figure.add_bar(
        x=lengths,
        y=[row["ngrams"] - single for row, single in zip(rows, once, strict=True)],
        name="more often",
        marker_color=METHOD_COLOURS["dart"],
    )
    figure.add_bar(
        x=lengths,
        y=once,
        name="once",
        marker_color=_NONE_COLOUR,
        text=[f"{row['singletons']:.0%}" for row in rows],
    )
    figure.update_layout(barmode="stack")
    return _finish(figure, "N-grams of the trie", "n-gram length (tokens)", "distinct n-grams")


def backoff_shares(rows: Sequence[Row]) -> go.Figure:
    """Bars of the share of held-out tokens by the length of the context that predicts them.

    Args:
        rows: of `backoff_rows`; the pooled one is left out.
    """
    chosen = [row for row in rows if row["matched"] != "all"]
    figure = go.Figure()
    for number, row in enumerate(chosen):
        none = row["matched"] == "0"
        mean = "" if none or row["mean_p"] is None else f", mean p {row['mean_p']:.2f}"
        figure.add_bar(
            x=["never seen behind it" if none else f"{row['matched']} before"],
            y=[row["share"]],
            name="none" if none else row["matched"],
            text=[f"{row['share']:.1%}{mean}"],
            marker_color=_NONE_COLOUR if none else _MATCH_COLOURS[number % len(_MATCH_COLOURS)],
        )
    figure.update_yaxes(tickformat=".0%")
    return _finish(figure, "What predicts held-out tokens", "longest matching context", "share of tokens")


def query_histogram(rows: Sequence[Row]) -> go.Figure:
    """Histograms of the time of a look-up over a logarithmic axis, one for each kind of query; dashes: medians.

    Args:
        rows: of `query_rows`, with raw samples.

    Raises:
        ValueError: no row has samples.
    """
    samples = {f"{row['what']}, {row['state']}": np.log10(row["samples_us"]) for row in rows if row["samples_us"]}
    if not samples:
        raise ValueError(f"{len(rows)} rows without samples_us, allowed: one with samples or more")
    every = np.concatenate(list(samples.values()))
    edges = np.linspace(every.min() - 1e-3, every.max() + 1e-3, _BINS + 1)
    middles = 10 ** ((edges[1:] + edges[:-1]) / 2)
    figure = go.Figure()
    for name, logs in samples.items():
        shares = np.histogram(logs, edges)[0] / logs.size
        colour = _SAMPLE_COLOURS.get(name)
        figure.add_scatter(
            x=middles.tolist(),
            y=shares.tolist(),
            name=name,
            mode="lines",
            line={"shape": "hvh", "color": colour},
            fill="tozeroy",
        )
        figure.add_vline(x=float(10 ** np.median(logs)), line={"color": colour, "dash": "dash"})
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%")
    return _finish(figure, "Look-ups of one level's candidates", "microseconds a query (log)", "share of samples")


def prune_times(rows: Sequence[Row], goal_ms: float = 0.0) -> go.Figure:
    """Lines of the time of a search by tree size, one for each beam width.

    Args:
        rows: of `prune_rows`.
        goal_ms: a dotted line, 0 for none.
    """
    figure = go.Figure()
    for number, beam in enumerate(dict.fromkeys(row["beam_width"] for row in rows)):
        line = sorted((row["num_nodes"], row["ms"]) for row in rows if row["beam_width"] == beam)
        figure.add_scatter(
            x=[nodes for nodes, _ in line],
            y=[ms for _, ms in line],
            name=f"beam {beam}",
            mode="lines+markers",
            line={"color": _LINE_COLOURS[number % len(_LINE_COLOURS)]},
        )
    if goal_ms:
        figure.add_hline(y=goal_ms, line={"color": "#333333", "dash": "dot"}, annotation_text="goal")
    figure.update_xaxes(tickvals=sorted({row["num_nodes"] for row in rows}))
    figure.update_yaxes(rangemode="tozero")
    return _finish(figure, "Search of one request", "nodes of the tree", "milliseconds a tree (median)")


def tau_by_weight(rows: Sequence[Row]) -> go.Figure:
    """Lines of tokens per round by the weight of the n-gram term, one a prompt set; dots: without a trie.

    Args:
        rows: of `ablation_rows`.
    """
    figure = go.Figure()
    for number, name in enumerate(dict.fromkeys(row["prompt_set"] for row in rows)):
        own = [row for row in rows if row["prompt_set"] == name]
        line = sorted((r["ngram_weight"], r["tau"]) for r in own if r["ngram_weight"] is not None)
        colour = {"color": _LINE_COLOURS[number % len(_LINE_COLOURS)]}
        weights = [weight for weight, _ in line]
        figure.add_scatter(x=weights, y=[tau for _, tau in line], name=name, mode="lines+markers", line=colour)
        without = [row["tau"] for row in own if row["ngram_weight"] is None]
        if without:
            dots = colour | {"dash": "dot"}
            ends = [min(weights), max(weights)] if weights else [0.0, 1.0]
            figure.add_scatter(x=ends, y=without * 2, name=f"{name}, no trie", mode="lines", line=dots)
    return _finish(figure, "What the trie is worth", "weight of the n-gram term", "tau (tokens a round)")
