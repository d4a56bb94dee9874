"""A closed-loop load test: a fixed number of clients, each of which sends its next request when its last has ended.

One engine serves them all with as many slots as there are clients, so a request never waits for a slot. Clocks are read
where the engine hands out events, that is after each of its steps; a token is seen when the step that made it ends.
Knows nothing about methods, repetitions or reports (see `load_cells`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.decode.engine import Engine, FinishEvent, TokenEvent
from workbench.measure.manifest import Manifest, ManifestEntry
from workbench.measure.statistics import percentiles, pool_rounds
from workbench.models.target import Target
from workbench.types import Drafter, GenerateResult

Clock = Callable[[], float]


@dataclass(frozen=True)
class RequestTimes:
    """When what happened to one request, in seconds since the measured window began.

    Attributes:
        submitted: its client sent it.
        chunks: when each of its pieces arrived; a piece is what one round (or prefill) emitted. At least one.
        finished: it ended.
    """

    submitted: float
    chunks: tuple[float, ...]
    finished: float

    @property
    def latency_s(self) -> float:
        """End-to-end latency."""
        return self.finished - self.submitted

    @property
    def first_token_s(self) -> float:
        """TTFT: from submission to the first token."""
        return self.chunks[0] - self.submitted

    def per_token_s(self, num_tokens: int) -> float:
        """TPOT: seconds a token after the first; NaN for an output of one token."""
        return (self.finished - self.chunks[0]) / (num_tokens - 1) if num_tokens > 1 else float("nan")


@dataclass(frozen=True)
class LoadResult:
    """One run of a manifest.

    Attributes:
        concurrency: number of clients.
        results, times: one a request, in order of the manifest.
        window_s: from the first submission to the end of the last request.
        rounds: engine steps that ran a round.
        prefills: engine steps that let requests in.
        scheduled_rows: rows of all rounds, those included that only fill up a bucket.
        peak_memory_bytes: most memory allocated on the CUDA device during the window; None on a CPU.
    """

    concurrency: int
    results: list[GenerateResult]
    times: list[RequestTimes]
    window_s: float
    rounds: int
    prefills: int
    scheduled_rows: int
    peak_memory_bytes: int | None

    @property
    def outputs(self) -> list[list[int]]:
        """Output token ids, one list a request."""
        return [result.token_ids for result in self.results]


def run_load(
    target: Target,
    drafter: Drafter,
    manifest: Manifest,
    concurrency: int,
    warmup: int = 0,
    row_bucket: int = 1,
    progress: bool = False,
    clock: Clock = perf_counter,
) -> LoadResult:
    """Sends all requests of a manifest through one engine and measures.

    Args:
        target: the model.
        drafter: the method.
        manifest: requests in the order in which clients take them.
        concurrency: clients, and slots of the engine.
        warmup: requests that run to their end before the window begins: the first ones of the manifest, from its start
            again when there are not enough. They are not counted.
        row_bucket: of the engine: rounds are filled up to a multiple of so many rows.
        progress: show a bar over the measured requests.
        clock: seconds from any origin.

    Raises:
        ValueError: an argument out of range, or a prompt that leaves the target no room for an output token.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency={concurrency} must be at least 1")
    if warmup < 0:
        raise ValueError(f"warmup={warmup} must be at least 0")
    for entry in manifest:
        if len(entry.prompt_ids) >= target.context_limit:
            room = f"{len(entry.prompt_ids)} tokens fills the context limit of {target.context_limit}"
            raise ValueError(f"request {entry.id!r}: prompt of {room}")
    limit = min(manifest.max_len, target.context_limit)
    engine = Engine(target, drafter, concurrency, limit, row_bucket=row_bucket)
    engine.prepare()
    entries = manifest.entries
    if warmup:
        _ClosedLoop(engine, [entries[i % len(entries)] for i in range(warmup)], clock).run(concurrency)
    cuda = target.device if target.device.type == "cuda" else None
    if cuda is not None:
        torch.cuda.synchronize(cuda)
        torch.cuda.reset_peak_memory_stats(cuda)
    loop = _ClosedLoop(engine, entries, clock)
    with tqdm(total=len(entries), disable=not progress, desc=f"{drafter.name}, c={concurrency}", unit="request") as bar:
        window_s = loop.run(concurrency, bar.update)
    return LoadResult(
        concurrency=concurrency,
        results=[loop.results[i] for i in range(len(entries))],
        times=[RequestTimes(loop.submitted[i], tuple(loop.chunks[i]), loop.finished[i]) for i in range(len(entries))],
        window_s=window_s,
        rounds=loop.rounds,
        prefills=loop.prefills,
        scheduled_rows=loop.scheduled_rows,
        peak_memory_bytes=torch.cuda.max_memory_allocated(cuda) if cuda is not None else None,
    )


