"""Draft networks of random weights in the sizes that are published for a target, and a random predictor for them.

They cost what trained ones cost and draft nonsense: for latencies where no checkpoint is at hand.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from workbench.budget.features import DraftFeatures
from workbench.budget.predictor import AcceptancePredictor, PredictorScorer
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_model import DartModel
from workbench.drafters.dflash_config import DFlashConfig, default_layer_ids
from workbench.drafters.dflash_model import DFlashModel
from workbench.models.cache import head_dim_of
from workbench.models.shapes import fill_random
from workbench.models.target import Target

#: First row of Qwen3's embedding that belongs to no token: the published networks take it for a mask.
QWEN3_MASK_ID = 151_669
#: Rows of a published draft head.
DART_VOCAB = 32_000

Network = TypeVar("Network", bound=nn.Module)


def dflash_sizes(config: PreTrainedConfig, num_layers: int = 5, block_size: int = 16) -> DFlashConfig:
    """Sizes of DFlash's draft network for a target: layers like its own, as many of its layers tapped.

    Args:
        config: of the target.
        num_layers: of the draft network.
        block_size: slots of a block, the anchor's included.

    Raises:
        ValueError: the target has too few layers to tap, or a size out of range.
    """
    layers = config.num_hidden_layers
    return DFlashConfig(
        **_shared_sizes(config),
        num_hidden_layers=num_layers,
        num_target_layers=layers,
        target_layer_ids=default_layer_ids(layers, num_layers),
        mask_token_id=min(QWEN3_MASK_ID, config.vocab_size - 1),
        block_size=block_size,
    )


def dart_sizes(config: PreTrainedConfig, draft_vocab_size: int = DART_VOCAB, draft_length: int = 7) -> DartConfig:
    """Sizes of DART's draft network for a target: one layer with its head counts and widths.

    Args:
        config: of the target.
        draft_vocab_size: rows of the draft head; at most the vocabulary.
        draft_length: mask slots; one position more is drafted.

    Raises:
        ValueError: a size out of range.
    """
    rows = min(draft_vocab_size, config.vocab_size)
    return DartConfig(**_shared_sizes(config), draft_vocab_size=rows, draft_length=draft_length)


def random_dflash(target: Target, seed: int = 0, num_layers: int = 5, block_size: int = 16) -> DFlashModel:
    """DFlash's draft network, on the target's device and in its dtype; see `dflash_sizes`.

    Args:
        seed: of the weights.
    """
    config = dflash_sizes(target.config, num_layers, block_size)
    with torch.device("meta"):
        model = DFlashModel(config)
    return _filled(model, target, seed)


def random_dart(target: Target, seed: int = 0, draft_vocab_size: int = DART_VOCAB, draft_length: int = 7) -> DartModel:
    """DART's draft network, on the target's device and in its dtype; see `dart_sizes`.

    The draft ids are spread evenly over the vocabulary.

    Args:
        seed: of the weights.
    """
    config = dart_sizes(target.config, draft_vocab_size, draft_length)
    with torch.device("meta"):
        model = DartModel(config)
    model = _filled(model, target, seed)
    rows = config.draft_vocab_size
    model.set_draft_ids(torch.arange(rows, device=target.device) * config.vocab_size // rows)
    return model


def random_scorer(target: Target, width: int = 16, seed: int = 0) -> PredictorScorer:
    """An acceptance predictor of random weights with its features, on the target's device.

    Its scores differ between requests and positions without being saturated, so that an allocator has work to do.

    Args:
        target: its head is that of the drafts.
        width: rows of a draft, anchor included, 2..64.
        seed: of the weights.

    Raises:
        ValueError: width out of range.
    """
    features = DraftFeatures(target.hidden_size, target.lm_head.weight.detach(), width)
    with torch.device("meta"):
        predictor = AcceptancePredictor(width)
    predictor = predictor.to_empty(device=target.device).requires_grad_(False).eval()
    fill_random(predictor, seed)
    return PredictorScorer(predictor, features)


def _shared_sizes(config: PreTrainedConfig) -> dict[str, int | float]:
    """Fields that a layer of the draft network shares with a layer of the target."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": head_dim_of(config),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        "max_position_embeddings": config.max_position_embeddings,
    }


def _filled(model: Network, target: Target, seed: int) -> Network:
    """A network that is on no device yet, made on the target's."""
    model = model.to(target.dtype).to_empty(device=target.device).requires_grad_(False).eval()
    fill_random(model, seed)
    return model
