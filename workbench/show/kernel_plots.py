"""Figures of kernel measurements: rows in, a plotly `Figure` out.

Rows are those of `measure.kernel_attention` and `measure.kernel_decision`; any mapping with the named fields does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.show.plots import _finish

Row = Mapping[str, Any]

COLOURS = {
    "packed": "#f28e2b",
    "rows16": "#59a14f",
    "rows128": "#e15759",
    "reference": "#4e79a7",
    "kernel": "#f28e2b",
    "sdpa": "#7f7f7f",
    "varlen": "#b07aa1",
    "flex": "#9c755f",
    "torch": "#7f7f7f",
}
_FLOOR = "#333333"


def tile_heights(rows: Sequence[Row], shape: str | None = None, context: int | None = None) -> go.Figure:
    """Bars of the time of every tile and library function by cell, with the floor of each cell; prefill left out.

    Args:
        rows: of the attention table.
        shape: name of a head shape; default the first one of the rows.
        context: committed rows of a request; default the first one of the shape.

    Raises:
        ValueError: a shape or context that no row has.
    """
    chosen = [row for row in _of(rows, "shape", shape) if row["kind"] != "prefill"]
    chosen = _of(chosen, "context", context)
    figure = _bars(chosen, "cell", "us", "%{y:.1f}")
    floors = {row["cell"]: row["floor_us"] for row in chosen}
    _mark_floor(figure, list(floors), list(floors.values()))
    figure.update_yaxes(type="log")
    title = f"Attention of {chosen[0]['models']} at context {chosen[0]['context']}"
    return _finish(figure, title, "requests x rows @ context", "microseconds (log)")


def split_lines(rows: Sequence[Row]) -> go.Figure:
    """Lines of the time of the packed tile against the number of programs that share its keys; stars: its own choice.

    Args:
        rows: of the split table.
    """
    figure = go.Figure()
    for cell in dict.fromkeys(row["cell"] for row in rows):
        line = [row for row in rows if row["cell"] == cell]
        figure.add_scatter(
            x=[row["splits"] for row in line],
            y=[row["us"] for row in line],
            name=cell,
            mode="lines+markers",
            marker={
                "symbol": ["star" if row["chosen"] else "circle" for row in line],
                "size": [14 if row["chosen"] else 7 for row in line],
            },
        )
    figure.update_xaxes(type="log", tickvals=sorted({row["splits"] for row in rows}))
    figure.update_yaxes(type="log")
    return _finish(figure, "Keys of a tile split over programs", "splits", "microseconds (log)")


def floor_share(rows: Sequence[Row], shape: str | None = None) -> go.Figure:
    """Bars of the share of the floor that every tile and library function reaches, by cell; prefill left out.

    Args:
        rows: of the attention table.
        shape: name of a head shape; default the first one of the rows.

    Raises:
        ValueError: a shape that no row has.
    """
    chosen = [row for row in _of(rows, "shape", shape) if row["kind"] != "prefill"]
    figure = _bars(chosen, "cell", "share", "%{y:.0%}")
    figure.add_hline(y=1.0, line={"color": _FLOOR, "dash": "dot"})
    figure.update_yaxes(tickformat=".0%")
    title = "Keys and values read once at copy speed, over the time taken"
    return _finish(figure, title, "requests x rows @ context", "share of the floor")


def decision_times(rows: Sequence[Row], requests: int | None = None) -> go.Figure:
    """Bars of the time of every other kernel of a round and of plain torch beside it, floors, and what a launch takes.

    Args:
        rows: of the decision table.
        requests: N; default the most of the rows.

    Raises:
        ValueError: a number of requests that no row has.
    """
    sized = [row for row in rows if row["requests"] is not None]
    most = max((row["requests"] for row in sized), default=None)
    chosen = _of(sized, "requests", most if requests is None else requests)
    figure = _bars(chosen, "kernel", "us", "%{y:.1f}")
    floors = {row["kernel"]: row["floor_us"] for row in chosen if row["share"] is not None}
    _mark_floor(figure, list(floors), list(floors.values()))
    figure.update_yaxes(type="log")
    kernels = list(dict.fromkeys(row["kernel"] for row in chosen))
    for row in rows:
        if row["requests"] is None:
            y, line = [row["us"]] * len(kernels), {"color": _FLOOR, "dash": "dot"}
            figure.add_scatter(x=kernels, y=y, name="a launch", mode="lines", line=line)
    return _finish(figure, f"Decision and acceptance, {chosen[0]['requests']} requests", "", "microseconds (log)")


def _bars(rows: Sequence[Row], axis: str, field: str, text: str) -> go.Figure:
    """Grouped bars of `field`: values of `axis` along it, one colour for each `what`; missing values leave a gap."""
    places = list(dict.fromkeys(row[axis] for row in rows))
    figure = go.Figure()
    for what in dict.fromkeys(row["what"] for row in rows):
        values = {row[axis]: row[field] for row in rows if row["what"] == what}
        if any(value is not None for value in values.values()):
            figure.add_bar(
                x=places,
                y=[values.get(place) for place in places],
                name=what,
                texttemplate=text,
                marker_color=COLOURS[what],
            )
    return figure.update_layout(barmode="group")


def _mark_floor(figure: go.Figure, places: Sequence[str], floors: Sequence[float]) -> None:
    figure.add_scatter(
        x=list(places),
        y=list(floors),
        name="floor",
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 40, "color": _FLOOR, "line": {"width": 2}},
    )


def _of(rows: Sequence[Row], field: str, value: Any) -> list[Row]:
    """Rows with `value` in `field`, by default that of the first row.

    Raises:
        ValueError: there are none.
    """
    known = list(dict.fromkeys(row[field] for row in rows))
    if not known or (value is not None and value not in known):
        raise ValueError(f"{field}={value!r}; allowed: {', '.join(map(str, known)) or 'none, there are no rows'}")
    wanted = known[0] if value is None else value
    return [row for row in rows if row[field] == wanted]
