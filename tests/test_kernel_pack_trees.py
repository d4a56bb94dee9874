"""Packing of trees: the kernel against the workspace that the engine packs on the host.

Built to catch: positions that count rows instead of depths, rows given to a neighbour where a request has none, what
lies behind a tree's last row taken for a part of it, and boundaries that are left from an earlier round.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, random_tree, whole

from kernels.pack import pack
from kernels.pack_trees import pack_trees
from kernels.ref.pack import ChainRows
from kernels.ref.pack_trees import pack_trees as reference
from kernels.ref.prune import DraftTrees as SearchedTrees
from workbench.batch import DraftTrees
from workbench.decode.rows import Workspace
from workbench.search.encode import ancestor_masks
from workbench.types import DraftTree

DEAD_ROW = 777


def new_rows(num_requests: int, num_rows: int) -> ChainRows:
    """Fields full of rubbish."""
    sizes = [num_rows] * 5 + [num_requests + 1]
    return ChainRows(*(torch.full((size,), -(2**40), device=DEVICE) for size in sizes))


def as_tables(trees: list[DraftTree | None], places: int) -> DraftTrees:
    """Trees as a search leaves them, rubbish behind each; None for a request that pads."""
    tables = np.full((4, len(trees), places), -(2**41), np.int64)  # tokens, parents, depths, ancestors
    scores = np.full((len(trees), places), np.nan, np.float32)
    for r, tree in enumerate(trees):
        if tree is not None:
            count = len(tree.tokens)
            bits = ancestor_masks(tree.parents).view(np.int64)
            tables[:, r, :count] = tree.tokens, tree.parents, tree.depths, bits
            scores[r, :count] = tree.scores
    tokens, parents, depths, ancestors = map(whole, tables)
    sizes = whole([0 if tree is None else len(tree.tokens) for tree in trees])
    return DraftTrees(tokens, parents, depths, torch.from_numpy(scores).to(DEVICE), ancestors, sizes)


def random_trees(rng: np.random.Generator, sizes: list[int]) -> list[DraftTree | None]:
    return [random_tree(rng, size, 1000, 1 + r % 9) if size else None for r, size in enumerate(sizes)]


def random_round(rng: np.random.Generator, num_requests: int, places: int) -> dict[str, object]:
    return {
        "trees": as_tables(random_trees(rng, rng.integers(0, places + 1, num_requests).tolist()), places),
        "slots": whole(rng.permutation(num_requests + 3)[:num_requests]),
        "context_len": whole(rng.integers(0, 40_000, num_requests)),
    }


def assert_same(given: dict[str, object], num_rows: int) -> ChainRows:
    got, want = (new_rows(len(given["slots"]), num_rows) for _ in range(2))
    pack_trees(**given, dead_row=DEAD_ROW, out=got)
    reference(**given, dead_row=DEAD_ROW, out=want)
    for name in ChainRows._fields:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    return got


def test_trees_of_a_round_are_those_of_the_kernels():
    """They are handed over as they are, so fields and order must agree."""
    assert DraftTrees._fields == SearchedTrees._fields


@pytest.mark.parametrize(("sizes", "num_rows"), [([1], 1), ([64], 64), ([6, 10, 7, 9], 32), ([16, 1, 64, 60, 5], 201)])
def test_equals_the_workspace(sizes, num_rows):
    rng = np.random.default_rng(0)
    trees = random_trees(rng, sizes)
    given = random_round(rng, len(sizes), 64) | {"trees": as_tables(trees, 64)}
    space = Workspace(len(sizes), num_rows, DEAD_ROW, torch.device("cpu"))
    space.pack(trees, given["slots"].tolist(), given["context_len"].tolist(), num_rows)
    got = assert_same(given, num_rows)
    for name in ChainRows._fields:
        assert torch.equal(getattr(got, name).cpu(), getattr(space, name)), name


@pytest.mark.parametrize(("num_requests", "places", "num_rows"), [(1, 1, 5), (3, 16, 64), (7, 64, 500), (33, 8, 300)])
def test_equals_the_reference(num_requests, places, num_rows):
    assert_same(random_round(np.random.default_rng(num_requests), num_requests, places), num_rows)


def test_requests_without_rows_anywhere():
    rng = np.random.default_rng(1)
    given = random_round(rng, 6, 16) | {"trees": as_tables(random_trees(rng, [0, 3, 0, 0, 2, 0]), 16)}
    got = assert_same(given, 8)
    assert got.starts.tolist() == [0, 0, 3, 3, 3, 5, 5]
    assert got.kv_row[5:].tolist() == [DEAD_ROW] * 3
    for name in ("tokens", "positions", "slot_of_row", "ancestors"):
        assert not getattr(got, name)[5:].any(), name


def test_nobody_is_there():
    given = random_round(np.random.default_rng(1), 4, 16) | {"trees": as_tables([None] * 4, 16)}
    got = assert_same(given, 70)
    assert not got.tokens.any() and not got.ancestors.any() and (got.kv_row == DEAD_ROW).all()


def test_what_does_not_fit_is_cut():
    rng = np.random.default_rng(2)
    given = random_round(rng, 4, 16) | {"trees": as_tables(random_trees(rng, [16, 10, 16, 4]), 16)}
    assert assert_same(given, 30).starts.tolist() == [0, 16, 26, 30, 30]


def test_the_first_rows_of_larger_trees():
    """A policy may let fewer rows pass than the search found."""
    rng = np.random.default_rng(3)
    trees = random_trees(rng, [9, 4, 16])
    given = random_round(rng, 3, 16)
    tables = as_tables(trees, 16)
    got = assert_same(given | {"trees": tables._replace(sizes=tables.sizes.clamp(max=5))}, 20)
    kept = [tree.first(4) for tree in trees]
    assert got.starts.tolist() == [0, 5, 9, 14]
    assert got.tokens[:14].tolist() == np.concatenate([tree.tokens for tree in kept]).tolist()
    assert got.ancestors[9:14].tolist() == ancestor_masks(kept[2].parents).tolist()


def test_chains_are_packed_as_chains():
    given = random_round(np.random.default_rng(4), 5, 12)
    rng = np.random.default_rng(5)
    lengths = [12, 0, 1, 7, 3]
    trees = as_tables([random_tree(rng, n, 1000, 1) if n else None for n in lengths], 12)
    got, want = (new_rows(5, 25) for _ in range(2))
    pack_trees(trees, given["slots"], given["context_len"], DEAD_ROW, got)
    chains = trees.tokens[:, 0].contiguous(), trees.tokens[:, 1:]
    pack(whole(lengths), *chains, given["slots"], given["context_len"], DEAD_ROW, want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sizes": torch.zeros(3)}, "sizes is torch.float32"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"context_len is torch.int64 \[3\]"),
        ({"tokens": torch.zeros(3, 65, dtype=torch.int64)}, r"trees.tokens \[3, 65\]"),
        ({"depths": torch.zeros(3, 15, dtype=torch.int64)}, r"trees.depths \[3, 15\]"),
        ({"ancestors": torch.zeros(16, 3, dtype=torch.int64).t()}, r"trees.ancestors \[3, 16\] .* contiguous"),
        ({"tokens": torch.zeros(2, 16, dtype=torch.int64)}, r"trees.tokens \[2, 16\]"),
        ({"depths": torch.zeros(3, 16, dtype=torch.int32)}, r"trees.depths \[3, 16\] torch.int32"),
        ({"context_len": torch.zeros(6, dtype=torch.int64)[::2]}, "context_len is"),
    ],
)
def test_bad_arguments_are_refused(change, named):
    given = random_round(np.random.default_rng(0), 3, 16)
    for name, tensor in change.items():
        if name in given:
            given[name] = tensor.to(DEVICE)
        else:
            given["trees"] = given["trees"]._replace(**{name: tensor.to(DEVICE)})
    for function in (pack_trees, reference):
        with pytest.raises(ValueError, match=named):
            function(**given, dead_row=0, out=new_rows(len(given["slots"]), 48))


def test_bad_outputs_are_refused():
    given = random_round(np.random.default_rng(0), 3, 16)
    good = new_rows(3, 48)
    for bad in (good._replace(starts=good.starts[:3]), good._replace(kv_row=good.kv_row[:40]), new_rows(3, 0)):
        with pytest.raises(ValueError, match=r"starts is|kv_row is|0 rows"):
            pack_trees(**given, dead_row=0, out=bad)
    many = random_round(np.random.default_rng(0), 257, 1)
    with pytest.raises(ValueError, match=r"257 requests, allowed 1\.\.256"):
        pack_trees(**many, dead_row=0, out=new_rows(257, 600))


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [1, 8, 32, 256])
def test_many_rounds(num_requests):
    rng = np.random.default_rng(num_requests)
    for places in (1, 16, 64):
        assert_same(random_round(rng, num_requests, places), 8 * num_requests)
        assert_same(random_round(rng, num_requests, places), num_requests * places + 5)


@pytest.mark.gpu
def test_replay_sees_new_boundaries_and_requests():
    rng = np.random.default_rng(0)
    given = random_round(rng, 16, 60)
    got = new_rows(16, 960)
    graph, _ = captured(lambda: pack_trees(**given, dead_row=DEAD_ROW, out=got))
    for _ in range(4):
        now = random_round(rng, 16, 60)
        for name in ("slots", "context_len"):
            given[name].copy_(now[name])
        for held, new in zip(given["trees"], now["trees"], strict=True):
            held.copy_(new)
        graph.replay()
        want = new_rows(16, 960)
        reference(**given, dead_row=DEAD_ROW, out=want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
