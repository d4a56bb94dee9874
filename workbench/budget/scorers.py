"""Scorers without weights: from the drafter's own confidence, or from nothing at all, as controls for the predictor.

Each is a `workbench.types.Scorer`: signals of R requests with n drafted tokens -> [R, n] float32, never rising along n.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral

import numpy as np
import torch

from workbench.budget.confidence import draft_log_probs, top_logits
from workbench.types import Scorer, Signals


def product_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Products along the last axis, of probabilities given by their logarithms."""
    return log_probs.cumsum(-1).exp()


def minimum_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Running minima along the last axis, of probabilities given by their logarithms."""
    return log_probs.cummin(-1).values.exp()


def product_scores(signals: Signals) -> np.ndarray:
    """Product of the draft probabilities up to this token: a chain holds only as long as all its links do."""
    return product_of(draft_log_probs(signals)).cpu().numpy()


def minimum_scores(signals: Signals) -> np.ndarray:
    """Lowest draft probability up to this token: what DScale does with its predicted probabilities."""
    return minimum_of(draft_log_probs(signals)).cpu().numpy()


#: Scorers that read the log-probabilities of drafted tokens [R, n] and nothing else, and their arithmetic on tensors.
FROM_LOG_PROBS: dict[Scorer, Callable[[torch.Tensor], torch.Tensor]] = {
    product_scores: product_of,
    minimum_scores: minimum_of,
}


def gap_scores(signals: Signals) -> np.ndarray:
    """Lowest distance between the best two draft logits up to this token; no probability, so not for seed lengths."""
    best = top_logits(signals.logits, 2)
    return (best[..., 0] - best[..., 1]).cummin(-1).values.cpu().numpy()


def check_seed(seed: int) -> None:
    """Raises ValueError unless `seed` is a whole number from 0 on."""
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"seed is {seed!r}, allowed >= 0 (whole numbers)")


def random_scorer(seed: int) -> Scorer:
    """A scorer of sorted uniform numbers.

    They follow from the seed, the number of tokens of a request and its newest token, so that they do not depend on
    which other requests are in the round.

    Raises:
        ValueError: see `check_seed`.
    """
    check_seed(seed)

    def random_scores(signals: Signals) -> np.ndarray:
        scores = np.empty(tuple(signals.tokens.shape), np.float32)
        for row, request in zip(scores, signals.requests, strict=True):
            key = (seed, len(request.tokens), int(request.tokens[-1]))
            row[:] = np.sort(np.random.default_rng(key).random(len(row), np.float32))[::-1]
        return scores

    return random_scores
