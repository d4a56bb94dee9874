"""Where committed tokens go in a drafter's slot cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from workbench.types import Commit


class CommittedRows(NamedTuple):
    """The rows of one commit, requests one after another.

    Attributes:
        slots: [R] int64, on the host.
        counts: [R] int64, rows of each request, on the host.
        ends: [R] int64, committed tokens of each request afterwards, on the host.
        slot_of_row: [M] int64, on the device.
        positions: [M] int64, on the device.
    """

    slots: np.ndarray
    counts: np.ndarray
    ends: np.ndarray
    slot_of_row: torch.Tensor
    positions: torch.Tensor


def committed_rows(
    commit: Commit, lengths: np.ndarray, max_len: int, tap_width: int, device: torch.device
) -> CommittedRows:
    """Places of the committed tokens, once they are known to fit.

    Args:
        commit: what became final.
        lengths: [slots] int64, committed tokens of each slot so far.
        max_len: most tokens of a slot.
        tap_width: columns that the taps must have.
        device: where the cache is.

    Raises:
        ValueError: no taps, a chunk that does not continue its slot, or one beyond `max_len`.
    """
    counts = np.array([len(t) for t in commit.tokens], np.int64)
    starts, slots = np.array(commit.starts, np.int64), np.array(commit.slots, np.int64)
    total = int(counts.sum())
    if commit.taps is None or commit.taps.shape != (total, tap_width):
        shape = None if commit.taps is None else list(commit.taps.shape)
        raise ValueError(f"taps {shape}; needed: [{total}, {tap_width}], one row a committed token")
    for slot, start, count in zip(slots, starts, counts, strict=True):
        if count < 1 or start not in (0, lengths[slot]) or start + count > max_len:
            raise ValueError(
                f"slot {slot}: {count} tokens from position {start}; allowed: 1 or more from 0 or {lengths[slot]}, "
                f"ending at {max_len} at the latest"
            )
    first_rows = np.cumsum(counts) - counts
    places = np.stack([np.repeat(slots, counts), np.arange(total) + np.repeat(starts - first_rows, counts)])
    slot_of_row, positions = torch.from_numpy(places).to(device)
    return CommittedRows(slots, counts, starts + counts, slot_of_row, positions)
