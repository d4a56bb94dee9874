"""Device sessions of drafters that draft on the host and keep nothing on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.batch import AcceptedRows, Batch, Candidates, Chains, DeviceRows
from workbench.types import DraftRequest, DraftSession, DraftTree, Stopwatch


class HostDrafts:
    """See `workbench.batch.DeviceSession`: nothing happens on the device, trees are what the session proposes.

    Args:
        session: one that learns nothing from the rounds of a request, only from its prefill.
    """

    on_host = True

    def __init__(self, session: DraftSession) -> None:
        self._session = session

    def draft(self, batch: Batch) -> None:
        """Nothing to draft on the device."""

    def commit(self, rows: DeviceRows, accepted: AcceptedRows, taps: torch.Tensor | None) -> None:
        """Nothing to keep on the device."""

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Nothing to count."""

    def trees(
        self, requests: Sequence[DraftRequest], drafted: Chains | Candidates | None, timer: Stopwatch
    ) -> list[DraftTree]:
        """What the session proposes."""
        return self._session.propose(requests, timer)
