"""Dynamic verification lengths of DScale (arXiv 2609.37532): the rows of a round shared out among chains.

A chain of length k is its anchor and its first k - 1 candidates; `scores[i, j - 1]` judges candidate j of request i and
never rises along j. Candidate j is row j, so a chain of length k grows by candidate k and loses candidate k - 1; the
anchor is never lost. Every request begins at its own expectation (`seed_lengths`); then, one row at a time, the best
next candidate of all requests is added, or the worst last one removed, until the rows are the budget exactly. Between
equal scores the request with the lowest index moves first, in both directions.

`allocate` is that loop. `allocate_topk` forgets the seed and takes the best candidates at once. `allocate_batched` is
the loop's result for many independent batches by one sort, since moves along sorted lists come in sorted order.
"""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch

from workbench.budget._jit import TOLERANCE, fill_seeds, hold_level, move_ends
from workbench.types import MAX_TREE_ROWS


def seed_lengths(scores: np.ndarray, limits: np.ndarray | None = None) -> np.ndarray:
    """Length that each request would choose for itself: half-up rounding of the sum of its scores, 1..limit.

    The anchor takes one of these rows, although the sum does not count it: 6.2 expected tokens give 6 rows.

    Args:
        scores: [N, width - 1] finite float, not rising along a row.
        limits: [N] most rows of each request, see `allocate`.

    Returns:
        [N] int32.

    Raises:
        ValueError: see `allocate`.
    """
    scores, limits = _checked(scores, limits)
    lengths = np.empty(len(limits), np.int32)
    fill_seeds(scores, limits, lengths)
    return lengths


def allocate(scores: np.ndarray, budget: int, width: int = 16, limits: np.ndarray | None = None) -> np.ndarray:
    """Lengths by the published loop, in exactly |budget - sum of seeds| moves.

    Best sum of the kept scores among all lengths that are at least the seeds (when it grows) or at most (when it
    shrinks), the anchor counting 1 (Proposition 1 of the paper).

    Args:
        scores: [N, width - 1] finite float, not rising along a row; compared as float32.
        budget: rows of all requests together; more than the limits allow is left over.
        width: most rows of a request, 1..64.
        limits: [N] integers 0..width, most rows of each request, default `width`. Scores of candidates beyond are not
            looked at. A request of limit 0 is padding and gets 0 rows.

    Returns:
        [N] int32, 1..limit, sum min(budget, sum of limits).

    Raises:
        ValueError: a bad shape, scores that are not finite or rise, limits outside 0..width, fewer rows than requests.
    """
    scores, limits = _checked(scores, limits, width)
    rows = _usable_rows(budget, limits)
    lengths = np.empty(len(limits), np.int32)
    fill_seeds(scores, limits, lengths)
    move_ends(scores, limits, rows, lengths)
    return lengths


