"""What a round works on and what it leaves for every request, however it is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.decode.accept import Accepted
from workbench.decode.live import LiveRequest
from workbench.decode.rows import Workspace
from workbench.models.cache import SlotCache
from workbench.models.target import Target
from workbench.types import Drafter, DraftSession, DraftTree, Stopwatch


@dataclass(frozen=True)
class RoundParts:
    """The models and the state of one engine.

    Attributes:
        target, drafter: the models.
        cache: K/V of the target.
        session: state of the drafter.
        workspace: where rounds are packed.
        timer: gets the seconds of every stage.
        row_bucket: rows are filled up to a multiple of this.
    """

    target: Target
    drafter: Drafter
    cache: SlotCache
    session: DraftSession
    workspace: Workspace
    timer: Stopwatch
    row_bucket: int = 1


@dataclass(frozen=True)
class Outcome:
    """What one round did for one request.

    Attributes:
        num_drafted: drafted nodes, before any were left out.
        tree: what was verified.
        accepted: what the accept rule kept of it.
    """

    num_drafted: int
    tree: DraftTree
    accepted: Accepted


@dataclass(frozen=True)
class RoundResult:
    """What one round did.

    Attributes:
        outcomes: one a request.
        num_rows: rows that the target ran, sentinels counted.
    """

    outcomes: Sequence[Outcome]
    num_rows: int


class Round(Protocol):
    """A way to run rounds. Target cache and drafter are extended by what was accepted; requests are not touched."""

    def run(self, live: Sequence[LiveRequest]) -> RoundResult:
        """One round over all live requests, which are in the order of their slots."""
        ...
