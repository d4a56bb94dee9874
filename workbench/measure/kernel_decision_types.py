"""What a case of the decision table is: sizes of a round, inputs of a kernel, and how outcomes are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.kernel_path import add_own_kernels
from workbench.measure.kernel_plan import HeadShape
from workbench.measure.kernel_times import differing

#: Calls of a kernel that is too short to be timed alone, on the same inputs: a round finds them in the cache too.
SHORT = 16


@dataclass(frozen=True)
class DecisionSizes:
    """Sizes of a round: N requests, drafts and mean verified rows of each, V, layers of the cache and its heads."""

    requests: int
    drafts: int
    mean_rows: int
    vocab: int
    layers: int
    shape: HeadShape
    dtype: torch.dtype
    device: torch.device

    @property
    def rows(self) -> int:
        """Verified rows of the round."""
        return self.requests * self.mean_rows


@dataclass(frozen=True)
class DecisionCase:
    """One kernel with its inputs.

    Attributes:
        kernel: its name.
        text: what the inputs are.
        inputs: arguments of the calls, which take turns.
        num_bytes: what must be read and written at least.
        moves: whether moving these bytes is what takes the time, so that a share of the floor means something; not so
            if a launch takes longer, or reads that wait for each other.
        outcome: what a call leaves, from the function and its arguments: tensors to compare.
        off: how far apart two outcomes are.
        tolerance: largest `off`.
        plain: calls of plain torch that do the same.
        short: whether a call is too short to be timed alone.
    """

    kernel: str
    text: str
    inputs: list[tuple]
    num_bytes: float
    moves: bool
    outcome: Callable[[Callable, tuple], tuple[torch.Tensor, ...]]
    off: Callable[[Any, Any], float] = differing
    tolerance: float = 0.0
    plain: list[Callable[[], Any]] = field(default_factory=list)
    short: bool = True

    def calls(self, function: Callable) -> list[Callable[[], Any]]:
        """`function` on all inputs in turn; a short one several times on the only ones."""
        calls = [lambda given=given: function(*given) for given in self.inputs]
        return calls if len(calls) > 1 or not self.short else calls * SHORT

    def error(self, kernel: Callable, reference: Callable) -> float:
        """How far the kernel's outcome on the first inputs is from the reference's."""
        return self.off(self.outcome(kernel, self.inputs[0]), self.outcome(reference, self.inputs[0]))


def results(function: Callable, given: tuple) -> tuple[torch.Tensor, ...]:
    """Outcome of a function that returns one or several tensors."""
    found = function(*given)
    return (found,) if isinstance(found, torch.Tensor) else tuple(found)


def written(*places: int) -> Callable[[Callable, tuple], tuple[torch.Tensor, ...]]:
    """Outcome of a function that writes into its arguments at `places`: what copies of them hold afterwards."""

    def outcome(function: Callable, given: tuple) -> tuple[torch.Tensor, ...]:
        own = [value.clone() if i in places else value for i, value in enumerate(given)]
        function(*own)
        return tuple(own[i] for i in places)

    return outcome


def packed(function: Callable, given: tuple) -> tuple[torch.Tensor, ...]:
    """Outcome of a function that fills the `ChainRows` which are its last argument: rows that held something else."""
    add_own_kernels()
    from kernels.ref.pack import ChainRows

    own = ChainRows(*(torch.full_like(part, -7) for part in given[-1]))
    function(*given[:-1], own)
    return tuple(own)
