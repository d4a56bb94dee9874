"""Rows of the draft table: DART's draft forward of one request by itself, against the bytes of the weights it reads.

It reads those behind attention and the head. Queries of the newest real row and of the masks, like keys, values and
features of real rows, are made when rows commit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from workbench.batch import Candidates
from workbench.decode.staging import Staging
from workbench.drafters.dart import DartDrafter
from workbench.drafters.dart_model import DartModel
from workbench.measure.forward_times import plan_target
from workbench.measure.kernel_times import release
from workbench.measure.latency_plan import MIN_LAYERS, LatencyPlan
from workbench.measure.latency_rounds import dart_drafter, observe_random, random_requests
from workbench.measure.roofline import FLOOR_BANDWIDTH, Ceilings
from workbench.measure.turns import time_in_turns
from workbench.models.shapes import shape_by_name
from workbench.models.target import Target
from workbench.types import MAX_TREE_ROWS

Row = dict[str, Any]


def draft_rows(plan: LatencyPlan, ceilings: Ceilings, progress: bool = False) -> list[Row]:
    """DART's drafts at all draft shapes of a plan; their targets have few layers, which a draft does not see.

    Args:
        plan: what to measure.
        ceilings: of the device, for the floor.
        progress: show a bar.

    Returns:
        Fields: shape, layers (of the stand-in target), what, requests, context, ms (median of the passes, with ms_min
        and ms_max), weight_mb (that a draft reads, see `draft_matrices`), floor_ms (those over the bytes a second that
        a copy by an elementwise kernel reads and writes), floor_bandwidth (which bandwidth that is), share (floor over
        time), capture_s, pool_mb, dtype, device.
    """
    rows = []
    for name in tqdm(plan.draft_shapes, desc="drafts", disable=not progress):
        rows.append(_draft_row(name, plan, ceilings))
        release(plan.device)
    return rows


def _draft_row(name: str, plan: LatencyPlan, ceilings: Ceilings) -> Row:
    layers = min(MIN_LAYERS, shape_by_name(name).num_hidden_layers)
    target = plan_target(plan, name, "stock", layers)
    drafter = dart_drafter(target, plan.seed)
    call = draft_call(target, drafter, plan.context, plan.seed)
    turn = time_in_turns({"dart": call}, plan.device, plan.repeats)["dart"]
    num_bytes = sum(w.numel() * w.element_size() for w in draft_matrices(drafter.model))
    floor_ms = 1e3 * num_bytes / ceilings.floor_bytes_per_s
    about = {"shape": name, "layers": layers, "what": "DART draft", "requests": 1, "context": plan.context}
    times = {"ms": turn.median_ms, "ms_min": turn.min_ms, "ms_max": turn.max_ms}
    floor = {"weight_mb": num_bytes / 1e6, "floor_ms": floor_ms, "floor_bandwidth": FLOOR_BANDWIDTH}
    floor |= {"share": floor_ms / turn.median_ms}
    costs = {"capture_s": turn.capture_s, "pool_mb": turn.pool_bytes / 1e6}
    where = {"dtype": str(plan.dtype).removeprefix("torch."), "device": str(plan.device)}
    return about | times | floor | costs | where


def draft_call(target: Target, drafter: DartDrafter, context: int, seed: int) -> Callable[[], Candidates]:
    """A draft behind `context` random tokens of one request, repeatable."""
    max_context = context + MAX_TREE_ROWS
    session = drafter.session(1, max_context)
    live = random_requests(target, 1, context, seed)
    observe_random(target, drafter, session, live, seed)
    staging = Staging(1, max_context, target.device)
    staging.stage([0], [context], [int(live[0].tokens[context])], [1 + drafter.max_nodes], 1 + drafter.max_nodes)
    with torch.inference_mode():
        device_session = session.on_device()
    return partial(device_session.draft, staging.batch(1))


def draft_matrices(model: DartModel) -> list[nn.Parameter]:
    """The matrices that a draft reads: no projection in front of attention, as its rows lie ready in the state."""
    layer = model.midlayer
    modules = (layer.self_attn.o_proj, *layer.mlp.children(), model.lm_head)
    return [weight for module in modules for weight in module.parameters()]
