"""A residual stream takes what a product brings, and is normed, in plain torch: the truth for `kernels.add_norm`."""

from __future__ import annotations

import torch

from kernels.ref.rms_norm import check_rms_norm, rms_norm
from kernels.tensor_checks import require_device, require_tensors


def check_add_norm(total: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape, dtype, device or layout than `add_norm` documents.
    """
    check_rms_norm(total, weight)
    if parts.dim() != 3:
        raise ValueError(f"parts is {list(parts.shape)}; expected [S, {total.shape[0]}, {total.shape[1]}]")
    require_tensors(parts=(parts, torch.float32, (len(parts), *total.shape)))
    require_device(total.device, parts=parts)


def add_norm(total: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds all parts to `total`, in float32 and rounded once, and returns the RMS norm of what it is now.

    Args:
        total: [M, H] float32, float16 or bfloat16, changed in place; rows may lie apart.
        parts: [S, M, H] float32, dense, such as the products over S pieces of the inner dimension.
        weight: [H] of the dtype of `total`.
        eps: added to the mean square.

    Returns:
        [M, H], dense, in the dtype of `total`; see `kernels.ref.rms_norm.rms_norm`.

    Raises:
        ValueError: see `check_add_norm`.
    """
    check_add_norm(total, parts, weight)
    total.copy_(total.float() + parts.sum(0))
    return rms_norm(total, weight, eps)
