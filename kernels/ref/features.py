"""Best logits, normaliser and entropy of rows of logits, in plain torch: the truth for `kernels.features`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.tensor_checks import require_rows

NUM_TOP = 16


class LogitFeatures(NamedTuple):
    """What n rows of logits say about themselves.

    Attributes:
        values: [n, 16] float32, the largest logits, largest first.
        ids: [n, 16] int64, where they are; between equal logits the lowest id comes first.
        normaliser: [n] float32, ln of the sum of exp.
        entropy: [n] float32, in nats.
    """

    values: torch.Tensor
    ids: torch.Tensor
    normaliser: torch.Tensor
    entropy: torch.Tensor


def check_logits(logits: torch.Tensor) -> None:
    """Refuses what no implementation takes.

    Raises:
        ValueError: not [n, V] of a float type with V from 16 to 2^31 - 1, or values of a row lie apart.
    """
    if logits.ndim != 2 or not NUM_TOP <= logits.shape[1] < 2**31 or not logits.is_floating_point():
        raise ValueError(f"logits {list(logits.shape)} {logits.dtype}, allowed [n, {NUM_TOP}..2^31-1] of a float type")
    require_rows(logits=logits)


def features(logits: torch.Tensor) -> LogitFeatures:
    """Sorts every row; sums in float64.

    Args:
        logits: [n, V] of any float type, compared as float32; rows may lie apart. Minus infinity is a probability of
            zero. A row with NaN or plus infinity has the normaliser NaN, and its best values are not defined.

    Raises:
        ValueError: see `check_logits`.
    """
    check_logits(logits)
    rows = logits.float()
    ordered = rows.sort(dim=-1, descending=True, stable=True)
    exact = rows.double()
    normaliser = torch.where(exact.isposinf().any(-1), torch.nan, exact.logsumexp(-1))
    entropy = torch.special.entr(exact.softmax(-1)).sum(-1)
    return LogitFeatures(
        ordered.values[:, :NUM_TOP].contiguous(),
        ordered.indices[:, :NUM_TOP].contiguous(),
        normaliser.float(),
        entropy.float(),
    )
