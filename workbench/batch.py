"""A round on the device: records of tensors with fixed shapes and addresses, so that work over them can be captured.

A bucket has room for R requests; those behind the live ones only pad it: they have no rows, their slot is 0 and
nothing may be written for them. Letters as in `workbench.types`, n drafted tokens of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workbench.types import DraftRequest, DraftTree, Stopwatch


@dataclass(frozen=True)
class Batch:
    """The requests of a round.

    Attributes:
        slots: [R] int64, cache slot of each.
        context_len: [R] int64, committed tokens.
        anchors: [R] int64, newest token, the one that is not committed yet.
        limits: [R] int64, most rows of each request, its root included; 0 for those that pad.
        num_live: [1] int64, requests that do not pad.
        budget: [1] int64, rows that a policy with a budget shares out.
        max_context: bound on context_len.
    """

    slots: torch.Tensor
    context_len: torch.Tensor
    anchors: torch.Tensor
    limits: torch.Tensor
    num_live: torch.Tensor
    budget: torch.Tensor
    max_context: int


@dataclass(frozen=True)
class DeviceRows:
    """M packed rows; those from starts[R] on are sentinels.

    Attributes:
        tokens, positions, slot_of_row, kv_row: [M] int64, see `workbench.models.packed.PackedRows`.
        ancestors: [M] int64, the 64 bits of each row, or None for causal rows.
        slots: [R] int64.
        starts: [R+1] int64.
        context_len: [R] int64.
        max_rows: bound on the rows of a request.
        max_context: bound on context_len.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_of_row: torch.Tensor
    kv_row: torch.Tensor
    ancestors: torch.Tensor | None
    slots: torch.Tensor
    starts: torch.Tensor
    context_len: torch.Tensor
    max_rows: int
    max_context: int


@dataclass(frozen=True)
class AcceptedRows:
    """What the accept rule kept of packed rows.

    Attributes:
        place: [M] int64, place of a row in the accepted path of its request, 0 for the root; -1 for other rows.
        next_tokens: [M] int64, token behind the row on that path, the bonus token behind its last; else anything.
        last: [R] int64, row of the last accepted token of each request; 0 for requests without rows.
        num_accepted: [R] int64, accepted drafted tokens.
        bonus: [R] int64, the token that the target adds.
    """

    place: torch.Tensor
    next_tokens: torch.Tensor
    last: torch.Tensor
    num_accepted: torch.Tensor
    bonus: torch.Tensor


@dataclass(frozen=True)
class Chains:
    """Drafted chains.

    Attributes:
        tokens: [R, n] int64.
        hidden: [R, n, H], input of the output head at every drafted position.
        logits: [R, n, V].
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """The best tokens at every depth, from which a search makes trees.

    Attributes:
        ids: [R, d, C] int64, best first.
        probs: [R, d, C] float32.
    """

    ids: torch.Tensor
    probs: torch.Tensor


class DeviceSession(Protocol):
    """The part of a draft session that runs on the device with fixed shapes; state is that of the session itself.

    `draft` and `commit` read nothing on the host, so both can be captured. `advance` and `trees` run on the host.

    Attributes:
        on_host: True if drafts come from `trees` alone, so that `draft` has nothing to do.
    """

    on_host: bool

    def draft(self, batch: Batch) -> Chains | Candidates | None:
        """Drafts for every request of the bucket; None for a drafter that proposes nothing."""
        ...

    def commit(self, rows: DeviceRows, accepted: AcceptedRows, taps: torch.Tensor | None) -> None:
        """Extends the contexts by the accepted rows; taps [M, number of taps * H]."""
        ...

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Tells the session how many tokens `commit` added to each slot."""
        ...

    def trees(
        self, requests: Sequence[DraftRequest], drafted: Chains | Candidates | None, timer: Stopwatch
    ) -> list[DraftTree]:
        """Draft trees of the live requests from what `draft` left, for a decision on the host."""
        ...
