"""The gated product of an MLP, in plain torch: the truth for `kernels.silu_mul`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.tensor_checks import require_floats, require_rows


def check_silu_mul(gate_up: torch.Tensor) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape, dtype or layout than `silu_mul` documents.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] < 2 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up is {list(gate_up.shape)}; expected [M, 2F] with F from 1")
    require_floats(gate_up.dtype, gate_up=gate_up)
    require_rows(gate_up=gate_up)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, the silu rounded to the dtype before the product.

    Args:
        gate_up: [M, 2F] float32, float16 or bfloat16, gate first; rows may lie apart.

    Returns:
        [M, F], dense, in the same dtype.

    Raises:
        ValueError: see `check_silu_mul`.
    """
    check_silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
