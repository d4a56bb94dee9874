"""Root-mean-square normalisation of rows, in plain torch: the truth for `kernels.rms_norm`."""

from __future__ import annotations

import torch

from kernels.tensor_checks import require_device, require_floats, require_rows


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape, dtype, device or layout than `rms_norm` documents.
    """
    if x.dim() != 2 or x.shape[1] < 1 or weight.shape != x.shape[1:]:
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}; expected [M, H] and [H]")
    require_floats(x.dtype, x=x, weight=weight)
    require_rows(x=x, weight=weight)
    require_device(x.device, weight=weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """round(x / sqrt(mean(x^2) + eps)) * weight, as the RMSNorm layers of Llama and Qwen3 in `transformers` have it.

    The quotient is float32 and rounded to the dtype of `x` before the product, which is in that dtype.

    Args:
        x: [M, H] float32, float16 or bfloat16; rows may lie apart.
        weight: [H] of the same dtype.
        eps: added to the mean square.

    Returns:
        [M, H], dense, in the dtype of `x`.

    Raises:
        ValueError: see `check_rms_norm`.
    """
    check_rms_norm(x, weight)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight
