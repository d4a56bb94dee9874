"""What a latency report is asked for, checked before anything runs: shapes, forwards, arms, numbers of requests.

Knows the parameters of notebook `04_latency` by name; makes no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.measure.kernel_plan import Cell, device_by_name
from workbench.measure.kernel_times import TOLERANCE
from workbench.models.forwards import FORWARDS
from workbench.models.shapes import Shape, shape_by_name
from workbench.types import MAX_TREE_ROWS

_LEAST = {"context": 1, "repeats": 1, "threads": 0, "layers": 0, "mean_rows": 1}
#: Slots of a DFlash block, so the most rows of a request that DScale can take.
BLOCK_SIZE = 16
#: DFlash's five draft layers read as many different ones of the target, and DART three.
MIN_LAYERS = 8
_MAX_REQUESTS = 64

#: Parameters that are goals of checks; 0 is none.
GOALS = (
    "goal_verify_over_gemm",
    "goal_ar_over_floor",
    "goal_step_reduction",
    "goal_decision_share",
    "goal_draft_ms",
)


@dataclass(frozen=True)
class Arm:
    """A way to run a decode step.

    Attributes:
        method: whose step it is.
        tile: of the attention of target and draft, see `workbench.models.attention`; "auto" is the kernels' choice.
        capture: what is a CUDA graph, see `workbench.decode.graphs.GraphPool`.
        search: where DART's search runs, see `workbench.drafters.dart.build_dart`.
    """

    method: str
    tile: str = "auto"
    capture: bool | tuple[str, ...] = True
    search: str = "host"

    @property
    def attention(self) -> str:
        """Of the target, by the name that it takes."""
        return "tile" if self.tile == "auto" else f"tile:{self.tile}"

    @property
    def captured(self) -> str:
        """What is a CUDA graph where there are any, in words."""
        return "all" if self.capture is True else ", ".join(self.capture or ("nothing",))


#: Arms by name. Four are cumulative: `control` is DFlash with the tile of a common serving engine; `tile` has ours,
#: whose attention also spares the launch that rotates where one tile holds the rows of a request
#: (`kernels.rotate_attend`); `allocation` has DScale's decision, launched kernel by kernel between captured draft and
#: verification; and in `graphs` that is captured too. Beside them, `paper` is `control` with the paper's tile of 16
#: rows a query head, and `launched` is `graphs` with only its draft captured. `dart` searches on the host, between two
#: graphs; `dart_search` searches on the device, so that its round is one graph.
ARMS = {
    "ar": Arm("AR"),
    "dart": Arm("DART"),
    "dart_search": Arm("DART", search="device"),
    "control": Arm("DFlash", tile="rows128"),
    "paper": Arm("DFlash", tile="paper"),
    "tile": Arm("DFlash"),
    "launched": Arm("DScale", capture=("draft",)),
    "allocation": Arm("DScale", capture=("draft", "verify")),
    "graphs": Arm("DScale"),
}
#: The one that all reductions are against.
CONTROL = "control"


@dataclass(frozen=True)
class LatencyPlan:
    """What the parameters come to.

    Attributes:
        device, dtype: of all models.
        cells: forwards by the name of a shape, the main one first.
        forwards: beside the target's own.
        forward_cells: of the main shape, measured with those.
        step_shapes: whose decode steps are measured.
        requests: N of the steps, ascending.
        arms: names of arms that are measured at every N.
        most_requests_arms: names of arms that are measured at the largest N only.
        context: committed tokens of every request of a step or draft.
        mean_rows: verified rows a request of DScale.
        draft_shapes: whose DART drafts are measured, the one with a goal first.
        layers: of every target, 0 for the published ones.
        repeats, seed: of every measurement.
    """

    device: torch.device
    dtype: torch.dtype
    cells: dict[str, list[Cell]]
    forwards: list[str]
    forward_cells: list[Cell]
    step_shapes: list[str]
    requests: list[int]
    arms: list[str]
    most_requests_arms: list[str]
    context: int
    mean_rows: int
    draft_shapes: list[str]
    layers: int
    repeats: int
    seed: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> LatencyPlan:
        """The plan of a notebook's parameters.

        Raises:
            ValueError: a value out of range or a name that is unknown; the message says what is allowed.
        """
        _check_sizes(params)
        cells = _cells(params)
        main = cells[params["shapes"][0]]
        return cls(
            device=device_by_name(params["device"]),
            dtype=getattr(torch, params["dtype"]),
            cells=cells,
            forwards=_forwards(params["forwards"]),
            forward_cells=_some(params["forward_cells"], main),
            step_shapes=_names("step_shapes", params["step_shapes"]),
            requests=sorted(params["requests"]),
            **_arms(params),
            draft_shapes=_names("draft_shapes", params["draft_shapes"]),
            **{name: params[name] for name in ("context", "mean_rows", "layers", "repeats", "seed")},
        )

    @property
    def shape(self) -> str:
        """Name of the main shape."""
        return next(iter(self.cells))

    def num_layers(self, name: str) -> int:
        """Layers of a target of that shape."""
        return self.layers or shape_by_name(name).num_hidden_layers

    def arms_at(self, requests: int) -> dict[str, Arm]:
        """Arms that are measured at one number of requests, by name, in the order of `ARMS`."""
        more = self.most_requests_arms if requests == max(self.requests) else []
        return {name: arm for name, arm in ARMS.items() if name in self.arms or name in more}


def _check_sizes(params: Mapping[str, Any]) -> None:
    for name in _LEAST.keys() & params.keys():
        if params[name] < _LEAST[name]:
            raise ValueError(f"{name}={params[name]} must be at least {_LEAST[name]}")
    for name in GOALS:
        if params[name] < 0:
            raise ValueError(f"{name}={params[name]} must be at least 0 (no goal)")
    if params["dtype"] not in TOLERANCE:
        raise ValueError(f"dtype={params['dtype']!r}; allowed: {', '.join(TOLERANCE)}")
    if params["mean_rows"] > BLOCK_SIZE:
        raise ValueError(f"mean_rows={params['mean_rows']}; allowed: 1..{BLOCK_SIZE}")
    if 0 < params["layers"] < MIN_LAYERS:
        raise ValueError(f"layers={params['layers']}; allowed: 0 (as published), {MIN_LAYERS} or more")
    requests = params["requests"]
    if not requests or len(set(requests)) < len(requests) or not all(1 <= n <= _MAX_REQUESTS for n in requests):
        raise ValueError(f"requests={list(requests)}; allowed: 1..{_MAX_REQUESTS}, at least one, each once")
    for field in ("step_shapes", "draft_shapes"):
        for name in params[field]:
            _check_context(field, "context", params["context"], shape_by_name(name))


def _check_context(field: str, what: str, context: int, shape: Shape) -> None:
    """Rows of the largest tree must have positions behind a context, whatever is measured there."""
    most = shape.max_position_embeddings
    if context + MAX_TREE_ROWS > most:
        raise ValueError(
            f"{field}: {what}={context} and {MAX_TREE_ROWS} rows go beyond the {most} positions of {shape.name}; "
            f"allowed: up to {most - MAX_TREE_ROWS}"
        )


def _cells(params: Mapping[str, Any]) -> dict[str, list[Cell]]:
    names = _names("shapes and other_shapes", [*params["shapes"], *params["other_shapes"]])
    if not params["shapes"]:
        raise ValueError("shapes=[]; allowed: at least one")
    fields = ["cells"] * len(params["shapes"]) + ["other_cells"] * len(params["other_shapes"])
    return {name: _parsed(field, params[field], shape_by_name(name)) for name, field in zip(names, fields, strict=True)}


def _parsed(field: str, texts: Sequence[str], shape: Shape) -> list[Cell]:
    cells = [Cell.parse(text) for text in texts]
    if not cells or len(set(cells)) < len(cells):
        raise ValueError(f"{field}={list(texts)}; allowed: at least one, each once")
    for cell in cells:
        if cell.kind == "prefill":
            raise ValueError(f"{field}: {cell.label!r} is a prefill; allowed: chain, ragged, tree")
        _check_context(field, f"context of {cell.label!r}", cell.context, shape)
    return cells


def _some(texts: Sequence[str], cells: Sequence[Cell]) -> list[Cell]:
    chosen = [Cell.parse(text) for text in texts]
    missing = [cell.label for cell in chosen if cell not in cells]
    if missing:
        raise ValueError(f"forward_cells={missing}; allowed: some of cells={[cell.label for cell in cells]}")
    return chosen


def _forwards(names: Sequence[str]) -> list[str]:
    allowed = [name for name in FORWARDS if name != "auto"]
    wrong = [name for name in names if name not in allowed]
    if wrong or len(set(names)) < len(names):
        raise ValueError(f"forwards={list(names)}; allowed: {', '.join(allowed)}, each once")
    return list(names)


def _arms(params: Mapping[str, Any]) -> dict[str, list[str]]:
    fields = {name: list(params[name]) for name in ("arms", "most_requests_arms")}
    names = [name for given in fields.values() for name in given]
    if any(name not in ARMS for name in names) or len(set(names)) < len(names) or CONTROL not in fields["arms"]:
        raise ValueError(
            f"arms={fields['arms']}, most_requests_arms={fields['most_requests_arms']}; allowed: {', '.join(ARMS)}, "
            f"each once in either of them, {CONTROL} among arms"
        )
    return fields


def _names(field: str, names: Sequence[str]) -> list[str]:
    """Names of published shapes, each once."""
    if len(set(names)) < len(names):
        raise ValueError(f"{field}={list(names)}; allowed: each once")
    return [shape_by_name(name).name for name in names]
