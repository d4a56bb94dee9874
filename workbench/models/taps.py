"""Reading hidden states on their way through a decoder, without asking the model to return them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def tapped_inputs(layers: Sequence[nn.Module], taps: Sequence[int], call: object = None) -> Iterator[dict]:
    """Collects the inputs of decoder layers while the block runs.

    Transformers can return hidden states itself, but leaves hooks on every module for it, which compilers cannot pass.

    Args:
        layers: the decoder's.
        taps: numbers of those whose input is wanted, i.e. indices into `hidden_states` of transformers.
        call: only forwards whose keyword argument `packed` is this object are looked at, so that threads which share a
            model do not mix their states.

    Yields:
        A dict that is filled during the block: tap -> [batch, rows, H], a copy, since layers may work in place.
    """
    states: dict[int, torch.Tensor] = {}

    def collector(tap: int) -> Callable[[nn.Module, tuple, dict], None]:
        def collect(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if kwargs.get("packed") is call:
                states[tap] = (args[0] if args else kwargs["hidden_states"]).clone()

        return collect

    handles = [layers[tap].register_forward_pre_hook(collector(tap), with_kwargs=True) for tap in sorted(set(taps))]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
