"""The closed-loop load test: its clients, its clocks, its cells and their ratios."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from workbench.decode.engine import Engine, generate
from workbench.drafters.ar import build_ar
from workbench.drafters.oracle import build_coin, build_scripted
from workbench.measure import load_cells, load_test
from workbench.measure.load_cells import LoadConfig, cell_row, run_cells
from workbench.measure.load_ratios import load_checks, summary_rows
from workbench.measure.load_test import LoadResult, RequestTimes, load_metrics, run_load
from workbench.measure.manifest import Manifest
from workbench.measure.statistics import depth_counts
from workbench.types import GenerateResult, RoundStats


def counted(step: float = 1.0):
    """A clock that moves by `step` at every reading."""
    return itertools.count(0.0, step).__next__


@pytest.fixture(scope="module")
def manifest(tiny_llama):
    """Seven requests over five prompts of different lengths."""
    rng = np.random.default_rng(3)
    prompts = {f"p{i}": rng.integers(3, 97, n).tolist() for i, n in enumerate((5, 1, 17, 30, 2))}
    return Manifest.build(prompts, 7, max_new_tokens=11)


def expected(target, manifest):
    """Outputs of plain decoding, one request at a time."""
    return [generate(target, build_ar(target), [e.prompt_ids], e.sampling)[0].token_ids for e in manifest]


# --- one run


@pytest.mark.parametrize("concurrency", [1, 3, 20])
def test_outputs_are_those_of_plain_decoding(tiny_llama, manifest, concurrency):
    load = run_load(tiny_llama, build_coin(tiny_llama), manifest, concurrency)
    assert load.outputs == expected(tiny_llama, manifest)
    assert len(load.times) == len(manifest) and load.peak_memory_bytes is None
    assert [result.prompt_len for result in load.results] == [len(e.prompt_ids) for e in manifest]


def test_clients_send_when_their_last_request_ended(tiny_llama, manifest):
    load = run_load(tiny_llama, build_scripted(tiny_llama), manifest, 3, clock=counted())
    sent = sorted((t.submitted, i) for i, t in enumerate(load.times))
    assert [i for _, i in sent] == list(range(7)), "requests are taken in the order of the manifest"
    for at, i in sent:
        open_now = sum(t.submitted <= at < t.finished for t in load.times)
        assert open_now <= 3
        if i >= 3:
            assert any(t.finished < at for t in load.times)
    for times, output in zip(load.times, load.outputs, strict=True):
        assert times.submitted < times.chunks[0] <= times.finished == times.chunks[-1]
        assert sorted(times.chunks) == list(times.chunks) and len(times.chunks) <= len(output)
    assert load.window_s == max(t.finished for t in load.times)


def test_as_many_run_as_there_are_clients(tiny_llama, manifest):
    load = run_load(tiny_llama, build_ar(tiny_llama), manifest, 3)
    sizes = {r.num_requests for result in load.results for r in result.rounds}
    assert max(sizes) == 3
    steps = sum(1 / r.num_requests for result in load.results for r in result.rounds)
    assert load.rounds == pytest.approx(steps)
    assert load.prefills >= 3


def test_warm_up_runs_first_and_does_not_count(tiny_llama, manifest, monkeypatch):
    sent = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, request: (sent.append(request), submit(self, request))[1])
    load = run_load(tiny_llama, build_ar(tiny_llama), manifest, 2, warmup=9, clock=counted())
    requests = [entry.request for entry in manifest]
    assert sent == [*requests, *requests[:2], *requests]
    assert len(load.results) == 7 and load.outputs == expected(tiny_llama, manifest)
    assert load.times[0].submitted == 1.0, "the window begins behind the warm-up"
    assert load.rounds == run_load(tiny_llama, build_ar(tiny_llama), manifest, 2).rounds


def test_sampled_requests_do_not_depend_on_the_load(tiny_llama):
    manifest = Manifest.build({"a": [5, 6, 7]}, 4, 8, temperature=1.0, seed=3)
    load = run_load(tiny_llama, build_coin(tiny_llama), manifest, 3)
    assert load.outputs == expected(tiny_llama, manifest)
    assert len({tuple(output) for output in load.outputs}) > 1, "every repetition draws on its own"


def test_scheduled_rows_fill_up_buckets(tiny_llama, manifest):
    plain = run_load(tiny_llama, build_scripted(tiny_llama), manifest, 3)
    filled = run_load(tiny_llama, build_scripted(tiny_llama), manifest, 3, row_bucket=8)
    verified = sum(r.num_verified for result in plain.results for r in result.rounds)
    assert plain.scheduled_rows == verified
    assert filled.rounds == plain.rounds and filled.scheduled_rows % 8 == 0
    assert verified < filled.scheduled_rows < verified + 8 * filled.rounds
    assert filled.outputs == plain.outputs


@pytest.mark.parametrize("change", [{"concurrency": 0}, {"warmup": -1}, {"row_bucket": 0}])
def test_run_load_refuses(tiny_llama, manifest, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        run_load(tiny_llama, build_ar(tiny_llama), manifest, **({"concurrency": 2} | change))


def test_a_prompt_without_room_is_refused(tiny_llama):
    manifest = Manifest.build({"long": [3] * 512}, 1, 4)
    with pytest.raises(ValueError, match=r"request 'long': prompt of 512 tokens fills the context limit of 512"):
        run_load(tiny_llama, build_ar(tiny_llama), manifest, 1)
    nearly = Manifest.build({"long": [3] * 511}, 2, 4)
    assert [len(o) for o in run_load(tiny_llama, build_ar(tiny_llama), nearly, 2).outputs] == [1, 1]


# --- metrics


def made_load() -> LoadResult:
    stages = {"draft": 0.1, "verify": 0.3}
    first = [RoundStats(7, 8, 3, 4, stages, 2, 7), RoundStats(7, 4, 0, 1, stages, 1, 3)]
    second = [RoundStats(7, 6, 1, 2, stages, 2, 5)]
    results = [
        GenerateResult([1] * 6, "", "length", 3, first, prefill_s=0.25),
        GenerateResult([1] * 3, "", "stop", 2, second, prefill_s=0.25),
        GenerateResult([1], "", "stop", 2, [], prefill_s=0.5),
    ]
    times = [
        RequestTimes(0.0, (0.5, 1.0, 2.0), 2.0),
        RequestTimes(0.0, (0.5, 1.5), 1.5),
        RequestTimes(1.5, (3.0,), 3.0),
    ]
    return LoadResult(2, results, times, 4.0, 2, 2, 32, 3 * 2**20)


def test_metrics_follow_their_definitions():
    row = load_metrics(made_load())
    assert (row["requests"], row["tokens"], row["output_tokens_per_s"], row["requests_per_s"]) == (3, 10, 2.5, 0.75)
    assert row["latency_mean_s"] == pytest.approx(5 / 3) and row["latency_p50_s"] == 1.5
    assert row["latency_p95_s"] == pytest.approx(1.95) and row["latency_p99_s"] == pytest.approx(1.99)
    assert row["ttft_mean_ms"] == pytest.approx(1e3 * 2.5 / 3)
    assert row["ttft_p99_ms"] == pytest.approx(1e3 * np.percentile([0.5, 0.5, 1.5], 99))
    assert row["tpot_mean_ms"] == pytest.approx(1e3 * (1.5 / 5 + 1.0 / 2) / 2)
    assert row["gap_mean_ms"] == pytest.approx(1e3 * (0.5 + 1.0 + 1.0) / 3)
    assert row["tau"] == pytest.approx((4 + 1 + 2) / 3)
    assert (row["rows_drafted"], row["rows_verified"], row["rows_scheduled"]) == (8, 6, pytest.approx(32 / 3))
    assert (row["rows_per_accepted"], row["rows_per_emitted"]) == (18 / 4, 18 / 7)
    assert (row["rounds"], row["prefills"], row["mean_live"]) == (2, 2, 1.5)
    assert row["step_ms"] == 1500.0, "four seconds less one of prefill, in two rounds"
    assert row["stage_ms"] == {"draft": pytest.approx(100), "verify": pytest.approx(300)}
    assert row["peak_memory_mib"] == 3.0


def test_metrics_of_requests_without_rounds():
    load = made_load()
    row = load_metrics(replace(load, results=load.results[2:], times=load.times[2:], rounds=0, scheduled_rows=0))
    missing = ("rows_per_accepted", "rows_per_emitted", "mean_live", "step_ms")
    assert [row[name] for name in missing] == [None] * 4
    assert all(np.isnan(row[name]) for name in ("tau", "tpot_mean_ms", "gap_mean_ms", "gap_p99_ms"))


def test_depth_counts():
    counts = depth_counts(made_load().results)
    assert counts == {"offered": [3, 3, 3, 2, 2, 1, 1], "reached": [2, 1, 1, 0, 0, 0, 0], "accepted": [1, 1, 0, 1]}
    assert depth_counts([]) == {"offered": [], "reached": [], "accepted": [0]}


# --- cells


@pytest.fixture
def methods(tiny_llama):
    return {"ar": build_ar(tiny_llama), "scripted": build_scripted(tiny_llama)}


QUIET = LoadConfig(concurrencies=(2, 3), repetitions=2, warmup=1, progress=False)


def test_cells(tiny_llama, methods, manifest):
    other = Manifest.build({"x": [7, 8]}, 3, 6, temperature=1.0)
    rows = run_cells(tiny_llama, methods, {"one": manifest, "two": other}, QUIET)
    cells = [(row["prompt_set"], row["concurrency"], row["method"]) for row in rows]
    assert cells == list(itertools.product(("one", "two"), (2, 3), ("ar", "scripted")))
    for row in rows:
        requests = {"one": 7, "two": 3}[row["prompt_set"]]
        assert (row["requests"], row["equal"], row["checked"], row["lossless"]) == (requests, requests, requests, True)
        assert row["worst_margin"] is None and row["repetitions"] == 2
        assert row["output_tokens_per_s_min"] <= row["output_tokens_per_s"] <= row["output_tokens_per_s_max"]
        assert row["manifest"] == {"one": manifest, "two": other}[row["prompt_set"]].digest
        assert sum(row["accepted_histogram"]) == 2 * row["rounds"] * row["mean_live"]
    control = {(row["prompt_set"], row["concurrency"]): row for row in rows if row["method"] == "ar"}
    for row in rows:
        ar = control[row["prompt_set"], row["concurrency"]]
        assert row["throughput_ratio"] == pytest.approx(row["output_tokens_per_s"] / ar["output_tokens_per_s"])
        assert row["latency_p99_ratio"] == pytest.approx(row["latency_p99_s"] / ar["latency_p99_s"])
    assert rows[0]["tau"] == 1.0 and rows[0]["acceptance_by_depth"] == []


def spy(monkeypatch, change=lambda name, outputs: outputs):
    """Records what `run_cells` runs, and changes outputs on the way."""
    calls = []

    def recorded(target, drafter, manifest, concurrency, *rest):
        calls.append((drafter.name, concurrency, len(manifest)))
        load = load_test.run_load(target, drafter, manifest, concurrency, *rest)
        for result, output in zip(load.results, change(drafter.name, load.outputs), strict=True):
            result.token_ids = output
        return load

    monkeypatch.setattr(load_cells, "run_load", recorded)
    return calls


def test_the_order_rotates(tiny_llama, methods, manifest, monkeypatch):
    calls = spy(monkeypatch)
    run_cells(tiny_llama, methods, {"one": manifest}, QUIET)
    once = [("ar", 2), ("scripted", 2), ("scripted", 2), ("ar", 2)]
    assert [call[:2] for call in calls] == [*once, *((name, 3) for name, _ in once)]


def test_the_baseline_can_be_a_mere_reference(tiny_llama, methods, manifest, monkeypatch):
    calls = spy(monkeypatch)
    config = replace(QUIET, measure_baseline=False, control="scripted", repetitions=1)
    rows = run_cells(tiny_llama, methods, {"one": manifest}, config)
    assert calls == [("scripted", 2, 7), ("scripted", 3, 7), ("ar", 3, 7)]
    assert [row["method"] for row in rows] == ["scripted", "scripted"]
    assert [row["throughput_ratio"] for row in rows] == [1.0, 1.0] and all(row["lossless"] for row in rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_wrong_output_takes_the_ratio(tiny_llama, methods, temperature, monkeypatch):
    manifest = Manifest.build({"a": [5, 6, 7], "b": [9]}, 3, 6, temperature)

    def wrong(name, outputs):
        return [[*o[:-1], (o[-1] + 1) % 97] if name == "scripted" and i == 1 else o for i, o in enumerate(outputs)]

    spy(monkeypatch, wrong)
    rows = run_cells(tiny_llama, methods, {"one": manifest}, replace(QUIET, concurrencies=(2,)))
    ar, scripted = rows
    assert (ar["lossless"], ar["equal"], ar["throughput_ratio"]) == (True, 3, 1.0)
    assert (scripted["lossless"], scripted["equal"], scripted["throughput_ratio"]) == (False, 2, None)
    assert (scripted["worst_margin"] is None) == (temperature > 0)
    summary = summary_rows(rows, "ar")
    assert [(row["method"], row["throughput_ratio"], row["throughput_low"]) for row in summary] == [
        ("scripted", None, None)
    ]
    checks = load_checks(rows, summary, {"scripted": 1.1}, suffix="_x")
    assert checks["lossless_load_greedy_x"].ok is False and checks["scripted_throughput_x"].ok is False


def test_sampled_runs_in_reduced_precision_are_checked_greedily(tiny_llama, methods, monkeypatch):
    class Half:
        """The tiny target under another dtype's name; nothing is computed in it."""

        def __init__(self, target):
            self._target = target

        def __getattr__(self, name):
            return load_cells.np_half if name == "dtype" else getattr(self._target, name)

    monkeypatch.setattr(load_cells, "np_half", np.dtype("float16"), raising=False)
    manifest = Manifest.build({"a": [5, 6, 7], "b": [9]}, 5, 12, temperature=1.0)
    calls = spy(monkeypatch)
    config = replace(QUIET, repetitions=1)
    rows = run_cells(Half(tiny_llama), methods, {"one": manifest}, config)
    assert calls[4:] == [("ar", 3, 2), ("scripted", 3, 2)], "two distinct prompts, each once"
    assert [(row["lossless"], row["equal"], row["checked"]) for row in rows] == [(True, 2, 2)] * 4
    assert all(row["side_check"] for row in rows)


