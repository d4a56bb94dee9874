"""Models and rounds with which one forward of a target is compared with another."""

from __future__ import annotations

import numpy as np
import torch
from drafter_zoo import stock_model
from test_target import SMALL, random_tree
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from workbench.decode.rows import Workspace, pack_chunks
from workbench.models.packed import causal_rows
from workbench.models.target import Target

TAPS = (5, 0, 3)


def sized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights large enough that a wrong operation shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    return model.eval()


def small(config_class: type = LlamaConfig, **changes: object) -> nn.Module:
    settings = {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes}
    return sized(AutoModelForCausalLM.from_config(config_class(**settings)))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, by the largest entry; infinite where the two have NaN in other places."""
    if not torch.equal(torch.isnan(found), torch.isnan(expected)):
        return float("inf")
    found, expected = found.nan_to_num().double(), expected.nan_to_num().double()
    return float((found - expected).abs().max() / expected.abs().max())


def rounds(target: Target, seed: int = 3) -> list[torch.Tensor]:
    """Logits, taps and cache of ragged prefills, of trees with sentinels, of one row, and of a chunk."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, target.vocab_size, n) for n in (1, 33, 6)]
    trees = [random_tree(rng, n, target.vocab_size) for n in (63, 0, 11)]
    slots, contexts = [2, 0, 3], [1, 33, 6]
    cache = target.new_cache(4, 100)
    cache.kv.fill_(torch.nan)  # whatever is read behind a context shows
    space = Workspace(5, 90, cache.max_len, target.device)
    outs = [
        target.forward(pack_chunks(prompts, slots, [0, 0, 0], target.device), cache, TAPS),
        target.forward(space.pack(trees, slots, contexts, num_rows=81), cache, TAPS),
        target.forward(causal_rows([7], 2, 1, target.device), cache, TAPS),
        target.forward(pack_chunks([np.full(5, 3)], [0], [33], target.device), cache, TAPS),
    ]
    live = [40, 64 + 1 + 12, 1, 5]
    kept = [x[:n] for out, n in zip(outs, live, strict=True) for x in (out.logits, out.taps)]
    return [*kept, cache.kv[:, :, :, :-1]]


def assert_alike(target: Target, other: Target, limit: float) -> None:
    for found, expected in zip(rounds(target), rounds(other), strict=True):
        assert error(found, expected) <= limit


def fresh(target: Target, forward: str = "fused") -> Target:
    return Target(stock_model(target), stop_ids=(), attention="tile", forward=forward)
