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
    forward("a", "16 x chain16 @ 9", 256, 1.0),
    forward("a", "1 x chain16 @ 8", 16, 1.5),
    forward("b", "1 x chain1 @ 8", 1, 7.0),
    forward("b", "32 x chain16 @ 8", 512, 5.0),
    forward("b", "32 x chain16 @ 8", 512, 6.0, role="products"),
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
        "verify_over_gemm_256_x": (1.2, False),
        "verify_over_merged_gemm_256_x": (1.2 + 0.1, None),
        "verify_over_gemm_16_x": (1.5, None),
        "verify_over_merged_gemm_16_x": (1.6, None),
        "verify_over_gemm_a_16xchain16_at_8_x": (1.1, None),
        "verify_over_merged_gemm_a_16xchain16_at_8_x": (1.1 + 0.1, None),
        "verify_over_gemm_a_32xchain8_at_8_x": (1.2, None),
        "verify_over_merged_gemm_a_32xchain8_at_8_x": (1.2 + 0.1, None),
        "verify_over_gemm_a_16xchain16_at_9_x": (1.0, None),
        "verify_over_merged_gemm_a_16xchain16_at_9_x": (1.1, None),
        "verify_over_gemm_a_1xchain16_at_8_x": (1.5, None),
        "verify_over_merged_gemm_a_1xchain16_at_8_x": (1.6, None),
        "verify_over_gemm_b_32xchain16_at_8_x": (5.0, None),
        "verify_over_merged_gemm_b_32xchain16_at_8_x": (5.1, None),
        "dscale_step_reduction_n8_x": (0.3, None),
        "dscale_step_reduction_n32_x": (0.5, True),
        "decision_share_x": (0.05, False),
        "dart_draft_ms_14b_x": (0.4, True),
        "dart_draft_ms_1.7b_x": (0.1, None),
    }


@pytest.mark.parametrize("worst", [0, 1, 2])
def test_the_worst_cell_of_a_row_count_is_judged(worst):
    values = [1.0, 1.1, 1.12]
    values[worst] = 1.3
    cells = ("16 x chain16 @ 8", "32 x chain8 @ 8", "32 x chain8 @ 99")
    rows = [forward("a", cell, 256, value) for cell, value in zip(cells, values, strict=True)]
    found = latency_checks(rows, [], [], WANTED)
    assert (found["verify_over_gemm_256"].value, found["verify_over_gemm_256"].ok) == (1.3, False)
    assert len(found) == 2 + 2 * 3


def test_the_worst_row_alone_is_judged():
    rows = [forward("a", f"1 x chain1 @ {context}", 1, 1.0) | {"over_weights": context / 10} for context in (15, 12)]
    found = latency_checks(rows, [], [], WANTED)
    assert (found["ar_over_weight_floor"].value, found["ar_over_weight_floor"].ok) == (1.5, False)


@pytest.mark.parametrize("goal", GOALS)
def test_each_goal_can_be_missed(goal):
    hard = {name: 1e9 if name == "goal_step_reduction" else 1e-9 for name in GOALS}
    found = latency_checks(FORWARDS, STEPS, DRAFTS, {goal: hard[goal]})
    assert [check.ok for check in found.values() if check.goal is not None] == [False]
