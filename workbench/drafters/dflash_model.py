"""DFlash's draft network in its published layout: a block of masks behind an anchor token, drafted in one pass.

Parameter names and shapes are those of the published checkpoints (paper arXiv 2602.06036), so `state_dict()` is the
file. Knows the arithmetic only: caches are in `dflash.py`, training layouts in `workbench.train`, files in
`dflash_files.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from workbench.drafters.dflash_config import DFlashConfig
from workbench.drafters.layers import GatedMlp, RmsNorm, rotary

#: (query [..., n, Hq, D], key [..., n, G, D], value [..., n, G, D]), nothing rotated -> [..., n, Hq * D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DFlashAttention(nn.Module):
    """The four projections and the norms of every query and key head."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)


class DFlashLayer(nn.Module):
    """One decoder layer. Context rows pass through `key_value` only; block slots through all of it."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def key_value(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of context features or of the normed states of block slots.

        Args:
            x: [..., H].

        Returns:
            (keys [..., G, D], normed but not rotated; values [..., G, D]).
        """
        attention, heads = self.self_attn, (-1, self.self_attn.head_dim)
        key = attention.k_norm(attention.k_proj(x).unflatten(-1, heads))
        return key, attention.v_proj(x).unflatten(-1, heads)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Moves block slots through the layer.

        Args:
            x: [..., n, H] states of the slots.
            attend: does the attention; it knows positions, caches and visibility.

        Returns:
            [..., n, H].
        """
        attention = self.self_attn
        normed = self.input_layernorm(x)
        query = attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim)))
        x = x + attention.o_proj(attend(query, *self.key_value(normed)))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashModel(nn.Module):
    """DFlash's draft network.

    A block is [anchor, MASK, MASK, ...] in the target's embedding: the anchor is the newest token, which the target has
    not read yet, at its true position a. Slots see each other in both directions and the context features of positions
    0..a-1; those become keys and values through the same projections as the slots, but without `input_layernorm`.

    Args:
        config: sizes.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def context(self, taps: torch.Tensor) -> torch.Tensor:
        """Context features, shared by all layers: taps [..., m * H], shallow to deep -> [..., H]."""
        return self.hidden_norm(self.fc(taps))

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """States behind the last layer -> inputs of the target's output head, both [..., H]."""
        return self.norm(x)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions [...]: two of [..., 1, D / 2] fp32, ready for `layers.rotate`."""
        return rotary(positions, self.config.head_dim, self.config.rope_theta)
