"""What the host tells the device about a round before it starts, in one copy to fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workbench.batch import Batch


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
        host = torch.zeros(4 * slots + 2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host, self._device = host, host.to(device)  # the same memory on a CPU
        sizes = [slots] * 4 + [1, 1]
        self._fields = [part.numpy() for part in host.split(sizes)]
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
    ) -> None:
        """Writes the live requests of a round, one entry each; see `workbench.batch.Batch`."""
        count = len(slots)
        for field, values in zip(self._fields, (slots, context_len, anchors, limits), strict=False):
            field[:count] = np.asarray(values)
            field[count:] = 0
        self._fields[4][0], self._fields[5][0] = count, budget
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def batch(self, num_requests: int) -> Batch:
        """The device's views for a bucket of that many requests."""
        return Batch(*(view[:num_requests] for view in self._views[:4]), *self._views[4:], self._max_context)
