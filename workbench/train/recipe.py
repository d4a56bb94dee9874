"""From a target and text to a run that is ready to train: what the recipes of all methods share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.models.cache import head_dim_of
from workbench.train.block_objective import BlockObjective, tap_scale_of
from workbench.train.data import Corpus, RowOrder, pack_best_fit, row_table
from workbench.train.evaluate import Follow
from workbench.train.packing import BlockBatches, BlockRule, TokenTable
from workbench.train.schedule import TrainConfig
from workbench.train.teacher import FeatureStore, Teacher
from workbench.train.trainer import Trainer


@dataclass(frozen=True)
class Recipe(ABC):
    """Sizes and data layout of a run. Zero sizes take the target's.

    Attributes:
        intermediate_size, num_heads, num_kv_heads: of a layer. With few K/V heads the masks see little: all that
            they know of the context comes through the values.
        rows_per_step, row_len, num_blocks: packed rows of a step, their tokens, and the prefixes drafted from in each.
        sampled_share: share of the rows that hold sampled responses.
        seed: of weights, order and prefixes.
        tree_sizes: drafted nodes of the rounds that an evaluation walks.

    Raises:
        ValueError: a field outside its range.
    """

    tree_sizes: ClassVar[tuple[int, ...]]

    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    rows_per_step: int = 32
    row_len: int = 1024
    num_blocks: int = 256
    sampled_share: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"rows_per_step": 1, "row_len": 1, "num_blocks": 1}
        for name, low in (lowest | dict.fromkeys(("intermediate_size", "num_heads", "num_kv_heads"), 0)).items():
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if not 0 <= self.sampled_share <= 1:
            raise ValueError(f"sampled_share={self.sampled_share} outside 0..1")

    @abstractmethod
    def teacher(self, target: PreTrainedModel, compiled: bool = False) -> Teacher:
        """The target with what the method wants to know of it."""

    def check(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Whether a run is possible for a target, as far as that can be told without text; builds no network.

        Raises:
            ValueError: a size that the target rules out, or settings that contradict each other.
        """
        if self.num_blocks > self.row_len:
            raise ValueError(f"num_blocks={self.num_blocks} outside 1..row_len={self.row_len}")

    @abstractmethod
    def run(
        self,
        target: PreTrainedModel,
        data: TrainingSet,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        compiled: bool = False,
        sparse: bool = False,
    ) -> Run:
        """A fresh run.

        Args:
            target: stock causal LM.
            data: from `training_set`.
            config: settings of the loop.
            tokenizer: of the target; for methods that look for an unused id.
            compiled, sparse: see `BlockObjective`.

        Raises:
            ValueError: settings that contradict each other or the data.
        """

    @property
    @abstractmethod
    def follow(self) -> Follow:
        """How rounds are followed in an evaluation, see `evaluate`."""

    def layer_sizes(self, target: PreTrainedModel) -> dict[str, Any]:
        """Fields that the configurations of all draft networks have."""
        config = target.config
        heads = self.num_heads or config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return {
            "vocab_size": target.get_output_embeddings().weight.shape[0],
            "hidden_size": config.hidden_size,
            "intermediate_size": self.intermediate_size or config.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": self.num_kv_heads or min(heads, config.num_key_value_heads),
            "head_dim": head_dim_of(config),
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
        }


@dataclass(frozen=True)
class TrainingSet:
    """Packed text with the target's states.

    Attributes:
        corpus: samples.
        table: their per-token facts on the device.
        rows: [rows, T] int32 places in the corpus.
        groups: row numbers of greedy and of sampled rows.
        features: target states of every token.
    """

    corpus: Corpus
    table: TokenTable
    rows: np.ndarray
    groups: tuple[np.ndarray, np.ndarray]
    features: FeatureStore

    @property
    def tap_scale(self) -> torch.Tensor:
        """[taps * H] fp32, what brings every tapped dimension to a root mean square of 1 over the responses."""
        return tap_scale_of(self.features.tap_rms(self.table.responses))

    def batches(self, recipe: Recipe, rule: BlockRule, seed_offset: int = 0) -> BlockBatches:
        """Batches of a run; without sampled rows all are greedy."""
        sampled = round(recipe.rows_per_step * recipe.sampled_share) if len(self.groups[1]) else 0
        if not len(self.groups[0]):
            sampled = recipe.rows_per_step
        seed = recipe.seed + seed_offset
        order = RowOrder(self.groups, (recipe.rows_per_step - sampled, sampled), seed)
        return BlockBatches(self.table, self.rows, order, recipe.num_blocks, rule, seed)


def training_set(
    teacher: Teacher, corpus: Corpus, row_len: int, batch_rows: int = 32, progress: bool = False
) -> TrainingSet:
    """Packs greedy and sampled samples into rows of their own and runs the target over all of them.

    Raises:
        ValueError: a sample longer than a row.
    """
    packed = []
    for is_sampled in (False, True):
        members = np.flatnonzero(corpus.sampled == is_sampled)
        packed.append([members[row] for row in pack_best_fit(corpus.lengths[members], row_len)])
    rows = row_table(corpus, packed[0] + packed[1], row_len)
    numbers = np.arange(len(rows))
    table = TokenTable(corpus, teacher.device)
    features = FeatureStore(teacher, table, torch.from_numpy(rows).to(teacher.device), batch_rows, progress)
    return TrainingSet(corpus, table, rows, (numbers[: len(packed[0])], numbers[len(packed[0]) :]), features)


@dataclass(frozen=True)
class Run:
    """A network with its loss and its loop.

    Attributes:
        objective, trainer: what trains.
        write: writes an exported network into a folder, in bfloat16.
    """

    objective: BlockObjective
    trainer: Trainer
    write: Callable[[nn.Module, str | Path], None]

    @property
    def num_parameters(self) -> int:
        """Trained weights."""
        return sum(p.numel() for p in self.objective.module.parameters())

    def export(self, averaged: bool = False) -> nn.Module:
        """The network in its published layout, with the averaged weights if asked for."""
        if not averaged:
            return self.objective.export()
        with self.trainer.averaged():
            return self.objective.export()

    def save(self, folder: str | Path, averaged: bool = False) -> None:
        """Writes `config.json` and `model.safetensors` (bfloat16)."""
        self.write(self.export(averaged), folder)
