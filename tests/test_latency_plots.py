"""Figures of latency measurements, without a front end."""

import json

import pytest

from workbench.measure.latency_plan import ARMS
from workbench.show import latency_plots


def forward(what, cell, ms, shape="a") -> dict:
    return {"shape": shape, "what": what, "cell": cell, "ms": ms, "weights_ms": 3.0, "floor_ms": 4.0}


def step(arm, requests, ms, reduction=None, shape="a", **stages) -> dict:
    other = ms - sum(stages.values())
    head = {"shape": shape, "arm": arm, "requests": requests, "ms": ms, "reduction": reduction}
    return head | {"stage_ms": stages, "other_ms": other}


FORWARDS = [
    forward("fused", "x", 5.0),
    forward("products", "x", 4.5),
    forward("compiled", "x", None),
    forward("fused", "y", 9.0),
    forward("stock", "y", 20.0),
    forward("fused", "x", 1.0, shape="b"),
]
STEPS = [
    step("ar", 1, 4.0, verify=4.0),
    step("control", 1, 10.0, 0.0, draft=2.0, verify=8.0),
    step("tile", 1, 8.0, 0.2, draft=2.0, verify=5.0),
    step("graphs", 1, 4.0, 0.6, draft=1.0, verify=2.0, allocate=1.0),
    step("control", 8, 20.0, 0.0, draft=10.0, verify=10.0),
    step("tile", 8, 21.0, -0.05, draft=10.0, verify=11.5),
]


def test_figures_have_titles_and_are_json():
    for figure in (
        latency_plots.forward_bars(FORWARDS),
        latency_plots.step_bars([row for row in STEPS if row["requests"] == 1]),
        latency_plots.stage_shares(STEPS),
    ):
        assert figure.layout.title.text and figure.layout.yaxis.title.text and figure.data
        json.loads(figure.to_json())


def test_forward_bars_show_one_shape_with_its_floors():
    bars = {trace.name: trace for trace in latency_plots.forward_bars(FORWARDS).data}
    assert list(bars) == ["fused", "products", "stock", "weights read", "floor"], "no bar for what has no time"
    assert list(bars["fused"].y) == [5.0, 9.0] and list(bars["stock"].y) == [None, 20.0]
    assert list(bars["weights read"].y) == [3.0, 3.0] and list(bars["floor"].y) == [4.0, 4.0]
    assert list(latency_plots.forward_bars(FORWARDS, "b").data[0].y) == [1.0]


def test_step_bars_leave_out_what_is_not_compared():
    chosen = [row for row in STEPS if row["arm"] in ("ar", "control", "tile")]
    bars = {trace.name: trace for trace in latency_plots.step_bars(chosen).data}
    assert list(bars) == ["control", "tile"]
    assert list(bars["tile"].x) == ["1", "8"] and list(bars["tile"].y) == [8.0, 21.0]
    assert list(bars["tile"].text) == ["-20%", "+5%"]


def test_step_bars_of_an_arm_at_some_numbers_only():
    figure = latency_plots.step_bars([step("late", 8, 5.0, 0.5), *STEPS, step("paper", 8, 19.0, 0.05)])
    bars = {trace.name: trace for trace in figure.data}
    assert list(bars["paper"].x) == ["8"] and list(bars["paper"].y) == [19.0]
    assert list(figure.layout.xaxis.categoryarray) == ["1", "8"]


def test_shares_of_a_step_sum_to_one():
    figure = latency_plots.stage_shares(STEPS)
    shares = {trace.name: trace.y for trace in figure.data}
    axis = figure.data[0].x
    assert list(axis[0]) == ["AR", "DFlash", "DFlash", "DScale"]
    assert list(axis[1]) == ["N=1", "N=1", "N=8", "N=1"]
    assert sum(y[1] for y in shares.values()) == pytest.approx(1)
    assert shares["between stages"][1] == pytest.approx(1 / 8)
    assert shares["between stages"][2] == 0, "stages that overlap leave nothing between them"
    assert "search" not in shares and shares["allocate"][3] == pytest.approx(0.25)


def test_methods_are_those_of_the_arms():
    assert {method: ARMS[arm].method for method, arm in latency_plots.METHODS.items()} == {
        method: method for method in ("AR", "DART", "DFlash", "DScale")
    }


@pytest.mark.parametrize("make", [latency_plots.forward_bars, latency_plots.step_bars, latency_plots.stage_shares])
def test_wrong_choices_are_refused(make):
    rows = FORWARDS if make is latency_plots.forward_bars else STEPS
    with pytest.raises(ValueError, match="shape='c'; allowed: a"):
        make(rows, "c")
    with pytest.raises(ValueError, match="there are no rows"):
        make([])
