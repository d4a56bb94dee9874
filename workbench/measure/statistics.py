"""Figures of a set of results: pooled over rounds, never averaged over averages."""

from __future__ import annotations

from collections.abc import Sequence
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
