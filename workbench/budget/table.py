"""All budget policies by name: a scorer that judges the drafts, and an allocator that shares out rows by its scores."""

from __future__ import annotations

from collections.abc import Callable

from workbench.budget.policy import (
    Allocator,
    BudgetPolicy,
    allocate_dvl,
    allocate_full,
    allocate_nodes,
    allocate_seed,
    allocate_uniform,
)
from workbench.budget.scorers import check_seed, gap_scores, minimum_scores, product_scores, random_scorer
from workbench.types import Scorer

ALLOCATORS: dict[str, Allocator] = {
    "full": allocate_full,
    "uniform": allocate_uniform,
    "seed": allocate_seed,
    "dvl": allocate_dvl,
    "topk": allocate_nodes,
}

#: name -> builder(seed). Those that need weights or a target are not here; the caller makes them.
SCORERS: dict[str, Callable[[int], Scorer]] = {
    "product": lambda seed: product_scores,
    "minimum": lambda seed: minimum_scores,
    "gap": lambda seed: gap_scores,
    "random": random_scorer,
}

#: name -> (scorer, allocator). Scorer None: no scores are used, or those that the drafter gave its trees.
POLICIES: dict[str, tuple[str | None, str]] = {
    "full": (None, "full"),
    "uniform": (None, "uniform"),
    "seed": ("predictor", "seed"),
    "dvl": ("predictor", "dvl"),
    "topk": ("predictor", "topk"),
    "product": ("product", "dvl"),
    "minimum": ("minimum", "dvl"),
    "gap": ("gap", "topk"),
    "random": ("random", "topk"),
    "oracle": ("oracle", "dvl"),
    "shared": (None, "topk"),
}


def check_policy(name: str) -> None:
    """Raises ValueError unless `name` is one of POLICIES."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"policy is {name!r}, allowed {', '.join(POLICIES)}")


def build_tree_policy(name: str, rows: float = 8.0) -> BudgetPolicy:
    """A policy for drafters of trees: everything, the same number of each, or `rows` a request shared by their scores.

    Raises:
        ValueError: a name of no such policy, or rows out of range.
    """
    allowed = [n for n, (scorer, _) in POLICIES.items() if scorer is None]
    if name not in allowed:
        raise ValueError(f"policy is {name!r}, allowed for a drafter of trees: {', '.join(allowed)}")
    return build_policy(name, rows)


def build_policy(name: str, rows: float = 8.0, scorer: Scorer | str | None = None, seed: int = 0) -> BudgetPolicy:
    """A policy of the table.

    Args:
        name: one of POLICIES.
        rows: mean rows a request, 1..64.
        scorer: used instead of the table's: a scorer, or a name of SCORERS. Needed where the table's ("predictor",
            "oracle") depends on weights or a target.
        seed: of scorers that draw.

    Raises:
        ValueError: an unknown name, rows or seed out of range, or a scorer that the caller must give is missing.
    """
    check_policy(name)
    check_seed(seed)
    needed, allocator = POLICIES[name]
    if scorer is None:
        scorer = needed
    if isinstance(scorer, str):
        if scorer not in SCORERS:
            raise ValueError(
                f"policy {name!r} wants scorer {scorer!r}; allowed: one of {', '.join(SCORERS)}, or an object"
            )
        scorer = SCORERS[scorer](seed)
    if scorer is not None and not callable(scorer):
        raise ValueError(f"scorer is {scorer!r}, allowed: one of {', '.join(SCORERS)}, or an object that can be called")
    return BudgetPolicy(name, ALLOCATORS[allocator], rows, scorer)
