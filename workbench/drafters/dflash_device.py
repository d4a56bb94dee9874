"""DFlash's part of a round on the device: drafts and commits with fixed shapes over a session's own state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from workbench.batch import AcceptedRows, Batch, Candidates, Chains, DeviceRows
from workbench.drafters.chain_trees import chain_trees, require_in_step
from workbench.drafters.dflash_packed import block_rows, block_states, write_context
from workbench.models.argmax import argmax_ids
from workbench.types import MAX_TREE_ROWS, DraftRequest, DraftTree, Signals, Stopwatch

if TYPE_CHECKING:
    from workbench.drafters.dflash import DFlashDrafter


class DFlashDevice:
    """A `workbench.batch.DeviceSession` over the state of a `DFlashSession`.

    It merges weights of the network, whose `Parameter` objects are replaced: an optimiser made before would update ones
    that nothing reads any more. So a network that is to be trained must not have been on the device. Weights that are
    changed later, in place or not, count from the next of these that is made on.

    Args:
        drafter: whose weights and policy these are.
        kv: [layers, 2, slots, L, G, D], the session's cache; L is a block and one more than a slot's tokens.
        lengths: [slots] int64 on the host, the session's committed tokens of each slot.
        rotary: (cos, sin) of the positions of the cache, each [L - 1, 1, D / 2] fp32.

    Raises:
        ValueError: blocks longer than the bits of a mask.
    """

    on_host = False

    def __init__(
        self,
        drafter: DFlashDrafter,
        kv: torch.Tensor,
        lengths: np.ndarray,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        if drafter.block_size > MAX_TREE_ROWS:
            raise ValueError(f"block_size={drafter.block_size} must be at most {MAX_TREE_ROWS} on the device")
        self._drafter, self._weights = drafter, drafter.device_weights()
        self._kv, self._lengths = kv, lengths
        self._turn = rotary[0][:, 0], rotary[1][:, 0]
        self._max_len = kv.shape[3] - 1 - drafter.block_size

    def draft(self, batch: Batch) -> Chains:
        """A chain for every request, in one forward; that of a padding request means nothing."""
        drafter = self._drafter
        block, mask_id = drafter.block_size, drafter.model.config.mask_token_id
        rows = block_rows(batch, block)
        tokens = functional.pad(batch.anchors[:, None], (0, block - 1), value=mask_id).flatten()
        states = drafter.embedding(tokens).to(self._kv.dtype)
        hidden = block_states(
            self._weights, states, drafter.first_slot, self._kv, self._turn, rows, drafter.tile
        ).unflatten(0, (len(batch.slots), -1))
        logits = drafter.head(hidden)
        return Chains(argmax_ids(logits), hidden, logits)

    def commit(self, rows: DeviceRows, accepted: AcceptedRows, taps: torch.Tensor | None) -> None:
        """Adds keys and values of the accepted rows.

        Raises:
            ValueError: no taps, or of another width than the network reads.
        """
        width = self._weights.fc.shape[1]
        if taps is None or taps.shape != (len(rows.positions), width):
            shape = None if taps is None else list(taps.shape)
            raise ValueError(f"taps {shape}; needed: [{len(rows.positions)}, {width}], one row a verified token")
        write_context(self._weights, self._kv, self._turn, taps.to(self._kv.dtype), rows, accepted.place)

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Counts the tokens that `commit` added to different slots.

        Raises:
            ValueError: a count below 0, or one that leads beyond what a slot holds; nothing is counted then.
        """
        for slot, count in zip(slots, counts, strict=True):
            if not 0 <= count <= self._max_len - self._lengths[slot]:
                raise ValueError(
                    f"slot {slot}: {count} more tokens behind {self._lengths[slot]}; allowed: 0 or more, ending at "
                    f"{self._max_len} at the latest"
                )
        self._lengths[list(slots)] += np.array(counts, np.int64)

    def trees(
        self, requests: Sequence[DraftRequest], drafted: Chains | Candidates | None, timer: Stopwatch
    ) -> list[DraftTree]:
        """See `workbench.drafters.chain_trees`; `drafted` holds chains of these requests in this order, then padding.

        Raises:
            ValueError: no chains, fewer than requests, or a request that does not continue its slot.
        """
        if not isinstance(drafted, Chains) or len(drafted.tokens) < len(requests):
            raise ValueError(f"drafted holds no chains for {len(requests)} requests")
        require_in_step(requests, self._lengths)

        def signals(places: list[int]) -> Signals:
            rows = slice(len(places)) if len(places) == len(requests) else places
            chosen = [requests[i] for i in places]
            return Signals(chosen, drafted.tokens[rows], drafted.hidden[rows], drafted.logits[rows])

        return chain_trees(requests, self._drafter.max_nodes, self._drafter.policy, signals, timer)
