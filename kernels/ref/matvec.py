"""A linear layer of one row, and that of gate and up with their activation: the plain path."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.tensor_checks import require_device, require_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def matvec(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """weight @ x, plus the residual: added up in float32 and rounded once.

    Args:
        x: [1, K] float32, float16 or bfloat16.
        weight: [N, K], dense; all tensors are of the dtype of `x`.
        residual: [1, N].
        out: [1, N], written and returned; may be `residual` itself. A new tensor if not given.

    Returns:
        [1, N] of the dtype of `x`.

    Raises:
        ValueError: see `check`.
    """
    check(x, weight, residual, out, weight.shape[0])
    sums = F.linear(x.float(), weight.float())
    if residual is not None:
        sums += residual.float()
    rounded = sums.to(x.dtype)
    return rounded if out is None else out.copy_(rounded)


def matvec_silu(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a gated layer, each step rounded as by the separate operators of torch.

    Args:
        x: [1, K] float32, float16 or bfloat16.
        gate_up: [2F, K], dense, of the dtype of `x`; rows 0..F-1 give the gate, the others up.

    Returns:
        [1, F] of the dtype of `x`.

    Raises:
        ValueError: an odd number of rows; see `check`.
    """
    check_gate_up(x, gate_up)
    gate, up = matvec(x, gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


def check_gate_up(x: torch.Tensor, gate_up: torch.Tensor) -> None:
    """Raises a ValueError naming what `matvec_silu` cannot take."""
    check(x, gate_up, None, None, 0)
    if len(gate_up) % 2:
        raise ValueError(f"gate_up has {len(gate_up)} rows; expected an even number")


def check(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None, num_rows: int
) -> None:
    """Raises a ValueError naming the tensor whose shape, dtype, layout or device does not fit."""
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}; expected one of {', '.join(map(str, DTYPES))}")
    if x.dim() != 2 or len(x) != 1 or x.shape[1] == 0:
        raise ValueError(f"x is {list(x.shape)}; expected [1, K], K at least 1")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous():
        raise ValueError(f"weight is {list(weight.shape)}; expected dense [N, {x.shape[1]}]")
    tensors = {"x": x, "weight": weight, "residual": residual, "out": out}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in tensors.items():
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, x {x.dtype}")
        if name in ("residual", "out") and tensor.shape != (1, num_rows):
            raise ValueError(f"{name} is {list(tensor.shape)}; expected [1, {num_rows}]")
    require_rows(**tensors)
    require_device(x.device, **tensors)
    if out is not None:
        beside = [weight, x] if residual is None or residual.data_ptr() == out.data_ptr() else [weight, x, residual]
        if any(_overlap(out, tensor) for tensor in beside):
            raise ValueError("out shares memory with an input; expected its own, or exactly that of residual")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two dense tensors have a byte in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
