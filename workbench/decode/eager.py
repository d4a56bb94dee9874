"""The round as plain calls, decisions on the host: runs anywhere, and takes every sampling rule and policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workbench.budget.limits import within_limits
from workbench.decode.accept import Accepted, accept_choices, accept_sampling
from workbench.decode.live import LiveRequest
from workbench.decode.round import Outcome, RoundParts, RoundResult
from workbench.decode.sampling import argmax_tokens
from workbench.models.packed import PackedRows
from workbench.types import Commit, DraftTree


class EagerRound:
    """See `workbench.decode.round.Round`.

    Args:
        parts: what it works on.
    """

    def __init__(self, parts: RoundParts) -> None:
        self._parts = parts

    def run(self, live: Sequence[LiveRequest]) -> RoundResult:
        """See `workbench.decode.round.Round`."""
        parts = self._parts
        timer, drafter = parts.timer, parts.drafter
        requests = [x.draft_request(drafter.max_nodes) for x in live]
        proposed = parts.session.propose(requests, timer)
        with timer.stage("allocate"):
            trees = drafter.policy.allocate(within_limits(proposed, requests, parts.target.vocab_size))
        with timer.stage("pack"):
            num_rows = bucket(sum(len(t.tokens) for t in trees), parts.row_bucket)
            rows = parts.workspace.pack(trees, [x.slot for x in live], [x.committed for x in live], num_rows)
        with timer.stage("verify"):
            out = parts.target.forward(rows, parts.cache, drafter.taps)
        with timer.stage("accept"):
            accepted = _accept(live, trees, rows, out.logits)
        with timer.stage("commit"):
            self._commit(live, trees, accepted, rows, out.taps)
        drafted = [tree.num_nodes for tree in proposed]
        return RoundResult([Outcome(*x) for x in zip(drafted, trees, accepted, strict=True)], num_rows)

    def _commit(
        self,
        live: Sequence[LiveRequest],
        trees: Sequence[DraftTree],
        accepted: Sequence[Accepted],
        rows: PackedRows,
        taps: torch.Tensor | None,
    ) -> None:
        """Keeps the KV rows of the accepted paths and hands them to the drafter."""
        for x, got in zip(live, accepted, strict=True):
            self._parts.cache.keep_path(x.slot, x.committed, got.path)
        if taps is not None:
            kept = [first + node for first, got in zip(rows.starts, accepted, strict=False) for node in got.path]
            taps = taps[torch.tensor(kept, device=taps.device)]
        self._parts.session.observe(
            Commit(
                slots=[x.slot for x in live],
                starts=[x.committed for x in live],
                tokens=[t.tokens[list(g.path)].astype(np.int64) for t, g in zip(trees, accepted, strict=True)],
                next_tokens=[g.bonus for g in accepted],
                taps=taps,
            )
        )


def bucket(num_rows: int, row_bucket: int) -> int:
    """The next multiple of `row_bucket`."""
    return -(-num_rows // row_bucket) * row_bucket


def _accept(
    live: Sequence[LiveRequest], trees: Sequence[DraftTree], rows: PackedRows, logits: torch.Tensor
) -> list[Accepted]:
    """One walk a request over the target's tokens; all greedy rows share one argmax."""
    argmax = argmax_tokens(logits) if any(x.request.sampling.greedy for x in live) else None
    accepted = []
    for x, tree, first in zip(live, trees, rows.starts, strict=False):
        own = slice(first, first + len(tree.tokens))
        if x.request.sampling.greedy:
            accepted.append(accept_choices(tree, argmax[own]))
        else:
            accepted.append(accept_sampling(tree, logits[own], x.committed, x.request.sampling, x.request.stream))
    return accepted
