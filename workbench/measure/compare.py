"""Methods side by side: the same prompts, the same process, interleaved prompt by prompt, each checked against AR.

A speed-up is a ratio of wall clocks per token and is only stated where the losslessness check ran and passed.
Handed a target and drafters; does not know how they were loaded or how results are shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tqdm.auto import tqdm

from workbench.decode.engine import Engine, Prompt, Request, complete, longest, requests_of
from workbench.decode.sampling import SamplingConfig
from workbench.measure.lossless import NOISE_ULPS, Divergence, check_greedy, first_divergence
from workbench.measure.records import Check
from workbench.measure.statistics import is_looped, pool_rounds
from workbench.models.target import Target
from workbench.types import Drafter, GenerateResult

#: Name of the baseline in the methods.
BASELINE = "ar"
#: Name of the row that pools all prompt sets.
POOLED = "all"
#: Longest greedy output of the separate check of sampled runs in reduced precision.
SIDE_CHECK_TOKENS = 64


@dataclass(frozen=True)
class CompareConfig:
    """How a comparison runs.

    Attributes:
        slots: prompts decoded side by side; they are timed together.
        repeats: timed runs of every prompt and method; the median counts.
        warmup: prompts of the first set that every method decodes before the clock starts.
        trace: keep draft trees in the results.
        noise_ulps: tolerance of the losslessness check in reduced precision (`lossless.NOISE_ULPS`).
        progress: show a progress bar.
    """

    slots: int = 1
    repeats: int = 1
    warmup: int = 1
    trace: bool = False
    noise_ulps: float = NOISE_ULPS
    progress: bool = True

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("repeats", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not self.noise_ulps >= 0:
            raise ValueError(f"noise_ulps={self.noise_ulps} must be at least 0")


@dataclass
class Batch:
    """What one method did with one group of prompts that ran together.

    Attributes:
        results: one a prompt.
        seconds: wall clock of the group, median of the repeats.
        checks: per prompt None (equal to AR), or the divergence; empty while unchecked.
    """

    results: list[GenerateResult]
    seconds: float
    checks: list[Divergence | None] = field(default_factory=list)


@dataclass
class Comparison:
    """All measurements of one comparison.

    Attributes:
        batches: (prompt set, method) -> groups in order of the prompts.
        rows: one dict a set and method, then the pooled ones; see `rows_of`.
    """

    batches: dict[tuple[str, str], list[Batch]]
    rows: list[dict[str, Any]]

    def results(self, prompt_set: str, method: str) -> list[GenerateResult]:
        """Results in order of the prompts.

        Raises:
            ValueError: a set or method that was not compared.
        """
        if (prompt_set, method) not in self.batches:
            known = ", ".join(f"{a}/{b}" for a, b in self.batches)
            raise ValueError(f"no results of {prompt_set}/{method}; allowed: {known}")
        return [result for batch in self.batches[prompt_set, method] for result in batch.results]

    @property
    def lossless(self) -> bool:
        """True if every method passed its check on every set."""
        return all(row["lossless"] is True for row in self.rows)


def compare(
    target: Target,
    methods: Mapping[str, Drafter],
    prompt_sets: Mapping[str, Sequence[Prompt]],
    sampling: SamplingConfig | None = None,
    config: CompareConfig | None = None,
) -> Comparison:
    """Runs every method over every prompt and measures it against autoregressive decoding.

    Args:
        target: the model.
        methods: name -> drafter; must hold "ar", the baseline.
        prompt_sets: name -> prompts (text, messages or token ids).
        sampling: default greedy, 128 tokens.
        config: how the comparison runs.

    Raises:
        ValueError: no baseline, no prompts, or a set called "all" (the name of the pooled rows).
    """
    sampling, config = sampling or SamplingConfig(), config or CompareConfig()
    if BASELINE not in methods:
        raise ValueError(f"methods={sorted(methods)} lack the baseline {BASELINE!r}")
    if not prompt_sets or not all(prompt_sets.values()) or POOLED in prompt_sets:
        sizes = {name: len(prompts) for name, prompts in prompt_sets.items()}
        raise ValueError(f"prompt_sets={sizes}: need at least one set, none empty, none called {POOLED!r}")
    asked = {name: requests_of(target, prompts, sampling) for name, prompts in prompt_sets.items()}
    most = min(longest([r for requests in asked.values() for r in requests]), target.context_limit)
    slots = min(config.slots, max(map(len, asked.values())))
    engines = {name: Engine(target, drafter, slots, most, config.trace) for name, drafter in methods.items()}
    warm = next(iter(asked.values()))[: config.warmup]
    for engine in engines.values():
        engine.prepare()
        if warm:
            complete(engine, warm)
    batches: dict[tuple[str, str], list[Batch]] = {(s, m): [] for s in asked for m in methods}
    groups = [(name, i) for name, requests in asked.items() for i in range(0, len(requests), config.slots)]
    for turn, (name, start) in enumerate(tqdm(groups, desc="compare", unit="prompt", disable=not config.progress)):
        requests = asked[name][start : start + config.slots]
        done = _run_group(target, engines, requests, config, turn)
        _check_group(target, engines, requests, done, sampling, config)
        for method, batch in done.items():
            batches[name, method].append(batch)
    rows = rows_of(batches, list(methods))
    return Comparison(batches, [row | engine_facts(engines[row["method"]]) for row in rows])


def engine_facts(engine: Engine) -> dict[str, Any]:
    """How an engine runs: forward (of the target), graphs (captured), capture_s and graph_mib (what they cost).

    And eager_rounds, those that could not be captured, and search: where draft trees are searched, or None.
    """
    report, forward = engine.graph_report, engine.target.forward_report
    return {
        "forward": "stock" if forward is None else forward.kind,
        "graphs": 0 if report is None else len(report.captures),
        "capture_s": 0.0 if report is None else sum(report.captures.values()),
        "graph_mib": 0.0 if report is None else report.reserved_bytes / 2**20,
        "eager_rounds": None if report is None else report.eager_rounds,
        "search": engine.searches,
    }


def _run_group(
    target: Target, engines: Mapping[str, Engine], requests: Sequence[Request], config: CompareConfig, turn: int
) -> dict[str, Batch]:
    """One group of prompts through all methods; each turn another method goes first, so that no one gains by order."""
    names = list(engines)
    names = names[turn % len(names) :] + names[: turn % len(names)]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    results: dict[str, list[GenerateResult]] = {}
    for _ in range(config.repeats):
        for name in names:
            _synchronise(target.device)
            begin = perf_counter()
            results[name] = complete(engines[name], requests)
            _synchronise(target.device)
            seconds[name].append(perf_counter() - begin)
    return {name: Batch(results[name], median(seconds[name])) for name in engines}


def _check_group(
    target: Target,
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    done: Mapping[str, Batch],
    sampling: SamplingConfig,
    config: CompareConfig,
) -> None:
    """Fills in the checks of a group.

    Draws are keyed by seed and position, so sampled outputs must equal AR's as well. In reduced precision a draw gives
    no margin to judge a divergence by, so sampled runs are checked there by a short greedy run of the same prompts.
    """
    outputs = {name: [result.token_ids for result in batch.results] for name, batch in done.items()}
    if not sampling.greedy and target.dtype.itemsize < 4:
        greedy = replace(sampling, temperature=0.0, max_new_tokens=min(sampling.max_new_tokens, SIDE_CHECK_TOKENS))
        short = [replace(request, sampling=greedy) for request in requests]
        for name, engine in engines.items():
            outputs[name] = [r.token_ids for r in complete(engine, short)]
    exact = not sampling.greedy and target.dtype.itemsize >= 4
    for name, batch in done.items():
        for request, reference, output in zip(requests, outputs[BASELINE], outputs[name], strict=True):
            if exact:
                batch.checks.append(_exact(reference, output))
            else:
                batch.checks.append(check_greedy(target, request.prompt_ids, reference, output, config.noise_ulps))


def _exact(reference: Sequence[int], output: Sequence[int]) -> Divergence | None:
    """Token equality of sampled outputs; a divergence has no margin and is always an error."""
    position = first_divergence(reference, output)
    if position is None:
        return None
    ids = [tokens[position] if position < len(tokens) else None for tokens in (reference, output)]
    return Divergence(position, ids[0], ids[1], float("nan"), float("nan"), 0.0)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(batches: Mapping[tuple[str, str], Sequence[Batch]], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Table rows: one a set and method, then one a method over all sets (set "all", only with two sets or more).

    Fields: prompt_set, method, prompts, tokens, seconds (wall clock, prefill included), tokens_per_s, speedup (over AR,
    seconds per token, pooled), tau, tau_unlooped, looped, lossless, equal (prompts whose tokens equal AR's),
    worst_margin (largest logit margin of a divergence), rounds, drafted_per_round, verified_per_round, prefill_s,
    acceptance_by_depth, stage_ms (per round).
    """
    sets = list(dict.fromkeys(name for name, _ in batches))
    grouped = {name: {m: list(batches[name, m]) for m in methods} for name in sets}
    if len(sets) > 1:
        grouped[POOLED] = {m: [b for name in sets for b in batches[name, m]] for m in methods}
    return [_row(name, m, by_method[m], by_method[BASELINE]) for name, by_method in grouped.items() for m in methods]


