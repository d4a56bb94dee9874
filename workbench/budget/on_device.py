"""A round's lengths decided on the device, in static shapes and without a look at the host: what a graph can capture.

Only policies whose arithmetic exists as tensors are here; `device_decision` gives None for the others, which decide on
the host from draft trees. Both ways take the same scores and end in the same lengths, up to scores that differ in their
last digits because the sums over the vocabulary are ordered differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from workbench.batch import Batch, Chains
from workbench.budget.confidence import Confidence, confidence_features, token_log_probs
from workbench.budget.policy import (
    BudgetPolicy,
    allocate_dvl,
    allocate_full,
    allocate_nodes,
    allocate_uniform,
    round_budget,
)
from workbench.budget.predictor import PredictorScorer
from workbench.budget.scorers import FROM_LOG_PROBS
from workbench.kernel_path import kernel
from workbench.types import MAX_TREE_ROWS, Policy, Scorer

#: (chains of width - 1 drafts, round) -> lengths [R] int64: 1..limit of each request, 0 for those that pad.
Decision = Callable[[Chains, Batch], torch.Tensor]
#: (chains, confidence of their logits, round) -> scores [R, n] float32.
DeviceScores = Callable[[Chains, Confidence, Batch], torch.Tensor]


def device_decision(policy: Policy, width: int) -> Decision | None:
    """The policy as a function of tensors, or None for one that needs the host.

    Limits beyond the width count as the width. From its first NaN on a request's scores count as the lowest of all: it
    gets rows there only when no other request can use them, and the others notice nothing else. (The host refuses such
    a round.)

    Args:
        policy: decides on the device if it is everything, the same number of each, or the loop of DScale over scores of
            the predictor, of draft probabilities or, without a scorer, over log-probabilities of the drafts.
        width: rows of a chain, anchor included, 2..64.

    Raises:
        ValueError: width out of range, or a predictor of another width.
    """
    if not 2 <= width <= MAX_TREE_ROWS:
        raise ValueError(f"width is {width}, allowed 2..{MAX_TREE_ROWS}")
    # Of a subclass only its author knows whether the arithmetic here is still its own.
    if type(policy) is not BudgetPolicy:
        return None
    rows = rows_of_each(policy, width)
    if rows is not None:
        return partial(_at_most, rows)
    scores = device_scores(policy.scorer, width)
    if policy.allocator is not allocate_dvl or scores is None:
        return None
    return partial(_shared_out, width, scores)


def rows_of_each(policy: Policy, max_rows: int) -> int | None:
    """Most rows of every draft, chain or tree, where a policy keeps the first rows of each and looks at no scores.

    Args:
        policy: any; None is returned for those that do more.
        max_rows: rows that a draft may have, its root included.
    """
    if type(policy) is not BudgetPolicy:
        return None
    if policy.allocator is allocate_full:
        return max_rows
    return min(round(policy.rows), max_rows) if policy.allocator is allocate_uniform else None


def device_scores(scorer: Scorer | None, width: int) -> DeviceScores | None:
    """A scorer as a function of tensors, None for one that needs the host.

    Args:
        scorer: see `workbench.types.Policy`; None for the drafter's own scores.
        width: see `device_decision`.

    Raises:
        ValueError: a predictor of another width.
    """
    if scorer is None:
        return partial(_from_log_probs, _sums)
    if type(scorer) is PredictorScorer:
        if scorer.predictor.width != width:
            raise ValueError(f"the predictor is for {scorer.predictor.width} rows, the drafts have {width}")
        return partial(_predicted, scorer)
    arithmetic = next((form for known, form in FROM_LOG_PROBS.items() if known is scorer), None)
    return None if arithmetic is None else partial(_from_log_probs, arithmetic)


def rows_of_bucket(policy: Policy, num_requests: int, max_rows: int) -> int:
    """Most packed rows of a round of up to that many requests; fewer of them never have more.

    Args:
        policy: any; one that is no `BudgetPolicy` may keep everything.
        num_requests: requests that the bucket has room for.
        max_rows: most rows of a request, its root included.

    Raises:
        ValueError: a size below 1.
    """
    for name, value in (("num_requests", num_requests), ("max_rows", max_rows)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    everything = num_requests * max_rows
    if type(policy) is not BudgetPolicy:
        return everything
    rows = rows_of_each(policy, max_rows)
    if rows is not None:
        return num_requests * rows
    if policy.allocator in (allocate_dvl, allocate_nodes):
        # At least a row a request, since a policy has no fewer.
        return min(round_budget(policy.rows, num_requests), everything)
    return everything


def _at_most(rows: int, chains: Chains, batch: Batch) -> torch.Tensor:
    return batch.limits.clamp(max=rows)


def _shared_out(width: int, scores: DeviceScores, chains: Chains, batch: Batch) -> torch.Tensor:
    scored = scores(chains, confidence_features(chains.logits), batch)
    allocate = kernel("allocate", scored.device)
    return allocate(scored, batch.limits.clamp(max=width), batch.budget)


def _predicted(scorer: PredictorScorer, chains: Chains, confidence: Confidence, batch: Batch) -> torch.Tensor:
    # On the host a request that has room for its root alone drafts nothing, so it is not counted there either.
    return scorer.scores(chains, confidence, (batch.limits > 1).sum())


def _from_log_probs(
    arithmetic: Callable[[torch.Tensor], torch.Tensor], chains: Chains, confidence: Confidence, batch: Batch
) -> torch.Tensor:
    return arithmetic(token_log_probs(chains.logits, chains.tokens, confidence.normaliser))


def _sums(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probability of a chain down to each of its tokens."""
    return log_probs.cumsum(-1)
