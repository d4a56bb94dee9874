"""Figures of load tests and traces, without a front end."""

import json

import pytest
from trace_setup import made_trace

from workbench.measure.load_ratios import add_ratios, summary_rows
from workbench.measure.predictor_quality import reliability_rows
from workbench.measure.replay import Replay
from workbench.measure.serving_trace import replay_rows
from workbench.show import plots, serving_plots


def cell(prompt_set, concurrency, method, speed, lossless=True) -> dict:
    return {
        "prompt_set": prompt_set,
        "concurrency": concurrency,
        "method": method,
        "lossless": lossless,
        "output_tokens_per_s": speed,
        "output_tokens_per_s_min": speed - 5,
        "output_tokens_per_s_max": speed + 2,
        **{name: 100 / speed for name in serving_plots.LATENCIES},
        "tau": 1.0 if method == "ar" else 3.0,
        "rows_verified": 1.0 if method == "ar" else 8.0,
        "reached_by_depth": [] if method == "ar" else [0.75, 0.5],
        "stage_ms": {"draft": 2.0, "verify": 5.0},
        "step_ms": 8.0,
    }


CELLS = [
    cell(prompt_set, c, method, speed * c)
    for prompt_set in ("maths", "code")
    for c in (16, 8)
    for method, speed in (("ar", 10), ("dflash", 20), ("dscale", 26))
]
SUMMARY = summary_rows(add_ratios(CELLS, "dflash"), "dflash")


def made_figures():
    trace = made_trace()
    return {
        "throughput": serving_plots.throughput(CELLS),
        "latency": serving_plots.latency(CELLS),
        "throughput_ratios": serving_plots.throughput_ratios(SUMMARY, "dflash"),
        "step_stages": serving_plots.step_stages(CELLS),
        "reached_depths": serving_plots.reached_depths(CELLS, 8),
        "row_use": serving_plots.row_use(CELLS),
        "retention": serving_plots.retention(replay_rows(trace, ["seed", "dvl", "uniform"], [4, 8])),
        "round_lengths": serving_plots.round_lengths(Replay(trace).round_rows(0)),
        "calibration": serving_plots.calibration(reliability_rows(trace)),
    }


@pytest.fixture(scope="module")
def figures():
    return made_figures()


def test_figures_have_titles_and_are_json(figures):
    for name, figure in figures.items():
        assert figure.layout.title.text and figure.layout.xaxis.title.text, name
        assert figure.data, name
        json.loads(figure.to_json())


def test_methods_have_their_colours(figures):
    for name in ("throughput", "latency", "throughput_ratios", "reached_depths", "row_use"):
        for trace in figures[name].data:
            colour = trace.marker.color or trace.line.color
            assert colour == plots.method_colour(trace.name), name


def test_throughput_shows_every_cell_with_its_range():
    figure = serving_plots.throughput(CELLS, "maths")
    lines = {trace.name: trace for trace in figure.data}
    assert list(lines) == ["ar", "dflash", "dscale"]
    assert list(lines["dscale"].x) == [16, 8] and list(lines["dscale"].y) == [416, 208]
    assert list(lines["dscale"].error_y.array) == [2, 2] and list(lines["dscale"].error_y.arrayminus) == [5, 5]
    assert list(figure.layout.xaxis.tickvals) == [8, 16] and "maths" in figure.layout.title.text


@pytest.mark.parametrize("field", serving_plots.LATENCIES)
def test_every_latency_has_a_name(field):
    figure = serving_plots.latency(CELLS, field, "code")
    assert figure.layout.yaxis.title.text == serving_plots.LATENCIES[field]
    assert list(figure.data[0].y) == [100 / 160, 100 / 80]


def test_ratios_leave_gaps_where_nothing_is_stated():
    rows = [cell("maths", 8, "dflash", 10), cell("maths", 8, "dscale", 12, lossless=False)]
    rows += [cell("maths", 16, "dflash", 10), cell("maths", 16, "dscale", 15)]
    (bars,) = serving_plots.throughput_ratios(summary_rows(add_ratios(rows, "dflash"), "dflash"), "dflash").data
    assert list(bars.x) == ["all", "c=8", "c=16"]
    assert list(bars.y) == [None, None, pytest.approx(1.5)]


def test_interval_bars_reach_the_bounds():
    first = SUMMARY[-1]
    bars = serving_plots.throughput_ratios([first | {"throughput_low": 1.0, "throughput_high": 3.0}], "dflash").data[0]
    assert bars.error_y.array[0] == pytest.approx(3.0 - first["throughput_ratio"])
    assert bars.error_y.arrayminus[0] == pytest.approx(first["throughput_ratio"] - 1.0)


def test_stages_and_the_rest_sum_to_the_step(figures):
    bars = {trace.name: list(trace.y) for trace in figures["step_stages"].data}
    assert list(bars) == ["draft", "verify", "between stages"]
    assert [sum(parts) for parts in zip(*bars.values(), strict=True)] == [8.0] * 6


def test_retention_is_drawn_against_rows():
    rows = replay_rows(made_trace(), ["seed", "uniform"], [8, 4])
    lines = {trace.name: trace for trace in serving_plots.retention(rows).data}
    assert lines["seed"].mode == "markers" and len(lines["seed"].x) == 1
    assert list(lines["uniform"].x) == sorted(lines["uniform"].x) and lines["uniform"].mode == "lines+markers"
    taus = serving_plots.retention(rows, "tau")
    assert "tau" in taus.layout.yaxis.title.text and list(taus.data[0].y) == [rows[0]["tau"]]


def test_lengths_are_drawn_behind_the_last_verified_candidate():
    shown = [
        {"scores": [0.9, 0.5, 0.1], "seed": 2, "final": 4, "accepted": 1},
        {"scores": [0.4, 0.3, 0.2], "seed": None, "final": 1, "accepted": 0},
    ]
    heat, seed, final, accepted = serving_plots.round_lengths(shown).data
    assert [list(row) for row in heat.z] == [[0.9, 0.5, 0.1], [0.4, 0.3, 0.2]] and list(heat.x) == [1, 2, 3]
    assert list(seed.x) == [1.5, None], "two rows are the anchor and candidate 1"
    assert list(final.x) == [3.5, 0.5] and list(accepted.x) == [1, 0]
    names = [trace.name for trace in serving_plots.round_lengths(shown[1:]).data[1:]]
    assert names == ["final", "accepted"], "no seeds without chances"
    assert serving_plots.round_lengths([]).data


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: serving_plots.latency(CELLS, "speed"), "field='speed'; allowed: latency_mean_s"),
        (lambda: serving_plots.throughput(CELLS, "chat"), "prompt_set='chat'; allowed: maths, code"),
        (lambda: serving_plots.reached_depths(CELLS, 4), "concurrency=4; allowed: 16, 8"),
        (lambda: serving_plots.throughput([]), "there are no rows"),
    ],
)
def test_wrong_choices_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