def _row(prompt_set: str, method: str, batches: Sequence[Batch], baseline: Sequence[Batch]) -> dict[str, Any]:
    results = [result for batch in batches for result in batch.results]
    checks = [check for batch in batches for check in batch.checks]
    checked = len(checks) == len(results)
    lossless = all(check is None or check.is_noise for check in checks) if checked else None
    tokens = sum(len(result.token_ids) for result in results)
    seconds = sum(batch.seconds for batch in batches)
    margins = [check.margin for check in checks if check is not None and not isnan(check.margin)]
    looped = [is_looped(result.token_ids) for result in results]
    unlooped = [result for result, loops in zip(results, looped, strict=True) if not loops]
    rounds = pool_rounds(results)
    return {
        "prompt_set": prompt_set,
        "method": method,
        "prompts": len(results),
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "speedup": _seconds_per_token(baseline) / (seconds / tokens) if lossless else None,
        "tau": rounds["tau"],
        "tau_unlooped": pool_rounds(unlooped)["tau"],
        "looped": sum(looped),
        "lossless": lossless,
        "equal": sum(check is None for check in checks) if checked else None,
        "worst_margin": max(margins, default=None),
        "prefill_s": sum(result.prefill_s for result in results),
        **{name: value for name, value in rounds.items() if name != "tau"},
    }


