"""Draft trees of many requests into one flat buffer of rows, in one launch.

As in `kernels.pack`, every program adds up all sizes itself, so that none waits for another, and a row finds its
request by counting the trees that end before it. All that a tree needs besides is gathered: tokens, depths and the bits
of its ancestors, which the search has written already.

The time is that of a launch: 24 bytes a row are read and 40 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.pack import locate_rows
from kernels.ref.pack import ChainRows
from kernels.ref.pack_trees import check_trees
from kernels.ref.prune import DraftTrees

_BLOCK = 64  # rows of a program: a tree of a single request is one
_MAX_REQUESTS = 256


@triton.jit
def _pack_trees(
    sizes_ptr,  # [R], as are slots and contexts; all of them int64
    slots_ptr,
    contexts_ptr,
    tree_tokens_ptr,  # [R, num_places], as are depths and tree_ancestors
    depths_ptr,
    tree_ancestors_ptr,
    tokens_ptr,  # [M], as are positions, slot_of_row, kv_row and ancestors
    positions_ptr,
    slot_of_row_ptr,
    kv_row_ptr,
    ancestors_ptr,
    starts_ptr,  # [R + 1]
    num_requests,
    num_rows,
    num_places,
    dead_row,
    REQUESTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, request, step = locate_rows(sizes_ptr, starts_ptr, num_requests, num_rows, REQUESTS, BLOCK)
    live = request < num_requests

    place = request.to(tl.int64) * num_places + step
    token = tl.load(tree_tokens_ptr + place, mask=live, other=0)
    depth = tl.load(depths_ptr + place, mask=live, other=0)
    ancestors = tl.load(tree_ancestors_ptr + place, mask=live, other=0)
    context = tl.load(contexts_ptr + request, mask=live, other=0)
    slot = tl.load(slots_ptr + request, mask=live, other=0)

    inside = rows < num_rows
    tl.store(tokens_ptr + rows, token, mask=inside)
    tl.store(positions_ptr + rows, context + depth, mask=inside)
    tl.store(slot_of_row_ptr + rows, slot, mask=inside)
    tl.store(kv_row_ptr + rows, tl.where(live, context + step, dead_row), mask=inside)
    tl.store(ancestors_ptr + rows, ancestors, mask=inside)


def pack_trees(
    trees: DraftTrees, slots: torch.Tensor, context_len: torch.Tensor, dead_row: int, out: ChainRows
) -> None:
    """See `kernels.ref.pack_trees`; one launch, nothing is read on the host.

    Raises:
        ValueError: see `kernels.ref.pack_trees.check_trees`, or more than 256 requests.
    """
    check_trees(trees, slots, context_len, out)
    num_requests, num_rows = len(slots), len(out.tokens)
    if num_requests > _MAX_REQUESTS:
        raise ValueError(f"{num_requests} requests, allowed 1..{_MAX_REQUESTS}")
    _pack_trees[(triton.cdiv(num_rows, _BLOCK),)](
        trees.sizes,
        slots,
        context_len,
        trees.tokens,
        trees.depths,
        trees.ancestors,
        *out,
        num_requests,
        num_rows,
        trees.tokens.shape[1],
        dead_row,
        triton.next_power_of_2(num_requests),
        _BLOCK,
        num_warps=4,
    )
