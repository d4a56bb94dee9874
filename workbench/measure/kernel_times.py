"""The time of one call, the bandwidth of a copy, and how far a result is off: what measurements of kernels share.

On a CUDA device all calls are captured in one graph, which is replayed between two events, so the launches of the host
are no part of the time; kernels whose launches overlap (`kernels.overlap`) hide the start of each call behind the one
before, others do not. On a CPU the clock runs around the same calls.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

#: Inputs of a measurement that reads memory sum to this at least, several times the level-2 cache of any device: each
#: call finds its own evicted, as one layer of a model does after all others.
ROTATED_BYTES = 256_000_000
_MAX_SETS = 64

#: Bytes of the copy that floors are stated by; a large one, as caches must not help.
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 26}

#: Largest relative error of a row (Frobenius norm) against float64. Rounding of the output alone takes a fifth of it,
#: and one key of a thousand too many or too few in any row exceeds it.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call over repeated passes.

    Attributes:
        median_us, min_us, max_us: of the passes, each divided by its calls.
        calls: in a pass.
        repeats: passes.
    """

    median_us: float
    min_us: float
    max_us: float
    calls: int
    repeats: int


def time_calls(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 15) -> Timing:
    """Times `calls`, which do the same on different inputs, one after another.

    Args:
        calls: take nothing; on a CUDA device they can be captured: no waiting for the device, fixed shapes.
        device: where they work.
        repeats: passes over all of them that count.

    Raises:
        ValueError: no calls or no repeats.
    """
    if not calls or repeats < 1:
        raise ValueError(f"{len(calls)} calls, repeats={repeats}; allowed: at least one of each")
    for call in calls:
        call()  # compiles what is compiled at first use
    passes = _replayed if device.type == "cuda" else _clocked
    seconds = passes(calls, device, repeats)
    times = [1e6 * s / len(calls) for s in seconds]
    return Timing(median(times), min(times), max(times), len(calls), repeats)


def _clocked(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each pass by the clock of the host."""
    seconds = []
    for _ in range(repeats):
        begin = perf_counter()
        for call in calls:
            call()
        seconds.append(perf_counter() - begin)
    return seconds


def _replayed(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each replay of a graph of all calls, by events of the device."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        for _ in range(3):
            graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        seconds = []
        for _ in range(repeats):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


def release(device: torch.device) -> None:
    """Gives memory that nobody holds any more back to the device, so that something of another size finds room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def sets_of(num_bytes: float, device: torch.device) -> int:
    """How many sets of inputs of `num_bytes` take turns, 2 to 64; on a CPU, whose times are only ratios, always 2."""
    if device.type != "cuda":
        return 2
    return max(2, min(_MAX_SETS, -(-ROTATED_BYTES // max(int(num_bytes), 1))))


def copy_bandwidth(device: torch.device, repeats: int = 15) -> float:
    """Bytes a second of a large copy on `device`, read and written ones counted; floors are bytes over this.

    An elementwise kernel does it. A plain copy inside a CUDA graph goes to a copy engine, which is slower by a third on
    an H200, and would make every floor look easier than it is.
    """
    numbers = _COPIED[device.type] // 4
    source = torch.randint(-(2**31), 2**31 - 1, (numbers,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: torch.neg(source, out=target)] * 2, device, repeats)
    return 8 * numbers / (timing.median_us * 1e-6)


def worst_row_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest relative error of a row; NaN when anything is NaN.

    Args:
        found: [M, ...] of any float type.
        exact: of the same shape, float64.
    """
    off = (found.double() - exact).flatten(1).norm(dim=1)
    return float((off / exact.flatten(1).norm(dim=1)).max())


def differing(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest share of entries of a tensor that differ from their counterpart; NaN differs from everything."""
    return max(float((a != b).double().mean()) for a, b in zip(found, wanted, strict=True))
