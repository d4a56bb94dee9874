"""One small instance of every drafter of the table, for any tiny target, and the stock model to compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from dflash_setup import random_dflash
from transformers import AutoModelForCausalLM, PreTrainedModel

from workbench.budget.predictor import AcceptancePredictor, PredictorInfo, save_predictor
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_files import save_dart
from workbench.drafters.dart_model import DartModel
from workbench.drafters.table import DRAFTERS
from workbench.models.reference import greedy_continuation
from workbench.models.target import Target
from workbench.search.trie import NgramTrie
from workbench.types import Drafter

#: Slots of a DFlash block: twice the mean rows that policies have by default, so that they must cut.
BLOCK_SIZE = 16


def random_prompts(vocab_size: int, count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 39 random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, n).tolist() for n in rng.integers(1, 40, count)]


def stock_model(target: Target) -> PreTrainedModel:
    """The same weights in an untouched transformers model with its own eager attention."""
    config = copy.deepcopy(target.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(target.model.state_dict())
    return model


def small_trie(target: Target) -> NgramTrie:
    """Counts of a few greedy outputs, so that drafts are accepted now and then."""
    prompts = [[i % target.vocab_size, (7 * i + 1) % target.vocab_size] for i in range(12)]
    return NgramTrie.count([p + list(greedy_continuation(target, p, 20)) for p in prompts], order=3)


def random_dart_model(target: Target) -> DartModel:
    """A DART network of random weights that drafts from three quarters of the vocabulary."""
    config = DartConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        draft_vocab_size=target.vocab_size * 3 // 4,
        draft_length=5,
        max_position_embeddings=512,
    )
    generator = torch.Generator().manual_seed(0)
    model = DartModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.2 * noise)
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    model.set_draft_ids(ids)
    return model


def random_dart(target: Target, folder: Path) -> Path:
    """A DART checkpoint of random weights in the published layout, written to `folder`."""
    save_dart(random_dart_model(target), folder)
    return folder


def looked_up(texts: Sequence[Sequence[int]]) -> Callable[..., Iterator[int]]:
    """A `continuation` of the foresight drafters that reads known greedy outputs instead of decoding them again."""

    def continuation(target: Target, tokens: Sequence[int], num_tokens: int) -> Iterator[int]:
        for text in texts:
            if list(text[: len(tokens)]) == list(tokens):
                return iter(text[len(tokens) : len(tokens) + num_tokens])
        return greedy_continuation(target, tokens, num_tokens)

    return continuation


def random_predictor(target: Target, folder: Path, width: int) -> Path:
    """An acceptance predictor of random weights for blocks of `width` slots."""
    torch.manual_seed(0)
    info = PredictorInfo(target.hidden_size, target.vocab_size, width, hidden_seed=3, logit_seed=4)
    path = folder / "predictor.safetensors"
    save_predictor(AcceptancePredictor(width), path, info)
    return path


def make_drafter(
    name: str, target: Target, folder: Path, texts: Sequence[Sequence[int]] = (), **options: object
) -> Drafter:
    """The drafter `name` with small settings; weights it needs are written below `folder`.

    `texts` are prompts with their greedy outputs, where they are known already; `options` go to the builder.
    """
    if name in ("dflash", "dscale"):
        path = random_dflash(target, folder / "dflash", BLOCK_SIZE)
        if name == "dflash":
            return DRAFTERS[name](target, path, **options)
        predictor = random_predictor(target, folder, BLOCK_SIZE)
        return DRAFTERS[name](target, path, predictor, continuation=looked_up(texts), **options)
    if name in ("oracle", "anti", "coin"):
        return DRAFTERS[name](target, continuation=looked_up(texts))
    if name == "dart":
        path = random_dart(target, folder / "dart")
        return DRAFTERS[name](target, path, trie=small_trie(target), num_nodes=24, **options)
    if name == "ngram":
        return DRAFTERS[name](target, trie=small_trie(target), num_nodes=9, **options)
    if name == "scripted":
        tokens = np.random.default_rng(0).integers(0, target.vocab_size, (4, 6))
        return DRAFTERS[name](target, script=[row[: 2 * i].tolist() for i, row in enumerate(tokens)])
    return DRAFTERS[name](target)


def tile_twin(target: Target) -> Target:
    """The same weights in a target that attends through the kernels' operators."""
    config = copy.deepcopy(target.model.config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.load_state_dict(target.model.state_dict())
    return Target(model, target.tokenizer, target.name, stop_ids=target.stop_ids, attention="tile")
