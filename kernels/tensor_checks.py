"""Checks of tensors before they reach a kernel, which would misread what does not fit; none looks at contents."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def require_rows(**tensors: torch.Tensor) -> None:
    """Raises a ValueError naming the first tensor whose last dimension is not dense."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1")


def require_int64(length: int, **tensors: torch.Tensor) -> None:
    """Raises a ValueError naming the first tensor that is not a dense int64 vector of that length."""
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64 or tensor.shape != (length,) or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected contiguous int64 [{length}]")


def require_tensors(**tensors: tuple[torch.Tensor, torch.dtype, Sequence[int]]) -> None:
    """Raises a ValueError naming the first tensor that is not contiguous, of that type and shape."""
    for name, (tensor, dtype, shape) in tensors.items():
        if tensor.dtype != dtype or tensor.shape != torch.Size(shape) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; expected contiguous {dtype} {list(shape)}"
            )


def require_device(device: torch.device, **tensors: torch.Tensor) -> None:
    """Raises a ValueError naming the first tensor that lies elsewhere."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; expected {device}")


def require_floats(dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raises a ValueError naming the first tensor of another dtype, or the dtype if it is not one that kernels take."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{next(iter(tensors))} is {dtype}, allowed: float32, float16, bfloat16")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}; expected {dtype}")
