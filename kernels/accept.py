"""The accept walk over the trees of a round, chains among them, in one launch and without walking.

A row agrees if its token is the target's choice after its parent and no earlier sibling offers the same. A row is
accepted if it and all its ancestors agree, which is one comparison of bits. At most one child of a row agrees, so the
accepted rows are a path, in the order of their numbers. Nothing waits for the row above.

One program owns one request. The time is that of a launch: 24 bytes a row are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.accept import AcceptedPaths, check_trees


@triton.jit
def _bit(rows):
    return tl.full(rows.shape, 1, tl.int64) << rows


@triton.jit
def _highest_bit(bits):
    """Number of the highest bit set, 0 for none; `bits` int64, at least 0."""
    place = tl.zeros_like(bits)
    for step in tl.static_range(6):
        half = 32 >> step
        above = (bits >> half) != 0
        place += tl.where(above, half, 0)
        bits = tl.where(above, bits >> half, bits)
    return place


@triton.jit
def _parents(ancestors, rows):
    """Row of each parent; 0 for the root. A parent is the nearest ancestor."""
    return _highest_bit(ancestors & (_bit(rows) - 1))


@triton.jit
def _accept(
    tokens_ptr,  # [M], as are ancestors and choices; all of them int64
    ancestors_ptr,
    choices_ptr,
    starts_ptr,  # [R + 1]
    path_ptr,  # [R, num_places]
    num_accepted_ptr,  # [R]
    bonus_ptr,  # [R]
    place_ptr,  # [M]
    num_places,
    ROWS: tl.constexpr,
):
    request = tl.program_id(0)
    start = tl.load(starts_ptr + request)
    count = tl.load(starts_ptr + request + 1) - start
    rows = tl.arange(0, ROWS)
    live = rows < count
    bits = tl.load(ancestors_ptr + start + rows, mask=live, other=0)
    tokens = tl.load(tokens_ptr + start + rows, mask=live, other=0)
    parents = _parents(bits, rows)
    wanted = tl.load(choices_ptr + start + parents, mask=live, other=0)

    keys = tokens * ROWS + parents
    earlier = (rows[None, :] < rows[:, None]) & (rows[None, :] > 0)  # [ROWS, ROWS]
    repeated = tl.sum((earlier & (keys[None, :] == keys[:, None])).to(tl.int32), axis=1) > 0

    agrees = live & ((rows == 0) | ((tokens == wanted) & (repeated == 0)))
    agreed = tl.sum(tl.where(agrees, _bit(rows), 0), axis=0)
    accepted = live & ((bits & ~agreed) == 0)
    place = tl.cumsum(accepted.to(tl.int32), 0) - 1
    length = tl.sum(accepted.to(tl.int32), axis=0)
    path = path_ptr + request.to(tl.int64) * num_places
    tl.store(path + place, rows.to(tl.int64), mask=accepted)
    tl.store(place_ptr + start + rows, tl.where(accepted, place, -1).to(tl.int64), mask=live)
    tl.store(path + rows, tl.zeros_like(bits) - 1, mask=(rows >= length) & (rows < num_places))
    tl.store(num_accepted_ptr + request, tl.maximum(length - 1, 0).to(tl.int64))
    last = tl.max(tl.where(accepted, rows, 0), axis=0)
    tl.store(bonus_ptr + request, tl.load(choices_ptr + start + last, mask=count > 0, other=0))


def accept(
    tokens: torch.Tensor, ancestors: torch.Tensor, starts: torch.Tensor, choices: torch.Tensor, max_rows: int
) -> AcceptedPaths:
    """See `kernels.ref.accept`; one launch, nothing is read on the host.

    Raises:
        ValueError: see `kernels.ref.accept.check_trees`.
    """
    check_trees(tokens, ancestors, starts, choices, max_rows)
    num_requests = len(starts) - 1
    path = torch.empty(num_requests, max_rows, dtype=torch.int64, device=tokens.device)
    num_accepted, bonus = (torch.empty(num_requests, dtype=torch.int64, device=tokens.device) for _ in range(2))
    place = torch.full_like(tokens, -1)  # rows of no request stay so
    rows = triton.next_power_of_2(max_rows)
    _accept[(num_requests,)](
        tokens,
        ancestors,
        choices,
        starts,
        path,
        num_accepted,
        bonus,
        place,
        max_rows,
        rows,
        num_warps=min(max(rows * rows // 512, 1), 8),
    )
    return AcceptedPaths(path, num_accepted, bonus, place)
