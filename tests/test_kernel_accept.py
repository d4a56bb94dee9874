"""The accept walk: the kernel against the one rule of the engine, on chains and trees.

Built to catch: a branch that is followed though its parent was refused, the second of equal siblings, the sign bit of
the sixty-fourth row, rows of a neighbour, and outputs that are left unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, joined_trees, poison_empty, random_tree, whole

from kernels.accept import accept
from kernels.ref.accept import AcceptedPaths
from kernels.ref.accept import accept as reference
from workbench.decode.accept import accept_choices
from workbench.types import DraftTree, chain_tree


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def both(trees: list[DraftTree], choices: list[int], max_rows: int, num_sentinels: int = 0) -> AcceptedPaths:
    """The outcome on which kernel, reference and engine agree; `place` says the same as `path`."""
    tokens, ancestors, starts = joined_trees(trees, num_sentinels)
    arguments = (tokens, ancestors, starts, whole([*choices, *[0] * num_sentinels]), max_rows)
    got, want = accept(*arguments), reference(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (got, want)
    places, place = starts.tolist(), [-1] * len(tokens)
    for r, tree in enumerate(trees):
        path = tuple(node for node in got.path[r].tolist() if node >= 0)
        if len(tree.tokens):
            walked = accept_choices(tree, np.array(choices[places[r] : places[r + 1]]))
            assert (path, int(got.bonus[r])) == (walked.path, walked.bonus)
        assert int(got.num_accepted[r]) == max(len(path) - 1, 0)
        for step, row in enumerate(path):
            place[places[r] + row] = step
    assert got.place.tolist() == place and got.place.dtype == torch.int64
    return got


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    size = len(tokens)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(size, np.int32), np.zeros(size))


def test_takes_the_matching_branch():
    #        0(9) -> 1(4) -> 3(5)
    #             -> 2(6) -> 4(5) -> 5(7)
    tree = tree_of([9, 4, 6, 5, 5, 7], [-1, 0, 0, 1, 2, 4])
    got = both([tree], [6, 5, 5, 0, 7, 3], max_rows=7)
    assert got.path.tolist() == [[0, 2, 4, 5, -1, -1, -1]]
    assert got.place.tolist() == [0, -1, 1, -1, 2, 3]
    assert (got.num_accepted.tolist(), got.bonus.tolist()) == ([3], [3])


def test_chains_stop_at_the_first_disagreement():
    chains = [chain_tree(1, [2, 3, 4]), chain_tree(5, []), chain_tree(1, [2, 3])]
    got = both(chains, [2, 8, 4, 5, 7, 2, 3, 6], max_rows=16, num_sentinels=4)
    assert got.num_accepted.tolist() == [1, 0, 2]
    assert got.bonus.tolist() == [8, 7, 6]
    assert got.place.tolist() == [0, 1, -1, -1, 0, 0, 1, 2, -1, -1, -1, -1]


def test_of_equal_siblings_the_first_is_followed():
    got = both([tree_of([0, 5, 5, 6, 5, 6], [-1, 0, 0, 2, 1, 4])], [5, 5, 6, 1, 6, 2], max_rows=6)
    assert got.path[0].tolist() == [0, 1, 4, 5, -1, -1]


def test_requests_without_rows():
    empty = tree_of([], [])
    got = both([empty, chain_tree(1, [2]), empty, empty], [2, 3], max_rows=2, num_sentinels=1)
    assert got.path.tolist() == [[-1, -1], [0, 1], [-1, -1], [-1, -1]]
    assert got.bonus.tolist() == [0, 3, 0, 0]


def test_a_broken_row_ends_the_path_and_shows():
    got = both([chain_tree(1, [2, 3, 4])], [2, -1, 4, 5], max_rows=4)
    assert (got.path[0].tolist(), got.bonus.tolist()) == ([0, 1, -1, -1], [-1])


def test_all_sixty_four_rows():
    chain = chain_tree(0, list(range(1, 64)))
    assert both([chain], [*range(1, 64), 77], max_rows=64).num_accepted.tolist() == [63]
    star = tree_of(list(range(64)), [-1] + [0] * 63)
    assert both([star], [63] * 64, max_rows=64).path[0, :2].tolist() == [0, 63]


@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed):
    rng = np.random.default_rng(seed)
    max_rows = int(rng.choice([1, 7, 16, 60, 64]))
    sizes = rng.integers(0, max_rows + 1, rng.integers(1, 6))
    trees = [random_tree(rng, int(n), vocab=3, reach=(1, 4, 64)[seed % 3]) for n in sizes]
    both(trees, rng.integers(0, 3, sizes.sum()).tolist(), max_rows, num_sentinels=seed % 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ancestors": torch.zeros(4, dtype=torch.int64)}, "ancestors is"),
        ({"choices": torch.zeros(3)}, "choices is torch.float32"),
        ({"starts": torch.zeros(1, dtype=torch.int64)}, r"starts is \[1\]"),
        ({"max_rows": 65}, r"max_rows is 65, allowed 1\.\.64"),
        ({"max_rows": 0}, "max_rows is 0"),
    ],
)
def test_bad_arguments_are_refused(change, named):
    tokens, ancestors, starts = joined_trees([chain_tree(1, [2, 3])])
    given = {"tokens": tokens, "ancestors": ancestors, "starts": starts, "choices": tokens, "max_rows": 3}
    given |= {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    for function in (accept, reference):
        with pytest.raises(ValueError, match=named):
            function(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("max_rows", [1, 16, 60, 64])
def test_many_rounds(max_rows):
    rng = np.random.default_rng(max_rows)
    for case in range(20):
        sizes = rng.integers(0, max_rows + 1, 32)
        trees = [random_tree(rng, int(n), vocab=2, reach=(1, 3, 64)[case % 3]) for n in sizes]
        both(trees, rng.integers(0, 2, sizes.sum()).tolist(), max_rows, num_sentinels=case)


@pytest.mark.gpu
def test_replay_sees_new_trees():
    rng = np.random.default_rng(0)
    fields = [whole(np.zeros(520)), whole(np.zeros(520)), whole(np.zeros(9)), whole(np.zeros(520))]
    graph, got = captured(lambda: accept(*fields, max_rows=64))
    for _ in range(4):
        sizes = rng.integers(0, 65, 8)
        trees = [random_tree(rng, int(n), vocab=2, reach=3) for n in sizes]
        for field, new in zip(fields, joined_trees(trees, 520 - sizes.sum()), strict=False):
            field.copy_(new)
        fields[3].copy_(whole(rng.integers(0, 2, 520)))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, reference(*fields, max_rows=64), strict=True))
