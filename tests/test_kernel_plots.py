"""Figures of kernel measurements, without a front end."""

import json

import pytest

from workbench.show import kernel_plots


def row(what, cell, us, shape="a", context=1024, kind="chain", **more) -> dict:
    share = None if us is None else 10 / us
    models = {"a": "Model A", "b": "Model B"}[shape]
    head = {"shape": shape, "models": models, "cell": cell, "context": context, "kind": kind, "what": what}
    return {**head, "us": us, "floor_us": 10.0, "share": share, **more}


ROWS = [
    row("rows16", "1 x chain16 @ 1024", 20.0),
    row("packed", "1 x chain16 @ 1024", 12.5),
    row("flex", "1 x chain16 @ 1024", None),
    row("rows16", "8 x chain16 @ 1024", 50.0),
    row("packed", "8 x chain16 @ 1024", 16.0),
    row("packed", "1 x prefill64 @ 1024", 99.0, kind="prefill"),
    row("packed", "1 x chain16 @ 8192", 70.0, context=8192),
    row("packed", "1 x chain16 @ 64", 5.0, shape="b", context=64),
]
SPLIT = [
    {"cell": cell, "splits": splits, "us": us, "chosen": splits == 4}
    for cell in ("x", "y")
    for splits, us in ((1, 9.0), (4, 3.0))
]
DECISION = [
    {"kernel": "features", "requests": 8, "what": "kernel", "us": 5.0, "floor_us": 2.0, "share": 0.4},
    {"kernel": "features", "requests": 32, "what": "kernel", "us": 9.0, "floor_us": 8.0, "share": 0.9},
    {"kernel": "features", "requests": 32, "what": "torch", "us": 99.0, "floor_us": 8.0, "share": 0.1},
    {"kernel": "pack", "requests": 32, "what": "kernel", "us": 2.0, "floor_us": 0.1, "share": None},
    {"kernel": "launch", "requests": None, "what": "torch", "us": 1.0, "floor_us": None, "share": None},
]


def test_figures_have_titles_and_are_json():
    figures = [
        kernel_plots.tile_heights(ROWS),
        kernel_plots.floor_share(ROWS),
        kernel_plots.split_lines(SPLIT),
        kernel_plots.decision_times(DECISION),
    ]
    for figure in figures:
        assert figure.layout.title.text and figure.layout.yaxis.title.text and figure.data
        json.loads(figure.to_json())


def test_tile_heights_shows_one_shape_at_one_context():
    bars = {trace.name: trace for trace in kernel_plots.tile_heights(ROWS).data}
    assert list(bars) == ["rows16", "packed", "floor"], "a peer without any time has no bar"
    assert list(bars["packed"].x) == ["1 x chain16 @ 1024", "8 x chain16 @ 1024"]
    assert list(bars["packed"].y) == [12.5, 16.0] and list(bars["floor"].y) == [10.0, 10.0]
    assert bars["packed"].marker.color == kernel_plots.COLOURS["packed"]
    assert list(kernel_plots.tile_heights(ROWS, context=8192).data[0].y) == [70.0]
    assert "Model B" in kernel_plots.tile_heights(ROWS, "b").layout.title.text


def test_floor_share_shows_all_contexts():
    bars = {trace.name: trace for trace in kernel_plots.floor_share(ROWS).data}
    assert list(bars["packed"].y) == [0.8, 0.625, pytest.approx(1 / 7)]
    assert list(bars["rows16"].y) == [0.5, 0.2, None]


def test_the_chosen_number_of_splits_is_a_star():
    first, second = kernel_plots.split_lines(SPLIT).data
    assert (first.name, second.name) == ("x", "y") and list(first.y) == [9.0, 3.0]
    assert list(first.marker.symbol) == ["circle", "star"]


def test_decision_shows_the_most_requests_and_floors_where_they_mean_something():
    bars = {trace.name: trace for trace in kernel_plots.decision_times(DECISION).data}
    assert list(bars["kernel"].y) == [9.0, 2.0] and list(bars["torch"].y) == [99.0, None]
    assert list(bars["floor"].x) == ["features"] and list(bars["floor"].y) == [8.0]
    assert list(bars["a launch"].x) == ["features", "pack"] and list(bars["a launch"].y) == [1.0, 1.0]
    assert list(kernel_plots.decision_times(DECISION, 8).data[0].y) == [5.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kernel_plots.tile_heights(ROWS, "c"), "shape='c'; allowed: a, b"),
        (lambda: kernel_plots.tile_heights(ROWS, "a", 64), "context=64; allowed: 1024, 8192"),
        (lambda: kernel_plots.floor_share([]), "there are no rows"),
        (lambda: kernel_plots.decision_times(DECISION, 9), "requests=9; allowed: 8, 32"),
    ],
)
def test_wrong_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
