"""Times of several calls that take turns, so that clocks and temperature are the same for all of them.

On a CUDA device each call is a graph of its own; a pass replays them one after another without waiting, each between
two events, so that the launch of a graph is hidden behind the one before it. On a CPU the clock runs around the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from workbench.decode.graphs import GraphPool

#: Passes in front of those that count, the first of which captures where there are graphs.
_WARM_UPS = {"cuda": 3, "cpu": 1}


@dataclass(frozen=True)
class Turns:
    """What a call took.

    Attributes:
        median_ms, min_ms, max_ms: over the passes.
        capture_s: warming up and capturing its graph; 0 without one.
        pool_bytes: device memory that was reserved for it.
    """

    median_ms: float
    min_ms: float
    max_ms: float
    capture_s: float
    pool_bytes: int


@torch.inference_mode()
def time_in_turns(calls: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int = 15) -> dict[str, Turns]:
    """Times calls that take turns.

    Args:
        calls: take nothing; on a CUDA device they can be captured: no waiting for the device, fixed shapes.
        device: where they work.
        repeats: passes over all of them that count.

    Raises:
        ValueError: no calls or no repeats.
    """
    if not calls or repeats < 1:
        raise ValueError(f"{len(calls)} calls, repeats={repeats}; allowed: at least one of each")
    pools = {name: GraphPool(device) for name in calls}
    for _ in range(_WARM_UPS[device.type]):
        for name, call in calls.items():
            pools[name].run((name,), call)
    passes = _by_events if device.type == "cuda" else _by_clock
    times = passes(calls, pools, device, repeats)
    return {
        name: Turns(median(ms), min(ms), max(ms), sum(report.captures.values()), report.reserved_bytes)
        for name, ms, report in ((name, times[name], pools[name].report) for name in calls)
    }


def _by_clock(
    calls: Mapping[str, Callable[[], Any]], pools: Mapping[str, GraphPool], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each call by the clock of the host."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = perf_counter()
            pools[name].run((name,), call)
            times[name].append(1e3 * (perf_counter() - begin))
    return times


def _by_events(
    calls: Mapping[str, Callable[[], Any]], pools: Mapping[str, GraphPool], device: torch.device, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of each call by events of the device."""
    with torch.cuda.device(device):
        marks = {
            name: [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)] for name in calls
        }
        for number in range(repeats):
            for name, call in calls.items():
                begin, end = marks[name][number]
                begin.record()
                pools[name].run((name,), call)
                end.record()
        torch.cuda.synchronize(device)
        return {name: [begin.elapsed_time(end) for begin, end in pairs] for name, pairs in marks.items()}
