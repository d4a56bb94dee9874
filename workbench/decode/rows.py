"""Packing: draft trees of several requests become one flat buffer of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workbench.models.packed import PackedRows
from workbench.search.encode import ancestor_masks
from workbench.types import DraftTree


def pack_trees(
    trees: Sequence[DraftTree], slots: Sequence[int], context_len: Sequence[int], device: torch.device
) -> PackedRows:
    """Rows of one tree a request; node i of a request becomes its row i, at position context + depth."""
    starts = np.concatenate([[0], np.cumsum([len(t.tokens) for t in trees])])
    positions = np.concatenate([c + t.depths for t, c in zip(trees, context_len, strict=True)])
    return _rows(
        np.concatenate([t.tokens for t in trees]),
        positions,
        np.concatenate([ancestor_masks(t.parents) for t in trees]),
        slots,
        starts,
        context_len,
        device,
    )


def pack_chunks(
    chunks: Sequence[np.ndarray], slots: Sequence[int], context_len: Sequence[int], device: torch.device
) -> PackedRows:
    """Rows of a prefill: one causal run of token ids a request, of any length."""
    starts = np.concatenate([[0], np.cumsum([len(c) for c in chunks])])
    positions = np.concatenate([n + np.arange(len(c)) for c, n in zip(chunks, context_len, strict=True)])
    return _rows(np.concatenate(chunks), positions, None, slots, starts, context_len, device)


def _rows(
    tokens: np.ndarray,
    positions: np.ndarray,
    ancestors: np.ndarray | None,
    slots: Sequence[int],
    starts: np.ndarray,
    context_len: Sequence[int],
    device: torch.device,
) -> PackedRows:
    counts = np.diff(starts)
    kv_row = np.arange(starts[-1]) - np.repeat(starts[:-1] - np.asarray(context_len), counts)
    columns = np.stack([tokens, positions, np.repeat(np.asarray(slots), counts), kv_row]).astype(np.int64)
    on_device = torch.from_numpy(columns).to(device)  # one copy to the device for all four
    return PackedRows(
        tokens=on_device[0],
        positions=on_device[1],
        slot_of_row=on_device[2],
        kv_row=on_device[3],
        ancestors=ancestors,
        slots=tuple(int(s) for s in slots),
        starts=tuple(starts.tolist()),
        context_len=tuple(int(c) for c in context_len),
    )
