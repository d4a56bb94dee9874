"""DART's objective: prefix-shared masked training with the target's own distribution as the teacher.

Paper arXiv 2601.19278, section on training; alignment and masks are those of inference. Tapped states hold single
dimensions hundreds of times larger than the rest, so the network is trained on taps divided by their root mean
square, which `export_dart` folds into `fc`: files keep the published layout.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel, rotate
from workbench.train.losses import distill, distill_chunk, position_weights
from workbench.train.masks import Attention, DenseAttention, FlexAttention, FlexBlocks
from workbench.train.packing import PackedBatch
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


class DartObjective:
    """Loss of a DART network on packed batches.

    Args:
        model: trained in place.
        embedding: [V, H], the target's input embedding; frozen.
        head: [V, H], the target's output head; frozen.
        features: target states of a batch.
        tap_scale: [3H] fp32, factor of every tapped dimension (see `tap_scale_of`).
        loss: settings.
        compiled: compile the forward and the loss (CUDA).
        sparse: use the sparse attention, which is only fast when compiled.
        chunk_rows: draft rows whose logits exist at once.
    """

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
        self.module = model
        self.settings = loss or DartLoss()
        self._features, self._chunk_rows, self._sparse = features, chunk_rows, sparse
        self._embedding = embedding.detach()
        self._teacher_head = head.detach()[model.draft_ids.to(head.device)].contiguous()
        self._tap_scale = tap_scale.to(self.device)
        self._weights = position_weights(model.config.depth, self.settings.gamma, self.device)
        self._flex: FlexBlocks | None = None
        compiler = functools.partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self._states, self._chunk, self._mass = map(compiler, (self._forward, distill_chunk, _mass))

    def over(self, features: FeatureSource) -> DartObjective:
        """The same network, loss and compiled code over another source of target states."""
        other = copy.copy(self)
        other._features = features
        return other

    @property
    def identity(self) -> str:
        """Settings of the loss, and a digest of draft ids and tap scales."""
        digest = hashlib.sha256(self.module.draft_ids.cpu().numpy().tobytes())
        digest.update(self._tap_scale.float().cpu().numpy().tobytes())
        return f"{self.settings} double_norm={self.module.double_norm} ids and scales {digest.hexdigest()[:16]}"

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.module.fc.weight.device

    def loss(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Sum over positions of gamma^t times the mean divergence of the rows at that position.

        Metrics: `kl` [d] and `agree` [d], means over valid rows: divergence, and how often draft and target prefer
        the same id.
        """
        found = self._features(batch)
        states = self.states(batch, found)
        teacher = functional.linear(found.hidden, self._teacher_head)
        valid = batch.valid.float()
        counts = valid.sum((0, 1)).clamp(min=1.0)  # [d]
        places = batch.slot_places(self.module.config.depth)
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
        share = (valid / counts).flatten(0, 1)  # [B * A, d]
        depth = self.module.config.depth
        metrics = {name: (share * v.view(-1, depth)).sum(0) for name, v in (("kl", kl), ("agree", agree))}
        return loss, metrics

    @torch.no_grad()
    def candidates(self, batch: PackedBatch, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts of every block as inference makes them, under dense attention.

        Returns:
            (target ids [B, A, d, C] int64 best first; probabilities over them, fp32; divergence from the target
            [B, A, d], fp32).
        """
        found = self._features(batch)
        places = (found.taps, batch.next_tokens, batch.positions, batch.anchors, batch.starts)
        half = found.taps.dtype != self.module.fc.weight.dtype
        with torch.autocast(self.device.type, found.taps.dtype if half else torch.bfloat16, enabled=half):
            logits = self.module.lm_head(self._forward(*places, dense=True)).float()
        best, index = logits.topk(min(num_candidates, logits.shape[-1]), dim=-1)
        places = batch.slot_places(self.module.config.depth)
        rows = torch.arange(len(places), device=places.device)[:, None, None]
        wanted = functional.linear(found.hidden, self._teacher_head)[rows, places].float().log_softmax(-1)
        kl = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
        return self.module.draft_ids[index], best.softmax(-1), kl

    def states(self, batch: PackedBatch, found: Features) -> torch.Tensor:
        """[B, A, d, H] inputs of the head for every block of a batch."""
        return self._states(found.taps, batch.next_tokens, batch.positions, batch.anchors, self._mask(batch))

    def _mask(self, batch: PackedBatch) -> BlockMask | torch.Tensor:
        if not self._sparse:
            return batch.starts
        num_rows, num_reals = batch.tokens.shape
        if self._flex is None:
            depth = self.module.config.depth
            self._flex = FlexBlocks(num_rows, num_reals, batch.anchors.shape[1], depth, batch.tokens.device)
        return self._flex.update(batch.anchors, batch.starts)

    def _forward(self, taps, next_tokens, positions, anchors, mask, dense: bool = False) -> torch.Tensor:
        model = self.module
        if self._sparse and not dense:
            attention: Attention = FlexAttention(mask)
        else:
            attention = DenseAttention(anchors, mask, positions.shape[1], model.config.depth)
        scaled = (taps * self._tap_scale).to(taps.dtype)
        return block_states(model, scaled, self._embedding[next_tokens], positions, anchors, attention)


def _mass(teacher: torch.Tensor, log_total: torch.Tensor) -> torch.Tensor:
    """Target probability of the draft vocabulary: logits [B, T, V_d] and their full logsumexp [B, T] -> [B, T]."""
    return (teacher.float().logsumexp(-1) - log_total).exp().clamp(max=1.0)


def tap_scale_of(rms: torch.Tensor) -> torch.Tensor:
    """1 / rms of every tapped dimension; dimensions that never move are left alone."""
    return torch.where(rms > 1e-6, 1.0 / rms.clamp(min=1e-6), 1.0)


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
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
            elif name.endswith("mask_rep"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        # The layer starts as a small change of its residual.
        model.midlayer.self_attn.o_proj.weight.mul_(0.5)
        model.midlayer.mlp.down_proj.weight.mul_(0.5)
        head = target_head[draft_ids.to(target_head.device)].float().cpu()
        model.lm_head.weight.copy_(head if final_norm is None else head * final_norm.float().cpu())
    return model


def export_dart(model: DartModel, tap_scale: torch.Tensor) -> DartModel:
    """A copy that takes unscaled taps: the scale is folded into `fc`."""
    exported = copy.deepcopy(model).requires_grad_(False).eval()
    exported.fc.weight.mul_(tap_scale.to(exported.fc.weight))
    return exported
