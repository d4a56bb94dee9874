"""How well scores foretell accepted lengths: regression, ranks and calibration, over rows of a trace.

Rows whose draft was not verified to its end are left out (see `Trace.uncensored`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.budget.trace import Trace

_NAN = float("nan")


def ranks(values: np.ndarray) -> np.ndarray:
    """[S] float64 ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def spearman(one: np.ndarray, two: np.ndarray) -> float:
    """Rank correlation of two columns; NaN when one of them is constant or has fewer than two rows."""
    a, b = ranks(one), ranks(two)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return _NAN
    return float(np.corrcoef(a, b)[0, 1])


def r_squared(predicted: np.ndarray, truth: np.ndarray) -> float:
    """1 - squared error over variance; NaN when the truth is constant. Negative when worse than its mean."""
    truth = truth.astype(np.float64)
    spread = float(((truth - truth.mean()) ** 2).sum()) if len(truth) else 0.0
    return 1.0 - float(((truth - predicted) ** 2).sum()) / spread if spread else _NAN


def auc(scores: np.ndarray, hits: np.ndarray) -> float:
    """Chance that a hit scores above a miss, ties counted half; NaN without hits or without misses."""
    num_hits = int(hits.sum())
    num_misses = len(hits) - num_hits
    if not num_hits or not num_misses:
        return _NAN
    surplus = ranks(scores)[hits].sum() - num_hits * (num_hits + 1) / 2
    return float(surplus / (num_hits * num_misses))


def calibration_error(probabilities: np.ndarray, hits: np.ndarray, num_bins: int = 10) -> float:
    """Expected calibration error: |mean probability - share of hits| of equally wide bins, weighed by their rows."""
    if not len(hits):
        return _NAN
    bins = np.clip((probabilities * num_bins).astype(int), 0, num_bins - 1)
    told = np.bincount(bins, probabilities, num_bins)
    seen = np.bincount(bins, hits.astype(np.float64), num_bins)
    return float(np.abs(told - seen).sum() / len(hits))


def reached(trace: Trace) -> np.ndarray:
    """[S, n] bool: at least j tokens were accepted, j = 1..n."""
    return trace.accepted[:, None] > np.arange(trace.width - 1)


def predictor_quality(trace: Trace, name: str = "predictor") -> dict[str, Any]:
    """Figures of one kind of scores.

    Args:
        trace: holds the scores `name`.
        name: scores in 0..1 are taken as chances that position j is accepted; of others only ranks are rated.

    Returns:
        rows: how many were rated.
        mean_accepted, mean_expected: accepted tokens, and the sum of the scores; the latter, `r2` and
            `calibration_error` are NaN when the scores are no chances.
        r2: of the sum of the scores as an estimate of the accepted length.
        spearman: of the sum of the scores with the accepted length.
        spearman_gap: of the mean top1-top2 logit gap with it, the signal without a predictor.
        auc: over all positions together; mean_auc: mean over positions.
        calibration_error: over all positions together.

    Raises:
        ValueError: the trace has no such scores.
    """
    scores, trace = _rated(trace, name)
    accepted = trace.accepted
    hits = reached(trace)
    chances = _are_chances(scores)
    expected = scores.sum(1, dtype=np.float64)
    by_position = [auc(scores[:, j], hits[:, j]) for j in range(hits.shape[1])]
    known = [value for value in by_position if not np.isnan(value)]
    return {
        "rows": len(trace),
        "mean_accepted": float(accepted.mean()) if len(trace) else _NAN,
        "mean_expected": float(expected.mean()) if len(trace) and chances else _NAN,
        "r2": r_squared(expected, accepted) if chances else _NAN,
        "spearman": spearman(expected, accepted),
        "spearman_gap": spearman(trace.gap, accepted),
        "auc": auc(scores.ravel(), hits.ravel()),
        "mean_auc": float(np.mean(known)) if known else _NAN,
        "calibration_error": calibration_error(scores.ravel(), hits.ravel()) if chances else _NAN,
    }


def quality_rows(trace: Trace, name: str = "predictor") -> list[dict[str, Any]]:
    """`predictor_quality` of all rows, of each label, of greedy, sampled and looped outputs; empty groups left out."""
    labels, sampled, looped = trace.labels, trace.sampled, trace.looped
    groups = {"all": np.ones(len(trace), bool), "greedy": ~sampled, "sampled": sampled}
    groups |= {"looped": looped, "not looped": ~looped}
    groups |= {f"label {label}": labels == label for label in sorted(set(labels)) if label}
    found = {group: trace.select(mask & trace.uncensored) for group, mask in groups.items()}
    return [{"group": group} | predictor_quality(part, name) for group, part in found.items() if len(part)]


def calibration_rows(trace: Trace, name: str = "predictor", num_bins: int = 10) -> list[dict[str, Any]]:
    """One table row a position: mean score, share accepted, their difference by bins, and how well hits are ranked.

    Raises:
        ValueError: the trace has no such scores, or they are no chances in 0..1.
    """
    scores, trace = _rated(trace, name)
    if not _are_chances(scores):
        raise ValueError(f"scores {name!r} lie in {scores.min()}..{scores.max()}; only chances in 0..1 are calibrated")
    hits = reached(trace)
    return [
        {
            "position": j + 1,
            "rows": len(trace),
            "predicted": float(scores[:, j].mean()) if len(trace) else _NAN,
            "observed": float(hits[:, j].mean()) if len(trace) else _NAN,
            "calibration_error": calibration_error(scores[:, j], hits[:, j], num_bins),
            "auc": auc(scores[:, j], hits[:, j]),
        }
        for j in range(hits.shape[1])
    ]


def reliability_rows(trace: Trace, name: str = "predictor", num_bins: int = 10) -> list[dict[str, Any]]:
    """One table row a bin of the scores, all positions together: mean score, share accepted, entries. Empty bins out.

    Raises:
        ValueError: see `calibration_rows`.
    """
    scores, trace = _rated(trace, name)
    if not _are_chances(scores):
        raise ValueError(f"scores {name!r} lie in {scores.min()}..{scores.max()}; only chances in 0..1 are calibrated")
    flat, hits = scores.ravel(), reached(trace).ravel()
    bins = np.clip((flat * num_bins).astype(int), 0, num_bins - 1)
    return [
        {
            "from": b / num_bins,
            "to": (b + 1) / num_bins,
            "entries": int((bins == b).sum()),
            "predicted": float(flat[bins == b].mean()),
            "observed": float(hits[bins == b].mean()),
        }
        for b in range(num_bins)
        if (bins == b).any()
    ]


def _rated(trace: Trace, name: str) -> tuple[np.ndarray, Trace]:
    if name not in trace.scores:
        raise ValueError(f"the trace has no scores {name!r}; it has: {', '.join(trace.scores) or 'none'}")
    trace = trace.select(trace.uncensored)
    return trace.scores[name], trace


def _are_chances(scores: np.ndarray) -> bool:
    return not scores.size or bool(scores.min() >= 0 and scores.max() <= 1)
