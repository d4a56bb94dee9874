"""Rows of the attention table: every tile of a cell and the library functions beside it, with error, floor and share.

The floor of a call is the time in which a large copy by an elementwise kernel moves, read and written, as many bytes as
the visible keys and values have, each read once a KV head. It leaves out queries and results, and what a device can do
beyond such a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm

from workbench.kernel_path import add_own_kernels
from workbench.measure.kernel_cases import AttentionCase
from workbench.measure.kernel_peers import PEERS, Absent
from workbench.measure.kernel_plan import KernelPlan
from workbench.measure.kernel_times import TOLERANCE, Timing, release, time_calls, worst_row_error

#: Tiles of `kernels.tile_attention` by name: the paper's verify tile, the one of its control arm, and ours.
TILES = ("rows16", "rows128", "packed")
#: What a CPU runs in their place.
REFERENCE = "reference"
#: Longest text of an error that stands in for a peer's time.
_MAX_NOTE = 160

Row = dict[str, Any]


def attention_rows(plan: KernelPlan, bandwidth: float, progress: bool = False) -> list[Row]:
    """All tiles and peers on all cells of a plan.

    Args:
        plan: what to measure.
        bandwidth: bytes a second that floors are stated by, see `copy_bandwidth`.
        progress: show a bar.

    Returns:
        Fields: shape, cell, what (a tile or a peer), tile_rows, splits, us (median of the passes, with us_min and
        us_max), floor_us (kv_bytes over `bandwidth`), share (floor over time), tflops, error with tolerance and ok,
        note (why a peer is absent, which then has no time), role ("kernel", "peer"), models, heads, kv_heads, head_dim,
        dtype, requests, kind, rows (of all requests), context, sets (of inputs that took turns).
    """
    rows = []
    cells = [(name, cell) for name, cells in plan.cells.items() for cell in cells]
    for name, cell in tqdm(cells, desc="attention", disable=not progress):
        case = AttentionCase(plan.shapes[name], cell, plan.dtype, plan.device, plan.seed)
        judge = _Judge(name, case, bandwidth, plan.repeats)
        rows += [judge.row(what, "kernel", calls, **how) for what, calls, how in _kernels(case)]
        for peer in PEERS:
            if peer != "flex" or (name == plan.shape and cell in plan.flex_cells):
                rows.append(judge.peer(peer))
        del case, judge
        release(plan.device)
    return rows


def split_rows(plan: KernelPlan, bandwidth: float, progress: bool = False) -> list[Row]:
    """The packed tile on the split cells of a plan with every number of splits, and which one it would choose itself.

    Args and fields as in `attention_rows`, and chosen. Empty on a CPU, whose reference splits nothing.
    """
    rows = []
    if plan.device.type != "cuda":
        return rows
    for cell in tqdm(plan.split_cells, desc="split keys", disable=not progress):
        case = AttentionCase(plan.shapes[plan.shape], cell, plan.dtype, plan.device, plan.seed)
        judge = _Judge(plan.shape, case, bandwidth, plan.repeats)
        own = _tile(case, "packed")
        for splits in plan.splits:
            calls = case.kernel_calls(replace(own, splits=splits))
            how = {"tile_rows": own.rows, "splits": splits}
            rows.append(judge.row("packed", "kernel", calls, **how) | {"chosen": splits == own.splits})
        del case, judge
        release(plan.device)
    return rows


class _Judge:
    """Makes the rows of one case: knows its exact result and its floor."""

    def __init__(self, name: str, case: AttentionCase, bandwidth: float, repeats: int) -> None:
        self._name, self._case, self._repeats = name, case, repeats
        self._numbers, self._exact = case.exact()
        self._num_bytes = case.kv_elements * case.queries[0].element_size()
        self._floor_us = 1e6 * self._num_bytes / bandwidth
        self._dtype = str(case.queries[0].dtype).removeprefix("torch.")

    def row(
        self,
        what: str,
        role: str,
        calls: Sequence[Callable[[], torch.Tensor]],
        packed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **cut: int,
    ) -> Row:
        """Checks the first of `calls`, whose result `packed` brings into [M, H, D], and times all of them."""
        out = calls[0]()
        found = out if packed is None else packed(out)
        error = worst_row_error(found[self._numbers], self._exact)
        return self._row(what, role, time_calls(calls, self._case.device, self._repeats), error, **cut)

    def peer(self, what: str) -> Row:
        """The row of a library function; whatever it raises becomes a note, as the kernels' rows stand without it."""
        try:
            made = PEERS[what](self._case)
            return self.row(what, "peer", made.calls, made.rows)
        except Absent as reason:
            note = str(reason)
        except Exception as error:  # an unsupported size may be refused in any way
            note = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_NOTE]
        return self._row(what, "peer", note=note)

    def _row(
        self,
        what: str,
        role: str,
        timing: Timing | None = None,
        error: float | None = None,
        note: str = "",
        tile_rows: int | None = None,
        splits: int | None = None,
    ) -> Row:
        case, shape, cell = self._case, self._case.shape, self._case.cell
        us, tolerance = timing.median_us if timing else None, TOLERANCE[self._dtype]
        return {
            "shape": self._name,
            "cell": cell.label,
            "what": what,
            "tile_rows": tile_rows,
            "splits": splits,
            "us": us,
            "floor_us": self._floor_us,
            "share": self._floor_us / us if us else None,
            "tflops": case.flops / us / 1e6 if us else None,
            "error": error,
            "tolerance": tolerance,
            "ok": None if error is None else error <= tolerance,
            "note": note,
            "role": role,
            "models": shape.models,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": self._dtype,
            "requests": cell.requests,
            "kind": cell.kind,
            "rows": sum(case.lengths),
            "context": cell.context,
            "kv_bytes": self._num_bytes,
            "us_min": timing.min_us if timing else None,
            "us_max": timing.max_us if timing else None,
            "sets": timing.calls if timing else None,
        }


def _kernels(case: AttentionCase) -> Iterator[tuple[str, list[Callable[[], torch.Tensor]], Row]]:
    """(name, calls, how it is cut) of what the device runs."""
    if case.device.type != "cuda":
        yield REFERENCE, case.reference_calls(), {}
        return
    for name in TILES:
        tile = _tile(case, name)
        yield name, case.kernel_calls(tile), {"tile_rows": tile.rows, "splits": tile.splits}


def _tile(case: AttentionCase, name: str) -> Any:
    """The tile that `kernels.tile_attention` takes for a case."""
    add_own_kernels()
    from kernels.tile_choice import choose_tile

    shape, cell = case.shape, case.cell
    return choose_tile(
        name,
        shape.heads // shape.kv_heads,
        shape.kv_heads,
        shape.head_dim,
        cell.requests,
        cell.max_rows,
        cell.context,
        case.queries[0].element_size(),
        torch.cuda.get_device_properties(case.device).multi_processor_count,
    )
