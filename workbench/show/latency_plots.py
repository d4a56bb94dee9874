"""Figures of latency measurements: rows in, a plotly `Figure` out.

Rows are those of `measure.forward_times` and `measure.step_times`; any mapping with the named fields does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.show.plots import STAGE_COLOURS, _finish
from workbench.types import STAGES

Row = Mapping[str, Any]

COLOURS = {
    "fused": "#f28e2b",
    "stock": "#4e79a7",
    "compiled": "#59a14f",
    "products": "#7f7f7f",
    "merged products": "#bab0ac",
    "control": "#7f7f7f",
    "paper": "#4e79a7",
    "tile": "#59a14f",
    "launched": "#bab0ac",
    "allocation": "#76b7b2",
    "graphs": "#f28e2b",
}
#: Methods in the order of the share figure, with the arm of each.
METHODS = {"AR": "ar", "DART": "dart", "DFlash": "tile", "DScale": "graphs"}
_OTHER = "between stages"
_OTHER_COLOUR = "#d9d9d9"
_FLOOR = "#333333"


def forward_bars(rows: Sequence[Row], shape: str | None = None) -> go.Figure:
    """Bars of the time of every forward and of its matrix products by cell, with two floors.

    Args:
        rows: of the forward table.
        shape: whose; default the first one of the rows.

    Raises:
        ValueError: a shape that no row has.
    """
    chosen = _of_shape(rows, shape)
    cells = list(dict.fromkeys(row["cell"] for row in chosen))
    figure = go.Figure()
    for what in dict.fromkeys(row["what"] for row in chosen):
        values = {row["cell"]: row["ms"] for row in chosen if row["what"] == what}
        if any(value is not None for value in values.values()):
            figure.add_bar(
                x=cells,
                y=[values.get(cell) for cell in cells],
                name=what,
                texttemplate="%{y:.2f}",
                marker_color=COLOURS.get(what),
            )
    for field, name, symbol in (("weights_ms", "weights read", "line-ew-open"), ("floor_ms", "floor", "x-thin-open")):
        values = {row["cell"]: row[field] for row in chosen}
        marker = {"symbol": symbol, "size": 30 if symbol.startswith("line") else 10, "color": _FLOOR}
        marker["line"] = {"width": 2}
        figure.add_scatter(x=cells, y=[values[cell] for cell in cells], name=name, mode="markers", marker=marker)
    figure.update_layout(barmode="group")
    figure.update_yaxes(type="log")
    return _finish(figure, f"Target forward, {chosen[0]['shape']}", "requests x rows @ context", "milliseconds (log)")


def step_bars(rows: Sequence[Row], shape: str | None = None) -> go.Figure:
    """Bars of the step of the control arm and of what DScale adds to it, by number of requests; arms may lack some.

    Args:
        rows: of the step table.
        shape: whose; default the first one of the rows.

    Raises:
        ValueError: a shape that no row has.
    """
    chosen = [row for row in _of_shape(rows, shape) if row["reduction"] is not None]
    numbers = [str(n) for n in sorted({row["requests"] for row in chosen})]
    figure = go.Figure()
    for arm in dict.fromkeys(row["arm"] for row in chosen):
        bars = {str(row["requests"]): row for row in chosen if row["arm"] == arm}
        figure.add_bar(
            x=list(bars),
            y=[row["ms"] for row in bars.values()],
            name=arm,
            text=[f"{-row['reduction']:+.0%}" for row in bars.values()],
            marker_color=COLOURS.get(arm),
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=numbers)
    return _finish(figure, f"Decode step, {chosen[0]['shape']}", "requests", "milliseconds a step")


def stage_shares(rows: Sequence[Row], shape: str | None = None) -> go.Figure:
    """Stacked bars of the share of every stage in a step, by method and number of requests.

    Args:
        rows: of the step table.
        shape: whose; default the first one of the rows.

    Raises:
        ValueError: a shape that no row has.
    """
    by_arm = {arm: method for method, arm in METHODS.items()}
    chosen = [row for row in _of_shape(rows, shape) if row["arm"] in by_arm]
    chosen.sort(key=lambda row: (list(by_arm).index(row["arm"]), row["requests"]))
    axis = [[by_arm[row["arm"]] for row in chosen], [f"N={row['requests']}" for row in chosen]]
    totals = [sum(row["stage_ms"].values()) + max(row["other_ms"], 0.0) for row in chosen]
    figure = go.Figure()
    for stage in (*STAGES, _OTHER):
        if stage == _OTHER:
            values = [max(row["other_ms"], 0.0) for row in chosen]
        else:
            values = [row["stage_ms"].get(stage, 0.0) for row in chosen]
        if any(values):
            shares = [value / total for value, total in zip(values, totals, strict=True)]
            figure.add_bar(x=axis, y=shares, name=stage, marker_color=STAGE_COLOURS.get(stage, _OTHER_COLOUR))
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_yaxes(tickformat=".0%")
    return _finish(figure, f"Stages of a step, {chosen[0]['shape']}", "method, requests", "share of a step")


def _of_shape(rows: Sequence[Row], shape: str | None) -> list[Row]:
    """Rows of a shape, by default of the first row's.

    Raises:
        ValueError: there are none.
    """
    known = list(dict.fromkeys(row["shape"] for row in rows))
    if not known or (shape is not None and shape not in known):
        raise ValueError(f"shape={shape!r}; allowed: {', '.join(known) or 'none, there are no rows'}")
    return [row for row in rows if row["shape"] == (known[0] if shape is None else shape)]
