"""From logits to the target's token, greedily or by sampling with counter-based randomness.

Every draw is keyed by (seed of the request, position of the token), so an output depends neither on the batch it ran
in nor on the drafter: with the same seed, every method produces the tokens that autoregressive decoding samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.models.argmax import argmax_ids

#: Temperatures below this are greedy.
GREEDY_TEMPERATURE = 1e-5

#: How sampled drafts are accepted. "match": the drafted token is the target's own draw at its position, so outputs
#: equal those of autoregressive decoding with the same seed. "rejection": a drafted token x is accepted with the
#: target's probability of x, and after a rejection the next choice is made without x. Under a shared budget the length
#: of one request may depend on the drafts of another, so requests that run together must draw independently: two
#: with the same prompt and seed are refused.
ACCEPT_RULES = ("match", "rejection")


@dataclass(frozen=True)
class SamplingConfig:
    """How one request is decoded.

    Attributes:
        max_new_tokens: most tokens generated, at least 1.
        temperature: 0 for greedy, else the logits are divided by it.
        top_k: keep the k largest logits; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, after top_k; 1.0 keeps all.
        seed: key of the request's randomness.
        stop_ids: ids that end the output; None for those of the target.
        stop_strings: strings that end the output; the text is cut before the first.
        accept_rule: of sampling, see `ACCEPT_RULES`; both keep the target's law exactly.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    accept_rule: str = "match"

    def __post_init__(self) -> None:
        for field in ("max_new_tokens", "top_k", "seed"):
            if not _is_whole(getattr(self, field)):
                raise ValueError(f"{field}={getattr(self, field)!r} must be a whole number")
        for field in ("temperature", "top_p"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{field}={value!r} must be a number")
        for field, each in (("stop_ids", _is_whole), ("stop_strings", lambda s: isinstance(s, str) and s != "")):
            value = getattr(self, field)
            if value is None and field == "stop_ids":
                continue
            if not isinstance(value, tuple | list | set | frozenset) or not all(each(v) for v in value):
                kind = "token ids" if field == "stop_ids" else "non-empty strings"
                raise ValueError(f"{field}={value!r} must be a tuple of {kind}")
            object.__setattr__(self, field, tuple(value))
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be finite and at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or a positive number of tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p} outside (0, 1]")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} outside 0..2**63-1")
        if self.accept_rule not in ACCEPT_RULES:
            raise ValueError(f"accept_rule={self.accept_rule!r}; allowed: {', '.join(ACCEPT_RULES)}")

    @property
    def greedy(self) -> bool:
        """True when the largest logit wins."""
        return self.temperature < GREEDY_TEMPERATURE


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def argmax_tokens(logits: torch.Tensor) -> np.ndarray:
    """[n] int64, id of the largest logit of each row of [n, V], the lowest id on ties.

    Raises:
        FloatingPointError: a row without a finite largest logit.
    """
    best = argmax_ids(logits)
    _require_finite(logits.gather(-1, best[:, None]))
    return best.cpu().numpy()


def _require_finite(values: torch.Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise FloatingPointError("the target's logits are not finite (NaN or infinity)")


def target_probs(logits: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """Probabilities the request samples from: temperature, then top_k, then top_p (the order of transformers).

    Args:
        logits: [n, V] any float dtype.

    Returns:
        [n, V] float64, rows sum to 1.
    """
    scores = logits.double() / config.temperature
    if 0 < config.top_k < scores.shape[-1]:
        floor = scores.topk(config.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < floor, -torch.inf)
    if config.top_p < 1.0:
        ascending, order = scores.sort(dim=-1, stable=True)
        outside = ascending.softmax(-1).cumsum(-1) <= 1.0 - config.top_p
        outside[:, -1] = False  # the most probable token always stays
        scores = scores.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return scores.softmax(-1)


def uniforms(seed: int, positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """[n] float64 in [0, 1): one Philox draw for each (seed, position), whatever else is drawn."""
    return np.array([np.random.Generator(np.random.Philox(key=seed, counter=int(p))).random() for p in positions])


def position_generator(seed: int, position: int, stream: int = 0) -> np.random.Generator:
    """Any number of draws that belong to one position of one request.

    Four draws use up one count of Philox, so the position stands in a higher word of the counter: streams of different
    positions never meet each other, nor the draws of `uniforms`.

    Args:
        seed: of the request.
        position: of the token.
        stream: 0..2^64-1, what else tells requests apart (`prompt_stream`).
    """
    return np.random.Generator(np.random.Philox(key=seed | stream << 64, counter=(position + 1) << 64))


def prompt_stream(prompt_ids: Sequence[int]) -> int:
    """A number for a prompt, so that requests of one seed draw independently unless they are the same request."""
    data = np.asarray(prompt_ids, np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def choose(logits: torch.Tensor, positions: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """The target's token after each row: [n] int64.

    Args:
        logits: [n, V].
        positions: [n] position of the token to be chosen (that of the row plus one).

    Sampling inverts the cumulative distribution at the uniform of the position, in float64.

    Raises:
        FloatingPointError: logits that are not finite.
    """
    if config.greedy:
        return argmax_tokens(logits)
    probs = target_probs(logits, config)
    return inverse_cdf(probs, torch.from_numpy(uniforms(config.seed, positions)).to(logits.device)).cpu().numpy()


def inverse_cdf(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """[n] int64, the id of each row at which its cumulative weight passes the draw.

    Args:
        weights: [n, V] float64, at least 0, any positive sum.
        draws: [n] float64 in [0, 1).

    Raises:
        FloatingPointError: weights that are not finite.
    """
    cumulative = weights.cumsum(-1)
    _require_finite(cumulative[:, -1])
    ids = torch.searchsorted(cumulative, (draws * cumulative[:, -1])[:, None], right=True)[:, 0]
    return ids.clamp_(max=weights.shape[-1] - 1)
