"""Timer, statistics, method texts, sweeps."""

import time

import numpy as np
import pytest
import torch

from workbench.measure.methods import build_methods, parse_method
from workbench.measure.statistics import is_looped, pool_rounds, round_rows
from workbench.measure.sweep import grid_points, sweep
from workbench.measure.timer import StageTimer
from workbench.types import GenerateResult, RoundStats


def rounds(*accepted: int, depth: int = 4, requests: int = 1, **stage_s: float) -> list[RoundStats]:
    return [RoundStats(2 * depth, 2 * depth + 1, a, a + 1, dict(stage_s), requests, depth) for a in accepted]


def result(tokens, stats=()) -> GenerateResult:
    return GenerateResult(list(tokens), "", "length", 3, list(stats), prefill_s=0.5)


# --- timer


def test_timer_accumulates_and_resets():
    timer = StageTimer("cpu")
    for _ in range(2):
        with timer.stage("draft"):
            time.sleep(0.01)
    with timer.stage("prefill"):
        pass
    assert set(timer.seconds) == {"draft", "prefill"}
    taken = timer.take()
    assert 0.02 <= taken["draft"] < 2.0
    assert timer.take() == {}


def test_timer_nested_stages_are_exclusive():
    timer = StageTimer()
    begin = time.perf_counter()
    with timer.stage("verify"):
        time.sleep(0.01)
        with timer.stage("accept"), timer.stage("verify"):
            time.sleep(0.02)
        time.sleep(0.01)
    whole = time.perf_counter() - begin
    taken = timer.take()
    assert taken["verify"] >= 0.04 and taken["accept"] < 0.015
    assert sum(taken.values()) == pytest.approx(whole, abs=0.02)


def test_timer_survives_errors_and_refuses_unknown_names():
    timer = StageTimer()
    with pytest.raises(KeyError), timer.stage("pack"):
        raise KeyError
    with timer.stage("pack"):
        pass
    assert set(timer.take()) == {"pack"}
    with pytest.raises(ValueError, match="stage='prune' is unknown; allowed: draft, search"):
        timer.stage("prune")


def test_timer_is_cheap():
    timer = StageTimer()
    begin = time.perf_counter()
    for _ in range(20_000):
        with timer.stage("commit"):
            pass
    assert (time.perf_counter() - begin) / 20_000 < 2e-5  # measured near 1e-6; the limit allows a busy machine


@pytest.mark.gpu
def test_timer_waits_for_the_device():
    timer = StageTimer("cuda")
    a = torch.randn(8192, 8192, device="cuda")
    a @ a  # the first product also sets up cuBLAS
    torch.cuda.synchronize()
    with timer.stage("draft"):
        a @ a
    with timer.stage("verify"):
        for _ in range(20):
            a @ a
    taken = timer.take()
    assert taken["verify"] > 5 * taken["draft"] > 0


# --- statistics


def test_loops_follow_their_definition():
    noise = list(np.random.default_rng(0).integers(1000, 2000, 80))
    assert not is_looped(noise)
    assert not is_looped([])
    for period in (1, 7, 64, 100):
        unit = list(range(period))
        needed = max(64, period)
        assert is_looped(noise + unit + (unit * 80)[:needed] + noise)
        assert not is_looped(noise + unit + (unit * 80)[: needed - 1] + noise)
    assert not is_looped(noise + list(range(101)) * 3), "a period above 100 is no loop"


def test_pooling_is_over_rounds_not_over_results():
    first = result([1], rounds(3, 3, 3, 3))
    second = result([1], rounds(0))
    pooled = pool_rounds([first, second])
    assert pooled["tau"] == pytest.approx((4 * 4 + 1) / 5)
    assert pooled["rounds"] == 5
    assert (pooled["drafted_per_round"], pooled["verified_per_round"]) == (8, 9)
    assert np.isnan(pool_rounds([result([1])])["tau"])


