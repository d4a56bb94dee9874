"""Targets and methods by name: what loads, and what the errors say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workbench import load
from workbench.load import load_method, load_target
from workbench.models.target import Target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder without a tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny-model"
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=[2, 5],
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / "copy")
    return to / "copy"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_folder(dtype: str, folder: Path) -> None:
    target = load_target(folder, dtype=dtype, context_limit=100)
    assert isinstance(target, Target)
    assert target.dtype == getattr(torch, dtype)
    assert (target.name, target.context_limit, target.stop_ids) == ("tiny-model", 100, (2, 5))
    assert target.tokenizer is None
    assert not target.model.training


def test_embedded_by_name(embedded: Target) -> None:
    assert embedded.name == "embedded"
    assert embedded.dtype == torch.float32
    assert embedded.context_limit == 8192
    assert embedded.tokenizer is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp32"}, "dtype='fp32' is not one of float32, bfloat16, float16"),
        ({"dtype": None}, "dtype=None is not one of"),
        ({"device": "gpu"}, "device='gpu' is not a device; use 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "mps"}, "device='mps' is not supported"),
        ({"device": "cuda:77"}, r"device='cuda:77': this machine has \d+ CUDA devices"),
        ({"context_limit": 0}, r"context_limit=0 outside 1\.\.128"),
        ({"context_limit": 129}, r"context_limit=129 outside 1\.\.128"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_out_of_range(arguments: dict, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(folder, **arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "name_or_path is empty"),
        ("embeded", "name_or_path='embeded' is unknown; did you mean 'embedded'"),
        ("./nowhere", "name_or_path='./nowhere': there is no such folder"),
        ("~/nowhere/at/all", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
    ],
)
def test_names_that_can_only_be_folders(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(name)


def test_folders_that_hold_no_model(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_target(tmp_path)
    with pytest.raises(ValueError, match="is a file; give the folder"):
        load_target(folder / "config.json")
    broken = copied(folder, tmp_path)
    weights = broken / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-8])
    with pytest.raises(ValueError, match="copy: the model cannot be read"):
        load_target(broken)
    weights.unlink()
    (broken / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"has no \*\.safetensors; other weight formats are not read"):
        load_target(broken)


def test_missing_weights_are_no_random_weights(folder: Path, tmp_path: Path) -> None:
    deeper = copied(folder, tmp_path)
    config = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"9 weights are missing, the first is model\.layers\.2\."):
        load_target(deeper)


def test_code_of_a_checkpoint_is_not_run(folder: Path, tmp_path: Path) -> None:
    foreign = copied(folder, tmp_path)
    config = json.loads((foreign / "config.json").read_text())
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (foreign / "config.json").write_text(json.dumps(config | own))
    (foreign / "own.py").write_text("raise SystemExit('code of the checkpoint ran')")
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        load_target(foreign)


def test_without_a_hub_the_error_names_the_id() -> None:
    with pytest.raises(
        OSError, match=r"target 'someone/some-model' is no local folder.*pass the folder of a downloaded"
    ):
        load_target("someone/some-model")


def build_fake(target: Target, path: str | None = None, *, width: int = 3, weight: float = 0.5) -> tuple:
    return target, path, width, weight


def test_method_gets_its_options(tiny_llama: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load.DRAFTERS, "fake", build_fake)
    assert load_method("fake", tiny_llama, path="p", width=7) == (tiny_llama, "p", 7, 0.5)
    assert load_method("fake", tiny_llama) == (tiny_llama, None, 3, 0.5)
    with pytest.raises(ValueError, match="widht=7: method 'fake' has no such option; it has: width, weight"):
        load_method("fake", tiny_llama, widht=7)


def test_unknown_method(tiny_llama: Target) -> None:
    with pytest.raises(ValueError, match=r"method='dartt' is unknown \(did you mean 'dart'\?\); one of ar, .*dart"):
        load_method("dartt", tiny_llama)
    with pytest.raises(ValueError, match="method 'ar' has no such option; it has: none"):
        load_method("ar", tiny_llama, width=7)


def test_every_method_of_the_table_names_its_options(tiny_llama: Target) -> None:
    """A builder that swallows any keyword would let a typing error pass."""
    for name in load.DRAFTERS:
        with pytest.raises(ValueError, match="no_such_option"):
            load_method(name, tiny_llama, no_such_option=1)
