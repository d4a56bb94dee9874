"""Rows of the table of the decision and acceptance kernels: time, error, and the bytes that must move at least.

Sizes are those of DScale with DFlash chains: N requests with `drafts` drafted tokens each, `mean_rows` verified rows a
request. On a CPU the references run in the kernels' place and there is nothing to compare them with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm

from workbench.kernel_path import add_own_kernels
from workbench.measure.kernel_decision_cases import CASES, DecisionCase, DecisionSizes
from workbench.measure.kernel_plan import KernelPlan
from workbench.measure.kernel_times import time_calls

Row = dict[str, Any]


def decision_rows(plan: KernelPlan, bandwidth: float, progress: bool = False) -> list[Row]:
    """Every kernel of a round but the attention, at every number of requests of a plan.

    Args:
        plan: what to measure.
        bandwidth: bytes a second that floors are stated by, see `copy_bandwidth`.
        progress: show a bar.

    Returns:
        Fields: kernel, case, requests, what ("kernel", or "reference" on a CPU, "torch" for plain torch, "launch" for
        an empty launch), role ("kernel", "peer"), us with us_min and us_max, bytes, floor_us, share (floor over time;
        None where the bytes are so few that the time is that of a launch), error with tolerance and ok.
    """
    rows = []
    work = [(requests, name) for requests in plan.requests for name in CASES]
    for requests, name in tqdm(work, desc="decision", disable=not progress):
        torch.manual_seed(plan.seed)
        sizes = DecisionSizes(
            requests,
            plan.drafts,
            plan.mean_rows,
            plan.vocab,
            plan.layers,
            plan.shapes[plan.shape],
            plan.dtype,
            plan.device,
        )
        case = CASES[name](sizes)
        head = {"kernel": name, "case": case.text, "requests": requests}
        rows += [head | row for row in _Measured(case, plan, bandwidth).rows()]
        del case
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()
    return [*rows, _launch_row(plan)]


@dataclass(frozen=True)
class _Measured:
    """Makes the rows of one kernel at one size."""

    case: DecisionCase
    plan: KernelPlan
    bandwidth: float

    def rows(self) -> list[Row]:
        """Of the kernel, or of its reference on a CPU; then of plain torch, where the case has such calls."""
        case, cuda = self.case, self.plan.device.type == "cuda"
        kernel, reference = kernel_and_reference(case.kernel)
        error = case.error(kernel, reference) if cuda else None
        calls = case.calls(kernel if cuda else reference)
        rows = [self._row("kernel" if cuda else "reference", "kernel", calls, error)]
        if case.plain:
            rows.append(self._row("torch", "peer", case.plain, None))
        return rows

    def _row(self, what: str, role: str, calls: list[Callable[[], Any]], error: float | None) -> Row:
        timing = time_calls(calls, self.plan.device, self.plan.repeats)
        floor = 1e6 * self.case.num_bytes / self.bandwidth
        share = floor / timing.median_us if self.case.moves else None
        times = {"us": timing.median_us, "us_min": timing.min_us, "us_max": timing.max_us}
        verdict = {"tolerance": self.case.tolerance, "ok": None if error is None else error <= self.case.tolerance}
        traffic = {"bytes": self.case.num_bytes, "floor_us": floor, "share": share}
        return {"what": what, "role": role, **times, **traffic, "error": error, **verdict}


def kernel_and_reference(name: str) -> tuple[Callable, Callable]:
    """Both functions of a name, with the same arguments."""
    add_own_kernels()
    if name == "kv_write":
        from kernels.kv_write import launch
        from kernels.ref.kv_write import kv_write

        return launch, kv_write
    from kernels.table import KERNELS

    return KERNELS[name]


def _launch_row(plan: KernelPlan) -> Row:
    """What a launch costs that does next to nothing: no kernel of a graph takes less."""
    one = torch.zeros(1, device=plan.device)
    timing = time_calls([lambda: one.add_(1)] * 32, plan.device, plan.repeats)
    head = {"kernel": "launch", "case": "one addition", "requests": None, "what": "torch", "role": "peer"}
    times = {"us": timing.median_us, "us_min": timing.min_us, "us_max": timing.max_us}
    return {**head, **times, "bytes": 8, "floor_us": None, "share": None, "error": None, "tolerance": None, "ok": None}
