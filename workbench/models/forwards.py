"""Which forward the layers of an adapted model have beside their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

#: The model's own operations; those, compiled; a fixed sequence of kernels; the best that fits target and device.
FORWARDS = ("stock", "compiled", "fused", "auto")


class WeightPlaces:
    """Where the weights of layers are when a fast forward begins to hold views of them.

    Changes in place, as by `load_state_dict`, reach those views. A copy of the model, `.to(...)` or an assigned
    parameter does not, and the fast forward would go on with the old values; so the places are compared.

    Args:
        modules: whose parameters count, those of their parts included.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = [part for module in modules for part in module.modules()]
        # The dicts themselves: asking modules for their attributes takes seven times as long in every forward. In a
        # deep copy of the model they are those of the copy, and so not where the original's were.
        self._places = [
            (part._parameters, name, weight.data_ptr())
            for part in parts
            for name, weight in part.named_parameters(recurse=False)
        ]

    @property
    def moved(self) -> bool:
        """True if a weight is elsewhere by now."""
        return any(weights[name].data_ptr() != place for weights, name, place in self._places)


@dataclass
class ForwardReport:
    """What a fast forward is and what it cost.

    Attributes:
        kind: "compiled" or "fused".
        merged: products that were saved by merging weights.
        seconds: one entry a compiled piece, the time of the compiler.
        reason: why "auto" did not fuse; "" where it did, or was not asked.
        places: where the weights are that it holds; None until it is made.
    """

    kind: str
    merged: int = 0
    seconds: list[float] = field(default_factory=list)
    reason: str = ""
    places: WeightPlaces | None = field(default=None, repr=False, compare=False)


class NormAhead:
    """The norm that a layer begins with, where the layer before made it with its last product."""

    def __init__(self) -> None:
        self._kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def put(self, of: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor) -> None:
        """Keeps the norm of the residual stream `of` by `weight`; `of` may not change in place before it is taken."""
        self._kept = (of, weight, normed)

    def take(self, of: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        """The norm by that very weight of what lies at that very place, once; None if another was kept, or none."""
        kept, self._kept = self._kept, None
        if kept is None or kept[1] is not weight:
            return None
        stream = kept[0]  # alive, so nothing else lies where it does
        return kept[2] if stream.data_ptr() == of.data_ptr() and stream.shape == of.shape else None


class SwitchedForward:
    """A layer's forward: the fast one where `packed` asks for it, else the layer's own.

    Attributes:
        plain, fast: both.
    """

    def __init__(self, plain: Callable, fast: Callable) -> None:
        self.plain, self.fast = plain, fast

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Arguments are those of the layer."""
        packed = kwargs.get("packed")
        return (self.fast if packed is not None and packed.fast else self.plain)(*args, **kwargs)
