"""Writing the keys and values of packed rows into one layer of the slot cache, in plain torch."""

from __future__ import annotations

import torch


def kv_write(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
) -> None:
    """Stores row i of `key` and `value` at (slot_of_row[i], kv_row[i]); arguments as in `kernels.kv_write`."""
    live = torch.arange(key.shape[0], device=key.device) < starts[-1]
    live &= (slot_of_row >= 0) & (slot_of_row < k_cache.shape[0]) & (kv_row >= 0) & (kv_row < k_cache.shape[1])
    k_cache[slot_of_row[live], kv_row[live]] = key[live]
    v_cache[slot_of_row[live], kv_row[live]] = value[live]
