"""Published sizes: parameter counts without memory, and random models that behave like models."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from workbench.budget.table import build_policy
from workbench.decode.engine import generate
from workbench.decode.sampling import SamplingConfig
from workbench.drafters.dart import DartDrafter, dart_taps
from workbench.drafters.dart_model import DartModel
from workbench.drafters.dflash import DFlashDrafter
from workbench.drafters.dflash_model import DFlashModel
from workbench.drafters.shapes import dart_sizes, dflash_sizes, random_dart, random_dflash, random_scorer
from workbench.models.packed import causal_rows
from workbench.models.shapes import SHAPES, Shape, random_target
from workbench.types import Signals

TINY = Shape("tiny", "qwen3", 48, 9, 6, 2, 12, 64, 211, True, 1e4, max_position_embeddings=256)
#: Odd on purpose: the head is its own, head_dim is not hidden / heads, and there is one group.
TINY_LLAMA = Shape("tiny llama", "llama", 40, 8, 5, 5, 16, 56, 97, False, 1e4, max_position_embeddings=256)


def num_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def logits_of(target, tokens):
    return target.forward(causal_rows(tokens, 0, 0, target.device), target.new_cache(1, len(tokens))).logits


# --- sizes


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("SmolLM2-135M", 134.5),
        ("Qwen3-1.7B", 1720.6),
        ("Qwen3-4B", 4022.5),
        ("Qwen3-8B", 8190.7),
        ("Qwen3-14B", 14768.3),
    ],
)
def test_targets_have_their_published_sizes(name, millions):
    config = SHAPES[name].config()
    assert config.rope_parameters["rope_theta"] == SHAPES[name].rope_theta
    assert config.eos_token_id is None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert num_parameters(model) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(("name", "millions"), [("Qwen3-4B", 537.4), ("Qwen3-8B", 1048.6)])
def test_dflash_has_its_published_size(name, millions):
    config = dflash_sizes(SHAPES[name].config())
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.mask_token_id == 151_669
    assert (config.rope_theta, config.num_drafts) == (1e6, 15)
    with torch.device("meta"):
        model = DFlashModel(config)
    assert num_parameters(model) / 1e6 == pytest.approx(millions, abs=0.06)
    assert len(model.state_dict()) == 58


@pytest.mark.parametrize(
    ("name", "reduced", "whole"),
    [
        ("Qwen3-1.7B", 136.9, 382.5),
        ("Qwen3-4B", 218.3, 525.3),
        ("Qwen3-8B", 399.5, 890.8),
        ("Qwen3-14B", 609.5, 1223.6),
    ],
)
def test_dart_has_its_published_size(name, reduced, whole):
    for rows, millions in ((32_000, reduced), (151_936, whole)):
        config = dart_sizes(SHAPES[name].config(), rows)
        assert config.depth == 8
        with torch.device("meta"):
            model = DartModel(config)
        assert num_parameters(model) / 1e6 == pytest.approx(millions, abs=0.06)


def test_sizes_out_of_range():
    with pytest.raises(ValueError, match=r"shape='Qwen3-9B' is unknown; allowed: SmolLM2-135M, Qwen3-1.7B"):
        random_target("Qwen3-9B")
    for change, message in (
        ({"family": "gpt"}, "family='gpt'; allowed: qwen3, llama"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 4}, "no multiple of num_key_value_heads=4"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(TINY, **change)
    with pytest.raises(ValueError, match="num_hidden_layers=0"):
        random_target(TINY, num_layers=0)
    with pytest.raises(ValueError, match="too few for 5 different layers"):
        dflash_sizes(dataclasses.replace(TINY, num_hidden_layers=6).config())


# --- random targets


@pytest.mark.parametrize("shape", [TINY, TINY_LLAMA], ids=lambda s: s.name)
def test_random_targets_follow_their_seed_and_leave_the_global_state(shape):
    state = torch.get_rng_state()
    first, again, other = (random_target(shape, torch.float32, seed=s) for s in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state()) and torch.get_default_dtype() == torch.float32
    one, two = first.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert (first.lm_head.weight is first.embedding.weight) == shape.tied
    assert first.stop_ids == () and first.name == shape.name and not first.lm_head.weight.requires_grad
    assert first.config.head_dim == shape.head_dim


def test_random_logits_are_spread_and_depend_on_the_context():
    target = random_target(TINY, torch.float32)
    logits = logits_of(target, [5, 9, 5, 9, 7])
    assert float(logits.std(-1).min()) > 2 and float(logits.std(-1).max()) < 4.5
    assert (logits[0] - logits[2]).abs().max() > 1, "the same token in another context"
    assert len(logits_of(target, list(range(40))).argmax(-1).unique()) > 15


def test_deep_random_targets_stay_finite_in_bfloat16():
    """As many layers as the largest published one, whose own probe must pass: rounding must not pile up."""
    shape = dataclasses.replace(TINY, num_hidden_layers=40, hidden_size=128, intermediate_size=384)
    target = random_target(shape, torch.bfloat16)
    exact = random_target(shape, torch.float32)
    exact.model.load_state_dict(target.model.state_dict())
    tokens = list(range(0, 200, 3))
    short, long = logits_of(target, tokens).float(), logits_of(exact, tokens)
    assert target.dtype == torch.bfloat16 and bool(short.isfinite().all())
    assert (short - long).pow(2).mean().sqrt() < 0.1 * long.std()


def test_fewer_layers_for_a_trial():
    target = random_target("SmolLM2-135M", torch.float32, num_layers=1)
    assert target.num_layers == 1 and target.name == "SmolLM2-135M (num_layers=1)"
    assert target.embedding.weight.std().item() == pytest.approx(3 * 576**-0.5, rel=0.01)


# --- random draft networks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_drafters_draft(dtype):
    target = random_target(TINY, dtype)
    dflash, dart = random_dflash(target, seed=1), random_dart(target, seed=1, draft_vocab_size=100)
    for network, make in ((dflash, random_dflash), (dart, random_dart)):
        assert network.norm.weight.dtype == dtype and not network.norm.weight.requires_grad
        assert torch.equal(make(target, seed=1).fc.weight, network.fc.weight)
        assert not torch.equal(make(target, seed=2).fc.weight, network.fc.weight)
        assert bool((network.norm.weight == 1).all())
    ids = dart.draft_ids
    assert (int(ids[0]), len(ids), len(ids.unique())) == (0, 100, 100) and int(ids[-1]) > 200
    assert int(dart.t2d.sum()) == 100 and dart.d2t.dtype == torch.int64
    assert dart.midlayer.mask_rep.std() > 0.5
    for drafter, drafted in (
        (DFlashDrafter(dflash, target.embedding, target.lm_head, build_policy("full")), 4),
        (DartDrafter(dart, target.embedding, dart_taps(target.num_layers)), 59),
    ):
        result = generate(target, drafter, [[1, 2, 3]], SamplingConfig(max_new_tokens=6))[0]
        assert len(result.token_ids) == 6 and result.rounds[0].num_drafted == drafted


def test_draft_vocabulary_ends_with_the_targets():
    assert dart_sizes(TINY.config()).draft_vocab_size == TINY.vocab_size


def test_random_scores_differ_and_fall():
    target = random_target(TINY_LLAMA, torch.float32)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 15, 40, generator=generator)
    signals = Signals([None] * 6, torch.zeros(6, 15, dtype=torch.int64), hidden, target.lm_head(hidden))
    scores = torch.from_numpy(random_scorer(target, seed=2)(signals))
    assert torch.equal(scores, torch.from_numpy(random_scorer(target, seed=2)(signals)))
    assert scores.shape == (6, 15) and bool((scores[:, 1:] <= scores[:, :-1]).all())
    assert float(scores.min()) > 0 and float(scores.max()) < 1
    assert float(scores[:, 0].std()) > 0.02 and float(scores[:, :5].mean()) > 0.02
    with pytest.raises(ValueError, match="width is 1"):
        random_scorer(target, width=1)


@pytest.mark.gpu
def test_random_targets_are_made_on_the_device():
    state = torch.cuda.get_rng_state()
    target = random_target(dataclasses.replace(TINY, hidden_size=512), torch.bfloat16, "cuda")
    assert target.device.type == "cuda" and target.dtype == torch.bfloat16
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert bool(logits_of(target, [1, 2, 3]).isfinite().all())
    assert random_dflash(target).fc.weight.is_cuda and random_dart(target).d2t.is_cuda
    assert random_scorer(target).features.matrix.is_cuda
