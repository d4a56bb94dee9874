"""Latency measurements on a tiny shape: turns, rows of all tables, checks."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from workbench.budget.table import build_policy
from workbench.drafters import dflash_packed
from workbench.drafters.dflash import DFlashDrafter
from workbench.drafters.shapes import random_dflash
from workbench.measure import forward_times
from workbench.measure.draft_times import draft_call, draft_matrices, draft_rows
from workbench.measure.forward_times import PRODUCTS, cell_inputs, forward_rows
from workbench.measure.kernel_plan import Cell
from workbench.measure.latency_checks import latency_checks
from workbench.measure.latency_plan import ARMS, GOALS, LatencyPlan
from workbench.measure.latency_rounds import RepeatedRound, arm_drafters, dart_drafter
from workbench.measure.parameters import read_parameters
from workbench.measure.records import clean
from workbench.measure.roofline import Ceilings
from workbench.measure.step_times import stage_rows, step_rows
from workbench.models import target as target_module
from workbench.models.attention import TileCall
from workbench.models.fused import run_layer
from workbench.models.shapes import SHAPES, Shape, random_target
from workbench.paths import notebooks_dir

NOTEBOOK = notebooks_dir() / "04_latency.ipynb"
CPU = torch.device("cpu")
SMALL = Shape("tiny", "qwen3", 64, 8, 4, 2, 16, 96, 211, False, 1e4)
CEILINGS = Ceilings(1e9, 1e9, 1e9, "float32")
TINY = {
    "shapes": ["tiny"],
    "cells": ["1 x chain1 @ 9", "2 x chain4 @ 9", "4 x chain2 @ 9", "1 x tree20 @ 9", "3 x ragged2 @ 9"],
    "other_shapes": ["other"],
    "other_cells": ["1 x chain1 @ 9"],
    "forwards": ["fused", "stock"],
    "forward_cells": ["2 x chain4 @ 9"],
    "step_shapes": ["tiny"],
    "requests": [3, 1],
    "context": 20,
    "draft_shapes": ["other", "tiny"],
    "repeats": 2,
}


def made_plan(**changes) -> LatencyPlan:
    """The tiny plan, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items()}
    return LatencyPlan.of(values | TINY | changes)


@pytest.fixture(scope="module", autouse=True)
def shapes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", SMALL)
        patch.setitem(SHAPES, "other", replace(SMALL, name="other", num_hidden_layers=9, tied=True))
        yield


@pytest.fixture(scope="module")
def forwards(shapes):
    return forward_rows(made_plan(), CEILINGS)


@pytest.fixture(scope="module")
def steps(shapes):
    return step_rows(made_plan())


@pytest.fixture(scope="module")
def drafts(shapes):
    return draft_rows(made_plan(), replace(CEILINGS, read_bytes_per_s=7e9))


@pytest.fixture(scope="module")
def target(shapes):
    return random_target("tiny", torch.float32, attention="tile")


# ---- forwards -------------------------------------------------------------------------------------------------------
def test_forward_rows(forwards):
    plan = made_plan()
    expected = [
        (name, cell.label, what)
        for name, cells in plan.cells.items()
        for cell in cells
        for what in ("stock", *PRODUCTS, *(["fused"] if cell in plan.forward_cells else []))
    ]
    assert [(row["shape"], row["cell"], row["what"]) for row in forwards] == expected
    for row in forwards:
        assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["note"] == ""
        assert (row["over_products"] is None) == (row["role"] == "products") == (row["share"] is None)
        assert clean(row)
    roles = {row["what"]: row["role"] for row in forwards}
    assert roles == {"stock": "forward", "fused": "other", "products": "products", "merged products": "products"}


