"""DScale's lengths (arXiv 2609.37532), one move after another in Python: the truth for `kernels.allocate`."""

from __future__ import annotations

import torch

from kernels.tensor_checks import require_device, require_int64, require_rows

#: Most rows of a chain, anchor included.
MAX_WIDTH = 64
#: Most scores that are decided together, padding to powers of two included.
MAX_SCORES = 1 << 14


def check_scores(scores: torch.Tensor, limits: torch.Tensor, budget: torch.Tensor) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape or type than `allocate` documents, or more scores than are decided together.
    """
    if scores.ndim != 2 or not 1 <= scores.shape[1] < MAX_WIDTH or scores.dtype != torch.float32:
        raise ValueError(f"scores {list(scores.shape)} {scores.dtype}, allowed [N, 1..{MAX_WIDTH - 1}] float32")
    padded = 1
    for size in scores.shape:
        padded <<= max(size - 1, 0).bit_length()
    if padded > MAX_SCORES or len(scores) == 0:
        raise ValueError(f"scores {list(scores.shape)}, allowed: 1 request to {MAX_SCORES} scores, padding included")
    require_rows(scores=scores)
    require_int64(len(scores), limits=limits)
    require_int64(1, budget=budget)
    require_device(scores.device, limits=limits, budget=budget)


def allocate(scores: torch.Tensor, limits: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Rows of every request: each starts at its own expectation; the best next or worst last candidates then move.

    Args:
        scores: [N, width - 1] float32, chance that candidates 1, 2, ... are accepted. Where they rise they are held
            level; NaN counts as minus infinity.
        limits: [N] int64, most rows of each request, 0..width; 0 for one that is not there, which gets no rows.
        budget: [1] int64, rows of all together; taken into the number of live requests..sum of the limits.

    Returns:
        [N] int64, 1..limit (0 for limit 0), their sum the budget. Of equal scores the lower request moves first.

    Raises:
        ValueError: see `check_scores`.
    """
    check_scores(scores, limits, budget)
    level = torch.where(scores.isnan(), -torch.inf, scores).cummin(-1).values.tolist()
    most = limits.tolist()
    live = [i for i, limit in enumerate(most) if limit > 0]
    rows = min(max(int(budget), len(live)), sum(most))
    lengths = [min(_seed(level[i][: most[i] - 1]), most[i]) if most[i] else 0 for i in range(len(most))]
    while sum(lengths) < rows:
        # The first of equal ones, as max and min do.
        chosen = max((i for i in live if lengths[i] < most[i]), key=lambda i: level[i][lengths[i] - 1])
        lengths[chosen] += 1
    while sum(lengths) > rows:
        chosen = min((i for i in live if lengths[i] > 1), key=lambda i: level[i][lengths[i] - 2])
        lengths[chosen] -= 1
    return torch.tensor(lengths, device=scores.device)


def _seed(scores: list[float]) -> int:
    """The sum of the scores, rounded half up, at least 1; it counts no anchor."""
    total = 0.0
    for score in scores:  # in this order, which decides on which side of a half the sum is rounded
        total += score
    return int(min(max(total, 1.0), 1e6) + 0.5)
