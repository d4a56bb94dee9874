"""Step-by-step decoding with nothing clever in it: the yardstick of the engine's tests and the oracle drafters' source.

Every token costs one forward over one row behind a cache of its own; no tree, no engine, no drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workbench.models.packed import causal_rows
from workbench.models.target import Target


def greedy_continuation(target: Target, tokens: Sequence[int], num_tokens: int) -> Iterator[int]:
    """The `num_tokens` tokens that the target puts behind `tokens` by argmax, one at a time, stop ids ignored."""
    cache = target.new_cache(1, len(tokens) + num_tokens)
    new, start = list(tokens), 0
    for _ in range(num_tokens):
        rows = causal_rows(new, 0, start, target.device)
        last = torch.tensor([len(new) - 1], device=target.device)
        token = int(target.forward(rows, cache, logit_rows=last).logits[0].argmax())
        yield token
        start += len(new)
        new = [token]
