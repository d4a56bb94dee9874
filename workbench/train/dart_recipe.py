"""DART's recipe: sizes, draft vocabulary and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.drafters.dart import dart_taps
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_files import save_dart
from workbench.train.dart_objective import DartLoss, DartObjective, new_dart
from workbench.train.data import frequent_ids, token_counts
from workbench.train.evaluate import Follow, follow_pruned
from workbench.train.recipe import Recipe, Run, TrainingSet
from workbench.train.schedule import TrainConfig
from workbench.train.teacher import Teacher
from workbench.train.trainer import Trainer


@dataclass(frozen=True)
class DartRecipe(Recipe):
    """Sizes, data layout and loss of a DART run. Zero sizes take the target's.

    Attributes:
        draft_vocab_size: ids of the draft head, the most frequent ones of the responses.
        draft_length: masks, one less than the drafted positions.
        sampled_weight: what a token of a sampled response counts in the draft vocabulary.
        gamma, weigh_by_mass, greedy_temperature: see `DartLoss`.
        Others: see `Recipe`.

    Raises:
        ValueError: a field outside its range.
    """

    tree_sizes: ClassVar[tuple[int, ...]] = (8, 16, 59)

    draft_vocab_size: int = 8192
    draft_length: int = 7
    sampled_weight: float = 0.25
    gamma: float = 0.6
    weigh_by_mass: bool = True
    greedy_temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("draft_vocab_size", "draft_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.sampled_weight <= 1:
            raise ValueError(f"sampled_weight={self.sampled_weight} outside 0..1")
        self.loss()

    def loss(self) -> DartLoss:
        """The loss settings."""
        return DartLoss(self.gamma, self.weigh_by_mass, self.greedy_temperature)

    def sizes(self, target: PreTrainedModel) -> DartConfig:
        """The network for a target."""
        return DartConfig(
            **self.layer_sizes(target), draft_vocab_size=self.draft_vocab_size, draft_length=self.draft_length
        )

    def check(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """See `Recipe.check`."""
        super().check(target, tokenizer)
        self.sizes(target)

    def teacher(self, target: PreTrainedModel, compiled: bool = False) -> Teacher:
        """Three taps and the target's own distribution."""
        return Teacher(target, dart_taps(target.config.num_hidden_layers), compiled=compiled)

    def run(
        self,
        target: PreTrainedModel,
        data: TrainingSet,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        compiled: bool = False,
        sparse: bool = False,
        counts: np.ndarray | None = None,
    ) -> Run:
        """See `Recipe.run`; `counts` [V] says how often each id occurs, None counts the responses of `data`."""
        sizes = self.sizes(target)
        if counts is None:
            counts = token_counts(data.corpus, sizes.vocab_size, self.sampled_weight)
        ids = torch.from_numpy(frequent_ids(counts, self.draft_vocab_size))
        embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        model = new_dart(sizes, ids, head, target.get_decoder().norm.weight, self.seed).to(head.device)
        objective = DartObjective(
            model, embedding, head, data.features, data.tap_scale, self.loss(), compiled=compiled, sparse=sparse
        )
        return Run(objective, Trainer(objective, data.batches(self, objective.rule), config), save_dart)

    @property
    def follow(self) -> Follow:
        """Pruned trees without n-grams."""
        return follow_pruned()
