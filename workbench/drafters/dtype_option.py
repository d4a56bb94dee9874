"""The `dtype` option that several drafters share."""

from __future__ import annotations

import torch

from workbench.models.target import Target

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(name: str, target: Target) -> torch.dtype:
    """The dtype of a draft network.

    Args:
        name: "float32", "bfloat16", "float16", or "auto" for the target's dtype, but bfloat16 on a CPU with
            instructions for it. A draft only proposes, so this never changes the law of the output.
        target: what it drafts for.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r}; allowed: {', '.join(_DTYPES)}")
    if name != "auto":
        return _DTYPES[name]
    # A block's few rows read all the weights: half the bytes is nearly half the time where the CPU multiplies bfloat16.
    has_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return torch.bfloat16 if target.device.type == "cpu" and has_bfloat16() else target.dtype
