"""Queries and searches over arrays that no trie has, for a process of its own (see `test_trie_hostile`)."""

from __future__ import annotations

import sys

import numpy as np

from workbench.search import _jit
from workbench.search.count_codes import code_counts


def hostile_arrays(rng: np.random.Generator) -> tuple[tuple, int, int]:
    """Arrays as `NgramTrie.arrays` gives them, with anything in them; ids are below the second number; the order."""
    order, vocab = int(rng.integers(2, 6)), int(rng.integers(1, 80))
    sizes = [int(rng.integers(0, min(vocab, 30) + 1)), *(int(n) for n in rng.integers(0, 60, order - 1))]
    total, inner = sum(sizes), sum(sizes[:-1])
    quantised, wide = rng.random() < 0.4, rng.random() < 0.3
    counts = rng.choice([0, 1, 5, 65535, 60000], total).astype("<u2")
    if quantised:
        tokens, counts = rng.integers(0, vocab << 8, total).astype("<u4"), np.empty(0, "<u1")
    elif wide:
        tokens = rng.integers(-3, vocab + 3, total).astype("<i4")
    else:
        tokens = rng.integers(0, vocab + 3, total).astype("<u2")
    tokens = np.sort(tokens) if rng.random() < 0.6 else tokens
    starts = rng.integers(0, total + 1, inner + 1).astype("<u4")
    starts = np.sort(starts) if rng.random() < 0.5 else starts
    if rng.random() < 0.4:
        starts = rng.choice([0, 1, 2**32 - 1, 2**31, total, total + 1], inner + 1).astype("<u4")
    overflow = 0 if quantised else min(int(rng.integers(0, 5)), total)
    nodes = rng.integers(0, 2**32 if rng.random() < 0.5 else max(total, 1), overflow).astype("<u4")
    large = rng.choice(np.array([0, 1, 70000, 2**63, 2**64 - 1], np.uint64), overflow).astype("<u8")
    codes = code_counts().astype(float) if quantised else np.empty(0)
    arrays = (tokens, counts, starts, nodes, large, sizes[0], order - 1, codes)
    for array in arrays:
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return arrays, vocab, order


def query_once(rng: np.random.Generator, arrays: tuple, vocab: int, order: int) -> None:
    """More queries than a block has now and then."""
    queries, width = int(rng.integers(1, 80)), int(rng.integers(1, 30))
    contexts = rng.integers(-1, vocab + 3, (queries, order - 1))
    if rng.random() < 0.3:
        contexts = rng.choice([-1, 0, 3, 2**62, -(2**63), 2**63 - 1], (queries, order - 1))
    ids = rng.integers(-1, vocab + 3, (queries, width)).astype(np.int32)
    probs, lengths = np.full(ids.shape, np.nan, np.float32), np.full(ids.shape, -9, np.int32)
    _jit.query_batch(arrays, contexts, ids, probs, lengths)
    assert ((probs >= 0) & (probs <= 1)).all() and ((lengths >= 0) & (lengths < order)).all()


def search_once(rng: np.random.Generator, arrays: tuple, vocab: int) -> None:
    """Trees whose parents, depths and order of scores must hold whatever the arrays say."""
    requests, levels, nodes = int(rng.integers(1, 4)), int(rng.integers(1, 6)), int(rng.integers(1, 64))
    ids = rng.integers(0, vocab + 3, (requests, levels, int(rng.integers(1, 30)))).astype(np.int32)
    probs = rng.random(ids.shape).astype(np.float32)
    probs[rng.random(probs.shape) < 0.1] = rng.choice([np.nan, np.inf, -1, 0, 1])
    contexts = rng.integers(-1, vocab + 3, (requests, int(rng.integers(1, 6))))
    contexts[:, -1] = np.abs(contexts[:, -1])
    lens, limits = rng.integers(1, contexts.shape[1] + 1, requests), rng.integers(0, nodes + 2, requests)
    config = (int(rng.integers(1, 25)), nodes, 0.5, 0.7, 0.9, 1e-10, int(rng.integers(-1, vocab)))
    whole = tuple(np.full((requests, nodes + 1), -7, np.int32) for _ in range(3))
    out = (*whole, np.full((requests, nodes + 1), np.nan, np.float32), np.full(requests, -7))
    _jit.prune_batch(ids, probs, contexts, lens, rng.integers(0, levels + 1, requests), limits, arrays, config, out)
    _, parents, depths, scores, sizes = out
    assert ((sizes >= 0) & (sizes <= limits)).all()
    for r in range(requests):
        for row in range(1, sizes[r]):
            parent = parents[r, row]
            assert 0 <= parent < row and depths[r, row] == depths[r, parent] + 1
            assert scores[r, row] <= scores[r, row - 1]


def main(seed: int, trials: int) -> None:
    """Raises what goes wrong."""
    rng = np.random.default_rng(seed)
    for _ in range(trials):
        arrays, vocab, order = hostile_arrays(rng)
        query_once(rng, arrays, vocab, order)
        search_once(rng, arrays, vocab)
    sys.stdout.write("survived\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
