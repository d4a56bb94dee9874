"""Rows of the draft table: DART's draft forward of one request by itself, against the bytes of its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from workbench.decode.staging import Staging
from workbench.drafters.dart_model import DartModel
from workbench.measure.forward_times import plan_target, release
from workbench.measure.latency_plan import MIN_LAYERS, LatencyPlan
from workbench.measure.latency_rounds import dart_drafter, observe_random, random_requests
from workbench.measure.turns import time_in_turns
from workbench.models.shapes import shape_by_name
from workbench.types import MAX_TREE_ROWS

Row = dict[str, Any]


def draft_rows(plan: LatencyPlan, bandwidth: float, progress: bool = False) -> list[Row]:
    """DART's drafts at all draft shapes of a plan; their targets have few layers, which a draft does not see.

    Args:
        plan: what to measure.
        bandwidth: bytes a second of a large copy, for the floor.
        progress: show a bar.

    Returns:
        Fields: shape, layers (of the stand-in target), what, requests, context, ms (median of the passes, with ms_min
        and ms_max), weight_mb (that a draft reads), floor_ms (those over `bandwidth`), share (floor over time),
        capture_s, pool_mb, dtype, device.
    """
    rows = []
    for name in tqdm(plan.draft_shapes, desc="drafts", disable=not progress):
        rows.append(_draft_row(name, plan, bandwidth))
        release(plan.device)
    return rows


def _draft_row(name: str, plan: LatencyPlan, bandwidth: float) -> Row:
    layers = min(MIN_LAYERS, shape_by_name(name).num_hidden_layers)
    target = plan_target(plan, name, "stock", layers)
    drafter = dart_drafter(target, plan.seed)
    max_context = plan.context + MAX_TREE_ROWS
    session = drafter.session(1, max_context)
    live = random_requests(target, 1, plan.context, plan.seed)
    observe_random(target, drafter, session, live, plan.seed)
    staging = Staging(1, max_context, target.device)
    anchor = int(live[0].tokens[plan.context])
    staging.stage([0], [plan.context], [anchor], [1 + drafter.max_nodes], 1 + drafter.max_nodes)
    with torch.inference_mode():
        device_session = session.on_device()
    call = partial(device_session.draft, staging.batch(1))
    turn = time_in_turns({"dart": call}, plan.device, plan.repeats)["dart"]
    num_bytes = draft_bytes(drafter.model)
    floor_ms = 1e3 * num_bytes / bandwidth
    about = {"shape": name, "layers": layers, "what": "DART draft", "requests": 1, "context": plan.context}
    times = {"ms": turn.median_ms, "ms_min": turn.min_ms, "ms_max": turn.max_ms}
    floor = {"weight_mb": num_bytes / 1e6, "floor_ms": floor_ms, "share": floor_ms / turn.median_ms}
    costs = {"capture_s": turn.capture_s, "pool_mb": turn.pool_bytes / 1e6}
    where = {"dtype": str(plan.dtype).removeprefix("torch."), "device": str(plan.device)}
    return about | times | floor | costs | where


def draft_bytes(model: DartModel) -> int:
    """Bytes of the matrices that a draft reads: keys, values and features of real rows are made when they commit."""
    layer = model.midlayer
    modules = (layer.self_attn.q_proj, layer.self_attn.o_proj, *layer.mlp.children(), model.lm_head)
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
