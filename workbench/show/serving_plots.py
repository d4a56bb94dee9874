"""Figures of load tests and of replayed traces: rows in, a plotly `Figure` out.

Rows of cells are those of `measure.load_cells`, summaries those of `measure.load_ratios`, the rest those of
`measure.replay` and `measure.predictor_quality`; any mapping with the named fields does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.show.plots import METHOD_COLOURS, STAGE_COLOURS, _finish, _of_set, _rows_of_set, method_colour
from workbench.types import STAGES

Row = Mapping[str, Any]

#: What a latency field is called on an axis.
LATENCIES = {
    "latency_mean_s": "mean latency (s)",
    "latency_p50_s": "median latency (s)",
    "latency_p95_s": "95 % latency (s)",
    "latency_p99_s": "99 % latency (s)",
    "ttft_mean_ms": "mean time to first token (ms)",
    "ttft_p99_ms": "99 % time to first token (ms)",
    "tpot_mean_ms": "mean time per output token (ms)",
    "gap_mean_ms": "mean time between pieces (ms)",
    "gap_p99_ms": "99 % time between pieces (ms)",
}
_SEED, _FINAL, _ACCEPTED = "#b07aa1", "#f28e2b", "#2a9d4a"


def throughput(rows: Sequence[Row], prompt_set: str | None = None) -> go.Figure:
    """Lines of output tokens a second against the number of clients, with the range of the repetitions.

    Args:
        rows: of cells.
        prompt_set: the set to show; default the last one of the rows.
    """
    chosen = _rows_of_set(rows, prompt_set)
    figure = go.Figure()
    for method, cells in _by_method(chosen).items():
        speeds = [row["output_tokens_per_s"] for row in cells]
        up = [row["output_tokens_per_s_max"] - speed for row, speed in zip(cells, speeds, strict=True)]
        down = [speed - row["output_tokens_per_s_min"] for row, speed in zip(cells, speeds, strict=True)]
        figure.add_scatter(
            x=[row["concurrency"] for row in cells],
            y=speeds,
            error_y={"type": "data", "array": up, "arrayminus": down, "thickness": 1},
            name=method,
            mode="lines+markers",
            line={"color": method_colour(method)},
        )
    _mark_clients(figure, chosen)
    figure.update_yaxes(rangemode="tozero")
    return _finish(figure, f"Throughput{_of_set(chosen)}", "clients", "output tokens a second")


def latency(rows: Sequence[Row], field: str = "latency_p95_s", prompt_set: str | None = None) -> go.Figure:
    """Lines of one kind of latency against the number of clients.

    Args:
        rows: of cells.
        field: one of LATENCIES.
        prompt_set: the set to show; default the last one of the rows.

    Raises:
        ValueError: an unknown field.
    """
    if field not in LATENCIES:
        raise ValueError(f"field={field!r}; allowed: {', '.join(LATENCIES)}")
    chosen = _rows_of_set(rows, prompt_set)
    figure = go.Figure()
    for method, cells in _by_method(chosen).items():
        figure.add_scatter(
            x=[row["concurrency"] for row in cells],
            y=[row[field] for row in cells],
            name=method,
            mode="lines+markers",
            line={"color": method_colour(method)},
        )
    _mark_clients(figure, chosen)
    figure.update_yaxes(rangemode="tozero")
    return _finish(figure, f"Latency{_of_set(chosen)}", "clients", LATENCIES[field])


def throughput_ratios(summary: Sequence[Row], control: str) -> go.Figure:
    """Bars of the throughput over the control's by scope, with confidence intervals; None leaves a gap."""
    scopes = list(dict.fromkeys(row["scope"] for row in summary))
    figure = go.Figure()
    for method, lines in _by_method(summary).items():
        by_scope = {row["scope"]: row for row in lines}
        means = [by_scope[scope]["throughput_ratio"] for scope in scopes]
        up = [_above(by_scope[scope]["throughput_high"], by_scope[scope]["throughput_ratio"]) for scope in scopes]
        down = [_above(by_scope[scope]["throughput_ratio"], by_scope[scope]["throughput_low"]) for scope in scopes]
        figure.add_bar(
            x=scopes,
            y=means,
            error_y={"type": "data", "array": up, "arrayminus": down, "thickness": 1},
            name=method,
            texttemplate="%{y:.2f} x",
            marker_color=method_colour(method),
        )
    figure.update_layout(barmode="group")
    figure.add_hline(y=1.0, line={"color": METHOD_COLOURS["ar"], "dash": "dot"})
    return _finish(figure, f"Throughput over {control}", "cells", "geometric mean of ratios")


def step_stages(rows: Sequence[Row], prompt_set: str | None = None) -> go.Figure:
    """Stacked bars of the stages of a step, one bar a number of clients and method; the rest is time between stages.

    Args:
        rows: of cells, with `stage_ms` and `step_ms`.
        prompt_set: the set to show; default the last one of the rows.
    """
    chosen = _rows_of_set(rows, prompt_set)
    axis = [[f"c={row['concurrency']}" for row in chosen], [row["method"] for row in chosen]]
    figure = go.Figure()
    for stage in STAGES:
        values = [row["stage_ms"].get(stage, 0.0) for row in chosen]
        if any(values):
            figure.add_bar(x=axis, y=values, name=stage, marker_color=STAGE_COLOURS[stage])
    rest = [max((row["step_ms"] or 0.0) - sum(row["stage_ms"].values()), 0.0) for row in chosen]
    figure.add_bar(x=axis, y=rest, name="between stages", marker_color="#d9d9d9")
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    return _finish(figure, f"Time of a step{_of_set(chosen)}", "clients and method", "ms a step")


