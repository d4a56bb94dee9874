"""Chains of many requests into one flat buffer of rows, in one launch.

Every program adds up all lengths itself, so that none waits for another; a row finds its request by counting the chains
that end before it, and all its fields follow from that request and its place in it. The flat buffer keeps its addresses
and its size while boundaries and requests change, so whatever was captured over it stays valid.

The time is that of a launch: 48 bytes a row are written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.pack import ChainRows, check_chains

_BLOCK = 64  # rows of a program: few enough that several multiprocessors share even a small round
_MAX_REQUESTS = 256


@triton.jit
def locate_rows(sizes_ptr, starts_ptr, num_requests, num_rows, REQUESTS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of this program and, of each, its request and its place there; the first program writes starts [R + 1].

    Every program adds up all sizes [R] itself, so that none waits for another. Behind the last row all requests have
    ended, also those that only pad, so the request of a sentinel is `num_requests` or more.
    """
    requests = tl.arange(0, REQUESTS)
    sizes = tl.load(sizes_ptr + requests, mask=requests < num_requests, other=0)
    ends = tl.minimum(tl.cumsum(sizes, 0), num_rows)  # [REQUESTS]
    if tl.program_id(0) == 0:
        tl.store(starts_ptr + requests + 1, ends, mask=requests < num_requests)
        tl.store(starts_ptr, tl.zeros([], tl.int64))
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ended = ends[None, :] <= rows[:, None]  # [BLOCK, REQUESTS]
    request = tl.sum(ended.to(tl.int32), axis=1)
    return rows, request, rows - tl.max(tl.where(ended, ends[None, :], 0), axis=1)


@triton.jit
def _pack(
    lengths_ptr,  # [R], as are anchors, slots and contexts; all of them int64
    anchors_ptr,
    drafts_ptr,  # [R, C]
    slots_ptr,
    contexts_ptr,
    tokens_ptr,  # [M], as are positions, slot_of_row, kv_row and ancestors
    positions_ptr,
    slot_of_row_ptr,
    kv_row_ptr,
    ancestors_ptr,
    starts_ptr,  # [R + 1]
    num_requests,
    num_rows,
    dead_row,
    draft_stride_request,
    draft_stride_token,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, request, step = locate_rows(lengths_ptr, starts_ptr, num_requests, num_rows, REQUESTS, BLOCK)
    live = request < num_requests

    anchor = tl.load(anchors_ptr + request, mask=live, other=0)
    draft_place = request.to(tl.int64) * draft_stride_request + (step - 1) * draft_stride_token
    draft = tl.load(drafts_ptr + draft_place, mask=live & (step > 0), other=0)
    position = tl.load(contexts_ptr + request, mask=live, other=0) + step
    slot = tl.load(slots_ptr + request, mask=live, other=0)
    ancestors = ~((tl.zeros_like(step) - 2) << tl.where(live, step, 0))  # bits 0..step

    inside = rows < num_rows
    tl.store(tokens_ptr + rows, tl.where(step > 0, draft, anchor), mask=inside)
    tl.store(positions_ptr + rows, tl.where(live, position, 0), mask=inside)
    tl.store(slot_of_row_ptr + rows, slot, mask=inside)
    tl.store(kv_row_ptr + rows, tl.where(live, position, dead_row), mask=inside)
    tl.store(ancestors_ptr + rows, tl.where(live, ancestors, 0), mask=inside)


def pack(
    lengths: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    dead_row: int,
    out: ChainRows,
) -> None:
    """See `kernels.ref.pack`; one launch, nothing is read on the host.

    Raises:
        ValueError: see `kernels.ref.pack.check_chains`, or more than 256 requests.
    """
    check_chains(lengths, anchors, drafts, slots, context_len, out)
    num_requests, num_rows = len(lengths), len(out.tokens)
    if num_requests > _MAX_REQUESTS:
        raise ValueError(f"{num_requests} requests, allowed 1..{_MAX_REQUESTS}")
    _pack[(triton.cdiv(num_rows, _BLOCK),)](
        lengths,
        anchors,
        drafts,
        slots,
        context_len,
        *out,
        num_requests,
        num_rows,
        dead_row,
        drafts.stride(0),
        drafts.stride(1),
        triton.next_power_of_2(num_requests),
        _BLOCK,
        num_warps=4,
    )