class _ClosedLoop:
    """Clients of one engine and what they saw; lists and dicts are keyed by the place in `entries`."""

    def __init__(self, engine: Engine, entries: Sequence[ManifestEntry], clock: Clock) -> None:
        self._engine = engine
        self._queue = deque(enumerate(entries))
        self._place: dict[int, int] = {}  # index that the engine gave -> place in entries
        self._clock = clock
        self._begin = 0.0
        self.submitted: dict[int, float] = {}
        self.chunks: dict[int, list[float]] = {}
        self.finished: dict[int, float] = {}
        self.results: dict[int, GenerateResult] = {}
        self.rounds = 0
        self.prefills = 0
        self.scheduled_rows = 0

    def run(self, clients: int, on_finish: Callable[[], object] = lambda: None) -> float:
        """Lets `clients` clients work until nothing is left; returns the seconds that took."""
        self._begin = self._clock()
        for _ in range(min(clients, len(self._queue))):
            self._submit_next()
        while self._engine.busy:
            events = self._engine.step()
            now = self._clock() - self._begin
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            stats = next((event.stats for event in tokens if event.stats is not None), None)
            self.scheduled_rows += stats.num_scheduled if stats else 0
            self.rounds += stats is not None
            self.prefills += stats is None
            for event in tokens:
                self.chunks[self._place[event.request]].append(now)
            for event in events:
                if isinstance(event, FinishEvent):
                    place = self._place.pop(event.request)
                    self.finished[place], self.results[place] = now, event.result
                    on_finish()
                    self._submit_next()
        return max(self.finished.values(), default=0.0)

    def _submit_next(self) -> None:
        """The client that is free takes the next request, if there is one."""
        if self._queue:
            place, entry = self._queue.popleft()
            self.submitted[place] = self._clock() - self._begin
            self.chunks[place] = []
            self._place[self._engine.submit(entry.request)] = place


def load_metrics(load: LoadResult) -> dict[str, Any]:
    """Figures of one run; `load_cells` puts repetitions together.

    Returns:
        output_tokens_per_s and requests_per_s (over the window); tau (tokens a round, bonus included);
        latency_mean_s, latency_p50_s, latency_p95_s, latency_p99_s (end to end); ttft_mean_ms, ttft_p99_ms;
        tpot_mean_ms (mean over requests of two tokens or more); gap_mean_ms, gap_p99_ms (between the pieces of a
        request, which hold several tokens each);
        rows_drafted, rows_verified and rows_scheduled (a round and request, root counted: what the drafter offered,
        what was verified, what the target ran); rows_per_accepted and
        rows_per_emitted (verified rows for each accepted draft and each token that rounds emitted; None without any);
        rounds and prefills (engine steps), mean_live (requests in a round), step_ms (wall clock a round, prefill left
        out), stage_ms (of a round), peak_memory_mib (CUDA only, else None); requests, tokens (output), window_s.
    """
    tokens = sum(len(output) for output in load.outputs)
    rounds = [r for result in load.results for r in result.rounds]
    verified = sum(r.num_verified for r in rounds)
    accepted = sum(r.num_accepted for r in rounds)
    emitted = sum(r.num_emitted for r in rounds)
    pooled = pool_rounds(load.results)
    prefill_s = sum(result.prefill_s for result in load.results)
    return {
        "output_tokens_per_s": tokens / load.window_s,
        "requests_per_s": len(load.results) / load.window_s,
        "tau": pooled["tau"],
        **_latencies(load),
        "rows_drafted": pooled["drafted_per_round"] + 1,
        "rows_verified": pooled["verified_per_round"],
        "rows_scheduled": load.scheduled_rows / len(rounds) if rounds else float("nan"),
        "rows_per_accepted": verified / accepted if accepted else None,
        "rows_per_emitted": verified / emitted if emitted else None,
        "rounds": load.rounds,
        "prefills": load.prefills,
        "mean_live": len(rounds) / load.rounds if load.rounds else None,
        "step_ms": 1e3 * (load.window_s - prefill_s) / load.rounds if load.rounds else None,
        "stage_ms": pooled["stage_ms"],
        "peak_memory_mib": None if load.peak_memory_bytes is None else load.peak_memory_bytes / 2**20,
        "requests": len(load.results),
        "tokens": tokens,
        "window_s": load.window_s,
    }


def _latencies(load: LoadResult) -> dict[str, float]:
    latency = [times.latency_s for times in load.times]
    first = [times.first_token_s for times in load.times]
    each = [t.per_token_s(len(output)) for t, output in zip(load.times, load.outputs, strict=True) if len(output) > 1]
    gaps = [gap for times in load.times for gap in np.diff(times.chunks)]
    p50, p95, p99 = percentiles(latency)
    return {
        "latency_mean_s": _mean(latency),
        "latency_p50_s": p50,
        "latency_p95_s": p95,
        "latency_p99_s": p99,
        "ttft_mean_ms": 1e3 * _mean(first),
        "ttft_p99_ms": 1e3 * percentiles(first, [99])[0],
        "tpot_mean_ms": 1e3 * _mean(each),
        "gap_mean_ms": 1e3 * _mean(gaps),
        "gap_p99_ms": 1e3 * percentiles(gaps, [99])[0],
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