def reached_depths(rows: Sequence[Row], concurrency: int, prompt_set: str | None = None) -> go.Figure:
    """Lines of the share of all rounds that accepted so many tokens or more, one a method, cut drafts included.

    Args:
        rows: of cells.
        concurrency: number of clients.
        prompt_set: the set to show; default the last one of the rows.

    Raises:
        ValueError: no cells of that number of clients.
    """
    known = list(dict.fromkeys(row["concurrency"] for row in rows))
    if concurrency not in known:
        raise ValueError(f"concurrency={concurrency}; allowed: {', '.join(map(str, known))}")
    chosen = _rows_of_set([row for row in rows if row["concurrency"] == concurrency], prompt_set)
    figure = go.Figure()
    for row in chosen:
        rates = row["reached_by_depth"]
        if rates:
            figure.add_scatter(
                x=list(range(1, len(rates) + 1)),
                y=list(rates),
                name=row["method"],
                mode="lines+markers",
                line={"color": method_colour(row["method"])},
            )
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    title = f"Accepted tokens, c={concurrency}{_of_set(chosen)}"
    return _finish(figure, title, "accepted tokens", "rounds with so many or more")


def row_use(rows: Sequence[Row], prompt_set: str | None = None) -> go.Figure:
    """Verified rows of a round and request against its tokens, one point a cell: up and to the left is better.

    Args:
        rows: of cells.
        prompt_set: the set to show; default the last one of the rows.
    """
    chosen = _rows_of_set(rows, prompt_set)
    figure = go.Figure()
    for method, cells in _by_method(chosen).items():
        figure.add_scatter(
            x=[row["rows_verified"] for row in cells],
            y=[row["tau"] for row in cells],
            text=[f"c={row['concurrency']}" for row in cells],
            name=method,
            mode="markers",
            marker={"color": method_colour(method), "size": 10},
        )
    return _finish(figure, f"Rows and tokens{_of_set(chosen)}", "verified rows a request", "tau (tokens a round)")


def retention(rows: Sequence[Row], field: str = "retention") -> go.Figure:
    """Lines of what replayed policies keep against the rows they spend, one a policy.

    Args:
        rows: of `Replay.table`.
        field: "retention" (share of the accepted tokens) or "tau".
    """
    figure = go.Figure()
    for i, policy in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        points = sorted((row["mean_rows"], row[field]) for row in rows if row["policy"] == policy)
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            name=policy,
            mode="lines+markers" if len(points) > 1 else "markers",
            marker={"size": 7 if len(points) > 1 else 12, "symbol": i},
        )
    if field == "retention":
        figure.update_yaxes(tickformat=".0%")
    label = "accepted tokens that are kept" if field == "retention" else "tau (tokens a draft)"
    return _finish(figure, "Replayed policies", "verified rows a request (mean)", label)


def round_lengths(round_rows: Sequence[Row], title: str = "Scores and lengths of one round") -> go.Figure:
    """Scores of every request of a round as shades, with its seed length, its final length and what was accepted.

    A length of k rows is drawn behind candidate k - 1, since the first row is the anchor.

    Args:
        round_rows: of `Replay.round_rows`.
        title: above the figure.
    """
    names = [f"request {i}" for i in range(len(round_rows))]
    columns = list(range(1, len(round_rows[0]["scores"]) + 1)) if round_rows else []
    figure = go.Figure(
        go.Heatmap(
            x=columns,
            y=names,
            z=[list(row["scores"]) for row in round_rows],
            colorscale="Blues",
            colorbar={"title": "score", "len": 0.7, "y": 0.3},
        )
    )
    marks = (
        ("seed", [row["seed"] for row in round_rows], _SEED, "line-ns-open", 1),
        ("final", [row["final"] for row in round_rows], _FINAL, "line-ns-open", 1),
        ("accepted", [row["accepted"] for row in round_rows], _ACCEPTED, "circle-open", 0),
    )
    for name, lengths, colour, symbol, anchor in marks:
        if any(length is not None for length in lengths):
            figure.add_scatter(
                x=[None if length is None else length - anchor + 0.5 * anchor for length in lengths],
                y=names,
                name=name,
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 16, "line": {"width": 3, "color": colour}},
            )
    figure.update_xaxes(dtick=1, range=[-0.5, len(columns) + 1])
    figure.update_yaxes(autorange="reversed")
    return _finish(figure, title, "drafted candidate", "").update_layout(height=140 + 32 * max(len(names), 4))


def calibration(rows: Sequence[Row]) -> go.Figure:
    """Observed share against the predicted one, all positions together; on the diagonal predictions are honest.

    Args:
        rows: of `predictor_quality.reliability_rows`.
    """
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="honest", line={"color": "#7f7f7f", "dash": "dot"})
    figure.add_scatter(
        x=[row["predicted"] for row in rows],
        y=[row["observed"] for row in rows],
        text=[f"{row['entries']} entries" for row in rows],
        mode="lines+markers",
        name="predictor",
        line={"color": METHOD_COLOURS["dscale"]},
    )
    figure.update_xaxes(range=[0, 1.02], tickformat=".0%")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return _finish(figure, "Calibration of the predictor", "predicted chance of acceptance", "share accepted")


def _by_method(rows: Sequence[Row]) -> dict[str, list[Row]]:
    methods = dict.fromkeys(row["method"] for row in rows)
    return {method: [row for row in rows if row["method"] == method] for method in methods}


def _mark_clients(figure: go.Figure, rows: Sequence[Row]) -> None:
    """Only numbers of clients that were measured stand on the axis."""
    figure.update_xaxes(tickvals=sorted({row["concurrency"] for row in rows}))


def _above(high: float | None, low: float | None) -> float | None:
    """Length of an error bar; None (or NaN, as a record holds None for it) where a bound is missing."""
    return None if high is None or low is None else high - low
