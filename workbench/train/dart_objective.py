"""DART's objective: prefix-shared masked training with the target's own distribution as the teacher.

Paper arXiv 2601.19278, section on training; alignment and masks are those of inference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel
from workbench.drafters.layers import rotate
from workbench.train.block_objective import BlockObjective, randomise
from workbench.train.losses import distill, distill_chunk, position_weights
from workbench.train.masks import Attention
from workbench.train.packing import BlockRule, PackedBatch
from workbench.train.teacher import Features, FeatureSource


@dataclass(frozen=True)
class DartLoss:
    """Settings of the loss.

    Attributes:
        gamma: weight of draft position t is gamma^t.
        weigh_by_mass: rows count as much as the target's probability of the draft vocabulary, so where the target
            wants a token outside of it the renormalised rest teaches little.
        greedy_temperature: temperature of the teacher on greedy samples; below 1 it leans to the token that was taken.

    Raises:
        ValueError: a field outside its range.
    """

    gamma: float = 0.6
    weigh_by_mass: bool = True
    greedy_temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma} outside 0..1 (0 excluded)")
        if not 0.01 <= self.greedy_temperature <= 10:
            raise ValueError(f"greedy_temperature={self.greedy_temperature} outside 0.01..10")


def block_states(
    model: DartModel,
    taps: torch.Tensor,
    next_embeddings: torch.Tensor,
    positions: torch.Tensor,
    anchors: torch.Tensor,
    attention: Attention,
) -> torch.Tensor:
    """All draft blocks of packed rows in one forward.

    Args:
        taps: [B, T, 3H].
        next_embeddings: [B, T, H], embedding of the token behind each place.
        positions: [B, T] int64, position inside the sample.
        anchors: [B, A] int64, place of every block's newest real row.
        attention: over T real keys and A * d slot keys, see `masks`.

    Returns:
        [B, A, d, H], inputs of the head; slot s of a block drafts the (s + 2)-th token behind its anchor.
    """
    num_rows, num_blocks = anchors.shape
    num_masks, depth = model.config.draft_length, model.config.depth
    features, inputs = model.real_rows(taps, next_embeddings)
    keys, values = model.key_value(inputs)
    mask_rep = model.midlayer.mask_rep
    mask_key, mask_value = model.key_value(mask_rep)
    rows = torch.arange(num_rows, device=anchors.device)[:, None]
    queries = _blocks(model.query(inputs[rows, anchors]), model.query(mask_rep), num_masks)
    slot_keys = _blocks(keys[rows, anchors], mask_key, num_masks)
    slot_values = _blocks(values[rows, anchors], mask_value, num_masks)
    slot_positions = positions[rows, anchors][..., None] + torch.arange(depth, device=anchors.device)
    cos, sin = model.rotary(positions)
    slot_cos, slot_sin = model.rotary(slot_positions)
    attended = attention(
        rotate(queries, slot_cos, slot_sin).flatten(1, 2),
        torch.cat([rotate(keys, cos, sin), rotate(slot_keys, slot_cos, slot_sin).flatten(1, 2)], dim=1),
        torch.cat([values, slot_values.flatten(1, 2)], dim=1),
    )
    residual = _blocks(features[rows, anchors], mask_rep[: features.shape[-1]], num_masks)
    return model.finish(residual, attended.unflatten(1, (num_blocks, depth)))


def _blocks(real: torch.Tensor, mask: torch.Tensor, num_masks: int) -> torch.Tensor:
    """real [B, A, ...] and mask [...] -> [B, A, 1 + num_masks, ...], the mask repeated."""
    masks = mask.to(real.dtype).expand(*real.shape[:2], num_masks, *mask.shape)
    return torch.cat([real.unsqueeze(2), masks], dim=2)


class DartObjective(BlockObjective):
    """Loss of a DART network on packed batches.

    Args:
        model: trained in place.
        embedding, features, tap_scale, compiled, sparse: see `BlockObjective`.
        head: [V, H], the target's output head; frozen.
        loss: settings.
        chunk_rows: draft rows whose logits exist at once.
    """

    measure = "kl"

    def __init__(
        self,
        model: DartModel,
        embedding: torch.Tensor,
        head: torch.Tensor,
        features: FeatureSource,
        tap_scale: torch.Tensor,
        loss: DartLoss | None = None,
        compiled: bool = False,
        sparse: bool = False,
        chunk_rows: int = 16384,
    ) -> None:
        super().__init__(model, embedding, features, tap_scale, model.config.depth, True, compiled, sparse)
        self.settings = loss or DartLoss()
        self._chunk_rows = chunk_rows
        self._teacher_head = head.detach()[model.draft_ids.to(head.device)].contiguous()
        self._weights = position_weights(model.config.depth, self.settings.gamma, self.device)
        self._chunk, self._mass = self._compile(distill_chunk), self._compile(_mass)

    @property
    def rule(self) -> BlockRule:
        """The anchor is the newest real row; the root follows it."""
        return BlockRule(self.module.config.depth, root=1)

    @property
    def identity(self) -> str:
        """Settings of the loss, and a digest of draft ids and tap scales."""
        digest = self._digest(self.module.draft_ids)
        return f"{self.settings} double_norm={self.module.double_norm} ids and scales {digest}"

    def loss(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Sum over positions of gamma^t times the mean divergence of the rows at that position.

        Metrics: `kl` [d] and `agree` [d], means over valid rows: divergence, and how often draft and target prefer
        the same id.
        """
        found = self.features(batch)
        states = self.states(batch, found)
        teacher = functional.linear(found.hidden, self._teacher_head)
        valid = batch.valid.float()
        counts = valid.sum((0, 1)).clamp(min=1.0)  # [d]
        places = batch.teacher_places
        weight = valid * self._weights / counts
        if self.settings.weigh_by_mass:
            mass = self._mass(teacher, found.log_total)
            weight = weight * mass.gather(1, places.flatten(1)).view(places.shape)
        cool = 1.0 / self.settings.greedy_temperature
        scale = torch.where(batch.sampled, 1.0, cool)[..., None].expand(places.shape)
        rows = torch.arange(places.shape[0], device=places.device)[:, None, None] * batch.tokens.shape[1]
        loss, kl, agree = distill(
            states.flatten(0, 2),
            self.module.lm_head.weight,
            teacher.flatten(0, 1),
            (rows + places).flatten(),
            scale.flatten(),
            weight.flatten(),
            self._chunk_rows,
            self._chunk,
        )
        share = valid / counts
        metrics = {name: (share * v.view(share.shape)).sum((0, 1)) for name, v in (("kl", kl), ("agree", agree))}
        return loss, metrics

    def read_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """[B, T], the token behind each place."""
        return batch.next_tokens

    def block_states(self, taps, embeddings, positions, anchors, attention: Attention) -> torch.Tensor:
        """See the function."""
        return block_states(self.module, taps, embeddings, positions, anchors, attention)

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Every slot drafts."""
        return self.module.lm_head(states)

    def target_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Through the draft vocabulary."""
        return self.module.draft_ids[index]

    def judge(self, logits: torch.Tensor, batch: PackedBatch, found: Features) -> torch.Tensor:
        """Divergence from the target inside the draft vocabulary."""
        places = batch.teacher_places
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        wanted = functional.linear(found.hidden, self._teacher_head)[rows, places].float().log_softmax(-1)
        return (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)


