"""CUDA graphs by key: the first call captures, later ones replay over whatever the same addresses hold by then.

The graphs of a pool share their memory, and are replayed one after another on one stream. What a graph returned stays
referenced, so graphs that are captured later never write there; those captured before it may. So an output must be read
before an older graph runs again, which in a round is the case: draft, decision, verification, reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeVar

import torch

T = TypeVar("T")


@dataclass
class GraphReport:
    """What captured graphs cost.

    Attributes:
        captures: key -> seconds of warming up and capturing.
        replays: replays in all.
        reserved_bytes: device memory that was reserved while capturing.
        eager_rounds: rounds that ran without graphs, since the device does not know how a request samples.
    """

    captures: dict[tuple, float] = field(default_factory=dict)
    replays: int = 0
    reserved_bytes: int = 0
    eager_rounds: int = 0


class GraphPool:
    """Captures and replays pieces of a round.

    Args:
        device: where the work runs; on a device other than CUDA every call runs the work itself.
        capture: False runs the work itself on CUDA too; a collection captures only keys that begin with one of its
            members.
    """

    def __init__(self, device: torch.device, capture: bool | Collection[str] = True) -> None:
        self._device, self._kinds = device, capture
        self.captures = bool(capture) and device.type == "cuda"
        self.report = GraphReport()
        self._graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, object]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None
        # One for all captures: libraries keep a workspace for every stream they have seen.
        self._side = torch.cuda.Stream(device) if self.captures else None

    def run(self, key: tuple, work: Callable[[], T]) -> T:
        """Runs `work`, by its graph once there is one.

        Args:
            key: of the graph, its kind first; the same key must always come with the same work over the same addresses.
            work: repeatable without harm (a first call runs it twice), of fixed shapes, reads nothing on the host.

        Returns:
            What `work` returned when it was captured: the same tensors each time, with new contents.
        """
        if not self.captures or not (self._kinds is True or key[0] in self._kinds):
            return work()
        if key not in self._graphs:
            self._graphs[key] = self._capture(key, work)
        graph, outputs = self._graphs[key]
        graph.replay()
        self.report.replays += 1
        return outputs

    def _capture(self, key: tuple, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        began = time.perf_counter()
        current, side = torch.cuda.current_stream(self._device), self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # compiles kernels and makes libraries allocate, neither of which can be captured
        current.wait_stream(side)
        # Of what the warm-up left nothing may be given back during the capture, or it would count as negative.
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=side):
            outputs = work()
        self.report.captures[key] = time.perf_counter() - began
        self.report.reserved_bytes += torch.cuda.memory_reserved(self._device) - reserved
        return graph, outputs


def request_buckets(slots: int) -> list[int]:
    """Numbers of requests with graphs of their own: 1, 2, every fourth up to 32, every eighth above, and `slots`."""
    steps = [1, 2, *range(4, 33, 4), *range(40, slots + 8, 8)]
    return sorted({min(step, slots) for step in steps})
