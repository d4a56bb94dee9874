"""A tiny target, corpus and draft networks that the training tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.drafters.dart import dart_taps
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dflash_config import DFlashConfig
from workbench.train.block_objective import tap_scale_of
from workbench.train.dart_objective import DartLoss, DartObjective, new_dart
from workbench.train.data import Corpus, RowOrder, concatenate, frequent_ids, pack_best_fit, row_table, token_counts
from workbench.train.dflash_objective import DFlashLoss, DFlashObjective, new_dflash
from workbench.train.packing import BlockBatches, BlockRule, TokenTable
from workbench.train.teacher import FeatureStore, Teacher

VOCAB, HIDDEN, DRAFT_VOCAB, ROW = 61, 16, 23, 40
CONFIG = DartConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    draft_vocab_size=DRAFT_VOCAB,
    draft_length=3,
)
# head_dim is not hidden / heads, and the masks are an id that occurs in the text: a constant like any other.
FLASH = DFlashConfig(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    num_target_layers=7,
    target_layer_ids=(1, 4),
    mask_token_id=60,
    block_size=5,
    rope_theta=500.0,
)
RULE = BlockRule(CONFIG.depth, root=1)


def tiny_model(hidden_size: int = HIDDEN) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_corpus(num_samples: int = 12, seed: int = 0) -> Corpus:
    generator = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_samples):
        prompt, response = generator.integers(2, 6), generator.integers(3, 14)
        pairs.append((generator.integers(0, VOCAB, prompt).tolist(), generator.integers(0, VOCAB, response).tolist()))
    half = num_samples // 2
    greedy, sampled = Corpus.from_responses(pairs[:half]), Corpus.from_responses(pairs[half:], sampled=True)
    return concatenate([greedy, sampled])


class Text:
    """A tiny target and packed text with its states.

    Args:
        taps: hidden states that are kept.
        num_blocks: blocks a row.
        rule: what the blocks are.
        taps_only: see `Teacher`.
    """

    def __init__(self, taps: Sequence[int], num_blocks: int, rule: BlockRule, taps_only: bool = False) -> None:
        self.model, self.corpus = tiny_model(), tiny_corpus()
        self.rows = row_table(self.corpus, pack_best_fit(self.corpus.lengths, ROW), ROW)
        self.table = TokenTable(self.corpus)
        self.teacher = Teacher(self.model, taps, chunk_rows=17, taps_only=taps_only)
        self.store = FeatureStore(self.teacher, self.table, torch.from_numpy(self.rows), batch_rows=2)
        self.scale = tap_scale_of(self.store.tap_rms(self.table.responses))
        order = RowOrder([np.arange(len(self.rows))], [2], seed=4)
        self.batches = BlockBatches(self.table, self.rows, order, num_blocks, rule, seed=4)
        self.embedding_module = self.model.get_input_embeddings()
        self.embedding, self.head = self.embedding_module.weight, self.model.lm_head.weight
        self.norm = self.model.model.norm.weight

    def taps_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, taps * H] of one sequence [n]."""
        return self.teacher.features(tokens[None], torch.arange(len(tokens))[None]).taps[0]


class Setup(Text):
    """Everything a tiny DART run needs."""

    def __init__(self, loss: DartLoss | None = None, num_blocks: int = 9, stored: bool = True) -> None:
        super().__init__(dart_taps(7), num_blocks, RULE)
        self.ids = torch.from_numpy(frequent_ids(token_counts(self.corpus, VOCAB), DRAFT_VOCAB))
        self.draft = new_dart(CONFIG, self.ids, self.head, self.norm, seed=1)
        source = self.store if stored else self.teacher
        self.objective = DartObjective(self.draft, self.embedding, self.head, source, self.scale, loss, chunk_rows=13)


class DFlashSetup(Text):
    """Everything a tiny DFlash run needs."""

    def __init__(self, loss: DFlashLoss | None = None, num_blocks: int = 9, shifted: bool = False) -> None:
        self.config = replace(FLASH, shifted=shifted)
        super().__init__(self.config.taps, num_blocks, BlockRule(self.config.num_drafts, root=0), taps_only=True)
        self.draft = new_dflash(self.config, self.norm, seed=1)
        with torch.no_grad():  # norms of ones would hide a norm that is left out
            for name, parameter in self.draft.named_parameters():
                if "norm" in name:
                    parameter.mul_(1 + 0.3 * torch.randn(parameter.shape))
        self.objective = DFlashObjective(
            self.draft, self.embedding, self.head, self.store, self.scale, loss, chunk_rows=13
        )
