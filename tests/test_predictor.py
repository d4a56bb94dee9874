"""The acceptance predictor: sizes, scores, standardisation, and its file."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_features import HIDDEN, VOCAB, make_head, make_signals, plain_features

from workbench.budget.features import DraftFeatures
from workbench.budget.predictor import (
    AcceptancePredictor,
    PredictorInfo,
    PredictorScorer,
    fold_standardisation,
    load_predictor,
    load_scorer,
    running_minimum,
    save_predictor,
)
from workbench.budget.table import build_policy
from workbench.types import chain_tree

INFO = PredictorInfo(HIDDEN, VOCAB, hidden_seed=3, logit_seed=4, notes={"pair": "tiny", "prompts": "ä"})
HEADER = {
    "format": "acceptance-predictor-1", "hidden_size": "24", "vocab_size": "97", "width": "16",
    "hidden_seed": "3", "logit_seed": "4",
}  # fmt: skip


def test_size_of_the_network():
    model = AcceptancePredictor()
    assert sum(p.numel() for p in model.parameters()) == 112_079
    shapes = {name: list(t.shape) for name, t in model.state_dict().items()}
    assert shapes == {
        "layers.0.weight": [64, 1735], "layers.0.bias": [64], "layers.2.weight": [15, 64], "layers.2.bias": [15],
    }  # fmt: skip


def test_formula_of_the_network():
    model, features = AcceptancePredictor(), torch.randn(5, 1735)
    w1, b1, w2, b2 = (t.detach().double().numpy() for t in model.state_dict().values())
    logits = np.maximum(features.double().numpy() @ w1.T + b1, 0) @ w2.T + b2
    np.testing.assert_allclose(model(features).detach(), logits, rtol=1e-4, atol=1e-4)
    probabilities = model.probabilities(features)
    np.testing.assert_allclose(probabilities.detach(), 1 / (1 + np.exp(-logits)), rtol=1e-4, atol=1e-5)
    assert probabilities.requires_grad  # training goes through it


def test_running_minimum_is_no_product():
    scores = running_minimum(torch.tensor([[0.9, 0.8, 0.95, 0.1, 0.2]]))
    torch.testing.assert_close(scores, torch.tensor([[0.9, 0.8, 0.8, 0.1, 0.1]]))


def test_scorer_goes_from_drafts_to_scores():
    head = make_head()
    model = AcceptancePredictor().requires_grad_(False)
    signals = make_signals(4, head)
    scores = PredictorScorer(model, DraftFeatures(HIDDEN, head))(signals)
    assert scores.shape == (4, 15) and scores.dtype == np.float32 and (np.diff(scores, axis=1) <= 0).all()
    plain = torch.from_numpy(plain_features(signals, 4)).float()
    np.testing.assert_allclose(scores, running_minimum(model.probabilities(plain)), atol=1e-4)


def test_scores_serve_the_policies():
    head = make_head()
    scorer = PredictorScorer(AcceptancePredictor(), DraftFeatures(HIDDEN, head))
    policy = build_policy("dvl", rows=5, scorer=scorer)
    signals = make_signals(4, head)
    rows = zip(signals.tokens.tolist(), policy.scorer(signals).tolist(), strict=True)
    trees = [chain_tree(0, tokens, scores) for tokens, scores in rows]
    assert sum(tree.num_nodes + 1 for tree in policy.allocate(trees)) == 20


def test_nan_in_a_draft_is_refused_by_the_policy():
    head = make_head()
    policy = build_policy("dvl", scorer=PredictorScorer(AcceptancePredictor(), DraftFeatures(HIDDEN, head)))
    signals = make_signals(2, head)
    signals.logits[1, 5, 7] = torch.nan
    trees = [chain_tree(0, [1] * 15, scores) for scores in policy.scorer(signals).tolist()]
    with pytest.raises(ValueError, match="scores are not finite: chain 1 has nan at candidate 1"):
        policy.allocate(trees)


def test_widths_of_predictor_and_features_must_agree():
    with pytest.raises(ValueError, match="the predictor is for 8 rows, the features for 16"):
        PredictorScorer(AcceptancePredictor(8), DraftFeatures(HIDDEN, make_head()))


def test_standardisation_is_folded():
    model = AcceptancePredictor()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    mean, deviation = 20 * torch.randn(1735, generator=generator), 0.1 + 5 * torch.rand(1735, generator=generator)
    features = mean + deviation * torch.randn(6, 1735, generator=generator)
    folded = fold_standardisation(model, mean, deviation)
    torch.testing.assert_close(folded(features), model((features - mean) / deviation), rtol=1e-3, atol=1e-3)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("mean", "deviation", "message"),
    [
        (torch.zeros(1734), torch.ones(1735), r"mean \[1734\], deviation \[1735\], allowed \[1735\]"),
        (torch.zeros(1735), torch.zeros(1735), "deviation above 0"),
        (torch.full((1735,), torch.nan), torch.ones(1735), "finite"),
        (torch.zeros(1735), torch.full((1735,), torch.inf), "finite"),
    ],
)
def test_bad_standardisation_is_refused(mean, deviation, message):
    with pytest.raises(ValueError, match=message):
        fold_standardisation(AcceptancePredictor(), mean, deviation)


def test_file_holds_weights_seeds_and_notes(tmp_path):
    model, path = AcceptancePredictor(), tmp_path / "made" / "predictor.safetensors"
    save_predictor(model, path, INFO)
    assert [file.name for file in path.parent.iterdir()] == [path.name] and 440_000 < path.stat().st_size < 460_000
    loaded, info = load_predictor(path)
    assert info == INFO
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in loaded.state_dict().items())
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.training
    head, signals = make_head(), make_signals(2, make_head())
    expected = PredictorScorer(model, DraftFeatures(HIDDEN, head, 16, 3, 4))(signals)
    np.testing.assert_array_equal(load_scorer(path, head)(signals), expected)


def test_file_of_half_precision_weights_is_float32_and_replaced_whole(tmp_path):
    path = tmp_path / "p.safetensors"
    save_predictor(AcceptancePredictor(), path, INFO)
    model = AcceptancePredictor().half()
    save_predictor(model, path, INFO)
    assert {t.dtype for t in load_file(path).values()} == {torch.float32}
    torch.testing.assert_close(load_predictor(path)[0].state_dict()["layers.2.bias"], model.layers[2].bias.float())


def test_another_width(tmp_path):
    save_predictor(AcceptancePredictor(8), tmp_path / "p", PredictorInfo(HIDDEN, VOCAB, 8))
    assert load_predictor(tmp_path / "p")[0].layers[2].out_features == 7
    with pytest.raises(ValueError, match="width of the predictor is 8, of its info 16"):
        save_predictor(AcceptancePredictor(8), tmp_path / "p", INFO)


def test_info_of_features():
    features = DraftFeatures(HIDDEN, make_head(), 16, 3, 4)
    assert PredictorInfo.of(features, INFO.notes) == INFO
    same = INFO.features(make_head())
    assert torch.equal(same.matrix, features.matrix)
    with pytest.raises(ValueError, match=r"belongs to an output head \[97, 24\], this one is \[98, 24\]"):
        INFO.features(make_head(98))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, allowed 1..131072"),
        ({"vocab_size": 15}, "vocab_size is 15"),
        ({"width": 65}, "width is 65, allowed 2..64"),
        ({"logit_seed": -1}, "logit_seed is -1"),
        ({"notes": {"width": "9"}}, "allowed: text to text, without format"),
        ({"notes": {"steps": 9}}, "text to text"),
    ],
)
def test_bad_info_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        PredictorInfo(**{"hidden_size": 24, "vocab_size": 97} | fields)


def write(path: Path, tensors: dict[str, torch.Tensor] | None = None, header: dict[str, str] | None = None) -> Path:
    weights = {name: t.detach() for name, t in AcceptancePredictor().state_dict().items()} | (tensors or {})
    save_file(
        {name: t for name, t in weights.items() if t.numel()}, path, metadata=HEADER if header is None else header
    )
    return path


def test_the_good_file_of_the_next_tests_is_good(tmp_path):
    assert load_predictor(write(tmp_path / "p"))[1].hidden_seed == 3


@pytest.mark.parametrize("missing", HEADER)
def test_missing_header_fields_are_refused(tmp_path, missing):
    header = {name: text for name, text in HEADER.items() if name != missing}
    with pytest.raises(
        ValueError, match="has format None" if missing == "format" else f"lacks {missing} in its header"
    ):
        load_predictor(write(tmp_path / "p", header=header))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("width", "17"), ("width", "65"), ("width", "-16"), ("width", "16.0"), ("width", ""), ("width", "1" * 5000),
        ("hidden_size", "99999999"), ("vocab_size", "1e9"), ("hidden_seed", "4294967296"), ("logit_seed", "٣"),
        ("format", "acceptance-predictor-2"),
    ],
)  # fmt: skip
def test_header_fields_out_of_range_are_refused(tmp_path, field, text):
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_predictor(write(tmp_path / "p", header=HEADER | {field: text}))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layers.0.bias": torch.zeros(0)}, r"missing layers.0.bias \[64\]"),
        ({"extra": torch.zeros(2)}, r"unexpected extra \[2\]"),
        ({"layers.0.weight": torch.zeros(64, 1734)}, r"is torch.float32 \[64, 1734\], needed float32 \[64, 1735\]"),
        ({"layers.2.bias": torch.zeros(15, dtype=torch.float64)}, r"layers.2.bias is torch.float64"),
        ({"layers.2.bias": torch.full((15,), torch.nan)}, r"NaN or infinity in layers.2.bias"),
        ({"layers.0.weight": torch.full((64, 1735), torch.inf)}, r"NaN or infinity in layers.0.weight"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        load_predictor(write(tmp_path / "p", tensors))


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    model = AcceptancePredictor().requires_grad_(False)
    model.layers[0].bias[3] = torch.inf
    with pytest.raises(ValueError, match=r"NaN or infinity in layers.0.bias"):
        save_predictor(model, tmp_path / "p", INFO)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 not weights",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"{}",
        json.dumps({"weights": []}).encode(),
    ],
    ids=["empty", "archive", "huge header", "no json", "no tensors", "json"],
)
def test_foreign_files_are_refused(tmp_path, content):
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_predictor(tmp_path / "p")


def test_cut_large_and_missing_files_are_refused(tmp_path):
    path = write(tmp_path / "p")
    whole = path.read_bytes()
    for size in (7, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="no readable safetensors file"):
            load_predictor(path)
    with path.open("wb") as file:
        file.truncate((1 << 24) + 1)
    with pytest.raises(ValueError, match="bytes, allowed up to 16777216"):
        load_predictor(path)
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match="is no file"):
            load_predictor(missing)
