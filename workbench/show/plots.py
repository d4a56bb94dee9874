"""Figures as pure functions: rows of a record in, a plotly `Figure` out. Nothing here measures or displays.

Rows are those of `measure.compare` (any mapping with the named fields does). A method has the same colour everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import plotly.graph_objects as go

from workbench.types import STAGES

Row = Mapping[str, Any]

METHOD_COLOURS = {
    "ar": "#7f7f7f",
    "sps": "#b07aa1",
    "eagle3": "#edc948",
    "dart": "#1b7fbd",
    "dflash": "#59a14f",
    "dspark": "#e15759",
    "domino": "#9c755f",
    "dscale": "#f28e2b",
    "ngram": "#76b7b2",
}
_SPARE_COLOURS = ("#4e79a7", "#d37295", "#8cd17d", "#499894", "#b6992d", "#fabfd2")
STAGE_COLOURS = dict(
    zip(STAGES, ("#4e79a7", "#76b7b2", "#edc948", "#b07aa1", "#e15759", "#9c755f", "#59a14f"), strict=True)
)


def method_colour(method: str) -> str:
    """The colour of a method; unknown names get one that depends on the name alone."""
    return METHOD_COLOURS.get(method) or _SPARE_COLOURS[crc32(method.encode()) % len(_SPARE_COLOURS)]


def speedup(rows: Sequence[Row]) -> go.Figure:
    """Bars of the speed-up over AR, grouped by prompt set; a method without a passed losslessness check has no bar."""
    figure = _bars_by_set(rows, "speedup", "%{y:.2f} x")
    figure.add_hline(y=1.0, line={"color": METHOD_COLOURS["ar"], "dash": "dot"})
    return _finish(figure, "Speed-up over autoregressive decoding", "prompt set", "speed-up (wall clock a token)")


def tau(rows: Sequence[Row]) -> go.Figure:
    """Bars of tokens per round (tau, bonus included), grouped by prompt set."""
    return _finish(_bars_by_set(rows, "tau", "%{y:.2f}"), "Tokens per round", "prompt set", "tau (tokens a round)")


def acceptance_by_depth(rows: Sequence[Row], prompt_set: str | None = None) -> go.Figure:
    """Lines of the acceptance rate by draft depth, one a method.

    Args:
        rows: with `acceptance_by_depth`; entry d-1 belongs to depth d.
        prompt_set: the set to show; default the last one of the rows (the pooled one, if there is one).
    """
    chosen = _rows_of_set(rows, prompt_set)
    figure = go.Figure()
    for row in chosen:
        rates = row["acceptance_by_depth"]
        if rates:
            depths = list(range(1, len(rates) + 1))
            figure.add_scatter(
                x=depths,
                y=list(rates),
                mode="lines+markers",
                name=row["method"],
                line={"color": method_colour(row["method"])},
            )
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return _finish(figure, f"Acceptance by depth{_of_set(chosen)}", "draft depth (tokens)", "rounds accepted to depth")


def stage_times(rows: Sequence[Row], prompt_set: str | None = None, share: bool = False) -> go.Figure:
    """Stacked bars of the stages of a round, one bar a method.

    Args:
        rows: with `stage_ms`, milliseconds a round by stage.
        prompt_set: the set to show; default the last one of the rows.
        share: show each stage as a share of the round instead of milliseconds.
    """
    chosen = _rows_of_set(rows, prompt_set)
    methods = [row["method"] for row in chosen]
    figure = go.Figure()
    for stage in STAGES:
        values = []
        for row in chosen:
            total = sum(row["stage_ms"].values()) if share else 1.0
            values.append(row["stage_ms"].get(stage, 0.0) / total if total else 0.0)
        if any(values):
            figure.add_bar(x=methods, y=values, name=stage, marker_color=STAGE_COLOURS[stage])
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    if share:
        figure.update_yaxes(tickformat=".0%")
    what = "Share of each stage" if share else "Time of each stage"
    return _finish(figure, f"{what} in a round{_of_set(chosen)}", "method", "share of round" if share else "ms a round")


def training_curves(
    steps: Sequence[Row], step: str = "step", loss: str = "loss", hits: str | None = "hit_by_position"
) -> go.Figure:
    """Loss (left axis) and hit rate of each draft position (right axis) over training steps.

    Args:
        steps: one mapping a logged step; those without a field are left out of its line.
        step, loss, hits: names of the fields; `hits` holds a list, entry i is the hit rate of draft position i + 1,
            None for no such lines.
    """
    figure = go.Figure()
    with_loss = [row for row in steps if row.get(loss) is not None]
    figure.add_scatter(
        x=[row[step] for row in with_loss],
        y=[row[loss] for row in with_loss],
        name="loss",
        mode="lines",
        line={"color": "#333333"},
    )
    with_hits = [row for row in steps if hits is not None and row.get(hits)]
    for i in range(max((len(row[hits]) for row in with_hits), default=0)):
        points = [(row[step], row[hits][i]) for row in with_hits if len(row[hits]) > i]
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points], name=f"hit, position {i + 1}", mode="lines", yaxis="y2"
        )
    axis = {
        "title": {"text": "hit rate"},
        "overlaying": "y",
        "side": "right",
        "range": [0, 1],
        "showgrid": False,
        "dtick": 0.2,
    }
    figure.update_layout(yaxis2=axis | {"tickformat": ".0%"}, legend={"x": 1.12})
    return _finish(figure, "Training", "step", "loss (nats)")


def trie_info(nodes_by_length: Sequence[int], title: str = "Nodes of the n-gram trie") -> go.Figure:
    """Bars of the number of distinct n-grams by length; entry n-1 belongs to length n."""
    lengths = [str(n) for n in range(1, len(nodes_by_length) + 1)]
    figure = go.Figure(
        go.Bar(
            x=lengths,
            y=list(nodes_by_length),
            marker_color=METHOD_COLOURS["dart"],
            texttemplate="%{y:,}",
            showlegend=False,
        )
    )
    return _finish(figure, title, "n-gram length (tokens)", "distinct n-grams").update_layout(showlegend=False)


def _bars_by_set(rows: Sequence[Row], field: str, text: str) -> go.Figure:
    """Grouped bars of `field`: sets on the axis, one colour a method; missing values leave a gap."""
    sets = list(dict.fromkeys(row["prompt_set"] for row in rows))
    figure = go.Figure()
    for method in dict.fromkeys(row["method"] for row in rows):
        values = {row["prompt_set"]: row[field] for row in rows if row["method"] == method}
        figure.add_bar(
            x=sets,
            y=[values.get(name) for name in sets],
            name=method,
            texttemplate=text,
            marker_color=method_colour(method),
        )
    return figure.update_layout(barmode="group")


def _rows_of_set(rows: Sequence[Row], prompt_set: str | None) -> list[Row]:
    """Rows of one set, by default of the last.

    Raises:
        ValueError: no rows, or a set that has none.
    """
    sets = list(dict.fromkeys(row["prompt_set"] for row in rows))
    if not sets or (prompt_set is not None and prompt_set not in sets):
        raise ValueError(f"prompt_set={prompt_set!r}; allowed: {', '.join(sets) or 'none, there are no rows'}")
    wanted = sets[-1] if prompt_set is None else prompt_set
    return [row for row in rows if row["prompt_set"] == wanted]


def _of_set(rows: Sequence[Row]) -> str:
    return f", prompt set {rows[0]['prompt_set']}"


def _finish(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    """The look that all figures share."""
    figure.update_xaxes(title_text=x)
    figure.update_layout(
        title_text=title,
        template="plotly_white",
        yaxis_title_text=y,
        showlegend=True,
        height=380,
        margin={"l": 70, "r": 30, "t": 60, "b": 60},
    )
    return figure
