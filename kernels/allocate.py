"""DScale's grow and shrink loop (arXiv 2609.37532) in one program, without the loop.

Scores never rise along a chain, so the moves of the published loop come in sorted order: growing takes the best of the
candidates that no seed holds, shrinking drops the worst of those that are held. How many moves there are is known
beforehand; which score the last of them has is found bit by bit, by counting the candidates that reach it. All above it
move, and of those equal to it as many as are missing, lower requests first. That is 32 counts instead of up to
(width - 1) N searches for a maximum, each waiting for the one before.

The time is that of one program's latency: the scores are a few kilobytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.allocate import check_scores

_LOWEST = tl.constexpr(-(2**31))
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _usable(scores):
    return tl.where(scores == scores, scores, -_INFINITY)


@triton.jit
def _smaller(first, second):
    return tl.minimum(first, second)


@triton.jit
def _seeds(scores_ptr, row_stride, requests, limits, COUNT: tl.constexpr):
    """[REQUESTS] int32; added up in the order of the candidates, since another may round to another side of a half."""
    level = tl.full(limits.shape, float("inf"), tl.float32)
    total = tl.zeros(limits.shape, tl.float64)
    for candidate in range(COUNT):
        inside = candidate + 1 < limits
        level = tl.minimum(level, _usable(tl.load(scores_ptr + requests * row_stride + candidate, inside, other=0.0)))
        total += tl.where(inside, level, 0.0).to(tl.float64)
    # Bounded before it becomes an integer, which a large float may not; it is positive, so truncation rounds down.
    rounded = (tl.minimum(tl.maximum(total, 1.0), 1e6) + 0.5).to(tl.int32)
    return tl.minimum(rounded, limits)


@triton.jit
def _order(values):
    """Integers in the order of the values, above the lowest int32."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # the two zeros are equal
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _last_moved(urgency, moves):
    """The largest integer that at least `moves` entries reach; the largest int32 if there is nothing to move."""
    threshold = tl.where(tl.sum((urgency >= 0).to(tl.int32)) >= moves, 0, _LOWEST)
    for step in range(31):
        trial = threshold + (1 << (30 - step))
        threshold = tl.where(tl.sum((urgency >= trial).to(tl.int32)) >= moves, trial, threshold)
    return threshold


@triton.jit
def _allocate(
    scores_ptr,  # [N, COUNT] float32
    limits_ptr,  # [N] int64
    budget_ptr,  # [1] int64
    lengths_ptr,  # [N] int64
    num_requests,
    row_stride,
    COUNT: tl.constexpr,
    REQUESTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    requests = tl.arange(0, REQUESTS)
    limits = tl.load(limits_ptr + requests, mask=requests < num_requests, other=0).to(tl.int32)
    seeds = _seeds(scores_ptr, row_stride, requests, limits, COUNT)
    rows = tl.maximum(tl.load(budget_ptr), tl.sum((limits > 0).to(tl.int32)).to(tl.int64))
    missing = tl.minimum(rows, tl.sum(limits).to(tl.int64)).to(tl.int32) - tl.sum(seeds)
    grows = missing > 0
    moves = tl.abs(missing)

    slots = tl.arange(0, CANDIDATES) + 1  # candidate j is row j of its chain
    places = requests[:, None] * row_stride + slots[None, :] - 1  # [REQUESTS, CANDIDATES]
    inside = slots[None, :] < limits[:, None]
    level = tl.associative_scan(_usable(tl.load(scores_ptr + places, mask=inside, other=0.0)), 1, _smaller)
    held = slots[None, :] < seeds[:, None]
    order = _order(level)
    urgency = tl.where(grows, tl.where(inside & (held == 0), order, _LOWEST), tl.where(held, ~order, _LOWEST))
    last = _last_moved(urgency, moves)
    ahead = tl.sum((urgency > last).to(tl.int32), axis=1)
    equal = tl.sum((urgency == last).to(tl.int32), axis=1)
    left = moves - tl.sum(ahead) - (tl.cumsum(equal, 0) - equal)  # moves that lower requests leave
    moved = ahead + tl.minimum(tl.maximum(left, 0), equal)
    lengths = seeds + tl.where(grows, moved, -moved)
    tl.store(lengths_ptr + requests, lengths.to(tl.int64), mask=requests < num_requests)


def allocate(scores: torch.Tensor, limits: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """See `kernels.ref.allocate`; one launch, nothing is read on the host.

    Raises:
        ValueError: see `kernels.ref.allocate.check_scores`.
    """
    check_scores(scores, limits, budget)
    num_requests, count = scores.shape
    lengths = torch.empty(num_requests, dtype=torch.int64, device=scores.device)
    requests, candidates = triton.next_power_of_2(num_requests), triton.next_power_of_2(count)
    _allocate[(1,)](
        scores,
        limits,
        budget,
        lengths,
        num_requests,
        scores.stride(0),
        count,
        requests,
        candidates,
        num_warps=min(max(requests * candidates // 512, 1), 16),  # up to 512 scores one warp, which needs no barrier
    )
    return lengths
