"""A tiny target, corpus and DART network that the training tests share."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.drafters.dart import dart_taps
from workbench.drafters.dart_config import DartConfig
from workbench.train.dart_objective import DartLoss, DartObjective, new_dart, tap_scale_of
from workbench.train.data import Corpus, RowOrder, concatenate, frequent_ids, pack_best_fit, row_table, token_counts
from workbench.train.packing import BlockBatches, TokenTable
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


class Setup:
    """Everything a tiny training run needs."""

    def __init__(self, loss: DartLoss | None = None, num_blocks: int = 9, stored: bool = True) -> None:
        self.model, self.corpus = tiny_model(), tiny_corpus()
        self.ids = torch.from_numpy(frequent_ids(token_counts(self.corpus, VOCAB), DRAFT_VOCAB))
        self.rows = row_table(self.corpus, pack_best_fit(self.corpus.lengths, ROW), ROW)
        self.table = TokenTable(self.corpus)
        self.teacher = Teacher(self.model, dart_taps(7), chunk_rows=17)
        self.store = FeatureStore(self.teacher, self.table, torch.from_numpy(self.rows), batch_rows=2)
        self.scale = tap_scale_of(self.store.tap_rms(self.table.response_mask))
        norm = self.model.model.norm.weight
        self.draft = new_dart(CONFIG, self.ids, self.model.lm_head.weight, norm, seed=1)
        order = RowOrder([np.arange(len(self.rows))], [2], seed=4)
        self.batches = BlockBatches(self.table, self.rows, order, num_blocks, CONFIG.depth, seed=4)
        source = self.store if stored else self.teacher
        self.embedding, self.head = self.model.get_input_embeddings().weight, self.model.lm_head.weight
        self.objective = DartObjective(self.draft, self.embedding, self.head, source, self.scale, loss, chunk_rows=13)
