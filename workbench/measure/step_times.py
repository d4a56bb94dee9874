"""Rows of the step table: whole decode steps and their stages, arms in turns, at contexts that stay.

A step is measured by the clock of the host around a round and its one look at the device; a stage is what passes on
the device's stream, host work counting where the device waits for it. Rounds are those of the device, so stages hold
more than their names say, see `step_rows`. DART searches with an n-gram trie over random tokens. Acceptance between
random models means nothing; the times do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tqdm.auto import tqdm

from workbench.measure.forward_times import kind_of, plan_target, random_cache
from workbench.measure.kernel_times import release
from workbench.measure.latency_plan import CONTROL, LatencyPlan
from workbench.measure.latency_rounds import RepeatedRound, Step, arm_drafters
from workbench.models.target import Target
from workbench.types import MAX_TREE_ROWS, STAGES, Drafter

Row = dict[str, Any]

#: Rounds in front of those that count, the first of which captures where there are graphs.
_WARM_UPS = {"cuda": 4, "cpu": 1}


def step_rows(plan: LatencyPlan, progress: bool = False) -> list[Row]:
    """All steps of a plan.

    Args:
        plan: what to measure.
        progress: show a bar.

    Returns:
        Fields: shape, layers, requests, arm (see `latency_plan.ARMS`), method, rows (that the target ran), ms (median
        of the steps, with ms_min and ms_max), reduction (1 - ms over that of the control arm, of DFlash and DScale),
        stage_ms (median by stage), other_ms (what no stage has), decision_share (the allocate stage over the step, of
        DScale), graphs, capture_s, pool_mb, num_eager, forward (how the target runs its layers), attention, captured,
        context, dtype, device.

        Stages of these rounds, as captured: "draft" has staging and the draft; "allocate" the decision with features,
        predictor, allocator and packing (arm `dart` cuts its trees on the host there, has "search" and "pack");
        "verify" everything of the verify graph, which is the target's forward, its choices, the accept rule, compaction
        of the cache and the drafter's commit; "accept" only the wait for that and the host's read of the outcome;
        "commit" only bookkeeping of the host. The round of arm `dart_search` is one graph, all of it in "verify".
    """
    rows: list[Row] = []
    with tqdm(total=len(plan.step_shapes) * len(plan.requests), desc="steps", disable=not progress) as bar:
        for name in plan.step_shapes:
            target = plan_target(plan, name)
            targets = {"tile": target} | {
                attention: Target(target.model, name=target.name, stop_ids=(), attention=attention)
                for attention in {arm.attention for arm in plan.arms_at(max(plan.requests)).values()} - {"tile"}
            }
            drafters = arm_drafters(target, plan.mean_rows, plan.seed)
            for requests in plan.requests:
                rows += _requests_rows(name, requests, targets, drafters, plan)
                release(plan.device)
                bar.update()
            del target, targets, drafters
            release(plan.device)
    return rows


def _requests_rows(
    name: str, requests: int, targets: dict[str, Target], drafters: dict[str, Drafter], plan: LatencyPlan
) -> list[Row]:
    """All arms at one number of requests, which share the target's cache."""
    target, warm_ups = targets["tile"], _WARM_UPS[plan.device.type]
    steps = warm_ups + plan.repeats
    cache = random_cache(target, requests, plan.context + MAX_TREE_ROWS, plan.seed)
    arms = plan.arms_at(requests)
    rounds = {
        arm: RepeatedRound(targets[how.attention], drafters[arm], cache, how, requests, plan.context, steps, plan.seed)
        for arm, how in arms.items()
    }
    taken: dict[str, list[Step]] = {arm: [] for arm in arms}
    for _ in range(steps):
        for arm, repeated in rounds.items():
            taken[arm].append(repeated.step())
    measured = {arm: _measured(steps_of[warm_ups:]) for arm, steps_of in taken.items()}
    about = {"shape": name, "layers": target.num_layers, "requests": requests}
    settings = {"forward": kind_of(target), "context": plan.context}
    settings |= {"dtype": str(plan.dtype).removeprefix("torch."), "device": str(plan.device)}
    rows = []
    for arm, how in arms.items():
        own, control = measured[arm], measured[CONTROL]["ms"]
        judged = {
            "reduction": 1 - own["ms"] / control if how.method in ("DFlash", "DScale") else None,
            "decision_share": own["stage_ms"].get("allocate", 0.0) / own["ms"] if how.method == "DScale" else None,
        }
        told = {"attention": how.attention, "captured": how.captured}
        head = about | {"arm": arm, "method": how.method}
        rows.append(head | own | judged | _costs(rounds[arm]) | told | settings)
    return rows


def _measured(steps: Sequence[Step]) -> Row:
    """Medians of the steps of an arm."""
    times = [1e3 * step.seconds for step in steps]
    stages = {
        stage: 1e3 * median(step.stage_s.get(stage, 0.0) for step in steps)
        for stage in STAGES
        if any(stage in step.stage_s for step in steps)
    }
    ms = median(times)
    spread = {"ms": ms, "ms_min": min(times), "ms_max": max(times)}
    return {"rows": steps[-1].rows} | spread | {"stage_ms": stages, "other_ms": ms - sum(stages.values())}


def _costs(repeated: RepeatedRound) -> Row:
    report = repeated.round.pool.report
    return {
        "graphs": len(report.captures),
        "capture_s": sum(report.captures.values()),
        "pool_mb": report.reserved_bytes / 1e6,
        "num_eager": repeated.round.num_eager,
    }


def stage_rows(steps: Sequence[Row]) -> list[Row]:
    """Stages of every step as a table: milliseconds and share of the step, one row a stage.

    What a stage holds is said in `step_rows`: commits of caches and drafters are part of "verify", packing of chains is
    part of "allocate".

    Args:
        steps: of `step_rows`.

    Returns:
        Fields: shape, requests, arm, method, stage, ms, share.
    """
    names = ("shape", "requests", "arm", "method")
    return [
        {name: row[name] for name in names} | {"stage": stage, "ms": ms, "share": ms / row["ms"]}
        for row in steps
        for stage, ms in row["stage_ms"].items()
    ]
