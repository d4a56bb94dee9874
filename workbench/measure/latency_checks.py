"""Checks of a latency report, from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.measure.latency_plan import GOALS
from workbench.measure.records import Check

Row = Mapping[str, Any]

#: Below, products are as short as reading their weights takes, and everything else weighs more beside them.
_GOAL_ROWS = 256
#: Of a forward; less is better.
_RATIOS = ("over_products", "over_merged", "over_weights", "over_checkpoint")


def latency_checks(
    forwards: Sequence[Row],
    steps: Sequence[Row],
    drafts: Sequence[Row],
    goals: Mapping[str, float] | None = None,
    suffix: str = "",
) -> dict[str, Check]:
    """How far forwards, steps and drafts are from what they should take at most.

    Args:
        forwards, steps, drafts: rows of `forward_rows`, `step_rows` and `draft_rows`; goals are for the first shape of
            each, unless said otherwise.
        goals: by parameter (`GOALS`); 0 or none makes a check informative only.
        suffix: appended to the names, to tell runs of different settings apart.

    Returns:
        verify_over_gemm_<M>: forward of M rows over the stock model's own seven products a layer and its head alone,
            of the worst cell of that many rows of the first shape. The goal is for this one, from 256 rows on.
        verify_over_merged_gemm_<M>: the same over merged products, four a layer, which is what the fused forward
            itself runs and which take less time: the stricter ratio, without a goal; of its own worst cell.
        verify_over_gemm_<size>_<cell>, verify_over_merged_gemm_<size>_<cell>: both of every cell of every shape,
            without a goal; the cell is requests x kind and rows, and the context, as in "8b_16xchain16_at_1024".
        ar_over_weight_floor, ar_over_checkpoint_floor: forward of one row over the time of reading the weights, those
            that are read (with a goal) and all of the checkpoint; of the worst cell of the first shape.
        dscale_step_reduction_n<N>: 1 - step of DScale over that of the control arm, the goal for most requests.
        decision_share: the largest share of a step that DScale's decision takes, over all shapes and numbers.
        dart_draft_ms_<size>: DART's draft forward, the goal for the first shape.
    """
    goals = dict.fromkeys(GOALS, 0.0) | dict(goals or {})
    found = _forward_checks(forwards, goals) | _step_checks(steps, goals)
    for number, row in enumerate(drafts):
        goal = goals["goal_draft_ms"] if number == 0 else 0.0
        found[f"dart_draft_ms_{_size(row)}"] = _at_most(row["ms"], goal)
    return {name + suffix: check for name, check in found.items()}


def _at_most(value: float | None, goal: float) -> Check:
    return Check(value, goal or None, "<=")


def _size(row: Row) -> str:
    """How names of checks call a shape: "8b" for Qwen3-8B."""
    return row["shape"].rpartition("-")[2].lower()


def _forward_checks(forwards: Sequence[Row], goals: Mapping[str, float]) -> dict[str, Check]:
    own = [row for row in forwards if row["role"] == "forward"]
    first = [row for row in own if row["shape"] == own[0]["shape"]]
    found: dict[str, Check] = {}
    for number in dict.fromkeys(row["rows"] for row in first):
        cells = [row for row in first if row["rows"] == number]
        worst = {name: max(row[name] for row in cells) for name in _RATIOS}
        if number == 1:
            found["ar_over_weight_floor"] = _at_most(worst["over_weights"], goals["goal_ar_over_floor"])
            found["ar_over_checkpoint_floor"] = _at_most(worst["over_checkpoint"], 0.0)
        else:
            goal = goals["goal_verify_over_gemm"] if number >= _GOAL_ROWS else 0.0
            found[f"verify_over_gemm_{number}"] = _at_most(worst["over_products"], goal)
            found[f"verify_over_merged_gemm_{number}"] = _at_most(worst["over_merged"], 0.0)
    for row in own:
        if row["rows"] > 1:
            name = f"{_size(row)}_{row['cell'].replace(' ', '').replace('@', '_at_')}"
            found[f"verify_over_gemm_{name}"] = _at_most(row["over_products"], 0.0)
            found[f"verify_over_merged_gemm_{name}"] = _at_most(row["over_merged"], 0.0)
    return found


def _step_checks(steps: Sequence[Row], goals: Mapping[str, float]) -> dict[str, Check]:
    full = [row for row in steps if row["arm"] == "graphs"]
    first = [row for row in full if row["shape"] == full[0]["shape"]]
    most = max((row["requests"] for row in first), default=0)
    found = {}
    for row in first:
        goal = goals["goal_step_reduction"] if row["requests"] == most else 0.0
        found[f"dscale_step_reduction_n{row['requests']}"] = Check(row["reduction"], goal or None)
    if full:
        worst = max(row["decision_share"] for row in full)
        found["decision_share"] = _at_most(worst, goals["goal_decision_share"])
    return found
