"""Quality figures, against scipy, closed forms and made-up predictors whose quality is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from trace_setup import made_trace

from workbench.measure.predictor_quality import (
    auc,
    calibration_error,
    calibration_rows,
    predictor_quality,
    quality_rows,
    r_squared,
    ranks,
    reached,
    reliability_rows,
    spearman,
)


def test_ranks_and_correlation_are_scipys():
    draw = np.random.default_rng(3)
    for values, others in (
        (draw.integers(0, 5, 200), draw.normal(size=200)),
        (draw.normal(size=31), draw.normal(size=31)),
        (np.array([3.0, 3.0]), np.array([1.0, 2.0])),
    ):
        assert ranks(values).tolist() == stats.rankdata(values).tolist()
        if np.ptp(values):
            assert spearman(values, others) == pytest.approx(stats.spearmanr(values, others).statistic)
        else:
            assert math.isnan(spearman(values, others))
    assert math.isnan(spearman(np.array([1.0]), np.array([2.0]))) and ranks(np.zeros(0)).tolist() == []


def test_auc_is_the_chance_of_the_right_order():
    draw = np.random.default_rng(4)
    scores, hits = draw.integers(0, 6, 80), draw.random(80) < 0.4
    pairs = scores[hits][:, None] - scores[~hits]
    assert auc(scores, hits) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    assert math.isnan(auc(scores, np.ones(80, bool))) and math.isnan(auc(scores, np.zeros(80, bool)))


def test_r_squared_and_calibration_error():
    truth = np.array([0, 2, 4])
    assert r_squared(truth.astype(float), truth) == 1.0 and r_squared(np.full(3, 2.0), truth) == 0.0
    assert r_squared(np.array([4.0, 2.0, 0.0]), truth) == -3.0 and math.isnan(r_squared(np.ones(2), np.ones(2)))
    told = np.array([0.1, 0.15, 0.95, 1.0])
    # First bin: told 0.125, seen 0.5 (two of four rows); last: told 0.975, seen 0.5.
    assert calibration_error(told, np.array([True, False, False, True])) == pytest.approx(0.5 * 0.375 + 0.5 * 0.475)
    assert math.isnan(calibration_error(np.zeros(0), np.zeros(0, bool)))


def test_a_perfect_and_a_blind_predictor():
    trace = made_trace(num_rounds=60)
    perfect = trace.with_scores("predictor", reached(trace))
    found = predictor_quality(perfect)
    assert found["rows"] == trace.uncensored.sum() < 300
    assert found["r2"] == found["auc"] == found["mean_auc"] == 1.0 and found["calibration_error"] == 0.0
    assert found["spearman"] == pytest.approx(1.0)
    assert found["mean_expected"] == found["mean_accepted"] == trace.accepted[trace.uncensored].mean()
    blind = trace.with_scores("predictor", np.tile(reached(trace.select(trace.uncensored)).mean(0), (300, 1)))
    found = predictor_quality(blind)
    assert found["r2"] == pytest.approx(0.0, abs=1e-6) and math.isnan(found["spearman"])
    assert found["mean_auc"] == 0.5 and 0 < found["spearman_gap"] < 0.9


def test_the_law_itself_is_calibrated():
    trace = made_trace(num_rounds=800)
    found = predictor_quality(trace)
    rows = calibration_rows(trace)
    # Fewer short lengths are left out than the law has (censored rows are drawn independently of it here).
    assert 0.3 < found["r2"] < 0.9 and found["calibration_error"] < 0.02
    assert [r["position"] for r in rows] == list(range(1, 16)) and {r["rows"] for r in rows} == {found["rows"]}
    assert all(abs(r["predicted"] - r["observed"]) < 0.04 and r["auc"] > 0.7 for r in rows)
    bins = reliability_rows(trace, num_bins=5)
    assert sum(b["entries"] for b in bins) == 15 * found["rows"]
    assert all(b["from"] <= b["predicted"] <= b["to"] and abs(b["predicted"] - b["observed"]) < 0.04 for b in bins)
    sharp = trace.with_scores("predictor", trace.scores["predictor"] ** 2)
    assert predictor_quality(sharp)["calibration_error"] > 0.05
    assert predictor_quality(sharp)["mean_auc"] == pytest.approx(found["mean_auc"], abs=1e-4)


def test_censored_rows_do_not_count():
    trace = made_trace(num_rounds=60)
    changed = replace(trace, accepted=np.where(trace.uncensored, trace.accepted, 0).astype(np.int16))
    assert predictor_quality(changed) == predictor_quality(trace)


def test_groups_and_other_scores():
    trace = made_trace(num_rounds=60)
    rows = {r["group"]: r for r in quality_rows(trace)}
    assert list(rows) == ["all", "greedy", "sampled", "looped", "not looped", "label even", "label odd"]
    assert rows["greedy"]["rows"] + rows["sampled"]["rows"] == rows["all"]["rows"]
    assert rows["label odd"]["rows"] == rows["sampled"]["rows"] and rows["looped"]["rows"] < rows["sampled"]["rows"]
    only = quality_rows(trace.select(~trace.sampled))
    assert [r["group"] for r in only] == ["all", "greedy", "not looped", "label even"]
    logits = trace.with_scores("gap", trace.scores["predictor"] * 9)
    found = predictor_quality(logits, "gap")
    assert math.isnan(found["r2"]) and math.isnan(found["calibration_error"]) and found["mean_auc"] > 0.7
    for rate in (calibration_rows, reliability_rows):
        with pytest.raises(ValueError, match=r"only chances in 0\.\.1"):
            rate(logits, "gap")
    with pytest.raises(ValueError, match="no scores 'none'; it has: predictor, random"):
        predictor_quality(trace, "none")
    empty = predictor_quality(trace.select(np.zeros(300, bool)))
    assert empty["rows"] == 0 and all(math.isnan(v) for n, v in empty.items() if n != "rows")
    assert calibration_rows(trace.select(np.zeros(300, bool)))[0]["rows"] == 0
