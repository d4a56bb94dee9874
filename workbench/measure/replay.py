"""Runs a recorded trace through any budget policy, without a model.

Every round of the trace is decided anew, from the scores that were recorded: what a policy cuts from a draft is lost to
it. The contexts stay those of full-width decoding, where a policy that cuts would have gone on from other places, so
`tau` here says what the policy keeps of a round, and a live run what it makes of a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from workbench.budget.dvl import seed_lengths
from workbench.budget.policy import BudgetPolicy
from workbench.budget.table import ALLOCATORS, POLICIES
from workbench.budget.trace import Trace
from workbench.types import DraftTree, Policy, chain_tree

_NAN = float("nan")
#: Allocators that look at no scores.
_BLIND = ("full", "uniform")


class Replay:
    """A trace that is decided again.

    Args:
        trace: recorded rounds with the scores that policies go by; those of "oracle" follow from what was accepted.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._rounds = trace.rounds()
        self._chains: dict[str | None, list[DraftTree]] = {}

    def lengths(self, policy: str | Policy = "dvl", rows: float = 8.0, scorer: str | None = None) -> np.ndarray:
        """[S] int32, rows that the policy gives to every draft, root counted.

        Args:
            policy: name of the table of policies, or a policy.
            rows: mean rows a request; of a named policy.
            scorer: scores it goes by; default those that its name goes by, or all equal.

        Raises:
            ValueError: an unknown policy, one that goes by scores that only a tree drafter has, or scores that the
                trace lacks or the policy cannot use.
        """
        policy, scorer = _resolved(policy, rows, scorer)
        chains = self._drafts(scorer)
        kept = [len(tree.tokens) for part in self._rounds for tree in policy.allocate(chains[part])]
        return np.array(kept, np.int32)

    def seeds(self, scorer: str) -> np.ndarray:
        """[S] int32, rows that every draft would choose for itself."""
        return seed_lengths(self.scores(scorer), self.trace.limit.astype(np.int32) + 1)

    def scores(self, scorer: str | None) -> np.ndarray:
        """[S, n] float32 scores by name; None for all equal.

        Raises:
            ValueError: the trace has no such scores.
        """
        trace = self.trace
        if scorer is None:
            return np.zeros((len(trace), trace.width - 1), np.float32)
        if scorer == "oracle" and scorer not in trace.scores:
            return (trace.accepted[:, None] > np.arange(trace.width - 1)).astype(np.float32)
        if scorer not in trace.scores:
            known = ", ".join(sorted({*trace.scores, "oracle"}))
            raise ValueError(f"the trace has no scores {scorer!r}; it has: {known}")
        return trace.scores[scorer]

    def row(self, policy: str | Policy = "dvl", rows: float = 8.0, scorer: str | None = None) -> dict[str, Any]:
        """One table row: policy, scorer, rows, then `figures`, then what seeds alone would keep.

        Returns:
            retention_seed, mean_seed: of the lengths that drafts choose for themselves; NaN for scores that are no
                chances.
        """
        policy, scorer = _resolved(policy, rows, scorer)
        head = {"policy": policy.name, "scorer": scorer or "", "rows": getattr(policy, "rows", _NAN)}
        row = head | figures(self.trace, self.lengths(policy, scorer=scorer))
        scores = self.scores(scorer)
        seeds = None
        if scorer is not None and scores.size and scores.min() >= 0 and scores.max() <= 1:
            seeds = figures(self.trace, self.seeds(scorer))
        row["retention_seed"] = seeds["retention"] if seeds else _NAN
        row["mean_seed"] = seeds["mean_rows"] if seeds else _NAN
        return row

    def table(self, policies: Iterable[str], rows: Sequence[float]) -> list[dict[str, Any]]:
        """`row` of every policy at every budget; once for those that no budget changes ("full", "seed")."""
        found = []
        for name in policies:
            fixed = name in POLICIES and POLICIES[name][1] in ("full", "seed")
            found += [self.row(name, value) for value in (rows[:1] if fixed else rows)]
        return found

    def round_rows(
        self, number: int, policy: str | Policy = "dvl", rows: float = 8.0, scorer: str | None = None
    ) -> list[dict[str, Any]]:
        """One table row a request of one round: prompt, scores, seed, final length, limit, accepted, kept.

        Args:
            number: index of the round.
            policy, rows, scorer: see `lengths`.

        Raises:
            ValueError: no such round, or see `lengths`.
        """
        if not 0 <= number < len(self._rounds):
            raise ValueError(f"number={number}: the trace has rounds 0..{len(self._rounds) - 1}")
        policy, scorer = _resolved(policy, rows, scorer)
        part = Replay(self.trace.select(self._rounds[number]))
        scores, final = part.scores(scorer), part.lengths(policy, scorer=scorer)
        chances = scorer is not None and scores.min() >= 0 and scores.max() <= 1
        seeds = part.seeds(scorer).tolist() if chances else [None] * len(final)
        return [
            {
                "prompt": int(part.trace.prompt[i]),
                "scores": scores[i].tolist(),
                "seed": seeds[i],
                "final": int(final[i]),
                "limit": int(part.trace.limit[i]),
                "accepted": int(part.trace.accepted[i]),
                "kept": int(min(part.trace.accepted[i], final[i] - 1)),
            }
            for i in range(len(final))
        ]

    def _drafts(self, scorer: str | None) -> list[DraftTree]:
        if scorer not in self._chains:
            limits = self.trace.limit.tolist()
            rows = zip(self.scores(scorer), limits, strict=True)
            self._chains[scorer] = [chain_tree(0, [0] * limit, scores[:limit]) for scores, limit in rows]
        return self._chains[scorer]


