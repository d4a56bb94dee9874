"""All that lies between the merged product of a layer and its attention, in one launch.

Queries, keys and values are split, queries and keys normed and rotated, keys and values written into the slot cache.
A program takes a few heads of one row, all of one kind; the halves of a head are loaded apart, so that a thread holds
the numbers that are rotated into each other, and the norm of a head stays inside a warp. Rows that belong to no
request, or whose place lies outside the cache, are not written, so they cannot race with a live row.

Least traffic: `qkv` read, as much written, 4 * M * (H + 2 Hk) * D bytes in half precision; cos and sin are small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import overlap_options, wait_for_previous
from kernels.ref.rotate_write import check_rotate_write

BLOCK_BYTES = 1024  # of either half of the heads of a program: 16 for each thread of two warps
NUM_WARPS = 2
#: Left to itself the assembler aims at 32 to 40 and, to get there, loads the angles and weights only after the sum of
#: squares: twice the latency.
MAX_REGISTERS = 56


@triton.jit
def _normed(first, second, weight_1, weight_2, eps, HEAD_DIM: tl.constexpr):
    """The halves of heads [HEADS, HALF], normed, rounded, weighed and rounded again, in their dtype."""
    dtype: tl.constexpr = first.dtype
    first, second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(first * first + second * second, axis=1)[:, None]
    scale = tl.rsqrt(squares / HEAD_DIM + eps)
    # Products of two half precision numbers are exact in float32, so these are the products in the dtype.
    first = (first * scale).to(dtype).to(tl.float32) * weight_1.to(tl.float32)
    second = (second * scale).to(dtype).to(tl.float32) * weight_2.to(tl.float32)
    return first.to(dtype), second.to(dtype)


@triton.jit
def _copy(x_ptr, out_ptr, inside, writable, HEAD_DIM: tl.constexpr):
    """Heads at `x_ptr` [HEADS, HALF], both halves, to `out_ptr` as they are."""
    first = tl.load(x_ptr, mask=inside)
    second = tl.load(x_ptr + HEAD_DIM // 2, mask=inside)
    tl.store(out_ptr, first, mask=writable)
    tl.store(out_ptr + HEAD_DIM // 2, second, mask=writable)


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    dims,
    inside,
    writable,
    eps,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Heads at `x_ptr` [HEADS, HALF], both halves, normed if asked and rotated, to `out_ptr`."""
    first = tl.load(x_ptr, mask=inside, other=0.0)
    second = tl.load(x_ptr + HEAD_DIM // 2, mask=inside, other=0.0)
    # Angles and weights are loaded for every head anew: from the nearest cache, in the layout of the heads.
    cos = tl.load(cos_ptr + dims, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + dims, mask=inside, other=0.0)
    if NORM:
        weight_1 = tl.load(weight_ptr + dims, mask=inside, other=0.0)
        weight_2 = tl.load(weight_ptr + HEAD_DIM // 2 + dims, mask=inside, other=0.0)
        first, second = _normed(first, second, weight_1, weight_2, eps, HEAD_DIM)
    first, second, cos, sin = first.to(tl.float32), second.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr, (first * cos - second * sin).to(dtype), mask=writable)
    tl.store(out_ptr + HEAD_DIM // 2, (second * cos + first * sin).to(dtype), mask=writable)


@triton.jit
def _place(slot_ptr, cache_row_ptr, live_ptr, row, num_slots, num_cache_rows, stride_slot, stride_row):
    """(where the row lies in a layer's cache, whether it may be written there)."""
    slot = tl.load(slot_ptr + row)
    cache_row = tl.load(cache_row_ptr + row)
    inside = (slot >= 0) & (slot < num_slots) & (cache_row >= 0) & (cache_row < num_cache_rows)
    return slot * stride_slot + cache_row * stride_row, inside & (row < tl.load(live_ptr))


@triton.jit
def _rotate_write(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    cache_row_ptr,
    live_ptr,
    eps,
    num_slots,
    num_cache_rows,
    qkv_stride,
    cos_stride,
    sin_stride,
    stride_slot,
    stride_row,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (M * groups,), a row's groups of HEADS heads one behind another: of queries, of keys, of values."""
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    groups: tl.constexpr = query_groups + 2 * kv_groups
    wait_for_previous(OVERLAP)
    row = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    lanes = tl.arange(0, HEADS)[:, None]
    dims = tl.broadcast_to(tl.arange(0, HALF)[None, :], [HEADS, HALF])
    first_half = dims < HEAD_DIM // 2
    row_ptr = qkv_ptr + row * qkv_stride
    cos_ptr += row * cos_stride
    sin_ptr += row * sin_stride
    if group < query_groups:
        heads = group * HEADS + lanes
        inside = first_half & (heads < NUM_HEADS)
        offsets = heads * HEAD_DIM + dims
        out_ptr = query_ptr + row * (NUM_HEADS * HEAD_DIM) + offsets
        _rotate(row_ptr + offsets, out_ptr, q_weight_ptr, cos_ptr, sin_ptr, dims, inside, inside, eps, HEAD_DIM, Q_NORM)
    else:
        place, live = _place(slot_ptr, cache_row_ptr, live_ptr, row, num_slots, num_cache_rows, stride_slot, stride_row)
        kv_group = group - query_groups
        kv_heads = kv_group % kv_groups * HEADS + lanes
        kv_inside = first_half & (kv_heads < NUM_KV_HEADS)
        # No mask of one number over all: the interpreter makes whole numbers of it.
        writable = first_half & (kv_heads < tl.where(live, NUM_KV_HEADS, 0))
        cache_offsets = place + kv_heads * stride_head + dims
        key_ptr = row_ptr + (NUM_HEADS + kv_heads) * HEAD_DIM + dims
        if kv_group < kv_groups:
            to_ptr = k_ptr + cache_offsets
            _rotate(key_ptr, to_ptr, k_weight_ptr, cos_ptr, sin_ptr, dims, kv_inside, writable, eps, HEAD_DIM, K_NORM)
        else:
            _copy(key_ptr + NUM_KV_HEADS * HEAD_DIM, v_ptr + cache_offsets, kv_inside, writable, HEAD_DIM)


def rotate_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """See `kernels.ref.rotate_write`; one launch, whose size follows from the shapes alone.

    Raises:
        ValueError: see `kernels.ref.rotate_write.check_rotate_write`.
    """
    check_rotate_write(qkv, q_weight, k_weight, cos, sin, kv, layer, slot_of_row, kv_row, starts, num_heads)
    num_rows, (num_kv_heads, head_dim) = len(qkv), kv.shape[4:]
    query = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return query
    half = triton.next_power_of_2(head_dim // 2)
    heads = min(
        triton.next_power_of_2(max(num_heads, num_kv_heads)), max(BLOCK_BYTES // (qkv.element_size() * half), 1)
    )
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    k_cache, v_cache = kv[layer, 0], kv[layer, 1]
    _rotate_write[(num_rows * groups,)](
        qkv,
        qkv if q_weight is None else q_weight,
        qkv if k_weight is None else k_weight,
        cos,
        sin,
        query,
        k_cache,
        v_cache,
        slot_of_row,
        kv_row,
        starts[-1:],
        eps,
        *k_cache.shape[:2],
        qkv.stride(0),
        cos.stride(0),
        sin.stride(0),
        *k_cache.stride()[:3],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None,
        HEADS=heads,
        HALF=half,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
        **overlap_options(qkv.device),
    )
    return query