def allocate_topk(scores: np.ndarray, budget: int, width: int = 16, limits: np.ndarray | None = None) -> np.ndarray:
    """Lengths of the best sum without regard to seeds: the anchors, and the best candidates of all requests.

    Arguments, result and errors are those of `allocate`.
    """
    scores, limits = _checked(scores, limits, width)
    extra = _usable_rows(budget, limits) - np.count_nonzero(limits)
    usable = np.arange(1, width) < limits[:, None]
    # Stable: between equal scores the lower request goes first, and within a request the earlier candidate.
    best = np.argsort(np.where(usable, -scores, np.inf), axis=None, kind="stable")[:extra]
    taken = np.bincount(best // max(width - 1, 1), minlength=len(limits))
    return ((limits > 0) + taken).astype(np.int32)


def allocate_batched(
    scores: torch.Tensor, budget: int | torch.Tensor, limits: torch.Tensor | None = None
) -> torch.Tensor:
    """`allocate` for B independent batches at once, on the device of the scores, ties included.

    Args:
        scores: [B, N, width - 1] float, see `allocate`.
        budget: rows of each batch, one number for all or [B].
        limits: [B, N] integers 0..width, see `allocate`; 0 fills up batches of fewer requests.

    Returns:
        [B, N] int32.

    Raises:
        ValueError: see `allocate`.
    """
    for name, value in (("scores", scores), ("limits", limits)):
        if not isinstance(value, torch.Tensor) and not (name == "limits" and value is None):
            raise ValueError(f"{name} has type {type(value).__name__}, allowed: a torch tensor")
    if scores.ndim != 3 or not 1 <= scores.shape[2] + 1 <= MAX_TREE_ROWS:
        raise ValueError(f"scores {list(scores.shape)}, allowed [B, N, 0..{MAX_TREE_ROWS - 1}]")
    device, width = scores.device, scores.shape[2] + 1
    if limits is None:
        limits = torch.full(scores.shape[:2], width, device=device)
    if limits.shape != scores.shape[:2] or limits.is_floating_point() or bool(((limits < 0) | (limits > width)).any()):
        raise ValueError(f"limits {list(limits.shape)}, allowed {list(scores.shape[:2])} integers 0..{width}")
    slots = torch.arange(1, width, device=device)
    usable = slots < limits[..., None]  # [B, N, width - 1]
    values = _checked_batch(scores.float(), usable)
    live, capacity = (limits > 0).sum(-1), limits.sum(-1)
    rows = _rows_of_batches(budget, live)
    seeds = _seed_batch(values, limits)
    missing = torch.minimum(rows, capacity) - seeds.sum(-1)  # [B], above 0 to grow
    grows = missing > 0
    held = slots < seeds[..., None]
    nothing = torch.full_like(values, torch.inf)
    # Best first among the candidates not held, or worst first among those held. Which of a request's own come first
    # between equals does not matter, since only their number is taken.
    gains = torch.where(usable & ~held, -values, nothing)
    losses = torch.where(held, values, nothing)
    order = torch.where(grows[:, None, None], gains, losses).flatten(1).sort(dim=-1, stable=True).indices
    places = torch.arange(order.shape[1], device=device).expand_as(order)
    moved = torch.empty_like(order).scatter_(1, order, places) < missing.abs()[:, None]
    moves = moved.view_as(values).sum(-1)
    return (seeds + torch.where(grows[:, None], moves, -moves)).int()


def _checked(scores: np.ndarray, limits: np.ndarray | None, width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Scores as level float32 [N, width - 1] and limits as int64 [N]."""
    scores = np.ascontiguousarray(scores, np.float32)
    if width is None and scores.ndim == 2:
        width = scores.shape[1] + 1
    if width is not None and (not _is_whole(width) or not 1 <= width <= MAX_TREE_ROWS):
        raise ValueError(f"width is {width!r}, allowed 1..{MAX_TREE_ROWS} (whole numbers)")
    if scores.ndim != 2 or scores.shape[1] != width - 1:
        raise ValueError(f"scores {list(scores.shape)}, allowed [N, {'width - 1' if width is None else width - 1}]")
    if limits is None:
        limits = np.full(len(scores), width, np.int64)
    else:
        limits = np.asarray(limits)
        good = limits.shape == scores.shape[:1] and limits.dtype.kind in "iu"
        if not good or (limits.size and not (limits.min() >= 0 and limits.max() <= width)):
            raise ValueError(f"limits {limits.tolist()}, allowed {len(scores)} integers 0..{width}")
        limits = limits.astype(np.int64)
    held = np.zeros_like(scores)
    place = hold_level(scores, limits, held)
    if place >= 0:
        i, j = divmod(place, scores.shape[1])
        raise ValueError(
            f"scores[{i}, :{j + 1}] ends in {scores[i, : j + 1][-2:].tolist()}, allowed: finite, not rising"
        )
    return held, limits


def _usable_rows(budget: int, limits: np.ndarray) -> int:
    num_live = np.count_nonzero(limits)
    if not _is_whole(budget) or budget < num_live:
        raise ValueError(f"budget is {budget!r}, allowed: an integer >= {num_live}, a row for each request's anchor")
    return min(int(budget), int(limits.sum()))


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _rows_of_batches(budget: int | torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """[B] integers, not below `live`, the requests of each batch."""
    allowed = f"allowed: integers from the requests of a batch on, one for all or [{len(live)}]"
    try:
        rows = torch.as_tensor(budget, device=live.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"budget is {budget!r}, {allowed}") from error
    whole = not rows.is_floating_point() and not rows.is_complex() and rows.dtype != torch.bool
    if not whole or rows.shape not in ((), live.shape):
        raise ValueError(f"budget is {rows.dtype} {list(rows.shape)}, {allowed}")
    if bool((rows < live).any()):
        raise ValueError(f"budget has fewer rows than requests in a batch, {allowed}")
    return rows.expand(len(live))


def _checked_batch(scores: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    """Level scores, 0 where they are not used."""
    scores = torch.where(usable, scores, 0.0)
    level = torch.where(usable, scores.cummin(-1).values, 0.0)
    # The negation catches NaN too.
    if not bool((scores.isfinite() & (scores <= level + TOLERANCE)).all()):
        raise ValueError("scores rise or are not finite, allowed: finite, not rising along the last axis")
    return level


def _seed_batch(values: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """[B, N] int64; added up one by one like `fill_seeds`, since another order may round to another side of a half."""
    total = torch.zeros(values.shape[:2], dtype=torch.float64, device=values.device)
    for column in values.unbind(-1):
        total += column.double()
    return torch.minimum((total.clamp(1.0, 1e6) + 0.5).floor().long(), limits)
