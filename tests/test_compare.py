"""Losslessness check and the comparison of methods."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from workbench.decode import engine
from workbench.decode.sampling import SamplingConfig
from workbench.drafters.ar import build_ar
from workbench.drafters.oracle import build_scripted
from workbench.measure import compare as comparing
from workbench.measure.compare import Batch, CompareConfig, compare, comparison_checks, rows_of
from workbench.measure.lossless import Divergence, check_greedy, first_divergence, next_logits
from workbench.types import GenerateResult, RoundStats


def rounds(*accepted: int) -> list[RoundStats]:
    return [RoundStats(8, 9, a, a + 1, {}, 1, 4) for a in accepted]


def result(tokens, stats=()) -> GenerateResult:
    return GenerateResult(list(tokens), "", "length", 3, list(stats), prefill_s=0.5)


# --- losslessness


def test_first_divergence():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([], []) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 2, 3], [1]) == 1


def test_any_divergence_is_an_error_in_fp32(tiny_llama):
    prompt = [5, 6, 7]
    reference = engine.generate(tiny_llama, build_ar(tiny_llama), [prompt], SamplingConfig(8, stop_ids=()))[0].token_ids
    assert check_greedy(tiny_llama, prompt, reference, reference) is None
    wrong = [*reference[:3], (reference[3] + 1) % 97, *reference[4:]]
    found = check_greedy(tiny_llama, prompt, reference, wrong)
    assert (found.position, found.reference, found.output) == (3, reference[3], wrong[3])
    logits = next_logits(tiny_llama, prompt + reference[:3])
    assert found.margin == pytest.approx((logits.max() - logits[wrong[3]]).item(), abs=1e-6)
    assert found.top2_margin == pytest.approx(torch.topk(logits, 2).values.diff().abs().item(), abs=1e-6)
    assert found.noise == 0.0 and not found.is_noise
    short = check_greedy(tiny_llama, prompt, reference, reference[:5])
    assert short.output is None and np.isnan(short.margin) and not short.is_noise


def test_near_ties_are_noise_in_reduced_precision(tiny_llama, monkeypatch):
    class Half:
        """A bf16 target whose logits are known."""

        dtype = torch.bfloat16

    logits = torch.tensor([20.0, 19.9, 5.0])
    monkeypatch.setattr("workbench.measure.lossless.next_logits", lambda target, ids: logits)
    near = check_greedy(Half(), [1], [0, 0], [0, 1])
    assert near.position == 1 and near.is_noise and near.noise == pytest.approx(4 * 2**-7 * 20)
    far = check_greedy(Half(), [1], [0, 0], [0, 2])
    assert far.margin == 15.0 and far.top2_margin == pytest.approx(0.1, abs=1e-5) and not far.is_noise
    assert not check_greedy(Half(), [1], [0, 0], [0, 1], noise_ulps=0.1).is_noise
    assert not check_greedy(Half(), [1], [0, 0], [0]).is_noise, "an early end is never rounding"


# --- comparison


@pytest.fixture
def methods(tiny_llama):
    return {"ar": build_ar(tiny_llama), "scripted": build_scripted(tiny_llama)}


SETS = {"one": [[5, 6, 7], [8, 9]], "two": [[3], [4, 4], [1, 2, 3]]}
QUIET = CompareConfig(progress=False)


def test_compare_rows(tiny_llama, methods):
    done = compare(tiny_llama, methods, SETS, SamplingConfig(10, stop_ids=()), replace(QUIET, repeats=2))
    assert [(r["prompt_set"], r["method"]) for r in done.rows] == [
        (name, method) for name in ("one", "two", "all") for method in ("ar", "scripted")
    ]
    assert done.lossless
    for row in done.rows:
        prompts = {"one": 2, "two": 3, "all": 5}[row["prompt_set"]]
        assert (row["prompts"], row["tokens"], row["equal"]) == (prompts, 10 * prompts, prompts)
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        baseline = next(r for r in done.rows if r["prompt_set"] == row["prompt_set"] and r["method"] == "ar")
        assert row["speedup"] == pytest.approx(baseline["seconds"] / row["seconds"])
    assert done.rows[0]["speedup"] == 1.0 and done.rows[0]["tau"] == 1.0
    assert {"verify", "accept", "commit"} <= set(done.rows[0]["stage_ms"])
    assert len(done.results("two", "scripted")) == 3
    with pytest.raises(ValueError, match="allowed: one/ar"):
        done.results("three", "ar")


def test_compare_side_by_side_and_sampled(tiny_llama, methods):
    config = replace(QUIET, slots=2, trace=True)
    done = compare(tiny_llama, methods, SETS, SamplingConfig(6, temperature=1.0, seed=3, stop_ids=()), config)
    assert done.lossless and [len(b.results) for b in done.batches["two", "ar"]] == [2, 1]
    assert done.results("one", "scripted")[0].rounds[0].tree is not None


def test_methods_are_interleaved_and_take_turns(tiny_llama, methods, monkeypatch):
    order = []

    def recorded(running, requests, *rest):
        order.append((running.drafter.name, len(requests)))
        return engine.complete(running, requests, *rest)

    monkeypatch.setattr(comparing, "complete", recorded)
    compare(tiny_llama, methods, {"one": SETS["one"]}, SamplingConfig(2), QUIET)
    assert order == [("ar", 1), ("scripted", 1), ("ar", 1), ("scripted", 1), ("scripted", 1), ("ar", 1)]


def test_a_wrong_method_gets_no_speedup(tiny_llama, methods, monkeypatch):
    def wrong(running, requests, *rest):
        made = engine.complete(running, requests, *rest)
        if running.drafter.name == "scripted" and list(requests[0].prompt_ids) == SETS["two"][0]:
            made[0].token_ids[-1] = (made[0].token_ids[-1] + 1) % 97
        return made

    monkeypatch.setattr(comparing, "complete", wrong)
    done = compare(tiny_llama, methods, SETS, SamplingConfig(4, stop_ids=()), QUIET)
    by_name = {(r["prompt_set"], r["method"]): r for r in done.rows}
    assert by_name["one", "scripted"]["lossless"] is True and by_name["one", "scripted"]["speedup"] is not None
    for name in ("two", "all"):
        row = by_name[name, "scripted"]
        assert row["lossless"] is False and row["speedup"] is None and row["worst_margin"] > 0
        assert row["equal"] == row["prompts"] - 1
    assert not done.lossless
    checks = comparison_checks(done.rows, {"scripted": (1.0, 0.0)}, suffix="_59")
    assert checks["lossless_greedy_59"].ok is False
    assert checks["scripted_tau_59"].ok is True and checks["scripted_speedup_59"].ok is None
    assert comparison_checks(done.rows, {"scripted": (1.0, 1.0)})["scripted_speedup"].ok is False
    assert "lossless_sampled" in comparison_checks(done.rows, sampled=True)
    assert comparison_checks(done.rows, {"other": (99.0, 99.0)})["scripted_tau"].ok is None, "no goal of its own"


def test_unchecked_batches_have_no_speedup():
    batches = {("s", m): [Batch([result([1, 2], rounds(1))], 1.0)] for m in ("ar", "x")}
    assert all(row["speedup"] is None and row["lossless"] is None for row in rows_of(batches, ["ar", "x"]))
    noise = Divergence(0, 1, 2, 0.1, 0.1, 0.5)
    for batch, check in ((batches["s", "ar"][0], None), (batches["s", "x"][0], noise)):
        batch.checks.append(check)
    rows = rows_of(batches, ["ar", "x"])
    assert len(rows) == 2, "one set alone is not pooled"
    assert rows[1]["lossless"] is True and rows[1]["equal"] == 0 and rows[1]["worst_margin"] == 0.1


def test_looped_outputs_are_counted_apart():
    loop, plain = result([7] * 80, rounds(4, 4)), result([1, 2], rounds(0, 0))
    rows = rows_of({("s", "ar"): [Batch([loop, plain], 1.0, [None, None])]}, ["ar"])
    assert rows[0]["looped"] == 1 and rows[0]["tau"] == 3.0 and rows[0]["tau_unlooped"] == 1.0


def test_sampled_half_precision_is_checked_by_a_greedy_run(tiny_llama, methods, monkeypatch):
    class Half:
        dtype = torch.bfloat16
        device = torch.device("cpu")
        context_limit = 512
        forward_report = None

    class Idle:
        graph_report = searches = None

        def __init__(self, target, drafter, *rest):
            self.target, self.drafter = target, drafter

        def prepare(self):
            pass

    seen = []

    def fake(running, requests):
        sampling = requests[0].sampling
        seen.append((running.drafter.name, sampling.temperature, sampling.max_new_tokens))
        return [result([1, 2] if sampling.temperature == 0 else [running.drafter.max_nodes]) for _ in requests]

    monkeypatch.setattr(comparing, "Engine", Idle)
    monkeypatch.setattr(comparing, "complete", fake)
    done = compare(Half(), methods, {"s": [[1]]}, SamplingConfig(100, temperature=0.7), replace(QUIET, warmup=0))
    assert seen[-2:] == [("ar", 0.0, 64), ("scripted", 0.0, 64)]
    assert done.lossless


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": {}}, "lack the baseline 'ar'"),
        ({"prompt_sets": {}}, "prompt_sets="),
        ({"prompt_sets": {"a": []}}, "prompt_sets="),
        ({"prompt_sets": {"all": [[1]]}}, "none called 'all'"),
    ],
)
def test_compare_refuses(tiny_llama, methods, change, message):
    arguments = {"target": tiny_llama, "methods": methods, "prompt_sets": SETS} | change
    with pytest.raises(ValueError, match=message):
        compare(**arguments)


@pytest.mark.parametrize("change", [{"slots": 0}, {"repeats": 0}, {"warmup": -1}, {"noise_ulps": float("nan")}])
def test_compare_config_refuses(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        CompareConfig(**change)
