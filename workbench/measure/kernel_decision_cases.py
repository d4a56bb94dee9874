"""Inputs of the decision and acceptance kernels at the sizes of a round, and plain torch that does the same."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from workbench.kernel_path import add_own_kernels
from workbench.measure.kernel_cases import tree_bits
from workbench.measure.kernel_decision_types import SHORT, DecisionCase, DecisionSizes, packed, results, written
from workbench.measure.kernel_times import differing, sets_of
from workbench.measure.kernel_tree_cases import TREE_ROWS, pack_trees_case, prune_alone_case, prune_case

#: Path that is accepted of each tree.
_TREE_PATH = (0, 2, 7, 20, 41)
_TEMPERATURE = 0.8
#: Sums over the vocabulary in float32 against float64, nats.
_SUM_TOLERANCE = 1e-4
#: Share of the sampled tokens that may differ in half precision, whose weights are float32 in the kernel.
_SAMPLED_TOLERANCE = 0.02


def _logits(sizes: DecisionSizes, rows: int) -> tuple[list[torch.Tensor], int]:
    """Sets of logits [rows, V] that take turns, and the bytes of one."""
    num_bytes = rows * sizes.vocab * sizes.dtype.itemsize
    shape = (rows, sizes.vocab)
    sets = [
        torch.randn(shape, device=sizes.device).mul_(4).to(sizes.dtype) for _ in range(sets_of(num_bytes, sizes.device))
    ]
    return sets, num_bytes


def features_case(sizes: DecisionSizes) -> DecisionCase:
    """Best logits, normaliser and entropy of every draft."""
    logits, num_bytes = _logits(sizes, sizes.requests * sizes.drafts)

    def off(found: Any, wanted: Any) -> float:
        sums = [float((a - b).abs().max()) for a, b in zip(found[2:], wanted[2:], strict=True)]
        return max(differing(found[:2], wanted[:2]), *sums)

    def plain(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        best, wide = rows.topk(16), rows.float()
        log_probs = wide.log_softmax(-1)
        return best.values, best.indices, wide.logsumexp(-1), -(log_probs.exp() * log_probs).sum(-1)

    text = f"{len(logits[0])} rows of {sizes.vocab}"
    calls = [lambda x=x: plain(x) for x in logits]
    inputs = [(x,) for x in logits]
    return DecisionCase("features", text, inputs, num_bytes, True, results, off, _SUM_TOLERANCE, calls)


def allocate_case(sizes: DecisionSizes) -> DecisionCase:
    """Lengths of all chains from their scores."""
    scores = (torch.rand(sizes.requests, sizes.drafts, device=sizes.device) ** 0.3).cumprod(-1).contiguous()
    limits = torch.full((sizes.requests,), sizes.drafts + 1, device=sizes.device)
    budget = torch.tensor([sizes.rows], device=sizes.device)
    num_bytes = scores.nbytes + 2 * limits.nbytes
    text = f"{sizes.requests} chains, {sizes.rows} rows"
    return DecisionCase("allocate", text, [(scores, limits, budget)], num_bytes, False, results)


def _chain_rows(sizes: DecisionSizes) -> tuple:
    """Arguments of `pack` but the last, for chains whose lengths differ and sum to the rows of a round."""
    device, number = sizes.device, sizes.requests
    lengths = torch.full((number,), sizes.mean_rows, device=device)
    spread = min(sizes.mean_rows - 1, sizes.drafts + 1 - sizes.mean_rows)
    pairs = number // 2 * 2
    lengths[:pairs:2] += spread
    lengths[1:pairs:2] -= spread
    anchors = torch.randint(0, sizes.vocab, (number,), device=device)
    drafts = torch.randint(0, 2, (number, sizes.drafts), device=device)  # few tokens, so that some are accepted
    contexts = torch.randint(0, 5000, (number,), device=device)
    return lengths, anchors, drafts, torch.arange(number, device=device), contexts, 9999


def _fields(sizes: DecisionSizes) -> list[torch.Tensor]:
    """Room for packed rows, in the order of `ChainRows`."""
    counts = [sizes.rows] * 5 + [sizes.requests + 1]
    return [torch.zeros(count, dtype=torch.int64, device=sizes.device) for count in counts]


def pack_case(sizes: DecisionSizes) -> DecisionCase:
    """Chains into flat rows."""
    add_own_kernels()
    from kernels.ref.pack import ChainRows

    given = (*_chain_rows(sizes), ChainRows(*_fields(sizes)))
    num_bytes = 6 * 8 * sizes.rows
    text = f"{sizes.requests} chains, {sizes.rows} rows"
    return DecisionCase("pack", text, [given], num_bytes, False, packed)


def _choose_case(sizes: DecisionSizes, heat: float) -> DecisionCase:
    logits, num_bytes = _logits(sizes, sizes.rows)
    number = torch.arange(sizes.rows, device=sizes.device)
    temperature = torch.full((sizes.requests,), heat, dtype=torch.float64, device=sizes.device)
    shared = (number, number // sizes.mean_rows, temperature, torch.arange(sizes.requests, device=sizes.device))
    draws = torch.rand(sizes.rows, 1, device=sizes.device)

    def plain(rows: torch.Tensor) -> torch.Tensor:
        if not heat:
            return rows.argmax(-1)
        return torch.searchsorted((rows.float() / heat).softmax(-1).cumsum(-1), draws)

    text = f"{sizes.rows} rows of {sizes.vocab}"
    tolerance = _SAMPLED_TOLERANCE if heat and sizes.dtype != torch.float32 else 0.0
    calls = [lambda x=x: plain(x) for x in logits]
    inputs = [(x, *shared) for x in logits]
    return DecisionCase("choose", text, inputs, num_bytes, True, results, differing, tolerance, calls)


def choose_greedy_case(sizes: DecisionSizes) -> DecisionCase:
    """The largest logit of every verified row."""
    return _choose_case(sizes, 0.0)


def choose_sampled_case(sizes: DecisionSizes) -> DecisionCase:
    """A draw for every verified row."""
    return _choose_case(sizes, _TEMPERATURE)


def walked_chains_case(sizes: DecisionSizes) -> DecisionCase:
    """Accepted paths of packed chains."""
    add_own_kernels()
    from kernels.ref.pack import ChainRows, pack

    rows = ChainRows(*_fields(sizes))
    pack(*_chain_rows(sizes), rows)
    choices = torch.randint(0, 2, rows.tokens.shape, device=sizes.device)
    given = (rows.tokens, rows.ancestors, rows.starts, choices, sizes.drafts + 1)
    text = f"{sizes.requests} chains, {sizes.rows} rows"
    return DecisionCase("accept", text, [given], 3 * 8 * sizes.rows, False, results)


def walked_trees_case(sizes: DecisionSizes) -> DecisionCase:
    """Accepted paths of trees."""
    rng, count = Random(sizes.requests), sizes.requests * TREE_ROWS
    bits = [row for _ in range(sizes.requests) for row in tree_bits("tree", TREE_ROWS, rng)]
    starts = torch.arange(sizes.requests + 1, device=sizes.device) * TREE_ROWS
    tokens, choices = torch.randint(0, 2, (2, count), device=sizes.device)
    given = (tokens, torch.tensor(bits, device=sizes.device), starts, choices, TREE_ROWS)
    text = f"{sizes.requests} trees of {TREE_ROWS}"
    return DecisionCase("accept", text, [given], 3 * 8 * count, False, results)


def compact_case(sizes: DecisionSizes) -> DecisionCase:
    """Cache rows of accepted tree paths moved together in all layers."""
    shape, device = sizes.shape, sizes.device
    context, room = 96, 160
    # Filled once and copied: the contents matter only for the comparison.
    kv = torch.randn(sizes.layers, 2, sizes.requests, room, shape.kv_heads, shape.head_dim, device=device).to(
        sizes.dtype
    )
    moved = len(_TREE_PATH) - 1
    path = torch.full((sizes.requests, TREE_ROWS), -1, device=device)
    path[:, : moved + 1] = torch.tensor(_TREE_PATH, device=device)
    slots = torch.arange(sizes.requests, device=device)
    shared = (slots, torch.full_like(slots, context), path, torch.full_like(slots, moved))
    sources = context + torch.tensor(_TREE_PATH[1:], device=device)
    targets = context + torch.arange(1, moved + 1, device=device)

    def plain(cache: torch.Tensor) -> None:
        """Knows that all paths are alike, which a round does not."""
        cache[:, :, :, targets] = cache[:, :, :, sources]

    caches = [kv, kv.clone(), kv.clone()]
    num_bytes = 2 * moved * sizes.requests * sizes.layers * 2 * shape.kv_heads * shape.head_dim * kv.element_size()
    text = f"{sizes.requests} paths of {moved} rows, {sizes.layers} layers"
    calls = [lambda cache=cache: plain(cache) for cache in caches]
    inputs = [(cache, *shared) for cache in caches]
    return DecisionCase("compact", text, inputs, num_bytes, True, written(0), plain=calls)


def kv_write_case(sizes: DecisionSizes) -> DecisionCase:
    """Keys and values of the verified rows into one layer."""
    shape, new = sizes.shape, {"dtype": sizes.dtype, "device": sizes.device}
    key, value = torch.randn(2, sizes.rows, shape.kv_heads, shape.head_dim, **new)
    caches = torch.zeros(2, sizes.requests, 2 * sizes.mean_rows, shape.kv_heads, shape.head_dim, **new)
    number = torch.arange(sizes.rows, device=sizes.device)
    slot, place = number // sizes.mean_rows, number % sizes.mean_rows
    given = (key, value, caches[0], caches[1], slot, place, torch.tensor([0, sizes.rows], device=sizes.device))

    def plain() -> None:
        caches[0][slot, place] = key
        caches[1][slot, place] = value

    text = f"{sizes.rows} rows, one layer"
    return DecisionCase("kv_write", text, [given], 4 * key.nbytes, False, written(2, 3), plain=[plain] * SHORT)


#: In the order of a round.
CASES: dict[str, Callable[[DecisionSizes], DecisionCase]] = {
    "prune": prune_case,
    "prune, alone": prune_alone_case,
    "features": features_case,
    "allocate": allocate_case,
    "pack": pack_case,
    "pack_trees": pack_trees_case,
    "kv_write": kv_write_case,
    "choose, greedy": choose_greedy_case,
    "choose, sampled": choose_sampled_case,
    "accept, chains": walked_chains_case,
    "accept, trees": walked_trees_case,
    "compact": compact_case,
}
