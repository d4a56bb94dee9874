"""Published `.trie` files for tests, made from the levels of a trie by plain array code."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from workbench.search.ngram_count import Level


def published_words(levels: list[Level], root_frequency: int, rng: np.random.Generator) -> np.ndarray:
    """The file as uint32 words: nodes numbered at random with parents first, lists of children shuffled.

    Args:
        levels: n-grams of every length.
        root_frequency: any integer; wrapped to 32 bits.
        rng: decides numbers and orders.
    """
    sizes = [1, *(level.tokens.size for level in levels)]
    first = np.cumsum([0, *sizes])
    tokens = np.concatenate([[0], *(level.tokens for level in levels)])
    counts = np.concatenate([[root_frequency], *(level.counts for level in levels)])
    parents = np.concatenate([[0], *(first[i] + level.parents for i, level in enumerate(levels))])
    age = np.zeros(tokens.size)
    for low, high in itertools.pairwise(first[1:]):
        age[low:high] = age[parents[low:high]] + rng.exponential(size=high - low)
    order = np.argsort(age, kind="stable")
    number = np.empty(order.size, np.int64)
    number[order] = np.arange(order.size)
    parents, tokens, counts = number[parents[order]], tokens[order], counts[order]
    num_children = np.bincount(parents[1:], minlength=parents.size)
    children = 1 + rng.permutation(parents.size - 1)
    children = children[np.argsort(parents[children], kind="stable")]
    places = 4 + 6 * np.arange(parents.size) + 3 * (np.cumsum(num_children) - num_children)
    words = np.zeros(4 + 9 * parents.size - 3, np.uint32)
    words[0], words[2] = len(levels), parents.size
    for offset, values in ((0, tokens), (1, parents), (3, counts), (4, num_children)):
        words[places + offset] = values & 0xFFFFFFFF
    listed = np.repeat(places + 6, num_children)
    run_begin = np.repeat(np.cumsum(num_children) - num_children, num_children)
    listed += 3 * (np.arange(children.size) - run_begin)
    words[listed], words[listed + 1] = tokens[children], children
    return words


def random_levels(sizes: list[int], vocab: int, rng: np.random.Generator) -> list[Level]:
    """Levels of about these sizes with random n-grams and counts, a few of them large."""
    levels, above = [], 1
    for size in sizes:
        keys = np.unique(rng.integers(0, above * vocab, size))
        counts = np.minimum(rng.zipf(1.5, keys.size), 2**31 - 1)
        levels.append(Level(keys % vocab, counts, keys // vocab))
        above = keys.size
    return levels


def write_published(path: Path, levels: list[Level], root_frequency: int, seed: int) -> None:
    """Writes `published_words`."""
    published_words(levels, root_frequency, np.random.default_rng(seed)).tofile(path)
