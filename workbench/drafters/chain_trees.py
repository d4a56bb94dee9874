"""Chains that a drafter of blocks left on the device become draft trees on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.budget.confidence import draft_log_probs
from workbench.types import DraftRequest, DraftTree, Policy, Signals, Stopwatch, chain_tree, root_tree


def chain_trees(
    requests: Sequence[DraftRequest],
    num_drafts: int,
    policy: Policy,
    draft: Callable[[list[int]], Signals],
    timer: Stopwatch,
) -> list[DraftTree]:
    """One chain a request, cut to what can be verified of it.

    Nodes are scored by the policy's scorer, or by the log-probability of the chain down to them; with zeros where the
    policy reads no scores, since each costs a pass over the vocabulary.

    Args:
        requests: who wants a draft.
        num_drafts: tokens of a whole chain.
        policy: decides how much is verified.
        draft: hands out the drafts of the requests at these places of `requests`; not called if none may have any.
        timer: gets what the drafts and their way to the host take as "draft", a scorer as "allocate".

    Returns:
        A tree for each request; only its root where its limits allow no more.
    """
    limits = [min(r.max_nodes, r.max_depth, num_drafts) for r in requests]
    trees = [root_tree(int(r.tokens[-1])) for r in requests]
    places = [i for i, limit in enumerate(limits) if limit > 0]
    if not places:
        return trees
    with timer.stage("draft"):
        signals = draft(places)
        tokens = signals.tokens.cpu().numpy()
        scores = np.zeros(tokens.shape, np.float32)
        if policy.scorer is None and policy.reads_scores:
            scores = draft_log_probs(signals).cumsum(-1).cpu().numpy()
    if policy.scorer is not None:
        with timer.stage("allocate"):
            scores = policy.scorer(signals)
    for i, drafted, scored in zip(places, tokens, scores, strict=True):
        trees[i] = chain_tree(int(trees[i].tokens[0]), drafted[: limits[i]], scored[: limits[i]])
    return trees


def require_in_step(requests: Sequence[DraftRequest], lengths: np.ndarray) -> None:
    """Refuses requests whose newest token does not follow their committed ones.

    Args:
        requests: who wants a draft.
        lengths: [slots] committed tokens of each slot.

    Raises:
        ValueError: naming the slot and both numbers.
    """
    for r in requests:
        if len(r.tokens) != lengths[r.slot] + 1:
            raise ValueError(
                f"slot {r.slot}: {len(r.tokens)} tokens; needed: the {lengths[r.slot]} committed and the root"
            )
