"""Figures of a set of results: pooled over rounds, never averaged over averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from workbench.types import STAGES, GenerateResult, acceptance_by_depth

#: Longest period that counts as a loop, and the shortest run of repeated ids.
LOOP_MAX_PERIOD = 100
LOOP_MIN_RUN = 64


def is_looped(token_ids: Sequence[int]) -> bool:
    """True if the output holds a loop: a run of max(64, p) ids or more that each equal the one p places before.

    p runs from 1 to 100, so an exact repetition of up to 100 ids is found once it has gone on for 64 ids (or once more
    around, if it is longer).
    """
    ids = np.asarray(token_ids)
    for period in range(1, min(LOOP_MAX_PERIOD, len(ids) - LOOP_MIN_RUN) + 1):
        equal = np.concatenate([[False], ids[period:] == ids[:-period], [False]])
        ends = np.flatnonzero(np.diff(equal.astype(np.int8)))
        if len(ends) and int((ends[1::2] - ends[::2]).max()) >= max(LOOP_MIN_RUN, period):
            return True
    return False


def pool_rounds(results: Sequence[GenerateResult]) -> dict[str, Any]:
    """Statistics over all rounds of `results`.

    Returns:
        tau: mean of accepted + 1; NaN without rounds.
        rounds: how many there were (a round counts once for every request in it).
        drafted_per_round, verified_per_round: mean nodes drafted (root not counted) and rows verified (root counted).
        acceptance_by_depth: entry d-1 see `types.acceptance_by_depth`.
        stage_ms: stage name -> milliseconds a round, in order of `types.STAGES`; a round of several requests counts
            once, its time is shared.
    """
    rounds = [r for result in results for r in result.rounds]
    engine_rounds = sum(1 / r.num_requests for r in rounds)
    stage_s: dict[str, float] = {}
    for r in rounds:
        for name, seconds in r.stage_s.items():
            stage_s[name] = stage_s.get(name, 0.0) + seconds / r.num_requests
    count = len(rounds) or float("nan")
    return {
        "tau": sum(r.num_accepted + 1 for r in rounds) / count,
        "rounds": len(rounds),
        "drafted_per_round": sum(r.num_drafted for r in rounds) / count,
        "verified_per_round": sum(r.num_verified for r in rounds) / count,
        "acceptance_by_depth": acceptance_by_depth(rounds),
        "stage_ms": {name: 1e3 * stage_s[name] / engine_rounds for name in STAGES if name in stage_s},
    }


def depth_counts(results: Sequence[GenerateResult]) -> dict[str, list[int]]:
    """Counts over all rounds of `results` that can be added up over runs.

    Returns:
        offered, reached: entry d-1 is the number of rounds that verified a node of depth d, and that accepted one.
        accepted: entry a is the number of rounds that accepted a drafted tokens.
    """
    rounds = [r for result in results for r in result.rounds]
    accepted = np.bincount([r.num_accepted for r in rounds], minlength=1)
    offered = np.bincount([r.max_depth for r in rounds], minlength=1)
    deepest = max((r.max_depth for r in rounds), default=0)
    reached = [int(accepted[depth:].sum()) for depth in range(1, deepest + 1)]
    return {
        "offered": [int(offered[depth:].sum()) for depth in range(1, deepest + 1)],
        "reached": reached,
        "accepted": accepted.tolist(),
    }


def round_rows(results: Sequence[GenerateResult]) -> list[dict[str, Any]]:
    """One table row a round: prompt and round (from 0), drafted, verified, accepted, emitted, ms of all its stages."""
    return [
        {
            "prompt": number,
            "round": i,
            "drafted": r.num_drafted,
            "verified": r.num_verified,
            "accepted": r.num_accepted,
            "emitted": r.num_emitted,
            "ms": 1e3 * sum(r.stage_s.values()),
        }
        for number, result in enumerate(results)
        for i, r in enumerate(result.rounds)
    ]


def percentiles(values: Sequence[float], ranks: Sequence[float] = (50, 95, 99)) -> list[float]:
    """Values below which `ranks` per cent of `values` lie, interpolated between neighbours; NaN without values.

    Raises:
        ValueError: a rank outside 0..100.
    """
    if not all(0 <= rank <= 100 for rank in ranks):
        raise ValueError(f"ranks={list(ranks)} outside 0..100")
    if not len(values):
        return [float("nan")] * len(ranks)
    return np.percentile(np.asarray(values, np.float64), ranks).tolist()


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean of ratios: two times faster and two times slower cancel. NaN without any.

    Raises:
        ValueError: a ratio that is not positive and finite.
    """
    return float(np.exp(_logarithms(ratios).mean())) if len(ratios) else float("nan")


def bootstrap_interval(
    ratios: Sequence[float], level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the geometric mean: `ratios` are drawn again with replacement.

    Args:
        ratios: one a cell.
        level: share of the resampled means that lie inside.
        resamples: how often all of them are drawn again.
        seed: of the draws.

    Returns:
        Lower and upper bound; NaN for fewer than two ratios, which say nothing about their spread.

    Raises:
        ValueError: a ratio that is not positive and finite, or an argument out of range.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level={level} outside (0, 1)")
    if resamples < 1:
        raise ValueError(f"resamples={resamples} must be at least 1")
    logs = _logarithms(ratios)
    if len(logs) < 2:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(0, len(logs), (resamples, len(logs)))
    tail = 50 * (1 - level)
    low, high = np.exp(percentiles(logs[drawn].mean(axis=1), (tail, 100 - tail)))
    return float(low), float(high)


def median_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of repeated measurements, field by field, with the fields of the first row.

    Numbers and mappings of numbers become medians (a name that a mapping lacks is left out of its median); values that
    are missing (None) in any row stay missing; text is that of the first row.
    """
    first = rows[0]
    return {name: _median([row[name] for row in rows]) for name in first}


def _median(values: Sequence[Any]) -> Any:
    if any(value is None for value in values) or isinstance(values[0], str):
        return values[0] if isinstance(values[0], str) else None
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _median([value[name] for value in values if name in value]) for name in names}
    return float("nan") if any(value != value for value in values) else median(values)


def _logarithms(ratios: Sequence[float]) -> np.ndarray:
    values = np.asarray(ratios, np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"ratios={values.tolist()!r:.120} must be positive and finite")
    return np.log(values)
