"""Rows of the forward table: target forwards over packed rows, and their matrix products alone in the same turns.

Weights are random, which costs what trained ones cost; keys and values of the contexts are random too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.batch import DeviceRows
from workbench.decode.rows import Workspace
from workbench.measure.kernel_cases import row_counts
from workbench.measure.kernel_plan import Cell
from workbench.measure.kernel_times import release
from workbench.measure.latency_plan import LatencyPlan
from workbench.measure.products import matrix_products
from workbench.measure.roofline import FLOOR_BANDWIDTH, Ceilings, forward_floor, weight_bytes
from workbench.measure.turns import Turns, time_in_turns
from workbench.models.cache import SlotCache
from workbench.models.shapes import random_target
from workbench.models.target import Target
from workbench.types import DraftTree, chain_tree

Row = dict[str, Any]

#: Names of the products' rows: the model's own, and with those of equal input as one.
PRODUCTS = {"products": False, "merged products": True}
_MAX_NOTE = 160


def forward_rows(plan: LatencyPlan, ceilings: Ceilings, progress: bool = False) -> list[Row]:
    """All forwards of a plan; logits of every row are part of them.

    Args:
        plan: what to measure.
        ceilings: of the device, for the floors.
        progress: show a bar.

    Returns:
        Fields: shape, layers, cell, what (kind of forward, or one of `PRODUCTS`), role ("forward" for the target's own,
        "other", "products"), ms (median of the passes, with ms_min and ms_max), over_products and over_merged (ratio to
        the products in the same turns: the stock model's own seven a layer and its head, or four a layer, merged where
        inputs are equal), weights_ms and checkpoint_ms (bytes that are read, and all of the checkpoint, over the bytes
        a second that a copy by an elementwise kernel reads and writes, see `copy_bandwidth`), over_weights,
        over_checkpoint, floor_ms (`forward_floor`), floor_bandwidth (which bandwidth these use), share (floor over
        time), capture_s, compile_s, pool_mb, note (why there is no time), requests, rows, context, dtype, device.
    """
    rows: list[Row] = []
    todo = sum(map(len, plan.cells.values()))
    with tqdm(total=todo, desc="forwards", disable=not progress) as bar:
        for name, cells in plan.cells.items():
            target = plan_target(plan, name)
            others = _other_targets(plan, target) if name == plan.shape and plan.forward_cells else {}
            for cell in cells:
                beside = others if cell in plan.forward_cells and name == plan.shape else {}
                rows += _cell_rows(name, cell, target, beside, plan, ceilings)
                release(plan.device)
                bar.update()
            del target, others, beside
            release(plan.device)
    return rows


def plan_target(plan: LatencyPlan, name: str, forward: str = "auto", layers: int = 0) -> Target:
    """A target of random weights that attends through the kernels; `layers` 0 is the plan's number."""
    number = layers or plan.num_layers(name)
    return random_target(name, plan.dtype, plan.device, plan.seed, number, attention="tile", forward=forward)


def kind_of(target: Target) -> str:
    """How a target runs its layers: "stock", "compiled" or "fused"."""
    return "stock" if target.forward_report is None else target.forward_report.kind


def _other_targets(plan: LatencyPlan, target: Target) -> dict[str, Target | str]:
    """Copies of the main target that run otherwise; the reason in place of one that cannot be made."""
    made: dict[str, Target | str] = {}
    for kind in plan.forwards:
        if kind != kind_of(target):
            try:
                made[kind] = plan_target(plan, plan.shape, kind)
            except Exception as error:  # the rest of the report stands without it
                made[kind] = _reason(error)
    return made


def _cell_rows(
    name: str,
    cell: Cell,
    target: Target,
    others: dict[str, Target | str],
    plan: LatencyPlan,
    ceilings: Ceilings,
) -> list[Row]:
    cache, rows = cell_inputs(cell, target, plan.seed)
    calls: dict[str, Callable[[], Any]] = {kind_of(target): partial(target.forward, rows, cache)}
    total = len(rows.tokens)
    calls |= {what: matrix_products(target, total, merged, plan.seed) for what, merged in PRODUCTS.items()}
    notes: dict[str, str] = {}
    compiled_before = {kind: _compile_seconds(other) for kind, other in others.items()}
    for kind, other in others.items():
        call, note = _tried(other, rows, cache)
        notes |= {kind: note} if note else {}
        calls |= {} if call is None else {kind: call}
    turns = time_in_turns(calls, plan.device, plan.repeats)
    floors = _floors(cell, target, total, ceilings)
    about = {"shape": name, "layers": target.num_layers, "cell": cell.label}
    sizes = {"requests": cell.requests, "rows": total, "context": cell.context}
    sizes |= {"dtype": str(plan.dtype).removeprefix("torch."), "device": str(plan.device)}
    found = []
    for what in [*calls, *notes]:
        role = "products" if what in PRODUCTS else "forward" if what == kind_of(target) else "other"
        times = _times(turns.get(what), turns, floors, role)
        spent = _compile_seconds(others[what]) - compiled_before[what] if what in others else 0.0
        costs = {"compile_s": spent, "note": notes.get(what, "")}
        found.append(about | {"what": what, "role": role} | times | costs | sizes)
    return found


