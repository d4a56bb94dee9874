"""A round on the device: records of tensors with fixed shapes and addresses, so that work over them can be captured.

A bucket has room for R requests; those behind the live ones only pad it: they have no rows, their slot is 0 and
nothing may be written for them. Letters as in `workbench.types`, n drafted tokens of a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from workbench.types import DraftRequest, DraftTree, Stopwatch

#: G, newest tokens of a request that a search on the device knows: n-grams have at most this many before their last.
NUM_TAIL = 4


@dataclass(frozen=True)
class Batch:
    """The requests of a round.

    Attributes:
        slots: [R] int64, cache slot of each.
        context_len: [R] int64, committed tokens.
        anchors: [R] int64, newest token, the one that is not committed yet.
        limits: [R] int64, most rows of each request, its root included; 0 for those that pad. For chains they bound
            the depth too.
        num_live: [1] int64, requests that do not pad.
        budget: [1] int64, rows that a policy with a budget shares out.
        max_context: bound on context_len.
        tails: [R, G] int64, newest tokens of each request, the root last; -1 in front of shorter ones. None where
            nothing searches on the device, like depths.
        depths: [R] int64, depth of the deepest node of a tree that is still useful; 0 for requests that pad.
    """

    slots: torch.Tensor
    context_len: torch.Tensor
    anchors: torch.Tensor
    limits: torch.Tensor
    num_live: torch.Tensor
    budget: torch.Tensor
    max_context: int
    tails: torch.Tensor | None = None
    depths: torch.Tensor | None = None


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


class DraftTrees(NamedTuple):
    """Draft trees that a search on the device made, as the kernels take them: fields and order are theirs.

    Row 0 of a request is its root; the first n rows are the tree of n rows. Rows from sizes[r] on mean nothing.

    Attributes:
        tokens, parents, depths: [R, N+1] int64, see `workbench.types.DraftTree`.
        scores: [R, N+1] float32.
        ancestors: [R, N+1] int64, the 64 bits of each row.
        sizes: [R] int64, rows of each tree within its request's limits; 0 for requests that pad.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    ancestors: torch.Tensor
    sizes: torch.Tensor


#: What a device session leaves of a draft; None for nothing.
Drafted = Chains | Candidates | DraftTrees | None


class DeviceSession(Protocol):
    """The part of a draft session that runs on the device with fixed shapes; state is that of the session itself.

    `draft` and `commit` read nothing on the host, so both can be captured. `advance` and `trees` run on the host.
    A session with an attribute `searches` that is true makes draft trees in `draft`, and needs tails and depths there.

    Attributes:
        on_host: True if drafts come from `trees` alone, so that `draft` has nothing to do.
    """

    on_host: bool

    def draft(self, batch: Batch) -> Drafted:
        """Drafts for every request of the bucket; None for a drafter that proposes nothing."""
        ...

    def commit(self, rows: DeviceRows, accepted: AcceptedRows, taps: torch.Tensor | None) -> None:
        """Extends the contexts by the accepted rows; taps [M, number of taps * H]."""
        ...

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Tells the session how many tokens `commit` added to each slot."""
        ...

    def trees(self, requests: Sequence[DraftRequest], drafted: Drafted, timer: Stopwatch) -> list[DraftTree]:
        """Draft trees of the live requests from what `draft` left, for a decision on the host."""
        ...
