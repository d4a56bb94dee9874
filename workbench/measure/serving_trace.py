"""Traces for a serving report: recorded from the requests of manifests or read from a file, then rated and replayed;
and predictors trained on prompts of their own.

Handed drafters that were built already; their weights are used again under the recording policy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.budget.features import DraftFeatures
from workbench.budget.predictor import PredictorScorer
from workbench.budget.scorers import gap_scores, minimum_scores, product_scores, random_scorer
from workbench.budget.table import POLICIES
from workbench.budget.trace import Trace
from workbench.measure.manifest import Manifest
from workbench.measure.predictor_quality import calibration_rows, quality_rows, reliability_rows
from workbench.measure.records import Check
from workbench.measure.replay import Replay
from workbench.measure.serving_predictor import (
    Labelled,
    features_of,
    require_other_prompts,
    require_whole_draft,
    with_policy,
)
from workbench.measure.statistics import is_looped
from workbench.models.target import Target
from workbench.train.predictor_objective import PredictorRecipe, PredictorRun, score_trace, train_predictor
from workbench.train.text import predictor_corpus
from workbench.train.trace import collect_trace, corpus_requests, mark_prompts
from workbench.types import Drafter, Scorer

#: What scores of a predictor are called in a trace; policies of the table look for this name.
PREDICTOR = "predictor"
#: Policy whose retention the checks speak of: DScale's.
CHECKED = "dvl"

Row = dict[str, Any]


def manifest_requests(manifests: Mapping[str, Manifest]) -> Labelled:
    """All requests of manifests, each with the label of its own."""
    pairs = [(entry.request, label) for label, manifest in manifests.items() for entry in manifest]
    return [request for request, _ in pairs], [label for _, label in pairs]


def kept_requests(
    target: Target, folder: str | Path, max_new_tokens: int, sampled_share: float = 0.1, seed: int = 0
) -> Labelled:
    """Requests for those prompts of training shards that drafters are kept from, with the numbers of their sources.

    Args:
        target, folder: see `predictor_corpus`.
        max_new_tokens, sampled_share, seed: see `corpus_requests`.

    Raises:
        ValueError: see `predictor_corpus` and `corpus_requests`.
    """
    corpus = predictor_corpus(folder, target)
    return corpus_requests(corpus, (), sampled_share, max_new_tokens, seed)


def record_trace(
    target: Target,
    drafter: Drafter,
    manifests: Mapping[str, Manifest],
    predictor: Scorer | None = None,
    features: DraftFeatures | None = None,
    slots: int = 8,
    progress: bool = False,
) -> Trace:
    """Decodes all requests of all manifests and keeps every draft with its scores and its accepted length.

    Args:
        target: the model.
        drafter: of chains, such as DFlash; whatever its policy, all of a draft is verified here.
        manifests: label (prompt set) -> requests.
        predictor: gives the scores `PREDICTOR`; None leaves them out.
        features: keep what a predictor is trained on; None keeps none.
        slots: requests that run side by side, and so are decided together.
        progress: show a bar.

    Returns:
        The trace, with the scores "product", "minimum", "gap" and "random" besides.

    Raises:
        ValueError: no manifest, or see `collect_trace`.
    """
    scorers: dict[str, Scorer] = {"product": product_scores, "minimum": minimum_scores, "gap": gap_scores}
    scorers["random"] = random_scorer(0)
    if predictor is not None:
        scorers[PREDICTOR] = predictor
    return _record(target, drafter, manifest_requests(manifests), features, scorers, slots, None, progress)


def train_scorer(
    target: Target,
    drafter: Drafter,
    lessons: Labelled,
    rated: Iterable[Manifest],
    recipe: PredictorRecipe,
    slots: int = 8,
    max_rows: int | None = None,
    progress: bool = False,
    trace: Trace | None = None,
) -> tuple[PredictorScorer, PredictorRun]:
    """Records drafts of requests and trains a predictor on them.

    Args:
        target, drafter, slots, progress: see `record_trace`.
        lessons: requests for prompts that the drafter was not trained on.
        rated: requests that the predictor is to be rated on; none of their prompts may be among the lessons.
        recipe: of the training.
        max_rows: stop the recording after the round that reaches so many drafts; None or 0 for no limit.
        trace: recorded earlier, that the predictor is to be rated on too; the same holds for its prompts.

    Returns:
        The scorer on the target's device, and the run, with its own held-back prompts scored.

    Raises:
        ValueError: shared prompts, lessons too short for a whole draft, or see `collect_trace` and `train_predictor`.
    """
    require_other_prompts(lessons[0], rated, trace)
    require_whole_draft(lessons[0], drafter.max_nodes + 1)
    features = features_of(target, drafter)
    recorded = _record(target, drafter, lessons, features, {}, slots, max_rows or None, progress)
    run = train_predictor(recorded, [recipe], device=target.device, progress=progress)
    # A run hands its network over on the CPU; the scorer gets one of its own, so that the run can still be saved.
    return PredictorScorer(copy.deepcopy(run.predictor).to(target.device), features), run


def _record(
    target: Target,
    drafter: Drafter,
    labelled: Labelled,
    features: DraftFeatures | None,
    scorers: Mapping[str, Scorer],
    slots: int,
    max_rows: int | None,
    progress: bool,
) -> Trace:
    requests, labels = labelled
    recording = collect_trace(
        target,
        lambda policy: with_policy(drafter, policy),
        requests,
        features,
        scorers,
        labels,
        slots,
        max_rows,
        progress=progress,
    )
    return mark_prompts(recording.trace, [is_looped(output) for output in recording.outputs])


def training_tables(run: PredictorRun) -> dict[str, list[Row]]:
    """Tables of a training: "training" its curve, "predictor" its outcome in one row, "validation" the quality on the
    prompts that it held back."""
    names = ("num_train", "num_validation", "validation_loss", "constant_loss")
    outcome = {name: getattr(run, name) for name in names}
    return {"training": run.rows, "predictor": [outcome], "validation": quality_rows(run.validation)}


def quality_tables(trace: Trace | None) -> dict[str, list[Row]]:
    """Tables "quality", "calibration" and "reliability"; empty ones where a trace has no scores of a predictor."""
    makers = {"quality": quality_rows, "calibration": calibration_rows, "reliability": reliability_rows}
    rated = trace is not None and PREDICTOR in trace.scores
    return {name: make(trace, PREDICTOR) if rated else [] for name, make in makers.items()}


def drawn_rounds(trace: Trace | None, count: int, budget: float) -> list[Row]:
    """The first rounds of a trace as `Replay.round_rows` by the checked policy, with round, policy and rows besides."""
    if trace is None:
        return []
    replay, policy = Replay(trace), checked_policy(trace)
    return [
        {"round": number, "policy": policy, "rows": budget} | row
        for number in range(min(count, len(trace.rounds())))
        for row in replay.round_rows(number, policy, budget)
    ]


def rescored(trace: Trace, scorer: PredictorScorer | None = None) -> Trace:
    """A recorded trace; one that holds features is scored anew as `PREDICTOR`, if there is a scorer.

    Raises:
        ValueError: see `score_trace`.
    """
    return trace if scorer is None or trace.features is None else score_trace(trace, scorer.predictor, PREDICTOR)


def replay_rows(trace: Trace, policies: Sequence[str], budgets: Sequence[float]) -> list[Row]:
    """`Replay.table` of those policies whose scores the trace has.

    Raises:
        ValueError: an unknown policy.
    """
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise ValueError(f"policies={unknown} are unknown; allowed: {', '.join(POLICIES)}")
    known = {*trace.scores, "oracle", None}
    # "shared" goes by the drafter's own scores, which a trace does not hold.
    possible = [name for name in policies if POLICIES[name][0] in known and name != "shared"]
    return Replay(trace).table(possible, budgets)


def checked_policy(trace: Trace) -> str:
    """The policy that retention is stated for: DScale's where the trace has a predictor's scores, else by products."""
    return CHECKED if PREDICTOR in trace.scores else "product"


def retention_checks(
    trace: Trace, budget: float, goal_seed: float = 0.0, goal_adjusted: float = 0.0, suffix: str = ""
) -> dict[str, Check]:
    """Shares of the accepted tokens that lengths keep: those that drafts choose for themselves, and those adjusted to
    the budget.

    Args:
        trace: S drafts.
        budget: mean rows a request.
        goal_seed, goal_adjusted: least shares; 0 or less makes a check informative only.
        suffix: appended to the names.
    """
    row = Replay(trace).row(checked_policy(trace), budget)
    goals = {"seed": (row["retention_seed"], goal_seed), "adjusted": (row["retention"], goal_adjusted)}
    return {
        f"retention_{name}{suffix}": Check(value, goal if goal > 0 else None) for name, (value, goal) in goals.items()
    }