def figures(trace: Trace, lengths: np.ndarray, rows: np.ndarray | None = None) -> dict[str, Any]:
    """What given lengths keep of a trace.

    Args:
        trace: S drafts.
        lengths: [S] rows verified of each, root counted.
        rows: [S] bool, only these; None for all.

    Returns:
        rounds, drafts: how many.
        mean_rows: rows a draft.
        tau: tokens a draft, the target's own included: min(accepted, length - 1) + 1.
        tau_full: tau of full width.
        rows_per_token: rows over tokens.
        retention: sum of min(accepted, length - 1) over the sum of accepted.
        lengths: [width] drafts of length 1..width.

    Raises:
        ValueError: lengths outside 1..limit + 1.
    """
    lengths = np.asarray(lengths)
    if lengths.shape != (len(trace),) or (lengths < 1).any() or (lengths > trace.limit + 1).any():
        raise ValueError(f"lengths {list(lengths.shape)} must be {len(trace)} numbers in 1..limit + 1")
    if rows is not None:
        trace, lengths = trace.select(rows), lengths[rows]
    accepted = trace.accepted.astype(np.int64)
    kept = np.minimum(accepted, lengths - 1)
    count, total = len(trace) or _NAN, int(accepted.sum())
    return {
        "rounds": len(trace.rounds()),
        "drafts": len(trace),
        "mean_rows": int(lengths.sum()) / count,
        "tau": int(kept.sum()) / count + 1,
        "tau_full": total / count + 1,
        "rows_per_token": int(lengths.sum()) / (int(kept.sum()) + count),
        "retention": int(kept.sum()) / total if total else _NAN,
        "lengths": np.bincount(lengths, minlength=trace.width + 1)[1:].tolist(),
    }


def _resolved(policy: str | Policy, rows: float, scorer: str | None) -> tuple[Policy, str | None]:
    if not isinstance(policy, str):
        return policy, scorer
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}; allowed: {', '.join(POLICIES)}")
    needed, allocator = POLICIES[policy]
    scorer = scorer or needed
    if scorer is None and allocator not in _BLIND:
        raise ValueError(f"policy={policy!r} goes by a drafter's own scores; name the scorer to replay it with")
    return BudgetPolicy(policy, ALLOCATORS[allocator], rows), scorer
