"""Kernel measurements on a GPU: tiles and library functions are right, and every row is there."""

from __future__ import annotations

import pytest
import torch
from test_kernel_times import made_plan

from workbench.measure.kernel_attention import attention_rows, split_rows
from workbench.measure.kernel_cases import AttentionCase
from workbench.measure.kernel_checks import kernel_checks
from workbench.measure.kernel_decision import decision_rows
from workbench.measure.kernel_decision_cases import CASES
from workbench.measure.kernel_peers import PEERS
from workbench.measure.kernel_plan import Cell, HeadShape, KernelPlan
from workbench.measure.kernel_times import TOLERANCE, worst_row_error

pytestmark = pytest.mark.gpu


def gpu_plan(dtype: str, cell: str, **changes) -> KernelPlan:
    """A plan of one cell, since every cell compiles kernels of its own."""
    own = {"cells": [cell], "flex_cells": [], "split_cells": [], "requests": [3], "other_shapes": [], "other_cells": []}
    return made_plan(**own | changes, shape="Qwen3-8B", device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "cell"),
    [
        ("bfloat16", "2 x chain16 @ 300"),
        ("bfloat16", "3 x ragged8 @ 300"),
        ("bfloat16", "1 x tree60 @ 300"),
        ("bfloat16", "1 x prefill200 @ 0"),
        ("float16", "3 x ragged8 @ 300"),
        ("float32", "1 x tree60 @ 300"),
    ],
)
def test_attention_on_a_gpu(dtype, cell):
    rows = attention_rows(gpu_plan(dtype, cell), 4e12)
    assert {row["what"] for row in rows if row["role"] == "kernel"} == {"rows16", "rows128", "packed"}
    assert kernel_checks(rows, [], [])["kernel_errors"].ok
    peers = {row["what"]: row for row in rows if row["role"] == "peer" and row["us"] is not None}
    # In float32 a library may round products to fewer bits.
    assert dtype == "float32" or ("sdpa" in peers and all(row["ok"] for row in peers.values())), peers


def test_flex_attention_on_a_gpu():
    """Compiled by torch, so the slowest of all."""
    case = AttentionCase(
        HeadShape("none", 8, 2, 64), Cell.parse("2 x chain16 @ 300"), torch.bfloat16, torch.device("cuda"), 3, sets=2
    )
    peer, (numbers, exact) = PEERS["flex"](case), case.exact()
    assert worst_row_error(peer.rows(peer.calls[0]())[numbers], exact) <= TOLERANCE["bfloat16"]


def test_splits_on_a_gpu():
    cell = "2 x chain16 @ 300"
    rows = split_rows(gpu_plan("bfloat16", cell, split_cells=[cell]), 4e12)
    assert [row["splits"] for row in rows] == [1, 2, 4, 8] and sum(row["chosen"] for row in rows) == 1
    assert all(row["ok"] for row in rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_decisions_on_a_gpu(dtype):
    rows = decision_rows(gpu_plan(dtype, "1 x chain1 @ 0"), 4e12)
    kernels = [row for row in rows if row["role"] == "kernel"]
    assert [row["kernel"] for row in kernels] == [*CASES] and all(row["ok"] for row in kernels)