def test_ratios_and_floors(forwards):
    cell = [row for row in forwards if row["cell"] == "2 x chain4 @ 9"]
    own, products, merged, _ = cell
    assert own["over_products"] == pytest.approx(own["ms"] / products["ms"])
    assert own["over_merged"] == pytest.approx(own["ms"] / merged["ms"])
    layer = 64 * (2 * 64 + 2 * 32 + 3 * 96)
    assert own["weights_ms"] == pytest.approx(4 * (8 * layer + 211 * 64) / 1e6)
    assert own["checkpoint_ms"] == pytest.approx(4 * (8 * layer + 2 * 211 * 64) / 1e6)
    assert own["over_checkpoint"] == pytest.approx(own["ms"] / own["checkpoint_ms"])
    assert own["floor_bandwidth"] == "copy"
    assert own["share"] == pytest.approx(own["floor_ms"] / own["ms"]) and own["floor_ms"] > own["weights_ms"]
    assert (own["rows"], own["requests"], own["context"], own["layers"]) == (8, 2, 9, 8)
    tied = forwards[-1]
    assert tied["checkpoint_ms"] == tied["weights_ms"] and tied["layers"] == 9


@pytest.mark.parametrize("text", TINY["cells"])
def test_packed_rows_of_a_cell(text, target):
    cell = Cell.parse(text)
    cache, rows = cell_inputs(cell, target, seed=1)
    starts = rows.starts.tolist()
    assert len(rows.tokens) == starts[-1] == cell.requests * cell.rows
    assert max(b - a for a, b in pairwise(starts)) <= rows.max_rows
    assert rows.context_len.tolist() == [9] * cell.requests and cache.max_len == rows.max_context == 9 + cell.max_rows
    assert float(cache.kv.std()) == pytest.approx(1, abs=0.1)
    depths = [bits.bit_count() - 1 for bits in rows.ancestors.tolist()]
    assert rows.positions.tolist() == [9 + depth for depth in depths]
    within = [row - starts[slot] for row, slot in enumerate(rows.slot_of_row.tolist())]
    assert (depths == within) == (cell.kind != "tree")


def test_a_forward_that_cannot_be_made_is_a_note(monkeypatch):
    made = forward_times.plan_target

    def broken(plan, name, forward="auto", layers=0):
        if forward == "fused":
            raise RuntimeError("no such kernel\nand more")
        return made(plan, name, forward, layers)

    monkeypatch.setattr(forward_times, "plan_target", broken)
    rows = forward_rows(made_plan(cells=TINY["forward_cells"], other_shapes=[]), CEILINGS)
    assert [(row["what"], row["note"]) for row in rows if row["role"] == "other"] == [
        ("fused", "RuntimeError: no such kernel")
    ]
    assert rows[-1]["ms"] is None and rows[-1]["over_products"] is None and clean(rows[-1])


def test_a_forward_that_breaks_is_a_note(monkeypatch):
    def made(plan, name, forward="auto", layers=0):
        return random_target(name, torch.float32, attention="tile" if forward == "auto" else "plain")

    monkeypatch.setattr(forward_times, "plan_target", made)
    rows = forward_rows(made_plan(cells=TINY["forward_cells"], other_shapes=[]), CEILINGS)
    assert "attention='plain' reads its rows on the host" in rows[-1]["note"] and rows[-1]["ms"] is None


