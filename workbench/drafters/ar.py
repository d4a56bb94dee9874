"""Autoregressive decoding as a drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.budget.table import build_policy
from workbench.drafters.host_drafts import HostDrafts
from workbench.models.target import Target
from workbench.types import Commit, DraftRequest, DraftTree, Stopwatch, root_tree


class ArDrafter:
    """Proposes the root alone, so every round is one step of the target. It is its own session: it has no state."""

    name = "ar"
    taps: tuple[int, ...] = ()
    max_nodes = 0

    def __init__(self) -> None:
        self.policy = build_policy("full")

    def session(self, slots: int, max_len: int) -> ArDrafter:
        """Nothing to keep."""
        return self

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """Root-only trees."""
        return [root_tree(int(r.tokens[-1])) for r in requests]

    def on_device(self) -> HostDrafts:
        """Everything stays on the host."""
        return HostDrafts(self)


def build_ar(target: Target, path: str | None = None) -> ArDrafter:
    """Autoregressive decoding: nothing is drafted."""
    refuse_path(path, "ar")
    return ArDrafter()


def refuse_path(path: str | None, name: str) -> None:
    """Raises ValueError when a path is given to a drafter that has no weights."""
    if path is not None:
        raise ValueError(f"path={str(path)!r}: drafter {name!r} has no weights, leave path unset")
