"""Prompts through the target: in one forward for all that enter together, or, on the device, by graphs of few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from workbench.batch import DeviceRows
from workbench.decode.graphs import GraphPool
from workbench.decode.round import RoundParts
from workbench.decode.rows import pack_chunks
from workbench.models.target import TargetOutput

#: Rows of the smallest graph; each next one has twice as many.
_SMALLEST = 64


class EagerPrefill:
    """Chunks of prompts in one forward.

    Args:
        parts: target, drafter and cache.
    """

    def __init__(self, parts: RoundParts) -> None:
        self._parts = parts

    def run(self, chunks: Sequence[np.ndarray], slots: Sequence[int], starts: Sequence[int]) -> TargetOutput:
        """Writes the K/V of prompt tokens.

        Args:
            chunks: token ids, one run a request.
            slots: cache slot of each request.
            starts: position of the first token of each chunk.

        Returns:
            Logits [R, V] behind the last token of each chunk, and taps of all rows, requests one after another.
        """
        parts = self._parts
        rows = pack_chunks(chunks, slots, starts, parts.target.device)
        last_rows = torch.tensor(rows.starts[1:], device=parts.target.device) - 1
        return parts.target.forward(rows, parts.cache, parts.drafter.taps, last_rows)


class CapturedPrefill:
    """Chunks of prompts one request after another, each by the smallest graph that it fits into.

    Rows behind the chunk stand at position 0 of the same slot; they are no live rows, so nothing of them is written.

    Args:
        parts: target, drafter and cache; the target attends through the kernels.
        pool: where graphs are kept.
        max_rows: most tokens of a chunk.
        max_context: bound on the tokens before a chunk.
    """

    def __init__(self, parts: RoundParts, pool: GraphPool, max_rows: int, max_context: int) -> None:
        self._parts, self._pool, self._max_context = parts, pool, max_context
        self._sizes = _sizes(max_rows)
        longest, device = self._sizes[-1], parts.target.device
        # Tokens, positions and slots of the rows; then slot, first row and end, context and last row of the request.
        host = torch.zeros(3 * longest + 5, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._host, self._device = host, host.to(device)  # the same memory on a CPU
        self._longest = longest

    def run(self, chunks: Sequence[np.ndarray], slots: Sequence[int], starts: Sequence[int]) -> TargetOutput:
        """See `EagerPrefill.run`."""
        done = [self._one(*each) for each in zip(chunks, slots, starts, strict=True)]
        taps = None if done[0].taps is None else torch.cat([out.taps for out in done])
        return TargetOutput(torch.cat([out.logits for out in done]), taps)

    def prepare(self) -> None:
        """Captures all graphs, over rows of no request."""
        self._stage(np.zeros(0, np.int64), 0, 0)
        for size in self._sizes:
            self._forward(size)

    def _one(self, chunk: np.ndarray, slot: int, start: int) -> TargetOutput:
        self._stage(chunk, slot, start)
        out = self._forward(next(size for size in self._sizes if size >= len(chunk)))
        if self._device.is_cuda:  # the host's buffer is written again for the next one
            torch.cuda.current_stream(self._device.device).synchronize()
        return TargetOutput(out.logits.clone(), None if out.taps is None else out.taps[: len(chunk)].clone())

    def _stage(self, chunk: np.ndarray, slot: int, start: int) -> None:
        tokens, positions, slot_of_row, request = (part.numpy() for part in self._host.split([self._longest] * 3 + [5]))
        count = len(chunk)
        tokens[:count], tokens[count:] = chunk, 0
        positions[:count], positions[count:] = np.arange(start, start + count), 0
        slot_of_row[:] = slot
        request[:] = (slot, 0, count, start, max(count - 1, 0))
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    @torch.inference_mode()
    def _forward(self, size: int) -> TargetOutput:
        fields = self._device.split([self._longest] * 3 + [1, 2, 1, 1])
        tokens, positions, slot_of_row = (field[:size] for field in fields[:3])
        slots, starts, context_len, last = fields[3:]
        rows = DeviceRows(
            tokens, positions, slot_of_row, positions, None, slots, starts, context_len, size, self._max_context
        )
        parts = self._parts
        return self._pool.run(
            ("prefill", size), partial(parts.target.forward, rows, parts.cache, parts.drafter.taps, last)
        )


def _sizes(max_rows: int) -> list[int]:
    """Rows of the graphs: doubling, up to what holds a chunk."""
    sizes = [_SMALLEST]
    while sizes[-1] < max_rows:
        sizes.append(2 * sizes[-1])
    return sizes