# ---- steps ----------------------------------------------------------------------------------------------------------
def test_step_rows(steps):
    assert [row["arm"] for row in steps if row["requests"] == 3] == list(ARMS)
    assert [row["arm"] for row in steps if row["requests"] == 1] == [a for a in ARMS if a not in ("paper", "launched")]
    rows = {row["arm"]: row["rows"] for row in steps if row["requests"] == 3}
    dflash, dscale = (
        dict.fromkeys(("control", "paper", "tile"), 48),
        dict.fromkeys(("launched", "allocation", "graphs"), 24),
    )
    assert rows == {"ar": 3, "dart": 180, "dart_search": 180} | dflash | dscale
    for row in steps:
        assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["num_eager"] == 0 and clean(row)
        assert 0 < sum(row["stage_ms"].values()) < 2 * row["ms"]
        assert ("search" in row["stage_ms"]) == (row["arm"] == "dart")
        assert (row["decision_share"] is not None) == (row["method"] == "DScale")
        assert (row["reduction"] is None) == (row["method"] in ("AR", "DART"))
    control, graphs = (next(row for row in steps if row["arm"] == arm) for arm in ("control", "graphs"))
    assert control["reduction"] == 0 and graphs["reduction"] == pytest.approx(1 - graphs["ms"] / control["ms"])
    assert graphs["decision_share"] == pytest.approx(graphs["stage_ms"]["allocate"] / graphs["ms"])
    assert (control["attention"], control["captured"]) == ("tile:rows128", "all")
    assert [row["captured"] for row in steps if row["arm"] == "allocation"] == ["draft, verify"] * 2
    assert [row["captured"] for row in steps if row["arm"] == "launched"] == ["draft"]
    assert [row["attention"] for row in steps if row["arm"] == "paper"] == ["tile:paper"]


def test_stages_as_a_table(steps):
    table = stage_rows(steps)
    assert len(table) == sum(len(row["stage_ms"]) for row in steps)
    first = table[0]
    assert (first["arm"], first["method"], first["requests"]) == ("ar", "AR", 1)
    assert first["share"] == pytest.approx(steps[0]["stage_ms"][first["stage"]] / steps[0]["ms"])


def test_drafters_of_the_arms(target):
    drafters = arm_drafters(target, 8, seed=0)
    assert drafters.keys() == ARMS.keys()
    policies = {arm: drafters[arm].policy.name for arm in ARMS if arm not in ("ar", "dart", "dart_search")}
    full, share = (
        dict.fromkeys(("control", "paper", "tile"), "full"),
        dict.fromkeys(("launched", "allocation", "graphs"), "dvl"),
    )
    assert policies == full | share
    assert [drafters[arm].tile for arm in ("control", "paper", "tile", "graphs")] == [
        "rows128",
        "paper",
        "auto",
        "auto",
    ]


@pytest.mark.parametrize("arm", ["control", "paper", "tile"])
def test_tiles_of_an_arm_reach_target_and_draft(arm, monkeypatch):
    found = {"draft": set(), "target": set()}

    def recorded(x, weights, layer, call, following):
        found["draft"].add(call.variant)
        run_layer(x, weights, layer, call, following)

    class Call(TileCall):
        def attend(self, *given):
            found["target"].add(self.variant)
            return super().attend(*given)

    monkeypatch.setattr(dflash_packed, "run_layer", recorded)
    monkeypatch.setattr(target_module, "TileCall", Call)
    target = random_target("tiny", torch.float32, attention=ARMS[arm].attention)
    found["target"].clear()
    cache = forward_times.random_cache(target, 1, 20 + 64, 0)
    RepeatedRound(target, arm_drafters(target, 8, 0)[arm], cache, ARMS[arm], 1, 20, steps=1, seed=0).step()
    wanted = {"control": "rows128", "paper": "paper", "tile": "auto"}[arm]
    assert found == {"draft": {wanted}, "target": {wanted}}


def test_an_unknown_tile_is_refused(target):
    network = random_dflash(target)
    with pytest.raises(ValueError, match="tile='rows7'; allowed: auto, "):
        DFlashDrafter(network, target.embedding, target.lm_head, build_policy("full"), tile="rows7")


@pytest.mark.parametrize("arm", ARMS)
def test_a_round_repeats_itself(arm, target):
    """Its contexts stay, whatever was accepted, and it can be run as often as was said."""
    cache = forward_times.random_cache(target, 2, 20 + 64, 0)
    drafter = arm_drafters(target, 8, 0)[arm]
    repeated = RepeatedRound(target, drafter, cache, ARMS[arm], 2, 20, steps=6, seed=0)
    context = cache.kv[:, :, :, :20].clone()
    results = [repeated.step() for _ in range(6)]
    assert torch.equal(cache.kv[:, :, :, :20], context)
    assert len({result.rows for result in results}) == 1
    assert all(result.seconds > 0 and result.stage_s for result in results)
    assert [x.num_tokens for x in repeated._live] == [21, 21] and [x.committed for x in repeated._live] == [20, 20]


