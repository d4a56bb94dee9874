"""Training the acceptance predictor: the loss by hand, that it learns, and what it must not see."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from trace_setup import made_trace

from workbench.budget.features import BATCH_SIZE, DraftFeatures, feature_size
from workbench.budget.predictor import PredictorInfo, load_predictor, save_predictor
from workbench.measure.predictor_quality import predictor_quality
from workbench.train.predictor_objective import (
    LabelledRows,
    PredictorObjective,
    PredictorRecipe,
    RowBatches,
    constant_loss,
    predictor_loss,
    score_trace,
    train_predictor,
)

WIDTH, SIZE = 16, feature_size(16)
LIVE = SIZE - BATCH_SIZE
VARIED = 300
QUICK = PredictorRecipe(epochs=8, batch_size=128, learning_rate=3e-3)


def full_trace(num_rounds=500, **fields):
    """A made-up trace with all 1735 features: 40 that tell, noise, zeros, and a batch context as real ones have it."""
    trace = made_trace(num_rounds, num_prompts=24, **fields)
    draw = np.random.default_rng(9)
    features = np.zeros((len(trace), SIZE), np.float16)
    features[:, :VARIED] = draw.normal(5.0, 3.0, size=(len(trace), VARIED))
    features[:, :40] = trace.features
    features[:, LIVE] = draw.integers(4, 6, len(trace))
    features[:, LIVE + 3] = 1
    return replace(trace, features=features)


@pytest.fixture(scope="module")
def trace():
    return full_trace()


@pytest.fixture(scope="module")
def run(trace):
    return train_predictor(trace, [QUICK])


def test_loss_by_hand():
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0]])
    p = 1 / (1 + np.exp(-logits.double().numpy()))
    entropy, length = predictor_loss(logits, torch.tensor([2, 0]), 0.02)
    hits = np.array([[1, 1, 0], [0, 0, 0]])
    assert entropy.item() == pytest.approx(-(hits * np.log(p) + (1 - hits) * np.log(1 - p)).mean(), rel=1e-6)
    assert length.item() == pytest.approx(0.02 * ((p.sum(1) - [2, 0]) ** 2).mean(), rel=1e-6)
    rows = LabelledRows(torch.zeros(4, 1), torch.tensor([3, 0, 1, 1]))
    # Rates 3/4, 1/4, 1/4.
    again = constant_loss(rows, rows, 4, 0.0)
    expected = -np.mean([r * math.log(r) + (1 - r) * math.log(1 - r) for r in (0.75, 0.25, 0.25)])
    assert again == pytest.approx(expected, rel=1e-5)


def test_it_learns_what_can_be_known(trace, run):
    assert run.validation_loss < 0.9 * run.constant_loss
    quality = predictor_quality(run.validation)
    assert quality["r2"] > 0.3 and quality["spearman"] > 0.5 and quality["calibration_error"] < 0.1
    assert [row["epoch"] for row in run.rows] == list(range(1, 9)) and run.rows[0]["run"] == 0
    assert run.validation_loss == min(row["validation_loss"] for row in run.rows)
    digests = {run.validation.prompts[i].digest for i in run.validation.prompt}
    assert len(digests) == 1  # a tenth of 12
    assert run.num_train + run.num_validation == trace.uncensored.sum()


def test_the_same_run_twice_is_the_same(trace, run):
    state = torch.get_rng_state()
    again = train_predictor(trace, [QUICK])
    for one, two in zip(run.predictor.parameters(), again.predictor.parameters(), strict=True):
        assert torch.equal(one, two)
    assert run.rows == again.rows and torch.equal(state, torch.get_rng_state())


def test_the_exported_network_takes_raw_features(trace, run):
    """Its loss on raw features is that of the standardised one on standardised features."""
    rest, held = trace.split_by_prompt(0.1)
    objective = PredictorObjective(LabelledRows.of(rest), WIDTH, QUICK)
    rows = LabelledRows.of(held)
    raw = objective.export()(rows.features.float())
    assert float(sum(predictor_loss(raw, rows.accepted, 0.02))) == pytest.approx(objective.mean_loss(rows), rel=1e-5)
    scored = run.validation.scores["predictor"]
    by_hand = run.predictor.probabilities(torch.from_numpy(run.validation.features).float()).numpy()
    assert np.allclose(scored, np.minimum.accumulate(by_hand, 1), atol=1e-6)


def test_the_number_of_live_requests_is_shut_out(trace, run):
    weight = run.predictor.layers[0].weight
    assert not weight[:, VARIED:].any() and weight[:, :VARIED].all()
    alone = trace.features.copy()
    alone[:, LIVE] = 1
    same = score_trace(replace(trace, features=alone), run.predictor).scores["predictor"]
    assert np.array_equal(same, score_trace(trace, run.predictor).scores["predictor"])
    seeing = PredictorObjective(LabelledRows.of(trace), WIDTH, replace(QUICK, use_live_count=True)).export()
    assert seeing.layers[0].weight[:, LIVE].all() and not seeing.layers[0].weight[:, LIVE + 1 :].any()


def test_features_that_never_vary_count_for_nothing(trace):
    features = trace.features.copy()
    features[:, 7] = 1000.0
    features[:, 8] = np.where(np.arange(len(trace)) % 2, 1000.0, 1000.5)  # one step of float16
    objective = PredictorObjective(LabelledRows.of(replace(trace, features=features)), WIDTH, QUICK)
    weight = objective.export().layers[0].weight
    assert not weight[:, 7:9].any() and weight[:, 6].all()


def test_cut_drafts_are_left_out(trace):
    rows = LabelledRows.of(trace)
    assert len(rows) == trace.uncensored.sum() < len(trace)
    assert rows.accepted.tolist() == trace.accepted[trace.uncensored].tolist()
    with pytest.raises(ValueError, match="no row whose whole draft"):
        LabelledRows.of(trace.select(~trace.uncensored))


def test_batches_follow_from_the_step(trace):
    rows = LabelledRows.of(trace)
    one, two = RowBatches(rows, 64, seed=3), RowBatches(rows, 64, seed=3)
    one.batch(0)
    assert torch.equal(one.batch(5).features, two.batch(5).features)
    assert not torch.equal(one.batch(5).features, RowBatches(rows, 64, seed=4).batch(5).features)
    assert one.identity == two.identity != RowBatches(rows, 32, seed=3).identity


def test_the_best_of_several_settings_is_kept(trace):
    frozen = replace(QUICK, learning_rate=0.0, epochs=1)
    found = train_predictor(trace, [frozen, QUICK, replace(QUICK, weight_decay=5.0, learning_rate=1e-2)])
    best = {n: min(r["validation_loss"] for r in found.rows if r["run"] == n) for n in range(3)}
    assert found.validation_loss == min(best.values()) and best[0] > best[1]
    assert found.recipe != frozen


def test_a_saved_predictor_scores_the_same(trace, run, tmp_path):
    features = DraftFeatures(8, torch.randn(40, 8), WIDTH)
    save_predictor(run.predictor, tmp_path / "p.safetensors", PredictorInfo.of(features, {"pair": "toy"}))
    assert 440_000 < (tmp_path / "p.safetensors").stat().st_size < 460_000
    loaded, _ = load_predictor(tmp_path / "p.safetensors")
    part = trace.select(slice(0, 50))
    assert np.array_equal(
        score_trace(part, loaded).scores["predictor"], score_trace(part, run.predictor).scores["predictor"]
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"weight_decay": 11.0}, "weight_decay=11.0"),
        ({"length_weight": -0.1}, "length_weight=-0.1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_settings_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        PredictorRecipe(**fields)


def test_traces_that_cannot_be_learned_are_refused(trace, run):
    with pytest.raises(ValueError, match="has no features; a predictor for 16 rows needs 1735"):
        train_predictor(trace.without_features())
    with pytest.raises(ValueError, match="has 40 features"):
        score_trace(made_trace(), run.predictor)
    with pytest.raises(ValueError, match="recipes is empty"):
        train_predictor(trace, [])
    one = trace.select(trace.prompt == 0)
    with pytest.raises(ValueError, match="needs at least 2"):
        train_predictor(one)
    assert len(score_trace(trace.select(np.zeros(len(trace), bool)), run.predictor)) == 0


@pytest.mark.gpu
def test_on_a_gpu_it_comes_to_the_same(trace, run):
    state = torch.cuda.get_rng_state()
    found = train_predictor(trace, [QUICK], device="cuda")
    assert found.predictor.layers[0].weight.device.type == "cpu" and torch.equal(state, torch.cuda.get_rng_state())
    assert found.constant_loss == pytest.approx(run.constant_loss, rel=1e-4)
    assert found.validation_loss == pytest.approx(run.validation_loss, rel=0.02)