def test_shared_rounds_count_their_time_once():
    two = [result([1], rounds(1, 1, requests=2, verify=0.01, draft=0.002)) for _ in range(2)]
    assert pool_rounds(two)["stage_ms"] == {"draft": pytest.approx(2.0), "verify": pytest.approx(10.0)}


def test_acceptance_counts_only_rounds_that_offered_the_depth():
    mixed = result([1], rounds(2, 0, depth=2) + rounds(4, depth=4))
    assert mixed.acceptance_by_depth == [2 / 3, 2 / 3, 1.0, 1.0]
    assert result([1]).acceptance_by_depth == []


def test_round_rows():
    rows = round_rows([result([1], rounds(2, verify=0.003)), result([1], rounds(0, 1))])
    assert [(r["prompt"], r["round"], r["accepted"]) for r in rows] == [(0, 0, 2), (1, 0, 0), (1, 1, 1)]
    assert rows[0]["ms"] == pytest.approx(3.0)


# --- method texts


def test_method_texts(tiny_llama):
    assert parse_method("dart") == ("dart", {})
    assert parse_method("dart:trie=none,num_nodes=31,path=/a/b") == (
        "dart",
        {"trie": None, "num_nodes": 31, "path": "/a/b"},
    )
    assert parse_method("dscale:rows=1e1,seed=3,x=-2.5E-3") == ("dscale", {"rows": 10.0, "seed": 3, "x": -2.5e-3})
    for wrong in ("dart:a=[", "dart:a=2001-99-99", "dart:a=" + "9" * 5000):
        with pytest.raises(ValueError, match="the value of a is no YAML"):
            parse_method(wrong)
    for wrong in ("dart:trie", "dart:a=1,a=2", "dart:=1"):
        with pytest.raises(ValueError, match="option=value"):
            parse_method(wrong)
    built = build_methods(["coin:accuracy=0.25", "coin", "ar", "coin"], tiny_llama, draft_len=3, seed="default")
    assert list(built) == ["ar", "coin:accuracy=0.25", "coin"]
    assert built["coin:accuracy=0.25"].accuracy == 0.25 and built["coin"].max_nodes == 3
    assert build_methods(["coin:draft_len=5"], tiny_llama, draft_len=3)["coin:draft_len=5"].max_nodes == 5
    with pytest.raises(ValueError, match="coin"):
        build_methods(["coni"], tiny_llama)
    with pytest.raises(ValueError, match="wrong_option"):
        build_methods(["coin:wrong_option=1"], tiny_llama)
    with pytest.raises(ValueError, match="no method has such an option"):
        build_methods(["coin"], tiny_llama, numnodes=3)


# --- sweeps


def test_grid_points():
    assert grid_points({"a": [1, 2], "b": ["x"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert grid_points({}) == [{}]
    for wrong in ({"a": []}, {"a": "xy"}):
        with pytest.raises(ValueError, match="grid a="):
            grid_points(wrong)


def test_sweep_resumes(tmp_path):
    store = tmp_path / "sweep.jsonl"
    calls = []

    def measure(a, b):
        calls.append(a)
        if a == 3:
            raise RuntimeError
        return [{"value": np.float32(a * b)}, {"value": float("nan")}]

    points = grid_points({"a": [1, 2, 3], "b": [10]})
    with pytest.raises(RuntimeError):
        sweep(measure, points, store, progress=False)
    store.write_text(store.read_text() + '{"point": {"a"')  # killed while it wrote
    rows = sweep(measure, points[:2], store, progress=False)
    assert calls == [1, 2, 3]
    assert rows == [{"a": a, "b": 10, "value": v} for a in (1, 2) for v in (10.0 * a, None)]
    assert sweep(lambda a, b: [{"value": 0}], [{"a": 4, "b": 1}], store, progress=False) == [
        {"a": 4, "b": 1, "value": 0}
    ]
    assert len(store.read_text().splitlines()) == 3
    store.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1"):
        sweep(measure, points, store, progress=False)
