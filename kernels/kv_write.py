"""Writing the keys and values of packed rows into one layer of the slot cache, as an operator that can be captured.

Rows that belong to no request are not written at all, so they cannot race with a live row however their indices are
set; neither is a row whose place lies outside the cache.

It is a launch of its own, before the attention: programs of one launch have no order, so an attention kernel that also
wrote its rows could not read them back from the cache. It could take them from `key` and `value` instead and write on
the side, which spares this launch; the launch is better spent on also rotating the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.kv_write import kv_write as kv_write_reference
from kernels.tensor_checks import require_device, require_int64, require_rows


@triton.jit
def _write(
    key_ptr,
    value_ptr,
    k_ptr,
    v_ptr,
    slot_ptr,
    row_ptr,
    live_ptr,
    num_slots,
    num_cache_rows,
    key_stride_row,
    key_stride_head,
    value_stride_row,
    value_stride_head,
    k_stride_slot,
    k_stride_row,
    k_stride_head,
    v_stride_slot,
    v_stride_row,
    v_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid: (M,). One row, all its heads, keys and values."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    place = tl.load(row_ptr + row)
    inside = (slot >= 0) & (slot < num_slots) & (place >= 0) & (place < num_cache_rows)
    if inside & (row < tl.load(live_ptr)):
        heads = tl.arange(0, BLOCK_HEADS)[:, None]
        dims = tl.arange(0, DIM)[None, :]
        mask = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        key = tl.load(key_ptr + row * key_stride_row + heads * key_stride_head + dims, mask=mask)
        value = tl.load(value_ptr + row * value_stride_row + heads * value_stride_head + dims, mask=mask)
        k_place = slot * k_stride_slot + place * k_stride_row
        v_place = slot * v_stride_slot + place * v_stride_row
        tl.store(k_ptr + k_place + heads * k_stride_head + dims, key, mask=mask)
        tl.store(v_ptr + v_place + heads * v_stride_head + dims, value, mask=mask)


def launch(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """`kv_write` by the kernel on any device; arguments are taken as checked."""
    num_rows, num_heads, head_dim = key.shape
    if num_rows == 0:
        return
    _write[(num_rows,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_of_row,
        kv_row,
        starts[-1:],
        *k_cache.shape[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


# Registered at import, as torch finds operators by name: a compiled model refers to `workbench::kv_write`.
@torch.library.custom_op("workbench::kv_write", mutates_args=("k_cache", "v_cache"))
def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Stores row i of `key` and `value` at (slot_of_row[i], kv_row[i]) for every i < starts[-1].

    On a CPU the plain reference, elsewhere the kernel. Metadata are int64 tensors on the device of `key`; nothing here
    waits for the device. No two live rows may share a place.

    Args:
        key, value: [M, Hk, D], keys rotated.
        k_cache, v_cache: [slots, L, Hk, D] of the same dtype, written in place.
        slot_of_row, kv_row: [M] place of each row; rows whose place is outside the cache are left out.
        starts: [R+1] first row of each request; the last entry ends the live rows.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    _check(key, value, k_cache, v_cache, slot_of_row, kv_row, starts)
    launch(key, value, k_cache, v_cache, slot_of_row, kv_row, starts)


@kv_write.register_kernel("cpu")
def _kv_write_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    _check(key, value, k_cache, v_cache, slot_of_row, kv_row, starts)
    kv_write_reference(key, value, k_cache, v_cache, slot_of_row, kv_row, starts)


@kv_write.register_fake
def _kv_write_fake(*_: object, **__: object) -> None:
    return None


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Refuses tensors that the kernel would misread."""
    if key.dim() != 3 or value.shape != key.shape:
        raise ValueError(f"key is {list(key.shape)}, value {list(value.shape)}; expected [M, Hk, D], both alike")
    if k_cache.dim() != 4 or k_cache.shape[2:] != key.shape[1:] or v_cache.shape != k_cache.shape:
        expected = f"[slots, L, {key.shape[1]}, {key.shape[2]}], both alike"
        raise ValueError(f"k_cache is {list(k_cache.shape)}, v_cache {list(v_cache.shape)}; expected {expected}")
    for name, tensor in (("value", value), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != key.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, key {key.dtype}")
    require_rows(key=key, value=value, k_cache=k_cache, v_cache=v_cache)
    require_int64(key.shape[0], slot_of_row=slot_of_row, kv_row=kv_row)
    require_int64(max(starts.numel(), 1), starts=starts)
    tensors = {"value": value, "k_cache": k_cache, "v_cache": v_cache}
    require_device(key.device, **tensors, slot_of_row=slot_of_row, kv_row=kv_row, starts=starts)
