"""What a kernel report is asked for, checked before anything runs: head shapes, cells, sizes.

Knows the parameters of notebook `08_kernels` by name; imports no kernel and makes no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.measure.kernel_times import TOLERANCE
from workbench.models.shapes import SHAPES, Shape, shape_by_name
from workbench.types import MAX_TREE_ROWS

_LEAST = {
    "layers": 1,
    "drafts": 1,
    "mean_rows": 1,
    "repeats": 1,
    "threads": 0,
    "goal_floor_share": 0,
}
_MIN_VOCAB = 16  # the best 16 logits are features
_MAX_REQUESTS = 256


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of a target.

    Attributes:
        models: whose they are.
        heads, kv_heads, head_dim: H, Hk, D.
    """

    models: str
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, name: str) -> HeadShape:
        """The heads of a published target, and all such targets that share them: one measurement stands for all.

        Raises:
            ValueError: an unknown name.
        """
        sizes = _heads(shape_by_name(name))
        return cls(", ".join(shape.name for shape in SHAPES.values() if _heads(shape) == sizes), *sizes)


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim


#: Kinds of rows. chain: so many rows of every request; ragged: chains of 1 to twice that, so many on average, as DScale
#: cuts them; tree: random trees; prefill: causal rows without ancestor bits.
KINDS = ("chain", "ragged", "tree", "prefill")
_CELL = re.compile(rf"(\d+) ?x ?({'|'.join(KINDS)})(\d+) ?@ ?(\d+)")


@dataclass(frozen=True)
class Cell:
    """One call of the attention: `requests` x `kind` `rows` @ `context`.

    Attributes:
        requests: N.
        kind: one of `KINDS`.
        rows: of each request, the mean of ragged ones.
        context: committed rows of each request.
    """

    requests: int
    kind: str
    rows: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Cell:
        """A cell from its text, such as "32 x chain16 @ 1024".

        Raises:
            ValueError: another form, or numbers out of range.
        """
        match = _CELL.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"cell={text!r}; allowed: N x KIND+ROWS @ CONTEXT with KIND one of {', '.join(KINDS)}")
        cell = cls(int(match[1]), match[2], int(match[3]), int(match[4]))
        if not 1 <= cell.requests <= _MAX_REQUESTS or cell.rows < 1:
            raise ValueError(f"cell={text!r}; allowed: 1..{_MAX_REQUESTS} requests of at least 1 row")
        if cell.kind != "prefill" and cell.max_rows > MAX_TREE_ROWS:
            raise ValueError(f"cell={text!r} has requests of {cell.max_rows} rows; allowed: 1..{MAX_TREE_ROWS}")
        return cell

    @property
    def max_rows(self) -> int:
        """Bound on the rows of a request, what a launch is sized for."""
        return 2 * self.rows if self.kind == "ragged" else self.rows

    @property
    def label(self) -> str:
        """The text that `parse` reads."""
        return f"{self.requests} x {self.kind}{self.rows} @ {self.context}"


@dataclass(frozen=True)
class KernelPlan:
    """What the parameters come to.

    Attributes:
        device, dtype: of all tensors.
        shapes: head shapes by the name of a target, the main one first.
        cells: the same names, cells measured with each.
        flex_cells: those of the main shape that FlexAttention is compiled for.
        split_cells, splits: of the main shape, measured with every number of splits.
        requests: N of the decision kernels, ascending.
        vocab, drafts, mean_rows, layers: sizes of the decision kernels: V, drafted tokens of a request, verified rows
            of a request, layers of the cache.
        repeats, seed: of every measurement.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, HeadShape]
    cells: dict[str, list[Cell]]
    flex_cells: list[Cell]
    split_cells: list[Cell]
    splits: list[int]
    requests: list[int]
    vocab: int
    drafts: int
    mean_rows: int
    layers: int
    repeats: int
    seed: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> KernelPlan:
        """The plan of a notebook's parameters.

        Raises:
            ValueError: a value out of range or a name that is unknown; the message says what is allowed.
        """
        _check_sizes(params)
        shapes = _shapes([params["shape"], *params["other_shapes"]])
        cells = _cells(params, list(shapes))
        return cls(
            device=device_by_name(params["device"]),
            dtype=getattr(torch, params["dtype"]),
            shapes=shapes,
            cells=cells,
            flex_cells=_some("flex_cells", params["flex_cells"], cells[params["shape"]]),
            split_cells=_some("split_cells", params["split_cells"], cells[params["shape"]]),
            splits=sorted(params["splits"]),
            requests=sorted(params["requests"]),
            **{name: params[name] for name in ("vocab", "drafts", "mean_rows", "layers", "repeats", "seed")},
        )

    @property
    def shape(self) -> str:
        """Name of the main head shape."""
        return next(iter(self.cells))


def _check_sizes(params: Mapping[str, Any]) -> None:
    for name in _LEAST.keys() & params.keys():
        if params[name] < _LEAST[name]:
            raise ValueError(f"{name}={params[name]} must be at least {_LEAST[name]}")
    if params["dtype"] not in TOLERANCE:
        raise ValueError(f"dtype={params['dtype']!r}; allowed: {', '.join(TOLERANCE)}")
    if params["vocab"] < _MIN_VOCAB:
        raise ValueError(f"vocab={params['vocab']} must be at least {_MIN_VOCAB}")
    if params["drafts"] >= MAX_TREE_ROWS or params["mean_rows"] > params["drafts"] + 1:
        raise ValueError(
            f"drafts={params['drafts']}, mean_rows={params['mean_rows']}; allowed: drafts below {MAX_TREE_ROWS} and at "
            "most one row more than drafts"
        )
    for name, values, bound in (("splits", params["splits"], 32), ("requests", params["requests"], _MAX_REQUESTS)):
        if len(set(values)) < len(values) or not all(1 <= value <= bound for value in values):
            raise ValueError(f"{name}={list(values)}; allowed: 1..{bound}, each once")
    uneven = [value for value in params["splits"] if value & (value - 1)]
    if uneven:
        raise ValueError(f"splits={uneven}; allowed: powers of two")


def _shapes(names: Sequence[str]) -> dict[str, HeadShape]:
    shapes = {name: HeadShape.of(name) for name in names}
    if len(set(shapes.values())) < len(names):
        raise ValueError(f"other_shapes={names[1:]} beside shape={names[0]!r}; allowed: each kind of heads once")
    return shapes


def _cells(params: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[Cell]]:
    if not params["cells"]:
        raise ValueError("cells=[]; allowed: at least one")
    main, other = ([Cell.parse(text) for text in params[name]] for name in ("cells", "other_cells"))
    for name, cells in (("cells", main), ("other_cells", other)):
        if len(set(cells)) < len(cells):
            raise ValueError(f"{name}={[cell.label for cell in cells]}; allowed: each once")
    return {names[0]: main} | {name: other for name in names[1:]}


def _some(name: str, texts: Sequence[str], cells: Sequence[Cell]) -> list[Cell]:
    """Cells of a parameter, which must be among those that are measured."""
    chosen = [Cell.parse(text) for text in texts]
    missing = [cell.label for cell in chosen if cell not in cells]
    if missing:
        raise ValueError(f"{name}={missing}; allowed: some of cells={[cell.label for cell in cells]}")
    return chosen


def device_by_name(name: str) -> torch.device:
    """A device that is there: the CPU or a CUDA device.

    Raises:
        ValueError: another name, or one of no device.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}; allowed: cpu, cuda, cuda:N")
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"device={name!r}: there are {count} CUDA devices; allowed: cpu" + ", cuda" * (count > 0))
    return torch.device("cuda", index)
