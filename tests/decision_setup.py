"""What the tests of the decision and acceptance kernels share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from workbench.search.encode import ancestor_masks
from workbench.types import DraftTree

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def poison_empty(on: bool) -> None:
    """Fresh memory holds NaN or the largest integer, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(on, warn_only=True)


def whole(values: object) -> torch.Tensor:
    """An int64 tensor on the device under test."""
    return torch.as_tensor(np.asarray(values, np.int64)).to(DEVICE)


def falling_scores(rng: np.random.Generator, num_requests: int, count: int, levels: int = 0) -> np.ndarray:
    """[N, count] float32 in 0..1, not rising; with `levels`, multiples of 1 / levels, so that many are equal."""
    scores = np.sort(rng.random((num_requests, count)).astype(np.float32))[:, ::-1]
    return np.round(scores * levels) / np.float32(levels) if levels else scores.copy()


def random_tree(rng: np.random.Generator, num_rows: int, vocab: int, reach: int) -> DraftTree:
    """Tokens below `vocab`; each parent is among the `reach` rows before its child, so a reach of 1 gives a chain."""
    parents, depths = np.full(num_rows, -1, np.int32), np.zeros(num_rows, np.int32)
    for row in range(1, num_rows):
        parents[row] = rng.integers(max(0, row - reach), row)
        depths[row] = depths[parents[row]] + 1
    tokens = rng.integers(0, vocab, num_rows).astype(np.int32)
    return DraftTree(tokens, parents, depths, np.zeros(num_rows, np.float32))


def joined_trees(trees: list[DraftTree], num_sentinels: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens [M], ancestors [M], starts [R+1]) of trees one behind another, sentinels last."""
    tokens = [*(t.tokens for t in trees), np.zeros(num_sentinels)]
    bits = [*(ancestor_masks(t.parents).view(np.int64) for t in trees), np.zeros(num_sentinels, np.int64)]
    starts = np.cumsum([0, *(len(t.tokens) for t in trees)])
    return whole(np.concatenate(tokens)), whole(np.concatenate(bits)), whole(starts)


def captured(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """The function in a CUDA graph, and the result that a replay rewrites; runs it once before, which compiles."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result
