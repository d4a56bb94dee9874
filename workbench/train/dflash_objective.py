"""DFlash's objective: a block of masks behind each anchor learns the tokens that followed it, by cross-entropy.

Paper arXiv 2602.06036, section on training; alignment and visibility are those of inference. The target's embedding and
output head are frozen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from workbench.drafters.dflash_config import DFlashConfig
from workbench.drafters.dflash_model import DFlashModel
from workbench.drafters.layers import rotate
from workbench.train.block_objective import BlockObjective, randomise
from workbench.train.losses import cross_entropy, cross_entropy_chunk, position_weights
from workbench.train.masks import Attention
from workbench.train.packing import BlockRule, PackedBatch
from workbench.train.teacher import Features, FeatureSource

#: Rotary factors (cos, sin) of places or slots.
Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DFlashLoss:
    """Settings of the loss.

    Attributes:
        gamma: the k-th drafted token (from 1) counts exp(-(k - 1) / gamma); published: 7 for blocks of 16, 4 of 8.

    Raises:
        ValueError: gamma out of range.
    """

    gamma: float = 7.0

    def __post_init__(self) -> None:
        if not 0.01 <= self.gamma <= 1e6:
            raise ValueError(f"gamma={self.gamma} outside 0.01..1000000")


def block_states(
    model: DFlashModel,
    taps: torch.Tensor,
    embeddings: torch.Tensor,
    positions: torch.Tensor,
    anchors: torch.Tensor,
    attention: Attention,
) -> torch.Tensor:
    """All draft blocks of packed rows in one forward.

    Args:
        taps: [B, T, m * H].
        embeddings: [B, A, n, H], of the anchor's token and the masks behind it.
        positions: [B, T] int64, position inside the sample.
        anchors: [B, A] int64, place of every block's root.
        attention: over T context keys and A * n slot keys, see `masks`; the slots of a block see each other.

    Returns:
        [B, A, n, H], inputs of the target's head.
    """
    num_slots = embeddings.shape[2]
    context = model.context(taps)
    slot_positions = positions.gather(1, anchors)[..., None] + torch.arange(num_slots, device=anchors.device)
    context_rotary, slot_rotary = model.rotary(positions), model.rotary(slot_positions)
    states = embeddings
    for layer in model.layers:
        keys, values = layer.key_value(context)
        states = layer(states, partial(_attend, rotate(keys, *context_rotary), values, slot_rotary, attention))
    return model.finish(states)


def _attend(keys, values, slots: Rotary, attention: Attention, query, key, value) -> torch.Tensor:
    """Attention of one layer as `DFlashLayer` calls it: rotated context keys and values stand before those of slots."""
    attended = attention(
        rotate(query, *slots).flatten(1, 2),
        torch.cat([keys, rotate(key, *slots).flatten(1, 2)], dim=1),
        torch.cat([values, value.flatten(1, 2)], dim=1),
    )
    return attended.unflatten(1, query.shape[1:3])


class DFlashObjective(BlockObjective):
    """Loss of a DFlash network on packed batches.

    Args:
        model: trained in place.
        embedding, features, tap_scale, compiled, sparse: see `BlockObjective`.
        head: [V, H], the target's output head; frozen.
        loss: settings.
        chunk_rows: draft rows whose logits exist at once.
    """

    measure = "ce"

    def __init__(
        self,
        model: DFlashModel,
        embedding: torch.Tensor,
        head: torch.Tensor,
        features: FeatureSource,
        tap_scale: torch.Tensor,
        loss: DFlashLoss | None = None,
        compiled: bool = False,
        sparse: bool = False,
        chunk_rows: int = 8192,
    ) -> None:
        super().__init__(model, embedding, features, tap_scale, model.config.block_size, False, compiled, sparse)
        self.settings = loss or DFlashLoss()
        self._head, self._chunk_rows = head.detach(), chunk_rows
        decay = math.exp(-1.0 / self.settings.gamma)
        self._weights = position_weights(model.config.num_drafts, decay, self.device)
        self._chunk = self._compile(cross_entropy_chunk)

    @property
    def rule(self) -> BlockRule:
        """The anchor is the root."""
        return BlockRule(self.module.config.num_drafts, root=0)

    @property
    def identity(self) -> str:
        """Settings of loss and blocks, and a digest of the tap scales."""
        config = self.module.config
        block = f"block {config.block_size} shifted={config.shifted} mask {config.mask_token_id}"
        return f"{self.settings} {block} taps {list(config.taps)} scales {self._digest()}"

    def loss(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weighted mean of the cross-entropy of all drafted response tokens.

        Metrics: `ce` [d] and `agree` [d], means over valid rows: cross-entropy, and how often the draft prefers the
        label.
        """
        states = self._drafting(self.states(batch, self.features(batch)))
        valid = batch.valid.float()
        weight = valid * self._weights
        loss, ce, agree = cross_entropy(
            states.flatten(0, 2),
            self._head,
            batch.labels.flatten(),
            (weight / weight.sum().clamp(min=1e-9)).flatten(),
            self._chunk_rows,
            self._chunk,
        )
        share = valid / valid.sum((0, 1)).clamp(min=1.0)
        metrics = {name: (share * v.view(share.shape)).sum((0, 1)) for name, v in (("ce", ce), ("agree", agree))}
        return loss, metrics

    def _drafting(self, states: torch.Tensor) -> torch.Tensor:
        """The slots that draft: unless shifted, the anchor's own does not. [B, A, n, H] -> [B, A, d, H]."""
        return states[:, :, -self.module.config.num_drafts :]

    def read_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """[B, A, n], the anchor's token and masks."""
        anchors = batch.tokens.gather(1, batch.anchors)[..., None]
        return functional.pad(anchors, (0, self._num_slots - 1), value=self.module.config.mask_token_id)

    def block_states(self, taps, embeddings, positions, anchors, attention: Attention) -> torch.Tensor:
        """See the function."""
        return block_states(self.module, taps, embeddings, positions, anchors, attention)

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Through the target's head."""
        return functional.linear(self._drafting(states).to(self._head.dtype), self._head)

    def target_ids(self, index: torch.Tensor) -> torch.Tensor:
        """The head has the whole vocabulary."""
        return index

    def judge(self, logits: torch.Tensor, batch: PackedBatch, found: Features) -> torch.Tensor:
        """Cross-entropy of the labels."""
        return logits.logsumexp(-1) - logits.gather(-1, batch.labels[..., None]).squeeze(-1)


def new_dflash(config: DFlashConfig, final_norm: torch.Tensor | None, seed: int = 0) -> DFlashModel:
    """A fresh network: random layers that start as small changes of their residual.

    Args:
        config: sizes.
        final_norm: [H] weight of the target's final norm, which its head expects; None starts at 1.
        seed: of the random weights.
    """
    model = DFlashModel(config)
    randomise(model, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.o_proj.weight.mul_(0.5)
            layer.mlp.down_proj.weight.mul_(0.5)
        if final_norm is not None:
            model.norm.weight.copy_(final_norm.float().cpu())
    return model
