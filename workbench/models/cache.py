"""The slot KV cache: one contiguous range of rows for every request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def head_dim_of(config: PreTrainedConfig) -> int:
    """D, width of an attention head; configurations that do not name it mean an equal share of the hidden size."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class SlotCache:
    """Keys (already rotated) and values of all layers; rows of a slot are token positions.

    Rows 0..C-1 of a slot are committed context; a round writes its rows at C, C+1, ... in packing order and
    `keep_path` then moves the accepted ones together. Nothing is cleared: rows past the committed length are
    garbage by definition and are overwritten by the next round.

    Args:
        num_layers, slots, max_len, num_kv_heads, head_dim: sizes.
        dtype, device: of the stored tensors.

    Attributes:
        kv: [layers, 2, slots, max_len + 1, Hk, D], index 1 is key / value.
        max_len: rows a slot has for tokens; also the number of the dead row behind them, where rows that belong to no
            request put what must be put somewhere.
    """

    def __init__(
        self,
        num_layers: int,
        slots: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_len = max_len
        self.kv = torch.zeros(num_layers, 2, slots, max_len + 1, num_kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        """Number of requests that fit."""
        return self.kv.shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (keys, values) of one layer, each [slots, max_len + 1, Hk, D]."""
        return self.kv[index, 0], self.kv[index, 1]

    def write(
        self, layer: int, slot_of_row: torch.Tensor, kv_row: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores rows: key, value [M, Hk, D] go to (slot_of_row [M], kv_row [M]), both int64."""
        self.kv[layer, 0].index_put_((slot_of_row, kv_row), key)
        self.kv[layer, 1].index_put_((slot_of_row, kv_row), value)

    def keep_path(self, slot: int, start: int, path: Sequence[int]) -> None:
        """Moves rows start + path[i] to start + i for all layers; `path` is increasing, so no source is lost."""
        moved = [(node, i) for i, node in enumerate(path) if node != i]
        if not moved:
            return
        source = torch.tensor([start + node for node, _ in moved], device=self.kv.device)
        target = torch.tensor([start + i for _, i in moved], device=self.kv.device)
        self.kv[:, :, slot].index_copy_(2, target, self.kv[:, :, slot].index_select(2, source))