# ---- drafts ---------------------------------------------------------------------------------------------------------
def test_draft_rows(drafts):
    assert [row["shape"] for row in drafts] == ["other", "tiny"]
    needed = 4 * (64 * 64 + 3 * 64 * 96 + 211 * 64)
    for row in drafts:
        assert row["layers"] == 8 and row["ms_min"] <= row["ms"] <= row["ms_max"] and clean(row)
        assert row["weight_mb"] == pytest.approx(needed / 1e6) and row["floor_ms"] == pytest.approx(needed / 1e6)
        assert row["share"] == pytest.approx(row["floor_ms"] / row["ms"]) and row["floor_bandwidth"] == "copy"


@torch.inference_mode()
def test_a_draft_reads_the_matrices_of_its_floor_and_no_other(shapes):
    target = random_target("tiny", torch.float32, attention="tile")
    drafter = dart_drafter(target, 0)
    call = draft_call(target, drafter, 20, 0)
    first = call()
    wanted = (first.ids.clone(), first.probs.clone())
    counted = draft_matrices(drafter.model)
    others = [p for p in drafter.model.parameters() if p.dim() == 2 and not any(p is c for c in counted)]
    assert len(counted) == 5 and len(others) == 4, "features, queries, keys, values"
    for weight in [*others, target.embedding.weight]:
        weight.fill_(math.nan)
    after = call()
    assert torch.equal(after.ids, wanted[0]) and torch.equal(after.probs, wanted[1])
    for weight in counted:
        kept = weight.clone()
        weight.fill_(math.nan)
        assert call().probs.isnan().any(), "a matrix that is counted is read"
        weight.copy_(kept)
    after = call()
    assert torch.equal(after.ids, wanted[0]) and torch.equal(after.probs, wanted[1])


def test_without_goals_nothing_is_judged(forwards, steps, drafts):
    found = latency_checks(forwards, steps, drafts, dict.fromkeys(GOALS, 0.0))
    assert all(check.ok is None and math.isfinite(check.value) for check in found.values())
    assert {"verify_over_gemm_8", "verify_over_gemm_tiny_4xchain2_at_9", "dart_draft_ms_tiny"} <= found.keys()
    assert latency_checks([], [], []) == {}


@pytest.mark.gpu
def test_everything_on_a_gpu():
    cells = ["1 x chain1 @ 300", "2 x chain16 @ 300", "1 x tree60 @ 300"]
    small = {"layers": 8, "dtype": "bfloat16", "device": "cuda", "context": 300, "requests": [1, 3]}
    names = {name: ["Qwen3-1.7B"] for name in ("shapes", "step_shapes", "draft_shapes")}
    plan = made_plan(**names, **small, cells=cells, other_shapes=[], forward_cells=cells[1:2], forwards=["stock"])
    forwards, steps, drafts = (
        forward_rows(plan, CEILINGS),
        step_rows(plan),
        draft_rows(plan, replace(CEILINGS, copy_bytes_per_s=4e12)),
    )
    assert [row["what"] for row in forwards[:4]] == ["fused", *PRODUCTS, "fused"]
    assert all(row["capture_s"] > 0 and row["note"] == "" for row in forwards)
    graphs = {row["arm"]: row["graphs"] for row in steps if row["requests"] == 3}
    few = {"launched": 1, "ar": 2, "dart": 2, "dart_search": 1, "allocation": 2}
    assert graphs == dict.fromkeys(ARMS, 3) | few
    assert all(row["num_eager"] == 0 and row["capture_s"] > 0 for row in steps) and drafts[0]["share"] < 1
