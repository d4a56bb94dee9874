"""A tiny DART network with weights that make every part of it count."""

from __future__ import annotations

import torch

from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel

VOCAB, HIDDEN, DRAFT_VOCAB = 97, 24, 41
# head_dim is not hidden / heads, and o_proj is wider than the hidden size, as in Qwen3-4B's drafter.
CONFIG = DartConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    draft_vocab_size=DRAFT_VOCAB,
    draft_length=4,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
)


def random_model(seed: int = 0, double_norm: bool = True, config: DartConfig = CONFIG) -> DartModel:
    generator = torch.Generator().manual_seed(seed)
    model = DartModel(config, double_norm)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else noise if "mask_rep" in name else 0.3 * noise)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    model.set_draft_ids(ids)
    return model.requires_grad_(False).eval()