def test_sampled_runs_by_rejection_are_checked_greedily(tiny_llama, methods, monkeypatch):
    """Their outputs keep AR's law but not its tokens."""
    manifest = Manifest.build({"a": [5, 6, 7], "b": [9]}, 5, 12, temperature=1.0, accept_rule="rejection")
    calls = spy(monkeypatch)
    config = replace(QUIET, concurrencies=(2,), repetitions=1)
    rows = run_cells(tiny_llama, methods, {"one": manifest}, config)
    assert calls == [("ar", 2, 5), ("scripted", 2, 5), ("ar", 2, 2), ("scripted", 2, 2)]
    assert [(row["lossless"], row["checked"], row["side_check"]) for row in rows] == [(True, 2, True)] * 2
    spy(monkeypatch, lambda name, outputs: [[0]] * len(outputs) if name == "scripted" else outputs)
    assert [row["lossless"] for row in run_cells(tiny_llama, methods, {"one": manifest}, config)] == [True, False]
    greedy = Manifest.build({"a": [5, 6, 7]}, 2, 12, accept_rule="rejection")
    assert not any(row["side_check"] for row in run_cells(tiny_llama, {"ar": methods["ar"]}, {"one": greedy}, config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {}}, r"methods=\[\] lack ar"),
        ({"manifests": {}}, "at least one"),
        ({"manifests": {"all": None}}, "none called 'all'"),
        ({"config": LoadConfig(control="dflash")}, r"methods=\['ar', 'scripted'\] lack dflash"),
    ],
)
def test_run_cells_refuses(tiny_llama, methods, manifest, change, message):
    arguments = {"target": tiny_llama, "methods": methods, "manifests": {"one": manifest}, "config": QUIET} | change
    with pytest.raises(ValueError, match=message):
        run_cells(**arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"concurrencies": ()},
        {"concurrencies": (4, 0)},
        {"concurrencies": (4, 4)},
        {"repetitions": 0},
        {"warmup": -1},
        {"row_bucket": 0},
        {"noise_ulps": float("nan")},
        {"control": "ar", "measure_baseline": False},
    ],
)
def test_load_config_refuses(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        LoadConfig(**change)


def test_counts_of_repetitions_are_added_up(manifest):
    run = load_cells.Run("m", 2, load_metrics(made_load()), depth_counts(made_load().results), [])
    longer = replace(run, counts={"offered": [4] * 8, "reached": [2] * 8, "accepted": [2, 0, 0, 0, 0, 0, 0, 0, 2]})
    row = cell_row("one", manifest, [run, longer], load_cells.Verdict(True, 7, 7, None))
    assert row["accepted_histogram"] == [3, 1, 0, 1, 0, 0, 0, 0, 2]
    assert row["acceptance_by_depth"][0] == pytest.approx(4 / 7) and row["acceptance_by_depth"][7] == 0.5
    assert row["reached_by_depth"][0] == pytest.approx(4 / 7) and row["reached_by_depth"][7] == pytest.approx(2 / 7)
