"""What the objectives of one-pass drafters share: packed rows in, states of all draft blocks out, and their judgement.

Tapped states hold single dimensions hundreds of times larger than the rest, so networks are trained on taps divided by
their root mean square, which an export folds into `fc`: files keep the published layouts.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask

from workbench.train.masks import Attention, DenseAttention, FlexAttention, FlexBlocks
from workbench.train.packing import BlockRule, PackedBatch
from workbench.train.teacher import Features, FeatureSource


class BlockObjective(ABC):
    """Loss of a draft network on packed batches; subclasses say what a block reads and what it is taught.

    Args:
        model: trained in place; has a linear map `fc` of the taps.
        embedding: [V, H], the target's input embedding; frozen.
        features: target states of a batch.
        tap_scale: [taps * H] fp32, factor of every tapped dimension (see `tap_scale_of`).
        num_slots: slots of a block.
        causal: see `masks.block_mask_function`.
        compiled: compile the forward and the loss (CUDA).
        sparse: use the sparse attention, which is only fast when compiled.
    """

    #: How tables call the mean of what `candidates` gives beside the drafts.
    measure: str

    def __init__(
        self,
        model: nn.Module,
        embedding: torch.Tensor,
        features: FeatureSource,
        tap_scale: torch.Tensor,
        num_slots: int,
        causal: bool,
        compiled: bool = False,
        sparse: bool = False,
    ) -> None:
        self.module = model
        self.features = features
        self._embedding = embedding.detach()
        self._tap_scale = tap_scale.to(self.device)
        self._num_slots, self._causal, self._sparse = num_slots, causal, sparse
        self._flex: FlexBlocks | None = None
        self._compile: Callable = functools.partial(torch.compile, dynamic=False) if compiled else lambda f: f
        self._states = self._compile(self._forward)

    @property
    @abstractmethod
    def rule(self) -> BlockRule:
        """What the blocks are."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Text that differs when settings or frozen inputs do."""

    @abstractmethod
    def loss(self, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(scalar loss, metrics by name), see `trainer.Objective`."""

    @abstractmethod
    def read_tokens(self, batch: PackedBatch) -> torch.Tensor:
        """Ids whose embeddings the network reads, in the shape that `block_states` takes."""

    @abstractmethod
    def block_states(self, taps, embeddings, positions, anchors, attention: Attention) -> torch.Tensor:
        """[B, A, n, H] states of the slots, from scaled taps [B, T, taps * H] and embeddings of `read_tokens`."""

    @abstractmethod
    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """States of slots -> [B, A, d, draft ids], logits of the drafted positions."""

    @abstractmethod
    def target_ids(self, index: torch.Tensor) -> torch.Tensor:
        """Rows of the draft head -> ids of the target."""

    @abstractmethod
    def judge(self, logits: torch.Tensor, batch: PackedBatch, found: Features) -> torch.Tensor:
        """[B, A, d] fp32, `measure` of every drafted position; logits [B, A, d, draft ids] fp32."""

    def over(self, features: FeatureSource) -> Self:
        """The same network, loss and compiled code over another source of target states."""
        other = copy.copy(self)
        other.features = features
        return other

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.module.fc.weight.device

    def export(self) -> nn.Module:
        """A copy of the network that takes unscaled taps, as files hold it."""
        return fold_scale(self.module, self._tap_scale)

    def states(self, batch: PackedBatch, found: Features) -> torch.Tensor:
        """[B, A, n, H] states of the slots of every block of a batch."""
        return self._states(*self._inputs(batch, found), self._mask(batch))

    @torch.no_grad()
    def candidates(
        self, batch: PackedBatch, found: Features, num_candidates: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts of every block as inference makes them, under dense attention.

        Args:
            batch: rows and blocks.
            found: features of its rows.
            num_candidates: C, candidates kept.

        Returns:
            (target ids [B, A, d, C] int64 best first; probabilities over them, fp32; `measure` [B, A, d], fp32).
        """
        half = found.taps.dtype != self.module.fc.weight.dtype
        with torch.autocast(self.device.type, found.taps.dtype if half else torch.bfloat16, enabled=half):
            states = self._forward(*self._inputs(batch, found), batch.starts, dense=True)
            logits = self.draft_logits(states).float()
        best, index = logits.topk(min(num_candidates, logits.shape[-1]), dim=-1)
        return self.target_ids(index), best.softmax(-1), self.judge(logits, batch, found)

    def _inputs(self, batch: PackedBatch, found: Features) -> tuple[torch.Tensor, ...]:
        return found.taps, self.read_tokens(batch), batch.positions, batch.anchors

    def _mask(self, batch: PackedBatch) -> BlockMask | torch.Tensor:
        if not self._sparse:
            return batch.starts
        num_rows, num_reals = batch.tokens.shape
        if self._flex is None:
            num_blocks, device = batch.anchors.shape[1], batch.tokens.device
            self._flex = FlexBlocks(num_rows, num_reals, num_blocks, self._num_slots, device, self._causal)
        return self._flex.update(batch.anchors, batch.starts)

    def _forward(self, taps, tokens, positions, anchors, mask, dense: bool = False) -> torch.Tensor:
        if self._sparse and not dense:
            attention: Attention = FlexAttention(mask)
        else:
            attention = DenseAttention(anchors, mask, positions.shape[1], self._num_slots, self._causal)
        scaled = (taps * self._tap_scale).to(taps.dtype)
        return self.block_states(scaled, self._embedding[tokens], positions, anchors, attention)

    def _digest(self, *frozen: torch.Tensor) -> str:
        """Of the tap scales and other tensors that the parameters do not show."""
        parts = [tensor.cpu().numpy().tobytes() for tensor in (self._tap_scale.float(), *frozen)]
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def tap_scale_of(rms: torch.Tensor) -> torch.Tensor:
    """1 / rms of every tapped dimension; dimensions that never move are left alone."""
    return torch.where(rms > 1e-6, 1.0 / rms.clamp(min=1e-6), 1.0)


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draws every matrix [out, in] with variance 1 / in; vectors are left alone."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)


def fold_scale(model: nn.Module, tap_scale: torch.Tensor) -> nn.Module:
    """A copy that takes unscaled taps: the scale is folded into `fc`."""
    exported = copy.deepcopy(model).requires_grad_(False).eval()
    exported.fc.weight.mul_(tap_scale.to(exported.fc.weight))
    return exported
