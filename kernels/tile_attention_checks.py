"""What attention refuses before it runs: checks that its kernels and its plain implementations share."""

from __future__ import annotations

import math

import torch

from kernels.ref.tile_attention import MAX_MASKED_ROWS
from kernels.tensor_checks import require_device, require_int64, require_rows

VARIANTS = ("auto", "paper", "rows16", "rows128", "packed")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256


def check_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    max_rows: int,
    max_context: int,
    variant: str,
) -> None:
    """Refuses tensors that the kernels would misread, and numbers outside their range; looks at no contents.

    Raises:
        ValueError: see `kernels.tile_attention.attend_rows`.
    """
    _check_sizes(scale, max_rows, max_context, variant, ancestors)
    if query.dim() != 3 or query.dtype not in _DTYPES or not 1 <= query.shape[2] <= _MAX_HEAD_DIM:
        expected = f"[M, H, D], D in 1..{_MAX_HEAD_DIM}, float32, float16 or bfloat16"
        raise ValueError(f"query is {query.dtype} {list(query.shape)}; expected {expected}")
    if k_cache.dim() != 4 or k_cache.shape[3] != query.shape[2] or v_cache.shape != k_cache.shape:
        expected = f"[slots, L, Hk, {query.shape[2]}], both alike"
        raise ValueError(f"k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}; expected {expected}")
    if k_cache.dtype != query.dtype or v_cache.dtype != query.dtype:
        raise ValueError(f"k_cache is {k_cache.dtype}, v_cache {v_cache.dtype}; expected {query.dtype} as query")
    heads, kv_heads = query.shape[1], k_cache.shape[2]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    require_rows(query=query, k_cache=k_cache, v_cache=v_cache)
    metadata = {"slots": slots, "starts": starts, "context_len": context_len}
    require_int64(slots.numel(), slots=slots, context_len=context_len)
    require_int64(slots.numel() + 1, starts=starts)
    if ancestors is not None:
        require_int64(query.shape[0], ancestors=ancestors)
        metadata["ancestors"] = ancestors
    require_device(query.device, k_cache=k_cache, v_cache=v_cache, **metadata)


def _check_sizes(scale: float, max_rows: int, max_context: int, variant: str, ancestors: torch.Tensor | None) -> None:
    """Refuses numbers outside their range."""
    if not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} must be above 0 and finite")
    if max_rows < 1 or (ancestors is not None and max_rows > MAX_MASKED_ROWS):
        raise ValueError(f"max_rows={max_rows} outside 1..{'' if ancestors is None else MAX_MASKED_ROWS}")
    if max_context < 0:
        raise ValueError(f"max_context={max_context} must be at least 0")
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is not one of {', '.join(VARIANTS)}")
