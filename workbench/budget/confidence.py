"""What draft logits say about themselves: best values, normaliser and entropy, in float32 whatever their type."""

from __future__ import annotations

from typing import NamedTuple

import torch

from workbench.kernel_path import kernel
from workbench.types import Signals

#: Where exp is still a normal float32 number. Keeps a logit of minus infinity from making the entropy NaN.
_FAR_BELOW = -87.0
#: Logits that one pass takes at once: what stays in a CPU's cache, and what a GPU has room for.
_PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
_BLOCK = 256


class Confidence(NamedTuple):
    """What rows of logits say about themselves.

    Attributes:
        tokens: [...] int64, id of the largest logit, the lowest between equals.
        values: [..., 16] float32, the largest logits, largest first.
        normaliser: [...] float32, ln of the sum of exp.
        entropy: [...] float32, in nats.
    """

    tokens: torch.Tensor
    values: torch.Tensor
    normaliser: torch.Tensor
    entropy: torch.Tensor


def confidence_features(logits: torch.Tensor) -> Confidence:
    """All of it from one pass over the vocabulary; nothing is read on the host, so the call can be captured.

    A row with NaN or plus infinity has the normaliser NaN; its tokens and values are not defined, those of other rows
    are not touched.

    Args:
        logits: [..., V] of any float type, V from 16 on. Contiguous, or the rows are copied first.

    Raises:
        ValueError: see `kernels.ref.features.check_logits`.
    """
    found = kernel("features", logits.device)(logits.flatten(0, -2))
    shape = logits.shape[:-1]
    return Confidence(
        found.ids[:, 0].unflatten(0, shape),
        found.values.unflatten(0, shape),
        found.normaliser.unflatten(0, shape),
        found.entropy.unflatten(0, shape),
    )


def draft_log_probs(signals: Signals) -> torch.Tensor:
    """[R, n] float32: log-probability of each drafted token under the draft distribution."""
    return token_log_probs(signals.logits, signals.tokens, normaliser_and_entropy(signals.logits)[0])


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor, normaliser: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of some tokens: logits [..., V], ids and normalisers [...] -> [...] float32."""
    return logits.gather(-1, tokens[..., None].long())[..., 0].float() - normaliser


def top_logits(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of every row, largest first: [..., V] -> [..., count] float32.

    They lie in the `count` blocks with the largest maxima, so only these are searched.
    """
    num_blocks = logits.shape[-1] // _BLOCK
    if num_blocks <= count:
        return logits.topk(count).values.float()
    whole = logits[..., : num_blocks * _BLOCK].unflatten(-1, (num_blocks, _BLOCK))
    blocks = whole.amax(-1).topk(count, sorted=False).indices[..., None].expand(*logits.shape[:-1], count, _BLOCK)
    candidates = whole.gather(-2, blocks).flatten(-2)
    return torch.cat((candidates, logits[..., num_blocks * _BLOCK :]), -1).topk(count).values.float()


def normaliser_and_entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ln of the sum of exp, and entropy in nats, of every row: [..., V] -> twice [...] float32."""
    rows = logits.flatten(0, -2)
    normaliser = torch.empty(len(rows), device=logits.device)
    entropy = torch.empty_like(normaliser)
    size = max(1, _PIECE.get(logits.device.type, _PIECE["cpu"]) // logits.shape[-1])
    for start in range(0, len(rows), size):
        piece = rows[start : start + size]
        largest = piece.amax(-1, keepdim=True).float()
        below = (piece - largest).clamp_(min=_FAR_BELOW)
        weights = below.exp()
        total = weights.sum(-1)
        log_total = total.log()
        normaliser[start : start + size] = largest[:, 0] + log_total
        entropy[start : start + size] = log_total - weights.mul_(below).sum(-1) / total
    return normaliser.view(logits.shape[:-1]), entropy.view(logits.shape[:-1])
