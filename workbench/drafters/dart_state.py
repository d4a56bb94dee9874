"""What DART remembers of every request of an engine, shared by its rounds on the host and on the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel
from workbench.models.cache import SlotCache

#: Candidates kept at each position before the search, as published.
NUM_CANDIDATES = 25


def num_candidates(config: DartConfig) -> int:
    """C, candidates at each position: a small draft vocabulary has fewer."""
    return min(NUM_CANDIDATES, config.draft_vocab_size)


class DraftRows(NamedTuple):
    """Parts of the rows of a draft, none of them rotated.

    Attributes:
        residual: [..., H].
        query: [..., n_h, head_dim].
        key, value: [..., n_kv, head_dim].
    """

    residual: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class DartState:
    """K/V of the real rows of every slot, and the rows that its next draft starts from.

    The cache has `draft_length` rows more than `max_len`: masks are written behind the real rows and overwritten by
    the next ones, so real rows in the cache are always exactly the committed tokens.

    Args:
        model: the draft network.
        slots: requests.
        max_len: most tokens of each.

    Attributes:
        cache: of one layer.
        drafts: [slots + 1, d, H + (n_h + 2 * n_kv) * head_dim], for each slot the rows of a draft: residual, query,
            key and value side by side. The first is the newest real row, of which the last two are not kept, since
            they lie in the cache; the others are masks and never change.
        newest: [slots + 1, H + n_h * head_dim], a view of what a commit replaces there.
        nowhere: [1] int64, the last entry of both, which belongs to no slot and takes what must be put somewhere.
        lengths: [slots] int64 on the host, committed tokens.
        turn: [1 + rows of a slot, 2, head_dim / 2] fp32, cosines and sines of the positions -1, of no use, 0, 1 ...
        cos, sin: [rows of a slot, 1, head_dim / 2], views of those from position 0 on.

    Raises:
        ValueError: sizes below 1.
    """

    def __init__(self, model: DartModel, slots: int, max_len: int) -> None:
        for name, value in (("slots", slots), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name}={value}; allowed: 1 or more")
        config, weight = model.config, model.fc.weight
        self.max_len = max_len
        rows, heads = max_len + config.draft_length, (config.num_key_value_heads, config.head_dim)
        # It starts as zeros: rows that nobody wrote must stay finite under a mask.
        self.cache = SlotCache(1, slots, rows, *heads, weight.dtype, weight.device)
        self.nowhere = torch.tensor([slots], device=weight.device)
        self.lengths = np.zeros(slots, np.int64)
        cos, sin = model.rotary(torch.arange(-1, rows, device=weight.device))
        self.turn = torch.cat([cos, sin], dim=1)
        self.cos, self.sin = self.turn[1:, :1], self.turn[1:, 1:]
        mask_rep = model.midlayer.mask_rep
        key, value = model.key_value(mask_rep)
        self._widths = config.hidden_size, model.query(mask_rep).numel(), key.numel(), value.numel()
        self._head_dim = config.head_dim
        self.drafts = weight.new_zeros(slots + 1, config.depth, sum(self._widths))
        self.newest = self.drafts[:, 0, : sum(self._widths[:2])]
        parts = mask_rep[: config.hidden_size], model.query(mask_rep), key, value
        self.drafts[:, 1:] = torch.cat([part.flatten() for part in parts])

    def split(self, rows: torch.Tensor) -> DraftRows:
        """Views of the parts of rows [..., H + (n_h + 2 * n_kv) * head_dim]."""
        residual, *heads = rows.split(self._widths, dim=-1)
        return DraftRows(residual, *(part.unflatten(-1, (-1, self._head_dim)) for part in heads))
