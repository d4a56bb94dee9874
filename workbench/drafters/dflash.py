"""DFlash as a drafter: one forward over a block of masks drafts a chain for every request of a round.

Follows arXiv 2602.06036 and the inference code of z-lab/dflash, for any number of requests at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from workbench.budget.table import build_policy
from workbench.drafters.chain_trees import chain_trees, require_in_step
from workbench.drafters.committed import committed_rows
from workbench.drafters.dflash_config import DFlashConfig, check_whole
from workbench.drafters.dflash_device import DFlashDevice
from workbench.drafters.dflash_files import load_dflash
from workbench.drafters.dflash_model import DFlashModel
from workbench.drafters.dflash_packed import DFlashWeights, current_weights
from workbench.drafters.dtype_option import resolve_dtype
from workbench.drafters.layers import rotate
from workbench.drafters.weights_option import require_fit, weights_folder
from workbench.models.argmax import argmax_ids
from workbench.models.attention import TILE_VARIANTS
from workbench.models.cache import SlotCache
from workbench.models.target import Target
from workbench.types import Commit, DraftRequest, DraftTree, Policy, Signals, Stopwatch


class DFlashDrafter:
    """Weights and settings of DFlash; state lives in its sessions.

    Args:
        model: the draft network, on the target's device.
        embedding: the target's input embedding.
        lm_head: the target's output head. A network of another dtype gets a copy of it in its own: with bfloat16 on a
            CPU that makes the largest product of a draft, 15 rows by the vocabulary, about three times as fast.
        policy: decides how much is verified; its scorer, if any, judges the drafts.
        num_drafts: tokens of a chain; the block shrinks with it. Default: those the network was trained for.
        tile: of the draft's attention in rounds on the device: "auto" or one of `TILE_VARIANTS`.

    Raises:
        ValueError: `num_drafts` outside 1 to what the network was trained for, or an unknown tile.
    """

    name = "dflash"

    def __init__(
        self,
        model: DFlashModel,
        embedding: nn.Embedding,
        lm_head: nn.Linear,
        policy: Policy,
        num_drafts: int | None = None,
        tile: str = "auto",
    ) -> None:
        config = model.config
        drafts = config.num_drafts if num_drafts is None else num_drafts
        check_whole("num_drafts", drafts, 1, config.num_drafts)
        if tile not in ("auto", *TILE_VARIANTS):
            raise ValueError(f"tile={tile!r}; allowed: auto, {', '.join(TILE_VARIANTS)}")
        self.model = model
        self.embedding = embedding
        self.policy = policy
        self.tile = tile
        self.taps = config.taps
        self.max_nodes = drafts
        self._device_weights: DFlashWeights | None = None
        #: Slot of the block that says the first draft.
        self.first_slot = 0 if config.shifted else 1
        dtype = model.fc.weight.dtype
        self._head_weight = lm_head.weight.detach().to(dtype)
        self._head_bias = None if lm_head.bias is None else lm_head.bias.detach().to(dtype)

    @property
    def block_size(self) -> int:
        """Slots of a block, the anchor's included."""
        return self.max_nodes + self.first_slot

    def device_weights(self) -> DFlashWeights:
        """The weights as rounds on the device read them, as they are now; shared by all sessions."""
        self._device_weights = current_weights(self.model, self._device_weights)
        return self._device_weights

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head: [..., H] -> [..., V] in the network's dtype."""
        return functional.linear(hidden, self._head_weight, self._head_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head` in fp32."""
        return self.head(hidden).float()

    def session(self, slots: int, max_len: int) -> DFlashSession:
        """New state for `slots` requests of up to `max_len` tokens each."""
        return DFlashSession(self, slots, max_len)


@dataclass(frozen=True)
class _Round:
    """What every layer's attention needs to know about one forward over the blocks of R requests.

    Attributes:
        slot: the only request's cache slot, or None.
        cache_rows: [R * (extent + block)] int64, rows of a cache layer (its slots one after another) to be gathered;
            None for one request. Beyond a request's context they name its own row 0, so nothing foreign is ever read.
        extent: rows of the longest context.
        cos, sin: [R, block, 1, D / 2] fp32 of the block's positions.
        visible: [R, 1, 1, extent + block] bool; None where all contexts are equally long.
    """

    slot: int | None
    cache_rows: torch.Tensor | None
    extent: int
    cos: torch.Tensor
    sin: torch.Tensor
    visible: torch.Tensor | None


class DFlashSession:
    """Context keys (rotated) and values of the committed tokens of every slot.

    The cache has a block more rows than `max_len`, where a single request's block is put behind its context for the
    time of a forward; the next committed rows overwrite it.
    """

    @torch.inference_mode()
    def __init__(self, drafter: DFlashDrafter, slots: int, max_len: int) -> None:
        for name, value in (("slots", slots), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name}={value}; allowed: 1 or more")
        model = drafter.model
        config, weight = model.config, model.fc.weight
        self._drafter, self._model = drafter, model
        self._device, self._max_len = weight.device, max_len
        rows, heads = max_len + drafter.block_size, (config.num_key_value_heads, config.head_dim)
        self._cache = SlotCache(config.num_hidden_layers, slots, rows, *heads, weight.dtype, weight.device)
        self._lengths = np.zeros(slots, np.int64)
        self._cos, self._sin = model.rotary(torch.arange(rows, device=weight.device))

    @torch.inference_mode()
    def observe(self, commit: Commit) -> None:
        """Adds keys and values of committed tokens, all requests in one batch.

        Raises:
            ValueError: no taps, a chunk that does not continue its slot, or one beyond `max_len`.
        """
        model = self._model
        rows = committed_rows(commit, self._lengths, self._max_len, model.fc.in_features, self._device)
        context = model.context(commit.taps.to(self._device, model.fc.weight.dtype))
        cos, sin = self._cos[rows.positions], self._sin[rows.positions]
        for index, layer in enumerate(model.layers):
            key, value = layer.key_value(context)
            self._cache.write(index, rows.slot_of_row, rows.positions, rotate(key, cos, sin), value)
        self._lengths[rows.slots] = rows.ends

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """One chain a request, from one forward for all of them; scored as `chain_trees` says.

        Raises:
            ValueError: a request whose newest token does not follow its committed ones.
        """
        drafter = self._drafter

        def signals(places: list[int]) -> Signals:
            return self._signals([requests[i] for i in places])

        return chain_trees(requests, drafter.max_nodes, drafter.policy, signals, timer)

    def on_device(self) -> DFlashDevice:
        """Drafts and commits of fixed shapes over the state of this session; both ways may take turns."""
        return DFlashDevice(self._drafter, self._cache.kv, self._lengths, (self._cos, self._sin))

    def _signals(self, requests: list[DraftRequest]) -> Signals:
        require_in_step(requests, self._lengths)
        hidden, logits = self.draft([r.slot for r in requests], [int(r.tokens[-1]) for r in requests])
        return Signals(requests, argmax_ids(logits), hidden, logits)

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], anchors: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The block of each request behind its committed tokens, in one forward.

        Args:
            slots: R different slots.
            anchors: newest token of each request, the one that is not committed yet.

        Returns:
            (inputs of the output head [R, n, H] in the network's dtype, logits [R, n, V] fp32); entry j drafts the
            j-th token behind the anchor, from 0.

        Raises:
            ValueError: a slot without committed tokens.
        """
        model, drafter = self._model, self._drafter
        lengths = self._lengths[list(slots)]
        if (lengths < 1).any():
            raise ValueError(f"slots={list(slots)}: one of them has no committed tokens yet")
        block = np.full((len(slots), drafter.block_size), model.config.mask_token_id, np.int64)
        block[:, 0] = anchors
        states = drafter.embedding(torch.from_numpy(block).to(self._device)).to(model.fc.weight.dtype)
        this_round = self._round(np.array(slots, np.int64), lengths)
        for index, layer in enumerate(model.layers):
            states = layer(states, partial(self._attend, this_round, index))
        hidden = model.finish(states[:, drafter.first_slot :])
        return hidden, drafter.logits(hidden)

    def _round(self, slots: np.ndarray, lengths: np.ndarray) -> _Round:
        block_size, extent = self._drafter.block_size, int(lengths.max())
        positions = torch.from_numpy(lengths[:, None] + np.arange(block_size)).to(self._device)
        cos, sin = self._cos[positions], self._sin[positions]
        if len(slots) == 1:
            return _Round(int(slots[0]), None, extent, cos, sin, None)
        steps = np.arange(extent + block_size)
        within = steps < lengths[:, None]
        rows_per_slot = self._cache.kv.shape[3]
        cache_rows = torch.from_numpy(slots[:, None] * rows_per_slot + np.where(within, steps, 0)).to(self._device)
        visible = None
        if lengths.min() < extent:
            visible = torch.from_numpy(within | (steps >= extent)).to(self._device)[:, None, None]
        return _Round(None, cache_rows.flatten(), extent, cos, sin, visible)

    def _attend(
        self, this_round: _Round, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of the blocks over context and block, bidirectional; see `dflash_model.Attend`."""
        cos, sin, extent = this_round.cos, this_round.sin, this_round.extent
        keys, values = (self._context(this_round, cached) for cached in self._cache.layer(index))
        keys[:, extent:] = rotate(key, cos, sin)
        values[:, extent:] = value
        attended = functional.scaled_dot_product_attention(
            rotate(query, cos, sin).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=this_round.visible,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(2)

    def _context(self, this_round: _Round, cached: torch.Tensor) -> torch.Tensor:
        """[R, extent + block, G, D] with the context rows filled in: a view for one request, a copy for more."""
        if this_round.cache_rows is None:
            stop = this_round.extent + self._drafter.block_size
            return cached[this_round.slot : this_round.slot + 1, :stop]
        gathered = cached.flatten(0, 1).index_select(0, this_round.cache_rows)
        return gathered.unflatten(0, (len(this_round.cos), -1))


def build_dflash(
    target: Target,
    path: str | Path | None = None,
    block_size: int = 0,
    policy: str | Policy = "full",
    rows: float = 8.0,
    seed: int = 0,
    dtype: str = "auto",
) -> DFlashDrafter:
    """DFlash: a chain drafted in one forward over a block of masks.

    Args:
        target: the target; the network runs on its device.
        path: folder with `config.json` and `model.safetensors`, in z-lab's or DeepSpec's dialect; None takes the
            shipped one of the embedded target.
        block_size: slots of a block, the anchor's included; 0 for those the network was trained with, the most there
            may be.
        policy, rows, seed: see `workbench.budget.table.build_policy`; a policy object is taken as it is.
        dtype: see `resolve_dtype`.

    Raises:
        ValueError: no weights are known for the target, they do not fit it, or an option is out of range.
    """
    folder = weights_folder(target, path, "DFlash")
    if not all(hasattr(policy, name) for name in ("allocate", "scorer", "reads_scores")):
        policy = build_policy(policy, rows, seed=seed)
    model = load_dflash(folder, resolve_dtype(dtype, target), target.device)
    config = model.config
    require_fit(
        folder,
        [
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("hidden_size", config.hidden_size, target.hidden_size),
            ("num_target_layers", config.num_target_layers, target.num_layers),
        ],
    )
    drafts = _num_drafts(config, block_size)
    return DFlashDrafter(model, target.embedding, target.lm_head, policy, drafts)


def _num_drafts(config: DFlashConfig, block_size: int) -> int:
    smallest = 1 if config.shifted else 2
    if type(block_size) is int and block_size == 0:
        return config.num_drafts
    check_whole("block_size", block_size, smallest, config.block_size)
    return block_size - smallest + 1