def _seconds_per_token(batches: Sequence[Batch]) -> float:
    tokens = sum(len(result.token_ids) for batch in batches for result in batch.results)
    return sum(batch.seconds for batch in batches) / tokens


def comparison_checks(
    rows: Sequence[Mapping[str, Any]],
    goals: Mapping[str, tuple[float, float]] | None = None,
    sampled: bool = False,
    suffix: str = "",
) -> dict[str, Check]:
    """Checks of a comparison: losslessness of everything, then tau and speed-up of each method over all sets.

    Args:
        rows: of a `Comparison`.
        goals: method -> least (tau, speed-up); 0 or less, or no entry, makes a check informative only.
        sampled: whether the outputs were sampled, for the name of the first check.
        suffix: appended to the names, to tell runs of different settings apart.
    """
    lossless = all(row["lossless"] is True for row in rows)
    checks = {f"lossless_{'sampled' if sampled else 'greedy'}{suffix}": Check(lossless, True, "==")}
    last = rows[-1]["prompt_set"]
    for row in rows:
        if row["prompt_set"] == last and row["method"] != BASELINE:
            for name, goal in zip(("tau", "speedup"), (goals or {}).get(row["method"], (0, 0)), strict=True):
                checks[f"{row['method']}_{name}{suffix}"] = Check(row[name], goal if goal > 0 else None)
    return checks