def _mass(teacher: torch.Tensor, log_total: torch.Tensor) -> torch.Tensor:
    """Target probability of the draft vocabulary: logits [B, T, V_d] and their full logsumexp [B, T] -> [B, T]."""
    return (teacher.float().logsumexp(-1) - log_total).exp().clamp(max=1.0)


def new_dart(
    config: DartConfig,
    draft_ids: torch.Tensor,
    target_head: torch.Tensor,
    final_norm: torch.Tensor | None,
    seed: int = 0,
    double_norm: bool = True,
) -> DartModel:
    """A fresh network: random layer, head taken from the target.

    Args:
        config: sizes.
        draft_ids: [V_d] int64 ascending.
        target_head: [V, H] weight of the target's output head.
        final_norm: [H] weight of the target's final norm, folded into the head since the draft's own starts at 1.
        seed: of the random weights.
        double_norm: see `DartModel`.
    """
    generator = torch.Generator().manual_seed(seed)
    model = DartModel(config, double_norm)
    model.set_draft_ids(draft_ids.cpu())
    randomise(model, generator)
    with torch.no_grad():
        model.midlayer.mask_rep.copy_(torch.randn(model.midlayer.mask_rep.shape, generator=generator))
        # The layer starts as a small change of its residual.
        model.midlayer.self_attn.o_proj.weight.mul_(0.5)
        model.midlayer.mlp.down_proj.weight.mul_(0.5)
        head = target_head[draft_ids.to(target_head.device)].float().cpu()
        model.lm_head.weight.copy_(head if final_norm is None else head * final_norm.float().cpu())
    return model
