"""Settings that must come before the first import of torch or Triton, and the target models the tests share."""

from __future__ import annotations

import os

import torch

# Triton decides at its first import whether it interprets (torch alone does not import it); without a GPU it must.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Iterator

import numpy as np
import pytest
import triton.language as tl
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from triton.runtime import interpreter

from workbench.kernel_path import add_own_kernels
from workbench.models.target import Target

add_own_kernels()


def pytest_configure() -> None:
    """A worker gets one thread: two workers share two cores."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Every test starts from the same random state, whichever ran before it."""
    torch.manual_seed(0)
    np.random.seed(0)
    yield


@pytest.fixture
def loops_over_loaded_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 interprets them by a conversion of arrays to integers that NumPy 2.4 has dropped."""

    def plain(bound: int | tl.tensor) -> int:
        return int(bound.handle.data.item()) if isinstance(bound, tl.tensor) else bound

    monkeypatch.setattr(interpreter, "range", lambda *bounds: range(*map(plain, bounds)), raising=False)


@pytest.fixture(scope="session")
def tiny_llama() -> Target:
    """Random Llama: 8 layers, tied head, 4 query and 2 KV heads, V = 97. Read-only."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return _random_target(LlamaForCausalLM, config, "tiny_llama", seed=11)


@pytest.fixture(scope="session")
def tiny_qwen3() -> Target:
    """Random Qwen3: 7 layers, own head, 6 query and 2 KV heads of 12 where hidden / heads is 8, V = 128. Read-only."""
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return _random_target(Qwen3ForCausalLM, config, "tiny_qwen3", seed=12)


@pytest.fixture(scope="session", params=["tiny_llama", "tiny_qwen3"])
def target(request: pytest.FixtureRequest) -> Target:
    """Each of the tiny targets in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def embedded() -> Target:
    """The embedded target in float32 on the CPU; `make test` has converted it, another caller pays for that once."""
    # Inside: most test files need no loader and should not wait for its imports.
    from workbench.load import load_target

    return load_target("embedded")


def _random_target(model_class: type, config: LlamaConfig | Qwen3Config, name: str, seed: int) -> Target:
    """Weights large enough that logits differ clearly and depend on the context."""
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(1.0, 0.1)
    return Target(model, name=name)
