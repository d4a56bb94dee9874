"""DScale: DFlash, unchanged, with a predictor that divides half of the rows among the requests of a round.

Follows arXiv 2609.37532. Everything that is particular to it is in its policy (`workbench.budget`): the draft is
DFlash's, and verification takes ragged chains as it takes every other tree. Lengths depend on the drafts alone, never
on what the accept rule will draw, so the output keeps the target's law.
"""

from __future__ import annotations

from pathlib import Path

from workbench.budget.predictor import PredictorScorer, load_scorer
from workbench.budget.table import POLICIES, build_policy, check_policy
from workbench.drafters.checkpoint_files import as_path
from workbench.drafters.dflash import DFlashDrafter, build_dflash
from workbench.drafters.oracle import Continuation, OracleScorer
from workbench.models.reference import greedy_continuation
from workbench.models.target import Target
from workbench.paths import data_dir
from workbench.types import Scorer

#: File name of a predictor.
PREDICTOR = "predictor.safetensors"


def build_dscale(
    target: Target,
    path: str | Path | None = None,
    predictor: str | Path = "default",
    policy: str = "dvl",
    rows: float = 8.0,
    seed: int = 0,
    dtype: str = "auto",
    continuation: Continuation = greedy_continuation,
) -> DFlashDrafter:
    """DFlash with its verification under a shared budget of rows, divided by a predictor of acceptance.

    Args:
        target: the target.
        path: folder of the DFlash weights; None takes the shipped ones of the embedded target.
        predictor: file of the acceptance predictor; "default" for the one that is shipped with the shipped weights.
            Policies that do not ask it never read it.
        policy: key of `workbench.budget.table.POLICIES`: "dvl" as published, "seed" without the adjustment to the
            budget, "topk" the best candidates of all requests at once, "uniform" and "full" without scores, others to
            compare with.
        rows: rows of a round divided by its requests; the paper takes half of the block's 16.
        seed: of the policy "random".
        dtype: see `resolve_dtype`.
        continuation: where the policy "oracle" has the truth from.

    Raises:
        ValueError: an option out of range, no weights or predictor known for the target, or ones that do not fit it.
    """
    check_policy(policy)
    if path is not None:
        as_path("path", path)
    needed = POLICIES[policy][0]
    scorer: Scorer | None = None
    if needed == "predictor":
        scorer = _predictor(target, path, predictor)
    elif needed == "oracle":
        scorer = OracleScorer(target, continuation)
    chosen = build_policy(policy, rows, scorer, seed)
    drafter = build_dflash(target, path, policy=chosen, dtype=dtype)
    if isinstance(scorer, PredictorScorer) and scorer.predictor.width != drafter.max_nodes + 1:
        raise ValueError(
            f"predictor={str(predictor)!r} is for drafts of {scorer.predictor.width} rows, the drafter's have "
            f"{drafter.max_nodes + 1}"
        )
    drafter.name = "dscale"
    return drafter


def _predictor(target: Target, path: str | Path | None, predictor: str | Path) -> PredictorScorer:
    if target.lm_head.bias is not None:
        raise ValueError("the target's output head has a bias, which the predictor's features do not know of")
    if predictor != "default":
        return load_scorer(as_path("predictor", predictor), target.lm_head.weight.detach())
    if target.name != "embedded" or path is not None:
        whose = f"target {target.name!r}" if path is None else f"the drafter in {str(path)!r}"
        raise ValueError(
            f"predictor is unset and none is shipped for {whose}; name a file, or take a policy that asks no predictor"
        )
    return load_scorer(data_dir() / "embedded" / "dscale" / PREDICTOR, target.lm_head.weight.detach())
