"""Checks of a latency report, from its rows alone."""

import pytest

from workbench.measure.latency_checks import latency_checks
from workbench.measure.latency_plan import GOALS


def forward(shape, cell, rows, products, role="forward") -> dict:
    ratios = {"over_products": products, "over_merged": products + 0.1, "over_weights": 1.2, "over_checkpoint": 1.1}
    return {"shape": shape, "cell": cell, "rows": rows, "role": role, **ratios}


def step(shape, arm, requests, reduction, share) -> dict:
    return {"shape": shape, "arm": arm, "requests": requests, "reduction": reduction, "decision_share": share}


FORWARDS = [
    forward("a", "1 x chain1 @ 8", 1, 1.0),
    forward("a", "1 x chain1 @ 8", 1, 9.0, role="other"),
    forward("a", "16 x chain16 @ 8", 256, 1.1),
    forward("a", "32 x chain8 @ 8", 256, 1.2),
    forward("a", "1 x chain16 @ 8", 16, 1.5),
    forward("b", "32 x chain16 @ 8", 512, 5.0),
]
STEPS = [
    step("a", "graphs", 8, 0.3, 0.02),
    step("a", "graphs", 32, 0.5, 0.03),
    step("a", "allocation", 32, 0.1, 0.9),
    step("b", "graphs", 64, 0.1, 0.05),
]
DRAFTS = [{"shape": "Qwen3-14B", "ms": 0.4}, {"shape": "Qwen3-1.7B", "ms": 0.1}]
WANTED = dict(zip(GOALS, (1.15, 1.3, 0.45, 0.04, 0.5), strict=True))


def test_checks():
    found = latency_checks(FORWARDS, STEPS, DRAFTS, WANTED, "_x")
    assert {name: (check.value, check.ok) for name, check in found.items()} == {
        "ar_over_weight_floor_x": (1.2, True),
        "ar_over_checkpoint_floor_x": (1.1, None),
        "verify_over_gemm_256_x": (1.1, True),
        "verify_over_merged_gemm_256_x": (1.1 + 0.1, None),
        "verify_over_gemm_256_32xchain8_x": (1.2, None),
        "verify_over_merged_gemm_256_32xchain8_x": (1.2 + 0.1, None),
        "verify_over_gemm_16_x": (1.5, None),
        "verify_over_merged_gemm_16_x": (1.6, None),
        "dscale_step_reduction_n8_x": (0.3, None),
        "dscale_step_reduction_n32_x": (0.5, True),
        "decision_share_x": (0.05, False),
        "dart_draft_ms_14b_x": (0.4, True),
        "dart_draft_ms_1.7b_x": (0.1, None),
    }


@pytest.mark.parametrize("goal", GOALS)
def test_each_goal_can_be_missed(goal):
    hard = {name: 1e9 if name == "goal_step_reduction" else 1e-9 for name in GOALS}
    found = latency_checks(FORWARDS, STEPS, DRAFTS, {goal: hard[goal]})
    assert [check.ok for check in found.values() if check.goal is not None] == [False]