def _times(own: Turns | None, turns: dict[str, Turns], floors: Row, role: str) -> Row:
    """The measured fields of a row; ratios to products and floors are those of forwards only."""
    ms = None if own is None else own.median_ms
    alone = {name: turns[name].median_ms for name in PRODUCTS}
    over = {
        "over_products": alone["products"],
        "over_merged": alone["merged products"],
        "over_weights": floors["weights_ms"],
        "over_checkpoint": floors["checkpoint_ms"],
    }
    if ms is None or role == "products":
        ratios: Row = dict.fromkeys([*over, "share"])
    else:
        ratios = {name: ms / base for name, base in over.items()} | {"share": floors["floor_ms"] / ms}
    spread = {"ms_min": None, "ms_max": None, "capture_s": None, "pool_mb": None}
    if own is not None:
        spread = {"ms_min": own.min_ms, "ms_max": own.max_ms}
        spread |= {"capture_s": own.capture_s, "pool_mb": own.pool_bytes / 1e6}
    return {"ms": ms} | ratios | floors | spread


def _floors(cell: Cell, target: Target, rows: int, ceilings: Ceilings) -> Row:
    size, config = target.dtype.itemsize, target.config
    weights = weight_bytes(config, size)
    least = forward_floor(config, rows, cell.context, cell.requests, ceilings, size)
    per_ms = ceilings.floor_bytes_per_s / 1e3
    return {
        "weights_ms": weights.read / per_ms,
        "checkpoint_ms": weights.whole / per_ms,
        "floor_ms": 1e3 * least["floor_s"],
        "floor_bandwidth": FLOOR_BANDWIDTH,
    }


def _tried(other: Target | str, rows: DeviceRows, cache: SlotCache) -> tuple[Callable[[], Any] | None, str]:
    """A forward that works, or a note why there is none; what is compiled at first use is compiled here."""
    if isinstance(other, str):
        return None, other
    call = partial(other.forward, rows, cache)
    try:
        time_in_turns({"trial": call}, other.device, 1)
    except Exception as error:  # as above
        return None, _reason(error)
    return call, ""


def _reason(error: Exception) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    return lines[0][:_MAX_NOTE]


def _compile_seconds(target: Target | str) -> float:
    report = None if isinstance(target, str) else target.forward_report
    return 0.0 if report is None else sum(report.seconds)


def cell_inputs(cell: Cell, target: Target, seed: int) -> tuple[SlotCache, DeviceRows]:
    """A cache of random keys and values, and packed rows of random tokens behind them, on the device."""
    rng = np.random.default_rng(seed)
    counts = row_counts(cell, Random(seed))
    tokens = [rng.integers(0, target.vocab_size, count) for count in counts]
    trees = [_random_tree(t, rng) if cell.kind == "tree" else chain_tree(int(t[0]), t[1:]) for t in tokens]
    cache = random_cache(target, cell.requests, cell.context + cell.max_rows, seed)
    workspace = Workspace(cell.requests, sum(counts), cache.max_len, target.device)
    workspace.pack(trees, range(cell.requests), [cell.context] * cell.requests)
    return cache, workspace.device_rows(cell.requests, sum(counts), cell.max_rows, cache.max_len)


def random_cache(target: Target, slots: int, max_len: int, seed: int) -> SlotCache:
    """A cache whose rows are all random normal numbers."""
    cache = target.new_cache(slots, max_len)
    cache.kv.normal_(generator=torch.Generator(target.device).manual_seed(seed))
    return cache


def _random_tree(tokens: np.ndarray, rng: np.random.Generator) -> DraftTree:
    """A tree whose parents are any earlier nodes."""
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, len(tokens)))], np.int32)
    depths = np.zeros(len(tokens), np.int32)
    for node in range(1, len(tokens)):
        depths[node] = depths[parents[node]] + 1
    return DraftTree(tokens.astype(np.int32), parents, depths, np.zeros(len(tokens), np.float32))
