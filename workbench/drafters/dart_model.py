"""DART's draft network in its published layout: one decoder layer that drafts all positions in one pass.

Parameter names and shapes are those of the published checkpoints (paper arXiv 2601.19278), so `state_dict()` is the
file. Knows the arithmetic only: caches are in `dart.py`, training layouts in `workbench.train`, files in
`dart_files.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from workbench.drafters.dart_config import DartConfig
from workbench.drafters.layers import GatedMlp, RmsNorm, rotary

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
}


class DartAttention(nn.Module):
    """The four projections; the inputs are 2H wide."""

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)


class DartLayer(nn.Module):
    """The one decoder layer and the representation of a mask slot."""

    def __init__(self, config: DartConfig) -> None:
        super().__init__()
        self.mask_rep = nn.Parameter(torch.zeros(2 * config.hidden_size))
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DartAttention(config)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, _ACTIVATIONS[config.hidden_act])


class DartModel(nn.Module):
    """DART's draft network.

    A real row i is made of the target's tapped states of token i and the embedding of token i + 1, and sits at
    rotary position i. Mask slots follow the newest real row. The newest real row drafts the token after the root,
    mask o (from 0) drafts token o + 2 after the root.

    Args:
        config: sizes.
        double_norm: apply the final norm twice before the head, as the published inference does.
    """

    def __init__(self, config: DartConfig, double_norm: bool = True) -> None:
        super().__init__()
        self.config = config
        self.double_norm = double_norm
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DartLayer(config)
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def draft_ids(self) -> torch.Tensor:
        """[V_d] int64, target id of every row of the head (`d2t` holds offsets)."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_draft_ids(self, ids: torch.Tensor) -> None:
        """Sets `d2t` and `t2d` from target ids, [V_d] int64, ascending.

        Raises:
            ValueError: wrong count, not ascending, or outside the vocabulary.
        """
        config = self.config
        ascending = len(ids) < 2 or bool((ids[1:] > ids[:-1]).all())
        if len(ids) != config.draft_vocab_size or not ascending or ids[0] < 0 or ids[-1] >= config.vocab_size:
            raise ValueError(
                f"draft ids: {len(ids)} given; needed: {config.draft_vocab_size} ascending ids in "
                f"0..{config.vocab_size - 1}"
            )
        self.d2t.copy_(ids.to(self.d2t.device) - torch.arange(len(ids), device=self.d2t.device))
        self.t2d.zero_()
        self.t2d[ids.to(self.t2d.device)] = True

    def real_rows(self, taps: torch.Tensor, next_embeddings: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of real rows.

        Args:
            taps: [..., 3H] tapped states of token i, shallow to deep.
            next_embeddings: [..., H] embedding of token i + 1.

        Returns:
            (features [..., H], the un-normed residual; inputs [..., 2H] of the projections, embedding first).
        """
        features = self.fc(taps)
        layer = self.midlayer
        return features, torch.cat([layer.input_layernorm(next_embeddings), layer.hidden_norm(features)], dim=-1)

    def query(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs [..., 2H] -> [..., n_h, head_dim], not rotated."""
        return self.midlayer.self_attn.q_proj(inputs).unflatten(-1, (-1, self.config.head_dim))

    def key_value(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs [..., 2H] -> two of [..., n_kv, head_dim], keys not rotated."""
        attention, head_dim = self.midlayer.self_attn, self.config.head_dim
        return (
            attention.k_proj(inputs).unflatten(-1, (-1, head_dim)),
            attention.v_proj(inputs).unflatten(-1, (-1, head_dim)),
        )

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """What follows attention, up to the head.

        Args:
            residual: [..., H], features of a real row or the first half of `mask_rep`.
            attended: [..., n_h * head_dim].

        Returns:
            [..., H], input of `lm_head`.
        """
        layer = self.midlayer
        states = residual + layer.self_attn.o_proj(attended)
        states = states + layer.mlp(layer.post_attention_layernorm(states))
        states = self.norm(states)
        return self.norm(states) if self.double_norm else states

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of positions [...]: two of [..., 1, head_dim / 2] fp32, ready for `layers.rotate`."""
        config = self.config
        return rotary(positions, config.head_dim, config.rope_theta, config.rope_factor)
