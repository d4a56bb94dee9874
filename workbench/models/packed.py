"""The packed rows: what one target forward reads, for any mix of requests, chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from workbench.batch import DeviceRows


@dataclass(frozen=True)
class PackedRows:
    """M rows of R requests in one flat buffer; rows behind the last request's are sentinels that nobody reads.

    Attributes:
        tokens: [M] int64.
        positions: [M] int64, rotary position of each row.
        slot_of_row: [M] int64, cache slot each row writes to.
        kv_row: [M] int64, cache row each row writes to: context length of its request plus its index in it.
        ancestors: [M] uint64, bit j set if the row may attend row j of its own request (itself included), or None:
            the rows of every request are causal (prefill), which may then be longer than 64.
        slots: [R] cache slots.
        starts: [R+1] first row of each request.
        context_len: [R] committed rows of each request.
        device_rows: the same on the device; None makes `on_device` copy what is missing there.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_of_row: torch.Tensor
    kv_row: torch.Tensor
    ancestors: np.ndarray | None
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    context_len: tuple[int, ...]
    device_rows: DeviceRows | None = None
    _masks: dict[torch.dtype, list[torch.Tensor | None]] = field(default_factory=dict, repr=False)
    _copied: list[DeviceRows] = field(default_factory=list, repr=False)

    @property
    def num_live(self) -> int:
        """Rows that belong to a request; those from here to M are sentinels."""
        return self.starts[-1]

    @property
    def kv_len(self) -> tuple[int, ...]:
        """[R] cache rows each request may see: its context plus its own rows."""
        return tuple(c + b - a for c, a, b in zip(self.context_len, self.starts, self.starts[1:], strict=False))

    def on_device(self) -> DeviceRows:
        """The rows for kernels; what is not there yet is copied at most once a forward."""
        if self.device_rows is not None:
            return self.device_rows
        if not self._copied:
            device, num_requests = self.tokens.device, len(self.slots)
            numbers = torch.tensor([*self.slots, *self.starts, *self.context_len]).to(device)
            slots, starts, context_len = numbers.split([num_requests, num_requests + 1, num_requests])
            bits = None
            if self.ancestors is not None:
                bits = torch.from_numpy(self.ancestors.view(np.int64)).to(device)
            longest = max(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))
            places = (self.tokens, self.positions, self.slot_of_row, self.kv_row)
            self._copied.append(DeviceRows(*places, bits, slots, starts, context_len, longest, max(self.context_len)))
        return self._copied[0]

    def additive_masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Per request [m, context + m] with 0 or -inf; None where plain causal or full attention says the same.

        Built once per forward and kept, since every layer asks for it.
        """
        if dtype not in self._masks:
            self._masks[dtype] = [self._mask(r, dtype) for r in range(len(self.slots))]
        return self._masks[dtype]

    def _mask(self, r: int, dtype: torch.dtype) -> torch.Tensor | None:
        first, stop, context = self.starts[r], self.starts[r + 1], self.context_len[r]
        rows = stop - first
        if rows == 1 or (self.ancestors is None and context == 0):
            return None
        if self.ancestors is None:
            allowed = np.tri(rows, dtype=bool)
        else:
            bits = np.arange(rows, dtype=np.uint64)
            allowed = (self.ancestors[first:stop, None] >> bits) & np.uint64(1) != 0
        mask = np.zeros((rows, context + rows), np.float32)
        mask[:, context:][~allowed] = -np.inf
        return torch.from_numpy(mask).to(self.tokens.device, dtype)


def causal_rows(tokens: Sequence[int], slot: int, start: int, device: torch.device) -> PackedRows:
    """Rows of one request that continue `start` committed ones causally."""
    count = len(tokens)
    places = torch.arange(start, start + count, device=device)
    return PackedRows(
        tokens=torch.tensor(list(tokens), device=device),
        positions=places,
        slot_of_row=torch.full((count,), slot, device=device),
        kv_row=places,
        ancestors=None,
        slots=(slot,),
        starts=(0, count),
        context_len=(start,),
    )
