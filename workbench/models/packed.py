"""The packed rows: what one target forward reads, for any mix of requests, chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class PackedRows:
    """M rows of R requests in one flat buffer.

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
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_of_row: torch.Tensor
    kv_row: torch.Tensor
    ancestors: np.ndarray | None
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    context_len: tuple[int, ...]
    _masks: dict[torch.dtype, list[torch.Tensor | None]] = field(default_factory=dict, repr=False)

    @property
    def num_rows(self) -> int:
        """M."""
        return self.starts[-1]

    @property
    def kv_len(self) -> tuple[int, ...]:
        """[R] cache rows each request may see: its context plus its own rows."""
        return tuple(c + b - a for c, a, b in zip(self.context_len, self.starts, self.starts[1:], strict=False))

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
