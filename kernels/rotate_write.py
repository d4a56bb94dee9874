"""All that lies between the merged product of a layer and its attention, in one launch.

Queries, keys and values are split, queries and keys normed and rotated, keys and values written into the slot cache.
A program takes a few heads of one row, all of one kind, and the norm of a head stays inside a warp. Rows that belong to
no request, or whose place lies outside the cache, are not written, so they cannot race with a live row.

Least traffic: `qkv` read, as much written, 4 * M * (H + 2 Hk) * D bytes in half precision; cos and sin are small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import overlap_options, wait_for_previous
from kernels.ref.rotate_write import check_rotate_write
from kernels.rotate_device import load_halves, rotated, store_halves

BLOCK_BYTES = 1024  # of either half of the heads of a program: 16 for each thread of two warps
NUM_WARPS = 2
#: Left to itself the assembler aims at 32 to 40 and, to get there, loads the angles and weights only after the sum of
#: squares: twice the latency.
MAX_REGISTERS = 56


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
        first, second = load_halves(row_ptr + offsets, inside, HEAD_DIM)
        first, second = rotated(first, second, q_weight_ptr, cos_ptr, sin_ptr, dims, inside, eps, HEAD_DIM, Q_NORM)
        store_halves(out_ptr, first, second, inside, HEAD_DIM)
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
            first, second = load_halves(key_ptr, kv_inside, HEAD_DIM)
            first, second = rotated(
                first, second, k_weight_ptr, cos_ptr, sin_ptr, dims, kv_inside, eps, HEAD_DIM, K_NORM
            )
            store_halves(k_ptr + cache_offsets, first, second, writable, HEAD_DIM)
        else:
            first, second = load_halves(key_ptr + NUM_KV_HEADS * HEAD_DIM, kv_inside, HEAD_DIM)
            store_halves(v_ptr + cache_offsets, first, second, writable, HEAD_DIM)


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
