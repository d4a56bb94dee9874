"""DFlash's recipe: sizes, the id of masks and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.drafters.dflash_config import DFlashConfig, default_layer_ids
from workbench.drafters.dflash_files import save_dflash
from workbench.train.dflash_objective import DFlashLoss, DFlashObjective, new_dflash
from workbench.train.evaluate import Follow, follow_chain
from workbench.train.recipe import Recipe, Run, TrainingSet
from workbench.train.schedule import TrainConfig
from workbench.train.teacher import Teacher
from workbench.train.trainer import Trainer


@dataclass(frozen=True)
class DFlashRecipe(Recipe):
    """Sizes, data layout and loss of a DFlash run. Zero sizes take the target's.

    Attributes:
        num_layers: layers of the network.
        num_taps: target layers it reads, spread evenly from the second to the third last.
        block_size, shifted: see `DFlashConfig`.
        mask_token_id: id whose embedding fills the masks; -1 looks for one, see `unused_id`.
        gamma: see `DFlashLoss`.
        Others: see `Recipe`.

    Raises:
        ValueError: a field outside its range.
    """

    tree_sizes: ClassVar[tuple[int, ...]] = (3, 7, 15)

    num_blocks: int = 64
    num_layers: int = 3
    num_taps: int = 3
    block_size: int = 16
    shifted: bool = False
    mask_token_id: int = -1
    gamma: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("num_layers", 1), ("num_taps", 1), ("block_size", 1 if self.shifted else 2)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {low}")
        if self.mask_token_id < -1:
            raise ValueError(f"mask_token_id={self.mask_token_id} must be an id, or -1 to look for one")
        self.loss()

    def loss(self) -> DFlashLoss:
        """The loss settings."""
        return DFlashLoss(self.gamma)

    def layer_ids(self, target: PreTrainedModel) -> tuple[int, ...]:
        """Target layers whose outputs are read.

        Raises:
            ValueError: the target has too few layers.
        """
        try:
            return default_layer_ids(target.config.num_hidden_layers, self.num_taps)
        except ValueError as error:
            raise ValueError(f"num_taps={self.num_taps}: {error}") from error

    def sizes(self, target: PreTrainedModel, mask_token_id: int) -> DFlashConfig:
        """The network for a target."""
        return DFlashConfig(
            **self.layer_sizes(target),
            num_hidden_layers=self.num_layers,
            num_target_layers=target.config.num_hidden_layers,
            target_layer_ids=self.layer_ids(target),
            mask_token_id=mask_token_id,
            block_size=self.block_size,
            shifted=self.shifted,
        )

    def check(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """See `Recipe.check`; an id for masks must exist even in text that holds no special token."""
        super().check(target, tokenizer)
        self.sizes(target, max(self.mask_token_id, 0))
        if self.mask_token_id < 0:
            num_embeddings = len(target.get_input_embeddings().weight)
            unused_id(tokenizer, num_embeddings, np.zeros(num_embeddings, np.int64))

    def teacher(self, target: PreTrainedModel, compiled: bool = False) -> Teacher:
        """Taps alone: the labels are the tokens that followed."""
        return Teacher(target, [i + 1 for i in self.layer_ids(target)], compiled=compiled, taps_only=True)

    def run(
        self,
        target: PreTrainedModel,
        data: TrainingSet,
        config: TrainConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
        compiled: bool = False,
        sparse: bool = False,
    ) -> Run:
        """See `Recipe.run`."""
        embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        mask = self.mask_token_id
        if mask < 0:
            mask = unused_id(tokenizer, len(embedding), np.bincount(data.corpus.tokens, minlength=len(embedding)))
        sizes = self.sizes(target, mask)
        model = new_dflash(sizes, target.get_decoder().norm.weight, self.seed).to(head.device)
        objective = DFlashObjective(
            model, embedding, head, data.features, data.tap_scale, self.loss(), compiled=compiled, sparse=sparse
        )
        return Run(objective, Trainer(objective, data.batches(self, objective.rule), config), save_dflash)

    @property
    def follow(self) -> Follow:
        """Chains of the best candidates."""
        return follow_chain


def unused_id(tokenizer: PreTrainedTokenizerBase | None, num_embeddings: int, counts: np.ndarray) -> int:
    """An id that can stand for masks: no text holds it, and the embedding has a row for it.

    Args:
        tokenizer: of the target.
        num_embeddings: rows of the embedding.
        counts: [V] how often each id occurs in the training text.

    Returns:
        The first id behind the tokenizer's if the embedding goes on there; else the last special id that never occurs.

    Raises:
        ValueError: there is neither, or no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("mask_token_id=-1 needs a tokenizer to look for an unused id; name one")
    if len(tokenizer) < num_embeddings:
        return len(tokenizer)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    # Text in use may end or begin with these although the training text does not.
    special -= {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    unused = [i for i in special if i < num_embeddings and not counts[i]]
    if not unused:
        raise ValueError("mask_token_id=-1: the tokenizer has no special id that the training text lacks; name an id")
    return max(unused)
