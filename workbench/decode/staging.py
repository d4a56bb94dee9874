"""What the host tells the device about a round before it starts, in one copy to fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workbench.batch import NUM_TAIL, Batch


class Staging:
    """Buffers for the requests of a round, and for the sampling settings of every slot.

    Args:
        slots: requests that fit.
        max_context: bound on their committed tokens.
        device: where the target is.

    Attributes:
        temperature: [slots] float64 on the device.
        seed: [slots] int64 on the device.
    """

    def __init__(self, slots: int, max_context: int, device: torch.device) -> None:
        self._max_context = max_context
        sizes = [slots] * 5 + [NUM_TAIL * slots, 1, 1]
        host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host, self._device = host, host.to(device)  # the same memory on a CPU
        *self._fields, tails, self._num_live, self._budget = (part.numpy() for part in host.split(sizes))
        self._tails = tails.reshape(slots, NUM_TAIL)
        self._views = self._device.split(sizes)
        self.temperature = torch.zeros(slots, dtype=torch.float64, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)

    def set_sampling(self, slot: int, temperature: float, seed: int) -> None:
        """Settings of the request that enters a slot."""
        self.temperature[slot] = temperature
        self.seed[slot] = seed

    def stage(
        self,
        slots: Sequence[int],
        context_len: Sequence[int],
        anchors: Sequence[int],
        limits: Sequence[int],
        budget: int,
        depths: Sequence[int] = (),
        tails: Sequence[np.ndarray] = (),
    ) -> None:
        """Writes the live requests of a round, one entry each; see `workbench.batch.Batch`.

        Args:
            slots, context_len, anchors, limits, budget: as there.
            depths: as there; () where nothing searches on the device.
            tails: the last tokens of each request, any number of them; () likewise.
        """
        for field, values in zip(self._fields, (slots, context_len, anchors, limits, depths), strict=True):
            field[: len(values)] = np.asarray(values)
            field[len(values) :] = 0
        self._tails.fill(-1)
        for row, tail in zip(self._tails, tails, strict=False):
            newest = tail[-NUM_TAIL:]
            row[NUM_TAIL - len(newest) :] = newest
        self._num_live[0], self._budget[0] = len(slots), budget
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def batch(self, num_requests: int) -> Batch:
        """The device's views for a bucket of that many requests."""
        slots, context_len, anchors, limits, depths = (view[:num_requests] for view in self._views[:5])
        tails, num_live, budget = self._views[5:]
        tails = tails.view(-1, NUM_TAIL)[:num_requests]
        return Batch(slots, context_len, anchors, limits, num_live, budget, self._max_context, tails, depths)
