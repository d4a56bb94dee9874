"""The predictor of a serving report: which drafters go by one, whether it fits them, and what it may learn from."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from workbench.budget.features import DraftFeatures
from workbench.budget.predictor import PredictorScorer
from workbench.budget.trace import Trace, prompt_digest
from workbench.decode.live import Request
from workbench.measure.manifest import Manifest
from workbench.models.target import Target
from workbench.types import Drafter, Policy

#: Requests, and what each of them is grouped by in reports.
Labelled = tuple[list[Request], list[str]]


def with_policy(drafter: Drafter, policy: Policy) -> Drafter:
    """The same weights and settings under another policy; a drafter has no state, so the two share all else."""
    twin = copy.copy(drafter)
    twin.policy = policy
    return twin


def predictor_of(drafters: Mapping[str, Drafter]) -> PredictorScorer | None:
    """The scorer of the first drafter whose policy goes by a predictor; None without one."""
    scorers = (drafter.policy.scorer for drafter in drafters.values())
    return next((scorer for scorer in scorers if isinstance(scorer, PredictorScorer)), None)


def with_predictor(drafters: Mapping[str, Drafter], scorer: PredictorScorer | None) -> dict[str, Drafter]:
    """The drafters, those that go by a predictor with `scorer` in its place; None leaves all as they are.

    Raises:
        ValueError: the scorer is for drafts of another width than one of theirs.
    """
    if scorer is not None:
        _require_width(scorer.predictor.width, drafters)
    changed = {}
    for name, drafter in drafters.items():
        if scorer is not None and isinstance(drafter.policy.scorer, PredictorScorer):
            drafter = with_policy(drafter, replace(drafter.policy, scorer=scorer))
        changed[name] = drafter
    return changed


def check_predictor(
    drafters: Mapping[str, Drafter],
    scorer: PredictorScorer | None,
    source: str = "",
    lessons: Labelled | None = None,
    trace: Trace | None = None,
) -> None:
    """Whether one predictor can judge all that it is meant for; asked before anything is decoded.

    Args:
        drafters: by method; those that go by a predictor are to go by this one.
        scorer: the predictor; None for none.
        source: the method whose drafts are recorded, to train on or to be rated; "" for none.
        lessons: what a new predictor is trained on, in place of `scorer`; None trains none.
        trace: a recorded trace, which is scored anew where it has features.

    Raises:
        ValueError: drafts of another width than the predictor's, or lessons too short for a whole draft.
    """
    if lessons:
        width = drafters[source].max_nodes + 1
        require_whole_draft(lessons[0], width)
    elif scorer is not None:
        width = scorer.predictor.width
    else:
        return
    _require_width(width, drafters, source)
    if trace is not None and trace.features is not None and trace.width != width:
        raise ValueError(f"the trace has drafts of {trace.width} rows, the predictor is for {width}")


def features_of(target: Target, drafter: Drafter) -> DraftFeatures:
    """The features of a drafter of chains that shares the target's output head."""
    return DraftFeatures(target.hidden_size, target.lm_head.weight, drafter.max_nodes + 1)


def require_whole_draft(lessons: Sequence[Request], width: int) -> None:
    """Refuses requests too short for even one draft that is verified as a whole; others teach nothing.

    Raises:
        ValueError: no request may have more tokens than a draft has rows.
    """
    longest = max((request.sampling.max_new_tokens for request in lessons), default=0)
    if longest <= width:
        raise ValueError(
            f"max_new_tokens={longest} leaves no draft of {width} rows whole to train a predictor on; allowed: more "
            f"than {width}"
        )


def require_other_prompts(lessons: Sequence[Request], rated: Iterable[Manifest], trace: Trace | None = None) -> None:
    """Refuses prompts that a predictor would be both trained and rated on.

    Raises:
        ValueError: a prompt of `lessons` is among those of `rated` or of `trace`.
    """
    asked = {prompt_digest(entry.prompt_ids) for manifest in rated for entry in manifest}
    if trace is not None:
        asked |= {prompt.digest for prompt in trace.prompts}
    shared = len(asked & {prompt_digest(request.prompt_ids) for request in lessons})
    if shared:
        raise ValueError(f"{shared} prompts to train on are also among those to rate on; name other prompts")


def _require_width(width: int, drafters: Mapping[str, Drafter], source: str = "") -> None:
    for name, drafter in drafters.items():
        judged = name == source or isinstance(drafter.policy.scorer, PredictorScorer)
        if judged and drafter.max_nodes + 1 != width:
            raise ValueError(
                f"the predictor is for drafts of {width} rows, those of method {name!r} have {drafter.max_nodes + 1}"
            )
