"""Tiny DFlash networks with weights that make every part of them count, and their forward restated in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from workbench.drafters.dflash_config import DFlashConfig, default_layer_ids
from workbench.drafters.dflash_files import save_dflash
from workbench.drafters.dflash_model import DFlashModel
from workbench.models.target import Target

VOCAB, HIDDEN = 97, 24
# head_dim is not hidden / heads, o_proj is wider than the hidden size, and fewer states are tapped than there are
# layers: nothing fits by accident.
CONFIG = DFlashConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    num_target_layers=9,
    target_layer_ids=(1, 7),
    mask_token_id=90,
    block_size=5,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
)


def random_network(config: DFlashConfig = CONFIG, seed: int = 0) -> DFlashModel:
    generator = torch.Generator().manual_seed(seed)
    model = DFlashModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model.requires_grad_(False).eval()


def config_for(target: Target, block_size: int = 8) -> DFlashConfig:
    """Sizes of a small DFlash network for any target."""
    return DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        num_target_layers=target.num_layers,
        target_layer_ids=default_layer_ids(target.num_layers, 2),
        mask_token_id=target.vocab_size - 1,
        block_size=block_size,
        max_position_embeddings=512,
    )


def random_dflash(target: Target, folder: Path, block_size: int = 8) -> Path:
    """A DFlash checkpoint of random weights in the published layout, written to `folder`."""
    save_dflash(random_network(config_for(target, block_size)), folder)
    return folder


def restated_hidden(
    model: DFlashModel, embedding: torch.Tensor, tokens: Sequence[int], taps: torch.Tensor, anchors: Sequence[int]
) -> torch.Tensor:
    """What the output head reads, from one pass over a whole sequence with the visibility of training, in float64.

    Args:
        embedding: [V, H].
        tokens: [S] ids.
        taps: [S, m * H] of every token; a block must not see those of its anchor and later ones.
        anchors: [N] positions where blocks begin.

    Returns:
        [N, slots, H] fp32, all slots of the block.
    """
    config, size = model.config, model.config.block_size
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}
    length, dim = len(tokens), config.head_dim

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * w[name]

    context = norm(taps.double() @ w["fc.weight"].T, "hidden_norm.weight")
    ids = torch.tensor([[tokens[a]] + [config.mask_token_id] * (size - 1) for a in anchors]).flatten()
    x = embedding.double()[ids]
    places = torch.tensor([a + j for a in anchors for j in range(size)])
    all_places = torch.cat([torch.arange(length), places])
    turn = torch.polar(
        torch.ones(()).double(),
        all_places.double()[:, None] / config.rope_theta ** (torch.arange(0, dim, 2).double() / dim),
    )

    def rotated(v, turns):  # pairs (j, j + D / 2) as complex numbers
        z = torch.complex(v[..., : dim // 2], v[..., dim // 2 :]) * turns[:, None]
        return torch.cat([z.real, z.imag], -1)

    def visible(slot, row):
        return row < anchors[slot // size] if row < length else (row - length) // size == slot // size

    seen = torch.tensor([[visible(q, k) for k in range(len(all_places))] for q in range(len(ids))])
    share = config.num_attention_heads // config.num_key_value_heads
    for i in range(config.num_hidden_layers):
        pre = f"layers.{i}."
        xn = norm(x, pre + "input_layernorm.weight")
        rows = torch.cat([context, xn])
        q = (xn @ w[pre + "self_attn.q_proj.weight"].T).view(len(xn), -1, dim)
        k = (rows @ w[pre + "self_attn.k_proj.weight"].T).view(len(rows), -1, dim)
        v = (rows @ w[pre + "self_attn.v_proj.weight"].T).view(len(rows), -1, dim)
        q = rotated(norm(q, pre + "self_attn.q_norm.weight"), turn[length:])
        k = rotated(norm(k, pre + "self_attn.k_norm.weight"), turn)
        out = torch.zeros_like(q)
        for head in range(config.num_attention_heads):
            scores = q[:, head] @ k[:, head // share].T / dim**0.5
            out[:, head] = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, head // share]
        x = x + out.flatten(1) @ w[pre + "self_attn.o_proj.weight"].T
        y = norm(x, pre + "post_attention_layernorm.weight")
        gate = y @ w[pre + "mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ w[pre + "mlp.up_proj.weight"].T)) @ w[pre + "mlp.down_proj.weight"].T
    return norm(x, "norm.weight").view(len(anchors), size, -1).float()
