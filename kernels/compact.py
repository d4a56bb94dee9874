"""KV rows of accepted tree paths moved together, for all layers and requests in one launch, in place.

A program owns a stretch of columns of one request in one layer, key or value, and moves its rows in increasing order,
four at a time: four are read, which hides the latency of the reads, then four are written. Row i is written after every
source up to path[i] >= i was read and no later step reads it, so a barrier between reading and writing makes it safe.

Least traffic: rows that move * layers * 2 * Hk * D elements, read and written once. Chains move nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.compact import check_paths

_COLUMNS = 1024


@triton.jit
def _source(path_ptr, place, length, num_columns):
    """Row that moves to `place`, and how many of its columns do: all or none."""
    row = tl.load(path_ptr + place, mask=place < length, other=-1)
    return row, tl.where(row > place, num_columns, 0)


@triton.jit
def _compact(
    kv_ptr,
    slots_ptr,  # [R], as are contexts and num_accepted; all int64
    contexts_ptr,
    num_accepted_ptr,
    path_ptr,  # [R, num_places]
    stride_layer,
    stride_kind,
    stride_slot,
    stride_row,
    num_places,
    num_columns,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)  # layer * 2 + key or value
    path_ptr += request * num_places
    length = tl.minimum(tl.load(num_accepted_ptr + request) + 1, num_places)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    first = kv_ptr + (plane // 2) * stride_layer + (plane % 2) * stride_kind
    first += tl.load(slots_ptr + request) * stride_slot + tl.load(contexts_ptr + request) * stride_row + columns
    place = tl.zeros([], tl.int64)
    while place < length:
        row_0, stop_0 = _source(path_ptr, place, length, num_columns)
        row_1, stop_1 = _source(path_ptr, place + 1, length, num_columns)
        row_2, stop_2 = _source(path_ptr, place + 2, length, num_columns)
        row_3, stop_3 = _source(path_ptr, place + 3, length, num_columns)
        values_0 = tl.load(first + row_0 * stride_row, mask=columns < stop_0)
        values_1 = tl.load(first + row_1 * stride_row, mask=columns < stop_1)
        values_2 = tl.load(first + row_2 * stride_row, mask=columns < stop_2)
        values_3 = tl.load(first + row_3 * stride_row, mask=columns < stop_3)
        tl.debug_barrier()
        tl.store(first + place * stride_row, values_0, mask=columns < stop_0)
        tl.store(first + (place + 1) * stride_row, values_1, mask=columns < stop_1)
        tl.store(first + (place + 2) * stride_row, values_2, mask=columns < stop_2)
        tl.store(first + (place + 3) * stride_row, values_3, mask=columns < stop_3)
        place += 4


def compact(
    kv: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """See `kernels.ref.compact`; one launch, nothing is read on the host.

    Raises:
        ValueError: see `kernels.ref.compact.check_paths`.
    """
    check_paths(kv, slots, context_len, path, num_accepted)
    num_requests, num_places = path.shape
    num_columns = kv.shape[4] * kv.shape[5]
    if num_requests == 0 or kv.numel() == 0:
        return
    block = min(triton.next_power_of_2(num_columns), _COLUMNS)
    _compact[(num_requests, 2 * len(kv), triton.cdiv(num_columns, block))](
        kv,
        slots,
        context_len,
        num_accepted,
        path,
        *kv.stride()[:4],
        num_places,
        num_columns,
        block,
        num_warps=min(max(block * kv.element_size() // 512, 1), 4),
        num_stages=1,  # reads of a later step must not move before the writes of an earlier one
    )
