"""From a target and text to a DART run that is ready to train: the choices that notebooks expose as parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from workbench.drafters.dart import dart_taps
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_files import save_dart
from workbench.drafters.dart_model import DartModel
from workbench.train.dart_objective import DartLoss, DartObjective, export_dart, new_dart, tap_scale_of
from workbench.train.data import Corpus, RowOrder, frequent_ids, pack_best_fit, row_table, token_counts
from workbench.train.packing import BlockBatches, TokenTable
from workbench.train.schedule import TrainConfig
from workbench.train.teacher import FeatureStore, Teacher
from workbench.train.trainer import Trainer


@dataclass(frozen=True)
class DartRecipe:
    """Sizes, data layout and loss of a DART run. Zero sizes take the target's.

    Attributes:
        draft_vocab_size: ids of the draft head, the most frequent ones of the responses.
        intermediate_size, num_heads, num_kv_heads: of the layer. With few K/V heads the masks see little: all that
            they know of the context comes through the values.
        draft_length: masks, one less than the drafted positions.
        rows_per_step, row_len, num_blocks: packed rows of a step, their tokens, and the prefixes drafted from in each.
        sampled_share: share of the rows that hold sampled responses.
        sampled_weight: what a token of a sampled response counts in the draft vocabulary.
        gamma, weigh_by_mass, greedy_temperature: see `DartLoss`.
        seed: of weights, order and prefixes.

    Raises:
        ValueError: a field outside its range.
    """

    draft_vocab_size: int = 8192
    intermediate_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    draft_length: int = 7
    rows_per_step: int = 32
    row_len: int = 1024
    num_blocks: int = 256
    sampled_share: float = 0.25
    sampled_weight: float = 0.25
    gamma: float = 0.6
    weigh_by_mass: bool = True
    greedy_temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows_per_step", "row_len", "num_blocks", "draft_vocab_size", "draft_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("sampled_share", "sampled_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} outside 0..1")
        self.loss()

    def loss(self) -> DartLoss:
        """The loss settings."""
        return DartLoss(self.gamma, self.weigh_by_mass, self.greedy_temperature)

    def sizes(self, target: PreTrainedModel) -> DartConfig:
        """The network for a target."""
        config = target.config
        heads = self.num_heads or config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        return DartConfig(
            vocab_size=target.get_output_embeddings().weight.shape[0],
            hidden_size=config.hidden_size,
            intermediate_size=self.intermediate_size or config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=self.num_kv_heads or min(heads, config.num_key_value_heads),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            draft_vocab_size=self.draft_vocab_size,
            draft_length=self.draft_length,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(rope.get("rope_theta", 10000.0)),
        )


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

    def batches(self, recipe: DartRecipe, seed_offset: int = 0) -> BlockBatches:
        """Batches of a run; without sampled rows all are greedy."""
        sampled = round(recipe.rows_per_step * recipe.sampled_share) if len(self.groups[1]) else 0
        if not len(self.groups[0]):
            sampled = recipe.rows_per_step
        seed = recipe.seed + seed_offset
        order = RowOrder(self.groups, (recipe.rows_per_step - sampled, sampled), seed)
        return BlockBatches(self.table, self.rows, order, recipe.num_blocks, recipe.draft_length + 1, seed)


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
class DartRun:
    """A network with its loss and its loop.

    Attributes:
        objective, trainer: what trains.
        tap_scale: [3H] factors that an export folds into `fc`.
    """

    objective: DartObjective
    trainer: Trainer
    tap_scale: torch.Tensor

    @property
    def num_parameters(self) -> int:
        """Trained weights."""
        return sum(p.numel() for p in self.objective.module.parameters())

    def export(self, averaged: bool = False) -> DartModel:
        """The network in its published layout, with the averaged weights if asked for."""
        if not averaged:
            return export_dart(self.objective.module, self.tap_scale)
        with self.trainer.averaged():
            return export_dart(self.objective.module, self.tap_scale)

    def save(self, folder: str | Path, averaged: bool = False) -> None:
        """Writes `config.json` and `model.safetensors` (bfloat16)."""
        save_dart(self.export(averaged), folder)


def dart_teacher(target: PreTrainedModel, compiled: bool = False) -> Teacher:
    """The target with DART's taps."""
    return Teacher(target, dart_taps(target.config.num_hidden_layers), compiled=compiled)


def dart_run(
    target: PreTrainedModel,
    data: TrainingSet,
    recipe: DartRecipe,
    config: TrainConfig,
    counts: np.ndarray | None = None,
    compiled: bool = False,
    sparse: bool = False,
) -> DartRun:
    """A fresh run.

    Args:
        target: stock causal LM.
        data: from `training_set`.
        recipe, config: settings.
        counts: [V] how often each id occurs; None counts the responses of `data`.
        compiled, sparse: see `DartObjective`.

    Raises:
        ValueError: settings that contradict each other or the data.
    """
    sizes = recipe.sizes(target)
    if counts is None:
        counts = token_counts(data.corpus, sizes.vocab_size, recipe.sampled_weight)
    ids = torch.from_numpy(frequent_ids(counts, recipe.draft_vocab_size))
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    model = new_dart(sizes, ids, head, target.get_decoder().norm.weight, recipe.seed).to(head.device)
    scale = tap_scale_of(data.features.tap_rms(data.table.response_mask))
    objective = DartObjective(
        model, embedding, head, data.features, scale, recipe.loss(), compiled=compiled, sparse=sparse
    )
    return DartRun(objective, Trainer(objective, data.batches(recipe), config), scale)
