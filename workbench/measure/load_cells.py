"""Load tests side by side: every method under every number of clients, repeated, each output checked against AR's.

A cell is one method on one manifest with one number of clients. Methods run in turn, and the first place moves on with
every repetition, so that no one gains by order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import isnan
from typing import Any

from workbench.measure.compare import BASELINE, SIDE_CHECK_TOKENS
from workbench.measure.load_ratios import ALL_CELLS, add_ratios
from workbench.measure.load_test import load_metrics, run_load
from workbench.measure.lossless import NOISE_ULPS, check_greedy, first_divergence
from workbench.measure.manifest import Manifest
from workbench.measure.statistics import depth_counts, median_row
from workbench.models.target import Target
from workbench.types import Drafter


@dataclass(frozen=True)
class LoadConfig:
    """How cells run.

    Attributes:
        concurrencies: numbers of clients.
        repetitions: runs of every cell; medians count.
        warmup: requests before each measured window.
        row_bucket: see `Engine`.
        control: method that the others are put in ratio to.
        measure_baseline: give AR cells of its own; else it runs once a manifest, for the losslessness check alone.
        noise_ulps: tolerance of the losslessness check in reduced precision (`lossless.NOISE_ULPS`).
        progress: show a bar a run.
    """

    concurrencies: tuple[int, ...] = (8, 16, 32)
    repetitions: int = 1
    warmup: int = 0
    row_bucket: int = 1
    control: str = BASELINE
    measure_baseline: bool = True
    noise_ulps: float = NOISE_ULPS
    progress: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "concurrencies", tuple(self.concurrencies))
        if (
            not self.concurrencies
            or min(self.concurrencies) < 1
            or len(set(self.concurrencies)) < len(self.concurrencies)
        ):
            raise ValueError(f"concurrencies={self.concurrencies}: need numbers of clients, each at least 1, each once")
        for name, least in (("repetitions", 1), ("warmup", 0), ("row_bucket", 1), ("noise_ulps", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.control == BASELINE and not self.measure_baseline:
            raise ValueError(f"control={BASELINE!r} is not measured with measure_baseline=False; name another method")


@dataclass(frozen=True)
class Run:
    """One repetition of one cell.

    Attributes:
        metrics: see `load_metrics`.
        counts: see `depth_counts`.
        outputs: output token ids, one list a request.
    """

    method: str
    concurrency: int
    metrics: dict[str, Any]
    counts: dict[str, list[int]]
    outputs: list[list[int]]


@dataclass(frozen=True)
class Verdict:
    """What the losslessness check found in all runs of one cell.

    Attributes:
        lossless: every output that was compared is AR's, up to near-ties of a dtype below float32.
        equal: requests whose output is AR's token for token, in the worst run.
        checked: requests that were compared in each run.
        worst_margin: largest logit margin at a divergence; None without one.
        side_check: not the measured outputs were compared, but those of a short greedy run of the same prompts.
    """

    lossless: bool
    equal: int
    checked: int
    worst_margin: float | None
    side_check: bool = False


def run_cells(
    target: Target, methods: Mapping[str, Drafter], manifests: Mapping[str, Manifest], config: LoadConfig
) -> list[dict[str, Any]]:
    """Measures every cell.

    Args:
        target: the model.
        methods: name -> drafter; must hold "ar" (the reference of the check) and the control.
        manifests: prompt set -> its requests.
        config: how cells run.

    Returns:
        Rows of `cell_row`, with ratios to the control (`add_ratios`).

    Raises:
        ValueError: no manifest, no baseline, an unknown control, or a manifest called "all".
    """
    missing = [name for name in dict.fromkeys((BASELINE, config.control)) if name not in methods]
    if missing:
        raise ValueError(f"methods={sorted(methods)} lack {', '.join(missing)}")
    if not manifests or ALL_CELLS in manifests:
        raise ValueError(f"manifests={list(manifests)}: need at least one, none called {ALL_CELLS!r}")
    rows = []
    for prompt_set, manifest in manifests.items():
        runs = _run_manifest(target, methods, manifest, config)
        verdicts = _verdicts(target, methods, manifest, runs, config)
        rows += [
            cell_row(prompt_set, manifest, [r for r in runs if (r.method, r.concurrency) == cell], verdict)
            for cell, verdict in verdicts.items()
        ]
    return add_ratios(rows, config.control)


def _run_manifest(target: Target, methods: Mapping[str, Drafter], manifest: Manifest, config: LoadConfig) -> list[Run]:
    names = [name for name in methods if config.measure_baseline or name != BASELINE]
    runs = []
    for concurrency in config.concurrencies:
        for repetition in range(config.repetitions):
            first = repetition % len(names)
            for name in [*names[first:], *names[:first]]:
                load = run_load(
                    target, methods[name], manifest, concurrency, config.warmup, config.row_bucket, config.progress
                )
                runs.append(Run(name, concurrency, load_metrics(load), depth_counts(load.results), load.outputs))
    return runs


def _verdicts(
    target: Target,
    methods: Mapping[str, Drafter],
    manifest: Manifest,
    runs: Sequence[Run],
    config: LoadConfig,
) -> dict[tuple[str, int], Verdict]:
    """(method, concurrency) -> what the check says, by concurrency, then in order of the methods.

    Draws are keyed by seed and position, so sampled outputs equal AR's too. Two kinds of sampled manifests are checked
    by a short greedy run of their prompts instead: in reduced precision a draw gives no margin to judge a divergence
    by, and the rule "rejection" keeps the law of AR's outputs but not their tokens.
    """
    measured = {run.method for run in runs}
    cells = [(name, c) for c in config.concurrencies for name in methods if name in measured]
    most = max(config.concurrencies)
    if not manifest.fixed_outputs or (not manifest.greedy and target.dtype.itemsize < 4):
        short = manifest.greedy_prompts(SIDE_CHECK_TOKENS)
        outputs = {name: run_load(target, drafter, short, most).outputs for name, drafter in methods.items()}
        of = {name: _verdict(target, short, outputs[BASELINE], [outputs[name]], config) for name in measured}
        return {(name, c): replace(of[name], side_check=True) for name, c in cells}
    reference = next((run.outputs for run in runs if run.method == BASELINE), None)
    if reference is None:
        reference = run_load(target, methods[BASELINE], manifest, most).outputs
    outputs_of = {cell: [run.outputs for run in runs if (run.method, run.concurrency) == cell] for cell in cells}
    return {cell: _verdict(target, manifest, reference, outputs_of[cell], config) for cell in cells}


def _verdict(
    target: Target,
    manifest: Manifest,
    reference: Sequence[Sequence[int]],
    repeated: Sequence[Sequence[Sequence[int]]],
    config: LoadConfig,
) -> Verdict:
    lossless, equal, margins = True, len(manifest), []
    for outputs in repeated:
        same = 0
        for entry, expected, output in zip(manifest, reference, outputs, strict=True):
            if first_divergence(expected, output) is None:
                same += 1
            elif entry.sampling.greedy:
                found = check_greedy(target, entry.prompt_ids, expected, output, config.noise_ulps)
                lossless &= found.is_noise
                margins.append(found.margin)
            else:
                lossless = False
        equal = min(equal, same)
    known = [margin for margin in margins if not isnan(margin)]
    return Verdict(lossless, equal, len(manifest), max(known, default=None))


def cell_row(prompt_set: str, manifest: Manifest, runs: Sequence[Run], verdict: Verdict) -> dict[str, Any]:
    """One table row.

    Fields: prompt_set, method, concurrency; medians over the repetitions of all fields of `load_metrics`, and the range
    of the throughput; acceptance_by_depth (share of the rounds that verified a node of the depth in which one was
    accepted), reached_by_depth (share of all rounds that accepted so many tokens), accepted_histogram (rounds by
    accepted tokens); fields of the verdict; repetitions, prompts (distinct), manifest (digest).
    """
    counts = {name: _added([run.counts[name] for run in runs]) for name in ("offered", "reached", "accepted")}
    rounds = sum(counts["accepted"])
    speeds = [run.metrics["output_tokens_per_s"] for run in runs]
    pairs = zip(counts["reached"], counts["offered"], strict=True)
    return {
        "prompt_set": prompt_set,
        "method": runs[0].method,
        "concurrency": runs[0].concurrency,
        **median_row([run.metrics for run in runs]),
        "output_tokens_per_s_min": min(speeds),
        "output_tokens_per_s_max": max(speeds),
        "acceptance_by_depth": [reached / offered for reached, offered in pairs],
        "reached_by_depth": [reached / rounds for reached in counts["reached"]],
        "accepted_histogram": counts["accepted"],
        "lossless": verdict.lossless,
        "equal": verdict.equal,
        "checked": verdict.checked,
        "worst_margin": verdict.worst_margin,
        "side_check": verdict.side_check,
        "repetitions": len(runs),
        "prompts": manifest.num_prompts,
        "manifest": manifest.digest,
    }


def _added(lists: Sequence[Sequence[int]]) -> list[int]:
    """Sums place by place; shorter lists count as zero beyond their end."""
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
