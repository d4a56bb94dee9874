"""How much of each request's draft is verified, when the requests of a round share a budget of rows.

Allocators here see drafted trees and their scores, nothing else: lengths are fixed before the accept rule draws.
Each takes (trees, rows), rows being the mean number of rows a request, and keeps the root of every tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from workbench.budget._jit import fill_seeds, hold_level, move_ends, path_minimum, spread_chains
from workbench.types import MAX_TREE_ROWS, DraftTree, Scorer

#: (trees of the round, mean rows a request) -> what is verified of each.
Allocator = Callable[[Sequence[DraftTree], float], list[DraftTree]]


@dataclass(frozen=True)
class BudgetPolicy:
    """A `workbench.types.Policy`.

    Attributes:
        name: key of `workbench.budget.table.POLICIES`.
        allocator: shares out the rows.
        rows: mean rows a request of a round, its root included, 1..64; DScale takes 8 of 16. The budget of a round is
            this times its requests, rounded (halves to even).
        scorer: see `workbench.types.Policy`.
    """

    name: str
    allocator: Allocator
    rows: float = 8.0
    scorer: Scorer | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.rows, Real) and not isinstance(self.rows, bool)
        if not number or not 1 <= self.rows <= MAX_TREE_ROWS:
            raise ValueError(f"rows is {self.rows!r}, allowed 1..{MAX_TREE_ROWS} (numbers)")

    @property
    def reads_scores(self) -> bool:
        """See `workbench.types.Policy`."""
        return self.allocator not in (allocate_full, allocate_uniform)

    def allocate(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """See `workbench.types.Policy`.

        Raises:
            ValueError: scores that the allocator cannot use, or a branched tree where it needs chains.
        """
        return self.allocator(trees, self.rows)


def round_budget(rows: float, num_requests: int) -> int:
    """Rows of a round of that many requests."""
    return round(rows * num_requests)


def allocate_full(trees: Sequence[DraftTree], rows: float) -> list[DraftTree]:
    """Everything that was drafted, whatever the budget."""
    return list(trees)


def allocate_uniform(trees: Sequence[DraftTree], rows: float) -> list[DraftTree]:
    """The first rows of every tree, the same number of each."""
    return [tree.first(round(rows) - 1) for tree in trees]


def allocate_seed(trees: Sequence[DraftTree], rows: float) -> list[DraftTree]:
    """Chains at their own expected length, whatever the budget; see `workbench.budget.dvl`."""
    return _cut(trees, _seeded(trees)[2])


def allocate_dvl(trees: Sequence[DraftTree], rows: float) -> list[DraftTree]:
    """Chains by the published loop; see `workbench.budget.dvl`."""
    scores, limits, lengths = _seeded(trees)
    move_ends(scores, limits, min(round_budget(rows, len(trees)), int(limits.sum())), lengths)
    return _cut(trees, lengths)


def allocate_nodes(trees: Sequence[DraftTree], rows: float) -> list[DraftTree]:
    """The budget's best nodes of all trees, branched or not.

    A node counts as its worst ancestor at best, so that no node is kept without its parent; where scores never rise
    along a path this is the best sum that any choice of that size has. Between equal ones the lower request goes first,
    then the lower node.

    Raises:
        ValueError: a score is NaN.
    """
    scores, parents, starts = _joined(trees)
    budget = round_budget(rows, len(trees))
    if budget >= len(scores):
        return list(trees)
    values = np.empty_like(scores)
    place = path_minimum(scores, parents, starts, values)
    if place >= 0:
        tree = np.searchsorted(starts, place, "right") - 1
        raise ValueError(f"the draft's scores are not finite: tree {tree} has one that is NaN")
    keep = np.zeros(len(scores), bool)
    keep[np.argsort(-values, kind="stable")[:budget]] = True
    counts, ends = np.add.reduceat(keep, starts[:-1], dtype=np.int64).tolist(), starts.tolist()
    kept = []
    for i, tree in enumerate(trees):
        mask = keep[ends[i] : ends[i + 1]]
        kept.append(tree.first(counts[i] - 1) if mask[: counts[i]].all() else tree.select(mask))
    return kept


def _joined(trees: Sequence[DraftTree]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores and parents of all trees one after another, and their starts [R+1]."""
    starts = np.zeros(len(trees) + 1, np.int64)
    np.cumsum([len(tree.tokens) for tree in trees], out=starts[1:])
    scores = np.concatenate([np.zeros(0, np.float32), *(tree.scores for tree in trees)])
    parents = np.concatenate([np.zeros(0, np.int32), *(tree.parents for tree in trees)])
    return scores, parents, starts


def _seeded(trees: Sequence[DraftTree]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Level scores [R, longest], rows of each chain [R] and seed lengths [R]."""
    scores, parents, starts = _joined(trees)
    limits = np.diff(starts)
    table = np.zeros((len(trees), int(limits.max(initial=1)) - 1), np.float32)
    branched = spread_chains(scores, parents, starts, table)
    if branched >= 0:
        raise ValueError(f"tree {branched} branches; this policy takes chains only, topk and shared take any tree")
    place = hold_level(table, limits, table)
    if place >= 0:
        i, j = divmod(place, table.shape[1])
        if not np.isfinite(table[i, j]):
            raise ValueError(f"the draft's scores are not finite: chain {i} has {table[i, j]} at candidate {j + 1}")
        raise ValueError(f"chain {i} has score {table[i, j]} at candidate {j + 1}, allowed: finite, not rising")
    lengths = np.empty(len(trees), np.int32)
    fill_seeds(table, limits, lengths)
    return table, limits, lengths


def _cut(trees: Sequence[DraftTree], lengths: np.ndarray) -> list[DraftTree]:
    return [tree.first(length - 1) for tree, length in zip(trees, lengths.tolist(), strict=True)]
