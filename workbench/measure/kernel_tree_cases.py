"""Inputs of the kernels that make and pack draft trees, at the sizes of DART (arXiv 2601.19278)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.batch import NUM_TAIL
from workbench.kernel_path import add_own_kernels
from workbench.measure.kernel_cases import tree_bits
from workbench.measure.kernel_decision_types import DecisionCase, DecisionSizes, packed
from workbench.measure.kernel_times import differing
from workbench.measure.search_cases import SearchCases, search_cases
from workbench.search.device_trie import device_trie
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie

if TYPE_CHECKING:
    from kernels.ref.prune import DraftTrees

#: Rows of the trees of a round: DART's 59 nodes and the root.
TREE_ROWS = 60
_LEVELS, _WIDTH = 7, 25
#: Tokens whose n-grams are counted, and the order.
_COUNTED, _ORDER = 1_000_000, 3
#: Sets of requests that take turns on a GPU. A CPU, whose reference is slow, has one.
_SETS = 16
#: Requests whose trees are compared with the reference, which takes a tenth of a second a tree.
_COMPARED = 4
#: Relative error of a score, a float32, beside one that was rounded from a float64 of another order of operations.
_SCORE_TOLERANCE = 1e-6


def prune_case(sizes: DecisionSizes) -> DecisionCase:
    """Trees from the candidates of all requests.

    The bytes are those of candidates and trees. What is read of the trie is left out: a look-up reads a few bytes after
    a few others, and the time is that of waiting for them. The trie is small enough for a GPU's level-2 cache.
    """
    add_own_kernels()
    from kernels.ref.prune import PruneSettings

    seed = int(torch.randint(1 << 31, (1,)))
    rng, shape = np.random.default_rng(seed), (sizes.requests, TREE_ROWS)
    weights = 1 / np.arange(1, sizes.vocab + 1)  # Zipf's law
    text = rng.choice(sizes.vocab, _COUNTED, p=weights / weights.sum())
    trie = NgramTrie.count([text], _ORDER, vocab_size=sizes.vocab)
    sets = _SETS if sizes.device.type == "cuda" else 1
    made = search_cases(trie, text, sets * sizes.requests, _LEVELS, min(_WIDTH, sizes.vocab), seed)
    levels = torch.full((sizes.requests,), _LEVELS, device=sizes.device)
    config, trees = PruneConfig(num_nodes=TREE_ROWS - 1), _no_trees(shape, sizes.device)
    rest = (device_trie(trie, sizes.device), PruneSettings(*config.flat()), trees)
    inputs = []
    for first in range(0, sets * sizes.requests, sizes.requests):
        ids, probs, tails = _on_device(made, slice(first, first + sizes.requests), sizes.device)
        inputs.append((ids, probs, tails, levels, torch.full_like(levels, TREE_ROWS), *rest))
    num_bytes = sum(part.nbytes for part in (*inputs[0][:5], *trees))
    what = f"{sizes.requests} x {_LEVELS} levels of {ids.shape[2]}, {trie.num_nodes / 1e6:.1f} million n-grams"
    return DecisionCase("prune", what, inputs, num_bytes, False, _searched, _off, short=False)


def prune_alone_case(sizes: DecisionSizes) -> DecisionCase:
    """The tree of a single request, however many a round has."""
    return prune_case(replace(sizes, requests=1))


def _on_device(made: SearchCases, part: slice, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Candidates [R, K, C], their probabilities and tails [R, G] of some requests."""
    ids, probs, contexts = (torch.from_numpy(array[part]).to(device) for array in (made.ids, made.probs, made.contexts))
    tails = torch.nn.functional.pad(contexts, (NUM_TAIL - contexts.shape[1], 0), value=-1)
    return ids, probs, tails


def _no_trees(shape: tuple[int, int], device: torch.device) -> DraftTrees:
    """Room for trees [R, rows] that holds what no tree does."""
    from kernels.ref.prune import DraftTrees

    fields = {name: torch.full(shape, -7, device=device) for name in DraftTrees._fields}
    fields |= {"scores": torch.full(shape, -7.0, device=device), "sizes": torch.full(shape[:1], -7, device=device)}
    return DraftTrees(**fields)


def _searched(function: Callable, given: tuple) -> tuple[torch.Tensor, ...]:
    """Trees of a few requests from the first to the last, scores behind all other fields; the others have no rows.

    Rows that mean nothing are zeros.
    """
    ids, probs, tails, levels, limits, trie, settings, out = given
    chosen = torch.linspace(0, len(limits) - 1, _COMPARED).round().long().unique().to(limits.device)
    few = torch.zeros_like(limits)
    few[chosen] = limits[chosen]
    own = _no_trees(tuple(out.tokens.shape), limits.device)
    function(ids, probs, tails, levels, few, trie, settings, own)
    behind = torch.arange(out.tokens.shape[1], device=limits.device) >= own.sizes[:, None]
    *fields, scores, bits = (field.masked_fill(behind, 0)[chosen] for field in own[:5])
    return (*fields, bits, own.sizes, scores)


def _off(found: Any, wanted: Any) -> float:
    """The largest share of entries of a field that differ, of scores by more than rounding."""
    close = torch.isclose(found[-1], wanted[-1], rtol=_SCORE_TOLERANCE, atol=0)
    return max(differing(found[:-1], wanted[:-1]), float((~close).double().mean()))


def pack_trees_case(sizes: DecisionSizes) -> DecisionCase:
    """Trees into flat rows: of each row 24 bytes are read, and 40 written."""
    add_own_kernels()
    from kernels.ref.pack import ChainRows
    from kernels.ref.prune import DraftTrees

    rng, device, shape = Random(sizes.requests), sizes.device, (sizes.requests, TREE_ROWS)
    bits = [tree_bits("tree", TREE_ROWS, rng) for _ in range(sizes.requests)]
    depths = [[(row % 2**64).bit_count() - 1 for row in rows] for rows in bits]
    trees = DraftTrees(
        tokens=torch.randint(0, sizes.vocab, shape, device=device),
        parents=torch.zeros(shape, dtype=torch.int64, device=device),  # not read, like scores
        depths=torch.tensor(depths, device=device),
        scores=torch.zeros(shape, device=device),
        ancestors=torch.tensor(bits, device=device),
        sizes=torch.full(shape[:1], TREE_ROWS, device=device),
    )
    contexts, count = torch.randint(0, 5000, shape[:1], device=device), sizes.requests * TREE_ROWS
    out = ChainRows(*(torch.zeros(n, dtype=torch.int64, device=device) for n in [count] * 5 + [sizes.requests + 1]))
    given = (trees, torch.arange(sizes.requests, device=device), contexts, 9999, out)
    text = f"{sizes.requests} trees of {TREE_ROWS}"
    return DecisionCase("pack_trees", text, [given], (3 + 5) * 8 * count, False, packed)
