"""Replay: what policies keep of recorded rounds, against figures worked out by hand and by another route."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from trace_setup import made_trace

from workbench.budget.dvl import allocate, allocate_topk
from workbench.budget.policy import BudgetPolicy, allocate_uniform
from workbench.budget.trace import Trace, TracePrompt
from workbench.measure.replay import Replay, figures


def small_trace() -> Trace:
    """Two rounds of width 4: scores 0.9 0.8 0.7 / 0.6 0.2 0.1, then 0.5 0.5 0.5 (one token left after the first)."""
    scores = np.array([[0.9, 0.8, 0.7], [0.6, 0.2, 0.1], [0.5, 0.5, 0.5]], np.float32)
    return Trace(
        step=np.array([0, 0, 3], np.int32),
        prompt=np.array([0, 1, 0], np.int32),
        position=np.array([4, 9, 7], np.int32),
        limit=np.array([3, 3, 1], np.int16),
        accepted=np.array([3, 0, 1], np.int16),
        gap=np.zeros(3, np.float32),
        prompts=(TracePrompt("a", "one"), TracePrompt("b", "two")),
        scores={"predictor": scores},
        width=4,
    )


def test_by_hand():
    replay = Replay(small_trace())
    # Sums 2.4, 0.9 and, of the one token it may have, 0.5: half-up roundings.
    assert replay.seeds("predictor").tolist() == [2, 1, 1]
    assert replay.lengths("seed").tolist() == [2, 1, 1]
    # Five rows for two requests: 2 + 1 grow by the next scores 0.8 and 0.7; the last round has two rows at most.
    assert replay.lengths("dvl", 2.5).tolist() == [3 + 1, 1, 2]
    assert replay.lengths("uniform", 2).tolist() == [2, 2, 2]
    assert replay.lengths("full").tolist() == [4, 4, 2]
    assert replay.lengths("oracle", 2.5).tolist() == [4, 1, 2]
    row = replay.row("dvl", 2.5)
    assert row == {
        "policy": "dvl",
        "scorer": "predictor",
        "rows": 2.5,
        "rounds": 2,
        "drafts": 3,
        "mean_rows": pytest.approx(7 / 3),
        "tau": pytest.approx(1 + 4 / 3),
        "tau_full": pytest.approx(1 + 4 / 3),
        "rows_per_token": pytest.approx(7 / 7),
        "retention": 1.0,
        "lengths": [1, 1, 0, 1],
        "retention_seed": pytest.approx(1 / 4),
        "mean_seed": pytest.approx(4 / 3),
    }
    uniform = replay.row("uniform", 2)
    assert (uniform["retention"], uniform["rows_per_token"], uniform["scorer"]) == (0.5, 6 / 5, "")
    assert math.isnan(uniform["retention_seed"]) and math.isnan(uniform["mean_seed"])


def test_round_rows():
    rows = Replay(small_trace()).round_rows(0, "dvl", 2.5)
    assert [(r["prompt"], r["seed"], r["final"], r["limit"], r["accepted"], r["kept"]) for r in rows] == [
        (0, 2, 4, 3, 3, 3),
        (1, 1, 1, 3, 0, 0),
    ]
    assert rows[1]["scores"] == pytest.approx([0.6, 0.2, 0.1])
    assert Replay(small_trace()).round_rows(1, "uniform", 2)[0]["seed"] is None
    with pytest.raises(ValueError, match=r"number=2: .* rounds 0..1"):
        Replay(small_trace()).round_rows(2)


@pytest.mark.parametrize("rows", [1, 1.5, 4, 8, 11.2, 16])
def test_policies_equal_the_allocators(rows):
    trace = made_trace(num_rounds=30)
    replay = Replay(trace)
    for policy, allocator in (("dvl", allocate), ("topk", allocate_topk)):
        lengths = replay.lengths(policy, rows)
        for part in trace.rounds():
            limits = trace.limit[part].astype(np.int32) + 1
            budget = min(round(rows * len(limits)), limits.sum())
            assert lengths[part].tolist() == allocator(trace.scores["predictor"][part], budget, limits=limits).tolist()
    blind = replay.lengths("uniform", rows)
    assert blind.tolist() == np.minimum(round(rows), trace.limit + 1).tolist()


def test_better_scores_keep_more():
    replay = Replay(made_trace(num_rounds=200))
    assert replay.row("full")["retention"] == 1.0
    kept = [replay.row(p, 4)["retention"] for p in ("oracle", "topk", "random")]
    assert kept[0] > kept[1] + 0.05 and kept[1] > kept[2] + 0.05
    more = [replay.row("dvl", rows)["retention"] for rows in (2, 4, 8, 12)]
    assert more == sorted(more) and more[0] < more[-1]
    # Blind to the trace's own limits nothing is lost at full width.
    assert replay.row("dvl", 16)["retention"] == 1.0


def test_tables_and_other_policies():
    trace = made_trace(num_rounds=200)
    replay = Replay(trace)
    rows = replay.table(("full", "seed", "uniform", "dvl"), (4, 8))
    assert [(r["policy"], r["rows"]) for r in rows] == [
        ("full", 4), ("seed", 4), ("uniform", 4), ("uniform", 8), ("dvl", 4), ("dvl", 8)
    ]  # fmt: skip
    assert rows[1]["retention"] == rows[1]["retention_seed"] == rows[5]["retention_seed"]
    own = BudgetPolicy("mine", allocate_uniform, rows=3)
    assert replay.row(own)["lengths"] == replay.row("uniform", 3)["lengths"]
    assert replay.row("dvl", 4, scorer="random")["retention"] < replay.row("dvl", 4)["retention"]
    assert replay.row("shared", 4, scorer="random")["lengths"] == replay.row("random", 4)["lengths"]


def test_rows_of_a_part():
    trace = made_trace()
    lengths = Replay(trace).lengths("uniform", 5)
    parts = [figures(trace, lengths, trace.labels == label) for label in ("even", "odd")]
    whole = figures(trace, lengths)
    assert sum(p["drafts"] for p in parts) == whole["drafts"] == 100
    kept = [(p["tau"] - 1) * p["drafts"] for p in parts]
    assert sum(kept) == pytest.approx((whole["tau"] - 1) * 100)
    assert np.add(parts[0]["lengths"], parts[1]["lengths"]).tolist() == whole["lengths"]
    none = figures(trace, lengths, np.zeros(100, bool))
    assert none["drafts"] == 0 and math.isnan(none["retention"]) and math.isnan(none["tau"])
    refusing = replace(trace, accepted=np.zeros_like(trace.accepted))
    assert math.isnan(figures(refusing, lengths)["retention"]) and figures(refusing, lengths)["tau"] == 1


def test_what_cannot_be_replayed():
    trace = made_trace()
    replay = Replay(trace)
    with pytest.raises(ValueError, match=r"policy='best'; allowed: full, .*dvl"):
        replay.row("best")
    with pytest.raises(ValueError, match="'product'; it has: oracle, predictor, random"):
        replay.row("product")
    with pytest.raises(ValueError, match="'shared' goes by a drafter's own scores"):
        replay.row("shared")
    with pytest.raises(ValueError, match="rows"):
        replay.row("dvl", 0.5)
    for lengths in (np.zeros(100, int), np.full(100, 16), np.ones(99, int)):
        with pytest.raises(ValueError, match=r"numbers in 1..limit \+ 1"):
            figures(trace, lengths)
    logits = trace.with_scores("gap", trace.scores["predictor"] * 20)
    assert math.isnan(Replay(logits).row("gap", 4)["retention_seed"])
