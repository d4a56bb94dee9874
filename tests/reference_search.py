"""Slow, obvious restatements of the n-gram look-up and the tree pruning, for tests only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np


def count_ngrams(sequences: Sequence[Sequence[int]], order: int, min_counts: Sequence[int] | None = None) -> Counter:
    """Occurrences of every n-gram of length 1..order inside one sequence; rare ones go, with what extends them."""
    counts: Counter = Counter()
    for sequence in sequences:
        ids = [int(token) for token in sequence]
        for start in range(len(ids)):
            for length in range(1, min(order, len(ids) - start) + 1):
                counts[tuple(ids[start : start + length])] += 1
    least = min_counts or [1] * order
    kept = {gram for gram in counts if all(counts[gram[:k]] >= least[k - 1] for k in range(1, len(gram) + 1))}
    return Counter({gram: counts[gram] for gram in kept})


def probability(counts: Counter, order: int, context: Sequence[int], token: int) -> tuple[float, int]:
    """Probability of one token and the length of the suffix that decided."""
    for length in range(min(order - 1, len(context)), 0, -1):
        suffix = tuple(context[len(context) - length :])
        if counts[(*suffix, token)] > 0:
            return float(np.float32(counts[(*suffix, token)] / counts[suffix])), length
    return 0.0, 0


def prune(topk_ids, topk_probs, context, counts, order, config) -> list[tuple[tuple[int, ...], float]]:
    """(path, score) of the kept nodes, best first: all extensions of all beam paths are scored, then sorted."""
    weight = config.ngram_weight if counts is not None else 0.0
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    everything: list[tuple[tuple[int, ...], float]] = []
    for level, (ids, probs) in enumerate(zip(topk_ids, topk_probs, strict=True)):
        level_weight = (level + 1.0) ** -config.level_exponent
        extended = []
        for path, score in beam:
            for token, prob in zip(ids, probs, strict=True):
                token, prob = int(token), float(prob)
                prob = 0.0 if math.isnan(prob) else min(max(prob, 0.0), 1.0)
                drafted = level_weight * config.logit_decay**level * math.log(prob + config.epsilon)
                gram = 0.0
                if level > 0 and weight > 0:
                    seen, _ = probability(counts, order, [*context, *path], token)
                    gram = level_weight * weight * math.log(seen + config.epsilon)
                extended.append(((*path, token), score + (min(drafted, 0.0) + min(gram, 0.0))))
        everything += extended
        extended.sort(key=lambda node: (node[0][-1] == config.eos_id, -node[1]))
        beam = extended[: config.beam_width]
    everything.sort(key=lambda node: -node[1])
    return everything[: config.num_nodes]
