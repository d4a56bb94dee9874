"""Inputs of search benchmarks that look like a draft model's: candidates that the trie knows, in every depth.

Candidates drawn at random would match nothing behind the first suffix and flatter every time.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from workbench.search.trie import NgramTrie

#: Continuations of the previous true token among the candidates of a level, at most.
_LIKELY = 12
#: Mean rank, by frequency, of the tokens that fill a level up.
_MEAN_RANK = 150.0
#: Candidates' probabilities fall as rank^-s with s = _STEEPNESS / (level + 1)^_FLATTENING, times a log-normal number of
#: spread _SPREAD. So the best of 25 have 0.75, 0.43, 0.30, ... 0.14: what DART's network hits on the embedded target.
_STEEPNESS, _FLATTENING, _SPREAD = 2.5, 0.75, 0.3


class SearchCases(NamedTuple):
    """Requests of a search.

    Attributes:
        contexts: [N, order - 1] int64 tokens before the drafts, the root last.
        ids: [N, K, C] int64 distinct candidates of every level.
        probs: [N, K, C] float32, falling along a level, each level sums to 1.
    """

    contexts: np.ndarray
    ids: np.ndarray
    probs: np.ndarray


def search_cases(
    trie: NgramTrie, tokens: np.ndarray, num_cases: int, levels: int = 7, width: int = 25, seed: int = 0
) -> SearchCases:
    """Candidates at random places of a text.

    A level holds the token that follows in the text, up to 12 likely continuations of the token before it and frequent
    tokens of the text, in random order; but the one that follows is as often in a place as the probability there says.

    Args:
        trie: n-grams that the candidates are looked up in later.
        tokens: [T] ids of a text, best one that was not counted; places spread over all of it.
        num_cases: N.
        levels: K.
        width: C.
        seed: of everything random.

    Raises:
        ValueError: a number is out of range, or the text is too short or holds ids outside the trie's vocabulary.
    """
    tokens = np.asarray(tokens)
    tail, least = trie.order - 1, trie.order - 1 + levels
    for name, value, most in (("num_cases", num_cases, 2**31), ("levels", levels, 64), ("width", width, 1024)):
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}, allowed 1..{most}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size < least:
        raise ValueError(f"tokens are {tokens.dtype} {tokens.shape}, allowed: one axis of {least} integers or more")
    if tokens.min() < 0 or tokens.max() >= trie.vocab_size:
        raise ValueError(f"tokens are {tokens.min()}..{tokens.max()}, allowed 0..{trie.vocab_size - 1}")
    if width > trie.vocab_size:
        raise ValueError(f"width is {width}, allowed 1..{trie.vocab_size}: the vocabulary has no more")
    rng = np.random.default_rng(seed)
    roots = rng.integers(tail - 1, tokens.size - levels, num_cases)
    contexts = tokens[roots[:, None] + np.arange(1 - tail, 1)].astype(np.int64)
    ids = _candidates(trie, tokens.astype(np.int64), roots, levels, width, rng)
    probs = _probabilities(num_cases, levels, width, rng)
    _shuffle(ids, probs, rng)
    return SearchCases(contexts, ids, probs)


def _candidates(
    trie: NgramTrie, tokens: np.ndarray, roots: np.ndarray, levels: int, width: int, rng: np.random.Generator
) -> np.ndarray:
    """Distinct candidates [N, K, C] int64 behind the tokens at `roots`; that of the text is the first of its level."""
    counts = np.bincount(tokens)
    common = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    follow: dict[int, list[int]] = {}
    ids = np.empty((roots.size, levels, width), np.int64)
    for case, root in enumerate(roots.tolist()):
        ranks = rng.exponential(_MEAN_RANK, (levels, 2 * width)).astype(np.int64)
        fillers = common[ranks % common.size].tolist()
        for level, (before, true) in enumerate(zip(*_pairs(tokens, root, levels), strict=True)):
            if before not in follow:
                follow[before] = trie.continuations([before], _LIKELY)[0].tolist()
            ids[case, level] = _distinct(chain([true], follow[before], fillers[level], range(trie.vocab_size)), width)
    return ids


def _pairs(tokens: np.ndarray, root: int, levels: int) -> tuple[list[int], list[int]]:
    """The tokens before those of every level, and the tokens that follow in the text."""
    return tokens[root : root + levels].tolist(), tokens[root + 1 : root + 1 + levels].tolist()


def _distinct(values: Iterable[int], size: int) -> list[int]:
    """The first `size` different ones."""
    seen: set[int] = set()
    return list(islice((value for value in values if not (value in seen or seen.add(value))), size))


def _probabilities(num_cases: int, levels: int, width: int, rng: np.random.Generator) -> np.ndarray:
    """[N, K, C] float32, falling and heavy-tailed, flatter level by level."""
    steepness = _STEEPNESS * np.arange(1, levels + 1) ** -_FLATTENING
    steepness = steepness[:, None] * rng.lognormal(0.0, _SPREAD, (num_cases, levels, 1))
    logits = -steepness * np.log(np.arange(1, width + 1)) + rng.normal(0.0, _SPREAD, (num_cases, levels, width))
    weights = np.exp(-np.sort(-logits, axis=2))
    return (weights / weights.sum(axis=2, keepdims=True)).astype(np.float32)


def _shuffle(ids: np.ndarray, probs: np.ndarray, rng: np.random.Generator) -> None:
    """Puts the first candidate of every level to a place drawn by `probs`, the others in random order around it."""
    ids[:, :, 1:] = rng.permuted(ids[:, :, 1:], axis=2)
    drawn = rng.random((*probs.shape[:2], 1)) * probs.sum(axis=2, keepdims=True)
    places = np.minimum((probs.cumsum(axis=2) < drawn).sum(axis=2, keepdims=True), probs.shape[2] - 1)
    moved = np.take_along_axis(ids, places, axis=2)
    np.put_along_axis(ids, places, ids[:, :, :1], axis=2)
    # Where the place is the first one, `moved` is the candidate itself.
    ids[:, :, :1] = moved
