"""Pieces that the draft networks share: norm, gated feed-forward block, rotary positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """RMS norm: mean square in fp32, back to the input's dtype, then the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        return functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * self.weight


class GatedMlp(nn.Module):
    """Gated feed-forward block of width `intermediate_size`, without biases."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[torch.Tensor], torch.Tensor] = functional.silu,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., H]."""
        return self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))


def rotary(
    positions: torch.Tensor, head_dim: int, theta: float, factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of positions [...]: two of [..., 1, head_dim / 2] fp32, ready for `rotate`.

    Args:
        positions: whole numbers.
        head_dim: even.
        theta: base of the frequencies.
        factor: positions are divided by it.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float().unsqueeze(-1) / factor / theta**exponents
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, rotate-half form, in fp32: x [..., heads, head_dim], cos and sin [..., 1, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
