"""Packing: draft trees of several requests become one flat buffer of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workbench.batch import Batch, DeviceRows
from workbench.models.packed import PackedRows
from workbench.search.encode import ancestor_masks
from workbench.types import DraftTree

_FIELDS = ("tokens", "positions", "slot_of_row", "kv_row", "ancestors")


class Workspace:
    """Arrays that the rounds of one engine are packed into: shapes and addresses stay, contents change.

    Every field of a row has its own stretch of one buffer, so a round travels to the device in one copy, and whatever
    was captured over the buffer finds the next round in the same place. Rows behind the last live one are sentinels:
    token 0 at position 0, with K/V bound for the cache's dead row, which no request ever reads.

    Args:
        max_requests: most requests of a round.
        max_rows: most rows of a round, sentinels included.
        dead_row: cache row (of slot 0) that sentinels write to.
        device: where the target is.

    Attributes:
        tokens, positions, slot_of_row, kv_row, ancestors: [max_rows] int64 on the device; `ancestors` holds 64 bits.
        starts: [max_requests + 1] int64 on the device, first row of each request; behind the last request, the end.
        slots, context_len: [max_requests] int64 on the device.

    Raises:
        ValueError: sizes below 1.
    """

    def __init__(self, max_requests: int, max_rows: int, dead_row: int, device: torch.device) -> None:
        for name, value in (("max_requests", max_requests), ("max_rows", max_rows)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.max_requests, self.max_rows, self._dead_row = max_requests, max_rows, dead_row
        sizes = [max_rows] * len(_FIELDS) + [max_requests + 1, max_requests, max_requests]
        host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host_buffer = host
        self._device_buffer = host.to(device)  # the same memory on a CPU
        self._host = [part.numpy() for part in host.split(sizes)]
        views = self._device_buffer.split(sizes)
        self.tokens, self.positions, self.slot_of_row, self.kv_row, self.ancestors = views[: len(_FIELDS)]
        self.starts, self.slots, self.context_len = views[len(_FIELDS) :]

    def pack(
        self,
        trees: Sequence[DraftTree],
        slots: Sequence[int],
        context_len: Sequence[int],
        num_rows: int | None = None,
    ) -> PackedRows:
        """Rows of one tree a request; node i of a request becomes its row i, at position context + depth.

        Args:
            trees, slots, context_len: one a request, at least one.
            num_rows: rows in all, filled up with sentinels; default: the live ones.

        Returns:
            Views of the workspace: valid until the next call.

        Raises:
            ValueError: more requests or rows than there is room for, or fewer rows asked for than are live.
        """
        starts = np.concatenate([[0], np.cumsum([len(t.tokens) for t in trees])])
        live = int(starts[-1])
        total = live if num_rows is None else num_rows
        if not 1 <= len(trees) <= self.max_requests:
            raise ValueError(f"{len(trees)} requests outside 1..{self.max_requests}")
        if not live <= total <= self.max_rows:
            raise ValueError(f"num_rows={total} outside {live} (live rows)..{self.max_rows} (room of the workspace)")
        masks = np.concatenate([ancestor_masks(t.parents) for t in trees])
        self._fill(trees, np.asarray(slots), np.asarray(context_len), starts, masks, total)
        if self._device_buffer is not self._host_buffer:
            self._device_buffer.copy_(self._host_buffer, non_blocking=True)
        return self._views(slots, context_len, starts, masks, total)

    def clear(self) -> None:
        """A round without rows: everything is a sentinel."""
        self._host_buffer.zero_()
        self._host[3][:] = self._dead_row
        if self._device_buffer is not self._host_buffer:
            self._device_buffer.copy_(self._host_buffer, non_blocking=True)

    def copy_requests(self, batch: Batch) -> None:
        """Takes slots and context lengths of a round that is packed on the device."""
        count = len(batch.slots)
        self.slots[:count].copy_(batch.slots)
        self.context_len[:count].copy_(batch.context_len)

    def device_rows(self, num_requests: int, num_rows: int, max_rows: int, max_context: int) -> DeviceRows:
        """Views for kernels of as many requests and rows; the two bounds are as in `DeviceRows`."""
        fields = (self.tokens, self.positions, self.slot_of_row, self.kv_row, self.ancestors)
        requests = (self.slots[:num_requests], self.starts[: num_requests + 1], self.context_len[:num_requests])
        return DeviceRows(*(field[:num_rows] for field in fields), *requests, max_rows, max_context)

    def _fill(
        self,
        trees: Sequence[DraftTree],
        slots: np.ndarray,
        contexts: np.ndarray,
        starts: np.ndarray,
        masks: np.ndarray,
        total: int,
    ) -> None:
        """Writes all fields on the host."""
        live, counts = starts[-1], np.diff(starts)
        tokens, positions, slot_of_row, kv_row, ancestors, all_starts, all_slots, all_context = self._host
        tokens[:live] = np.concatenate([t.tokens for t in trees])
        positions[:live] = np.repeat(contexts, counts) + np.concatenate([t.depths for t in trees])
        slot_of_row[:live] = np.repeat(slots, counts)
        kv_row[:live] = np.arange(live) - np.repeat(starts[:-1] - contexts, counts)
        ancestors[:live] = masks.view(np.int64)
        for field, sentinel in zip(self._host, (0, 0, 0, self._dead_row, 0), strict=False):
            field[live:total] = sentinel
        all_starts[: len(starts)] = starts
        all_starts[len(starts) :] = live
        for field, values in ((all_slots, slots), (all_context, contexts)):
            field[: len(trees)] = values
            field[len(trees) :] = 0

    def _views(
        self, slots: Sequence[int], context_len: Sequence[int], starts: np.ndarray, masks: np.ndarray, total: int
    ) -> PackedRows:
        num_requests = len(starts) - 1
        return PackedRows(
            tokens=self.tokens[:total],
            positions=self.positions[:total],
            slot_of_row=self.slot_of_row[:total],
            kv_row=self.kv_row[:total],
            ancestors=masks,
            slots=tuple(int(s) for s in slots),
            starts=tuple(starts.tolist()),
            context_len=tuple(int(c) for c in context_len),
            device_rows=self.device_rows(num_requests, total, int(np.diff(starts).max()), int(max(context_len))),
        )


def pack_chunks(
    chunks: Sequence[np.ndarray], slots: Sequence[int], context_len: Sequence[int], device: torch.device
) -> PackedRows:
    """Rows of a prefill: one causal run of token ids a request, of any length."""
    counts = [len(c) for c in chunks]
    starts = np.concatenate([[0], np.cumsum(counts)])
    kv_row = np.concatenate([n + np.arange(len(c)) for c, n in zip(chunks, context_len, strict=True)])
    columns = np.stack([np.concatenate(chunks), np.repeat(np.asarray(slots), counts), kv_row]).astype(np.int64)
    on_device = torch.from_numpy(columns).to(device)  # one copy to the device for all
    return PackedRows(
        tokens=on_device[0],
        positions=on_device[2],
        slot_of_row=on_device[1],
        kv_row=on_device[2],
        ancestors=None,
        slots=tuple(int(s) for s in slots),
        starts=tuple(starts.tolist()),
        context_len=tuple(int(c) for c in context_len),
    )
