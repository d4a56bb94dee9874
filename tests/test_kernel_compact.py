"""KV rows of accepted paths: the kernel against the cache's own method.

Built to catch: a row that is overwritten before it is read, layers or heads that are left out, columns past a block,
and rows of other slots that change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, whole

from kernels.compact import compact
from kernels.ref.compact import compact as reference
from workbench.models.cache import SlotCache


def paths_of(rows: Sequence[Sequence[int]], places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(path [R, places] padded with -1, num_accepted [R])."""
    table = np.full((len(rows), places), -1)
    for line, path in zip(table, rows, strict=True):
        line[: len(path)] = path
    return whole(table), whole([max(len(path) - 1, 0) for path in rows])


def random_paths(rng: np.random.Generator, num_requests: int, places: int) -> list[list[int]]:
    """Increasing from 0, of any length; an empty one for a request that is not there."""
    paths = []
    for _ in range(num_requests):
        keep = rng.random(places) < rng.random()
        paths.append([0, *(np.flatnonzero(keep[1:]) + 1).tolist()] if rng.random() < 0.9 else [])
    return paths


def filled_cache(layers: int, slots: int, max_len: int, heads: int, dim: int, dtype: torch.dtype) -> SlotCache:
    cache = SlotCache(layers, slots, max_len, heads, dim, dtype, DEVICE)
    cache.kv.copy_(torch.arange(cache.kv.numel(), device=DEVICE).view_as(cache.kv) % 2039)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(3, 10), (1, 64), (9, 128)])
def test_equals_the_cache(heads, dim, dtype):
    rng = np.random.default_rng(heads)
    cache, want = (filled_cache(2, 5, 90, heads, dim, dtype) for _ in range(2))
    paths = [*random_paths(rng, 2, 60), [0, 1, 2], list(range(0, 60, 3))]
    slots, contexts = [4, 0, 3, 1], [0, 30, 7, 11]
    path, num_accepted = paths_of(paths, 60)
    compact(cache.kv, whole(slots), whole(contexts), path, num_accepted)
    for slot, context, kept in zip(slots, contexts, paths, strict=True):
        want.keep_path(slot, context, kept)
    assert torch.equal(cache.kv, want.kv)


@pytest.mark.parametrize("seed", range(4))
def test_random_paths(seed):
    rng = np.random.default_rng(seed)
    places = int(rng.choice([1, 5, 16, 64]))
    got, want = (filled_cache(1, 4, 200, 2, 8, torch.float32) for _ in range(2))
    arguments = (whole(rng.permutation(4)[:3]), whole(rng.integers(0, 130, 3)))
    arguments += paths_of(random_paths(rng, 3, places), places)
    compact(got.kv, *arguments)
    reference(want.kv, *arguments)
    assert torch.equal(got.kv, want.kv)


def test_chains_and_absent_requests_move_nothing():
    cache, want = (filled_cache(2, 3, 40, 2, 8, torch.float32) for _ in range(2))
    path, num_accepted = paths_of([list(range(16)), [], [0]], 16)
    compact(cache.kv, whole([0, 1, 2]), whole([3, 0, 8]), path, num_accepted)
    assert torch.equal(cache.kv, want.kv)


def test_layers_may_lie_apart():
    wide = filled_cache(3, 4, 50, 2, 8, torch.float32).kv
    before = wide.clone()
    arguments = (whole([1]), whole([5]), *paths_of([[0, 2, 5, 9, 10, 20]], 6))
    compact(wide[::2, :, 1:], *arguments)
    reference(before[::2, :, 1:], *arguments)
    assert torch.equal(wide, before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv": torch.zeros(2, 2, 3, 4, 5)}, r"kv \[2, 2, 3, 4, 5\]"),
        ({"kv": torch.zeros(2, 2, 3, 9, 4, 5).transpose(4, 5)}, "in one piece"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots is"),
        ({"path": torch.zeros(2, 4)}, "path"),
        ({"num_accepted": torch.zeros(2)}, "num_accepted is torch.float32"),
    ],
)
def test_bad_arguments_are_refused(change, named):
    path, num_accepted = paths_of([[0], [0]], 4)
    given = {
        "kv": torch.zeros(2, 2, 3, 9, 4, 5, device=DEVICE),
        "slots": whole([0, 1]),
        "context_len": whole([1, 1]),
        "path": path,
        "num_accepted": num_accepted,
    }
    given |= {name: tensor.to(DEVICE) for name, tensor in change.items()}
    for function in (compact, reference):
        with pytest.raises(ValueError, match=named):
            function(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("layers", "heads", "dim"), [(36, 8, 128), (30, 3, 64), (4, 5, 96)])
def test_real_sizes(layers, heads, dim, dtype):
    rng = np.random.default_rng(dim)
    got, want = (filled_cache(layers, 9, 700, heads, dim, dtype) for _ in range(2))
    arguments = (whole(rng.permutation(9)[:8]), whole(rng.integers(0, 600, 8)))
    arguments += paths_of(random_paths(rng, 8, 60), 60)
    compact(got.kv, *arguments)
    reference(want.kv, *arguments)
    assert torch.equal(got.kv, want.kv)


@pytest.mark.gpu
def test_replay_sees_new_paths():
    rng = np.random.default_rng(0)
    got, want = (filled_cache(6, 8, 300, 4, 64, torch.float16) for _ in range(2))
    slots, contexts = whole(np.arange(8)), whole(np.zeros(8))
    path, num_accepted = paths_of([[0]] * 8, 60)
    graph, _ = captured(lambda: compact(got.kv, slots, contexts, path, num_accepted))
    for _ in range(4):
        for place, new in zip((path, num_accepted), paths_of(random_paths(rng, 8, 60), 60), strict=True):
            place.copy_(new)
        slots.copy_(whole(rng.permutation(8)))
        contexts.copy_(whole(rng.integers(0, 200, 8)))
        graph.replay()
        reference(want.kv, slots, contexts, path, num_accepted)
        assert torch.equal(got.kv, want.kv)
