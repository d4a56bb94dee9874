"""Published files of a DART network, read strictly, and the drafter built from them."""

from __future__ import annotations

import json

import pytest
import torch
from dart_setup import DRAFT_VOCAB, HIDDEN, VOCAB, random_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.drafters.dart import build_dart, dart_taps
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_files import load_dart, save_dart
from workbench.models.target import Target
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie


def written(tmp_path, edit=None, config_edit=None):
    """A published checkpoint made by hand: tensors by name, config by field."""
    tensors = {name: tensor.clone() for name, tensor in random_model().state_dict().items()}
    fields = {
        "architectures": ["LlamaForCausalLMDart"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "draft_length": 4,
        "draft_vocab_size": DRAFT_VOCAB,
        "num_hidden_layers": 36,
    }
    if edit:
        edit(tensors)
    if config_edit:
        config_edit(fields)
    tmp_path.mkdir(exist_ok=True)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


def test_published_names_and_shapes(tmp_path):
    shapes = {name: tuple(t.shape) for name, t in load_dart(written(tmp_path)).state_dict().items()}
    assert shapes == {
        "fc.weight": (24, 72),
        "midlayer.mask_rep": (48,),
        "midlayer.hidden_norm.weight": (24,),
        "midlayer.input_layernorm.weight": (24,),
        "midlayer.post_attention_layernorm.weight": (24,),
        "midlayer.self_attn.q_proj.weight": (40, 48),
        "midlayer.self_attn.k_proj.weight": (20, 48),
        "midlayer.self_attn.v_proj.weight": (20, 48),
        "midlayer.self_attn.o_proj.weight": (24, 40),
        "midlayer.mlp.gate_proj.weight": (40, 24),
        "midlayer.mlp.up_proj.weight": (40, 24),
        "midlayer.mlp.down_proj.weight": (24, 40),
        "norm.weight": (24,),
        "lm_head.weight": (41, 24),
        "d2t": (41,),
        "t2d": (97,),
    }


def test_saved_network_reads_back_the_same(tmp_path):
    model = random_model()
    save_dart(model, tmp_path / "a", torch.float32)
    again = load_dart(tmp_path / "a")
    assert again.config == DartConfig.from_dict(json.loads((tmp_path / "a" / "config.json").read_text()))
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    save_dart(model, tmp_path / "a")
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16 and stored["d2t"].dtype == torch.int64


def test_embedding_in_the_file_is_ignored(tmp_path):
    folder = written(tmp_path, lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}))
    assert "embed_tokens.weight" not in load_dart(folder).state_dict()


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda t: t.pop("norm.weight"), "missing norm.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected extra"),
        (lambda t: t.update({"fc.weight": torch.zeros(24, 71)}), r"fc.weight is \[24, 71\], needed \[24, 72\]"),
        (lambda t: t.update(d2t=t["d2t"].int()), "d2t is torch.int32"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].long()}), "norm.weight is torch.int64"),
        (lambda t: t["d2t"].__setitem__(40, VOCAB), "d2t names ids outside"),
        (lambda t: t["d2t"].__setitem__(1, int(t["d2t"][0]) - 1), "one id twice"),
    ],
    ids=["missing", "unexpected", "shape", "int32", "integer weight", "id range", "double id"],
)
def test_bad_tensors_are_refused(tmp_path, edit, words):
    with pytest.raises(ValueError, match=words):
        load_dart(written(tmp_path, edit))


def test_all_problems_are_listed_at_once(tmp_path):
    def edit(tensors):
        tensors.pop("fc.weight")
        tensors["stray"] = torch.zeros(1)
        tensors["norm.weight"] = torch.zeros(5)

    with pytest.raises(ValueError, match=r"missing fc.weight.*unexpected stray.*norm.weight is \[5\]"):
        load_dart(written(tmp_path, edit))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": "24"}, "hidden_size='24'"),
        ({"intermediate_size": 10**12}, "intermediate_size=1000000000000"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 9}, "must be even"),
        ({"draft_vocab_size": 98}, "above vocab_size"),
        ({"draft_length": None}, "lacks draft_length"),
        ({"hidden_act": "swishy"}, "hidden_act='swishy'"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope type 'yarn'"),
        ({"rope_scaling": 3}, "must be an object"),
        ({"target_hidden_size": 48}, "target_hidden_size=48"),
        ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ],
)
def test_bad_config_fields_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        load_dart(written(tmp_path, config_edit=lambda fields: fields.update(change)))


def test_config_dialects(tmp_path):
    def newer(fields):
        del fields["rope_theta"], fields["head_dim"], fields["draft_vocab_size"], fields["num_key_value_heads"]
        fields |= {"rope_parameters": {"rope_theta": 7.0, "rope_type": "linear", "factor": 2.0}}

    def edit(tensors):
        for name in "qkv":
            tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.zeros(24, 48)
        tensors["midlayer.self_attn.o_proj.weight"] = torch.zeros(24, 24)

    config = load_dart(written(tmp_path, edit, newer)).config
    assert (config.rope_theta, config.rope_factor, config.head_dim) == (7.0, 2.0, 6)
    assert (config.draft_vocab_size, config.num_key_value_heads) == (DRAFT_VOCAB, 4)
    fields = config.to_dict()
    assert DartConfig.from_dict(fields) == config
    del fields["rope_theta"]
    assert DartConfig.from_dict(fields).rope_theta == 10000.0


def test_damaged_or_foreign_files_are_refused(tmp_path):
    folder = written(tmp_path)
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_dart(tmp_path / "nowhere")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:100])
    with pytest.raises(ValueError, match="no readable safetensors"):
        load_dart(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load_dart(folder)
    written(tmp_path)
    for text, words in (("{", "no JSON"), ("[]", "holds a list"), (" " * (1 << 20) + "{}", "bytes")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            load_dart(folder)


def tiny_target(num_layers: int = 7, hidden: int = HIDDEN, vocab: int = VOCAB) -> Target:
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


def test_builder_reads_folder_and_trie(tmp_path):
    folder, target = written(tmp_path), tiny_target()
    built = build_dart(target, folder, num_nodes=16, dtype="float32")
    assert (built.taps, built.trie, built.max_nodes, built.prune.eos_id) == ((2, 3, 4), None, 16, 5)
    assert not any(p.requires_grad for p in built.model.parameters())
    NgramTrie.count([[1, 2, 3]]).save(folder / "ngram.trie")
    assert build_dart(target, folder).trie.num_nodes == 6
    assert build_dart(target, folder, trie=None).trie is None
    assert build_dart(target, folder, dtype="bfloat16").model.fc.weight.dtype == torch.bfloat16
    assert build_dart(target, folder, prune=PruneConfig(num_nodes=3)).max_nodes == 3


def test_builder_refuses_what_does_not_fit(tmp_path):
    folder = written(tmp_path)
    with pytest.raises(ValueError, match="path is unset"):
        build_dart(tiny_target())
    with pytest.raises(ValueError, match="needs 7 or more"):
        build_dart(tiny_target(num_layers=6), folder)
    with pytest.raises(ValueError, match="hidden_size=24, but the target has 32"):
        build_dart(tiny_target(hidden=32), folder)
    with pytest.raises(ValueError, match="vocab_size=97, but the target has 98"):
        build_dart(tiny_target(vocab=98), folder)
    with pytest.raises(ValueError, match="dtype='half'"):
        build_dart(tiny_target(), folder, dtype="half")


def test_taps_of_known_targets():
    assert [dart_taps(n) for n in (28, 36, 40, 64)] == [(2, 14, 25), (2, 18, 33), (2, 20, 37), (2, 32, 61)]
