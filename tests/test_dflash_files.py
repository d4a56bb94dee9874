"""Published files of a DFlash network in both dialects, read strictly, and the drafter built from them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from dflash_setup import CONFIG, HIDDEN, VOCAB, random_network, restated_hidden
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.budget.table import build_policy
from workbench.drafters.dflash import build_dflash
from workbench.drafters.dflash_config import DFlashConfig, default_layer_ids
from workbench.drafters.dflash_files import load_dflash, save_dflash
from workbench.drafters.dflash_model import DFlashModel
from workbench.models.target import Target
from workbench.types import Commit


def zlab_fields() -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 5,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 7]},
        "num_target_layers": 9,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "max_window_layers": 3,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def deepspec_fields() -> dict:
    fields = zlab_fields() | {"architectures": ["Qwen3DSparkModel"], "max_window_layers": 9, "num_anchors": 512}
    for name in ("auto_map", "dflash_config", "rope_theta", "rope_scaling"):
        del fields[name]
    return fields | {
        "mask_token_id": 90,
        "target_layer_ids": [1, 7],
        "markov_rank": 0,
        "enable_confidence_head": False,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    }


def written(folder, edit=None, config_edit=None, fields=None):
    """A published checkpoint made by hand: tensors by name, config by field."""
    tensors = {name: tensor.clone() for name, tensor in random_network().state_dict().items()}
    fields = fields or zlab_fields()
    if edit:
        edit(tensors)
    if config_edit:
        config_edit(fields)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def deepspec_written(folder):
    copies = {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN), "lm_head.weight": torch.randn(VOCAB, HIDDEN)}
    return written(folder, lambda tensors: tensors.update(copies), fields=deepspec_fields())


def test_published_names_and_shapes(tmp_path):
    shapes = {name: tuple(t.shape) for name, t in load_dflash(written(tmp_path)).state_dict().items()}
    expected = {"fc.weight": (24, 48), "hidden_norm.weight": (24,), "norm.weight": (24,)}
    for i in range(3):
        expected |= {
            f"layers.{i}.self_attn.q_proj.weight": (40, 24),
            f"layers.{i}.self_attn.k_proj.weight": (20, 24),
            f"layers.{i}.self_attn.v_proj.weight": (20, 24),
            f"layers.{i}.self_attn.o_proj.weight": (24, 40),
            f"layers.{i}.self_attn.q_norm.weight": (10,),
            f"layers.{i}.self_attn.k_norm.weight": (10,),
            f"layers.{i}.mlp.gate_proj.weight": (40, 24),
            f"layers.{i}.mlp.up_proj.weight": (40, 24),
            f"layers.{i}.mlp.down_proj.weight": (24, 40),
            f"layers.{i}.input_layernorm.weight": (24,),
            f"layers.{i}.post_attention_layernorm.weight": (24,),
        }
    assert shapes == expected


@pytest.mark.parametrize(
    "hidden, intermediate, millions, deepspec_millions",
    [(2560, 9728, 537.4, 1315.3), (4096, 12288, 1048.6, 2293.3)],
    ids=["Qwen3-4B", "Qwen3-8B"],
)
def test_published_sizes(hidden, intermediate, millions, deepspec_millions):
    config = DFlashConfig.from_dict(
        {
            "block_size": 16,
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
            "num_target_layers": 36,
            "num_hidden_layers": 5,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        }
    )
    with torch.device("meta"):
        model = DFlashModel(config)
    assert (len(model.state_dict()), config.num_drafts) == (58, 15)
    assert config.taps == (2, 10, 18, 26, 34)
    total = sum(p.numel() for p in model.parameters())
    assert round(total / 1e6, 1) == millions
    assert round((total + 2 * config.vocab_size * hidden) / 1e6, 1) == deepspec_millions
    assert (config.rms_norm_eps, config.rope_theta, config.max_position_embeddings) == (1e-6, 1e6, 40960)


def test_default_layer_ids():
    found = [default_layer_ids(*sizes) for sizes in ((36, 5), (40, 5), (64, 5), (36, 1), (30, 3))]
    assert found == [(1, 9, 17, 25, 33), (1, 10, 19, 28, 37), (1, 16, 31, 46, 61), (18,), (1, 14, 27)]
    for sizes in ((7, 5), (4, 2), (3, 2)):
        with pytest.raises(ValueError, match="too few for"):
            default_layer_ids(*sizes)
    for sizes in ((2, 1), (36, 0)):
        with pytest.raises(ValueError, match="outside"):
            default_layer_ids(*sizes)


def test_saved_network_reads_back_the_same(tmp_path):
    for config in (CONFIG, dataclasses.replace(CONFIG, shifted=True)):
        model = random_network(config)
        save_dflash(model, tmp_path / "a", torch.float32)
        again = load_dflash(tmp_path / "a")
        assert again.config == config and not any(p.requires_grad for p in again.parameters())
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name]), name
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    save_dflash(model, tmp_path / "a")
    assert {t.dtype for t in load_file(tmp_path / "a" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == "bfloat16"


def test_saved_config_is_the_published_one(tmp_path):
    save_dflash(random_network(), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    theirs = zlab_fields()
    assert {name: theirs[name] for name in theirs if fields.get(name) != theirs[name]} == {
        "auto_map": theirs["auto_map"],
        "max_window_layers": 3,
    }


def test_dialects():
    zlab, deepspec = DFlashConfig.from_dict(zlab_fields()), DFlashConfig.from_dict(deepspec_fields())
    assert zlab == CONFIG and deepspec == dataclasses.replace(CONFIG, shifted=True)
    assert (zlab.num_drafts, deepspec.num_drafts) == (4, 5)
    newer = zlab_fields()
    newer["dflash_config"]["block_size"] = newer.pop("block_size")
    assert DFlashConfig.from_dict(newer) == CONFIG
    del newer["dflash_config"]["target_layer_ids"], newer["rope_theta"], newer["head_dim"]
    found = DFlashConfig.from_dict(newer | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}})
    assert (found.target_layer_ids, found.rope_theta, found.head_dim) == ((1, 4, 6), 7.0, 6)
    lifted = deepspec_fields() | {"dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 7]}}
    assert DFlashConfig.from_dict(lifted).shifted
    embeddings = zlab_fields()
    embeddings["dflash_config"]["target_layer_ids"] = [-1, 7]
    assert DFlashConfig.from_dict(embeddings).taps == (0, 8)


def test_deepspec_file_has_two_tensors_more_which_are_not_read(tmp_path):
    folder = deepspec_written(tmp_path)
    assert len(load_file(folder / "model.safetensors")) == len(load_dflash(folder).state_dict()) + 2
    config = DFlashConfig.from_dict(deepspec_fields() | {"num_hidden_layers": 5, "block_size": 7})
    with torch.device("meta"):
        assert len(DFlashModel(config).state_dict()) + 2 == 60
    assert config.num_drafts == 7


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda t: t.pop("norm.weight"), "missing norm.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected extra"),
        (
            lambda t: t.update({"markov_head.markov_w1.weight": torch.zeros(2)}),
            "unexpected markov_head.markov_w1.weight",
        ),
        (
            lambda t: t.update({"layers.3.mlp.up_proj.weight": torch.zeros(40, 24)}),
            "unexpected layers.3.mlp.up_proj.weight",
        ),
        (lambda t: t.update({"fc.weight": torch.zeros(24, 72)}), r"fc.weight is \[24, 72\], needed \[24, 48\]"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].long()}), "norm.weight is torch.int64"),
        (lambda t: t["fc.weight"].__setitem__((0, 0), torch.nan), "NaN or infinity in fc.weight"),
    ],
    ids=["missing", "unexpected", "markov head", "more layers", "shape", "integer weight", "nan"],
)
def test_bad_tensors_are_refused(tmp_path, edit, words):
    with pytest.raises(ValueError, match=words):
        load_dflash(written(tmp_path, edit))


def test_all_problems_are_listed_at_once(tmp_path):
    def edit(tensors):
        tensors.pop("fc.weight")
        tensors["stray"] = torch.zeros(1)
        tensors["norm.weight"] = torch.zeros(5)

    with pytest.raises(ValueError, match=r"missing fc.weight.*unexpected stray.*norm.weight is \[5\]"):
        load_dflash(written(tmp_path, edit))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"intermediate_size": 10**12}, "intermediate_size=1000000000000"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 9}, "must be even"),
        ({"block_size": 1}, "block_size=1: a block that is not shifted"),
        ({"block_size": None}, "lacks block_size"),
        ({"num_target_layers": None, "vocab_size": None}, "lacks vocab_size, num_target_layers"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"rope_theta": "x"}, "rope_theta='x'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope type 'yarn'"),
        ({"rope_scaling": 3}, "must be an object"),
        ({"rope_scaling": False}, "rope_scaling=False must be an object"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        (
            {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters: rope type 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_scaling: rope type 'linear'"),
        ({"rope_parameters": {"rope_theta": 6000.0}}, "different bases .*5000.0.*6000.0"),
        ({"rope_scaling": {"rope_theta": "x"}}, "different bases .*'x'"),
        ({"rope_theta": 0}, r"rope_theta=0 outside 1\.0"),
        ({"rope_theta": False}, r"rope_theta=False outside"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 0}}, "rope_theta=0 outside"),
        ({"layer_types": 5}, "layer_types=5 must be a list"),
        ({"layer_types": True}, "layer_types=True must be a list"),
        ({"layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
        ({"layer_types": [None]}, r"layer_types=\['None'\]; allowed: full_attention"),
        ({"dflash_config": 3}, "dflash_config=3"),
        ({"dflash_config": None}, "neither dflash_config nor markov_rank"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks mask_token_id"),
    ],
)
def test_bad_config_fields_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=rf"{tmp_path.name}.config\.json: .*{words}"):
        load_dflash(written(tmp_path, config_edit=lambda fields: fields.update(change)))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"mask_token_id": VOCAB}, "mask_token_id=97 outside 0..96"),
        ({"mask_token_id": None}, "lacks mask_token_id"),
        ({"target_layer_ids": [1, 8]}, "target_layer_ids=8 outside -1..7"),
        ({"target_layer_ids": [-2, 7]}, "target_layer_ids=-2 outside"),
        ({"target_layer_ids": [7, 1]}, "must ascend"),
        ({"target_layer_ids": [1, 1]}, "must ascend"),
        ({"target_layer_ids": [1, "7"]}, "target_layer_ids='7'"),
        ({"target_layer_ids": []}, r"target_layer_ids=\(\) must be a list"),
        ({"target_layer_ids": 3}, "target_layer_ids=3 must be a list"),
        ({"shift_label": "yes"}, "shifted='yes'"),
        ({"projector_type": "domino"}, "projector_type='domino'"),
        ({"markov_rank": 256}, "markov_rank=256"),
        ({"enable_confidence_head": True}, "enable_confidence_head=True"),
    ],
)
def test_bad_method_fields_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        load_dflash(written(tmp_path, config_edit=lambda fields: fields["dflash_config"].update(change)))


def test_damaged_or_foreign_files_are_refused(tmp_path):
    folder = written(tmp_path)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_dflash(tmp_path / "nowhere")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:100])
    with pytest.raises(ValueError, match="no readable safetensors"):
        load_dflash(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load_dflash(folder)


def tiny_target(num_layers: int = 9, hidden: int = HIDDEN, vocab: int = VOCAB) -> Target:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return Target(LlamaForCausalLM(config), name="tiny", stop_ids=(5, 6))


def test_builder_reads_a_folder(tmp_path):
    folder, target = written(tmp_path), tiny_target()
    built = build_dflash(target, folder, dtype="float32")
    assert (built.name, built.taps, built.max_nodes, built.policy.name) == ("dflash", (2, 8), 4, "full")
    assert not any(p.requires_grad for p in built.model.parameters())
    assert build_dflash(target, folder, block_size=3).max_nodes == 2
    assert build_dflash(target, folder, dtype="bfloat16").model.fc.weight.dtype == torch.bfloat16
    built = build_dflash(target, folder, policy="product", rows=3.5)
    assert (built.policy.name, built.policy.rows) == ("product", 3.5) and built.policy.scorer is not None
    policy = build_policy("uniform", 2)
    assert build_dflash(target, folder, policy=policy).policy is policy


def test_deepspec_drafts_from_every_slot_with_the_targets_own_head(tmp_path):
    target = tiny_target()
    built = build_dflash(target, deepspec_written(tmp_path), dtype="float32")
    assert (built.max_nodes, built.block_size) == (5, 5)
    tokens, taps = np.arange(7), torch.randn(7, 2 * HIDDEN)
    session = built.session(1, 8)
    session.observe(Commit([0], [0], [tokens[:6]], [6], taps[:6]))
    _, logits = session.draft([0], [6])
    hidden = restated_hidden(built.model, target.embedding.weight.detach(), tokens.tolist(), taps, [6])
    torch.testing.assert_close(logits, hidden @ target.lm_head.weight.detach().T, rtol=1e-4, atol=1e-5)


def test_builder_refuses_what_does_not_fit(tmp_path):
    folder = written(tmp_path)
    with pytest.raises(ValueError, match="path is unset and no DFlash weights are shipped for target 'tiny'"):
        build_dflash(tiny_target())
    with pytest.raises(ValueError, match="num_target_layers=9, but the target has 8"):
        build_dflash(tiny_target(num_layers=8), folder)
    with pytest.raises(ValueError, match="hidden_size=24, but the target has 32"):
        build_dflash(tiny_target(hidden=32), folder)
    with pytest.raises(ValueError, match="vocab_size=97, but the target has 98"):
        build_dflash(tiny_target(vocab=98), folder)
    with pytest.raises(ValueError, match="dtype='half'"):
        build_dflash(tiny_target(), folder, dtype="half")
    for block_size in (-1, 1, 6, 4.0, 2.5, "4", True, False, None):
        with pytest.raises(ValueError, match=rf"block_size={block_size!r} outside 2\.\.5 \(whole numbers\)"):
            build_dflash(tiny_target(), folder, block_size=block_size)
    for policy in (None, 3, ["full"]):
        with pytest.raises(ValueError, match=r"policy is .*, allowed full, uniform"):
            build_dflash(tiny_target(), folder, policy=policy)
    for path in (123, ["a"], True):
        with pytest.raises(ValueError, match=r"path=.* has type (int|list|bool); allowed: the path"):
            build_dflash(tiny_target(), path)
    with pytest.raises(ValueError, match="policy is 'all'"):
        build_dflash(tiny_target(), folder, policy="all")
    with pytest.raises(ValueError, match="scorer 'predictor'"):
        build_dflash(tiny_target(), folder, policy="dvl")
