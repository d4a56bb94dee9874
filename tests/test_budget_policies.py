"""Policies on drafted trees: chains, branched trees, scorers without weights, the table."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from workbench.budget.dvl import allocate, allocate_topk, seed_lengths
from workbench.budget.policy import BudgetPolicy, allocate_nodes
from workbench.budget.scorers import gap_scores, minimum_scores, product_scores, random_scorer
from workbench.budget.table import ALLOCATORS, POLICIES, SCORERS, build_policy
from workbench.types import DraftRequest, DraftTree, Signals, chain_tree, root_tree

OUTSIDE = sorted({scorer for scorer, _ in POLICIES.values() if scorer and scorer not in SCORERS})


def no_scores(signals: Signals) -> np.ndarray:
    return np.zeros(tuple(signals.tokens.shape), np.float32)


def policy(name: str, rows: float = 8.0) -> BudgetPolicy:
    """With a scorer that nobody calls where the caller must give one."""
    return build_policy(name, rows, scorer=no_scores if POLICIES[name][0] in OUTSIDE else None)


def random_chains(rng: np.random.Generator, lengths: list[int], levels: int = 0) -> list[DraftTree]:
    trees = []
    for i, length in enumerate(lengths):
        scores = rng.random(length)
        scores = np.minimum.accumulate(np.round(scores * levels) / levels if levels else scores)
        trees.append(chain_tree(i, rng.integers(0, 90, length).tolist(), scores.tolist()))
    return trees


def random_tree(rng: np.random.Generator, num_nodes: int, levels: int = 0, monotone: bool = True) -> DraftTree:
    parents = np.array([-1, *(rng.integers(0, node) for node in range(1, num_nodes + 1))], np.int32)
    depths, scores = np.zeros(num_nodes + 1, np.int32), np.zeros(num_nodes + 1, np.float32)
    for node in range(1, num_nodes + 1):
        step = rng.integers(0, levels + 1) / levels if levels else rng.random()
        depths[node] = depths[parents[node]] + 1
        scores[node] = (scores[parents[node]] if monotone else 0.0) - step
    return DraftTree(rng.integers(0, 90, num_nodes + 1).astype(np.int32), parents, depths, scores)


def small_tree(parents: list[int], scores: list[float]) -> DraftTree:
    """Tokens 1, 2, 3, ..."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tokens = np.arange(1, len(parents) + 1, dtype=np.int32)
    return DraftTree(tokens, np.array(parents, np.int32), np.array(depths, np.int32), np.array(scores, np.float32))


def padded(trees: list[DraftTree], width: int = 16) -> tuple[np.ndarray, np.ndarray]:
    scores = np.zeros((len(trees), width - 1), np.float32)
    for row, tree in zip(scores, trees, strict=True):
        row[: tree.num_nodes] = tree.scores[1:]
    return scores, np.array([len(tree.tokens) for tree in trees])


def num_rows(trees: list[DraftTree]) -> list[int]:
    return [len(tree.tokens) for tree in trees]


def assert_part(part: DraftTree, whole: DraftTree) -> None:
    """Root first, the nodes of `whole` in their order, every parent before its child."""
    assert part.tokens[0] == whole.tokens[0] and part.parents[0] == -1
    rows = np.arange(len(part.tokens))
    assert (part.parents[1:] < rows[1:]).all() and (part.parents[1:] >= 0).all()
    assert (part.depths[1:] == part.depths[part.parents[1:]] + 1).all()
    assert [array.dtype for array in (part.tokens, part.parents, part.depths, part.scores)] == [
        np.int32, np.int32, np.int32, np.float32,
    ]  # fmt: skip


def assert_same(one: DraftTree, other: DraftTree) -> None:
    for name in ("tokens", "parents", "depths", "scores"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("lengths", [[15], [15, 0, 3, 15, 1, 8], [0, 0], []], ids=str)
def test_every_policy_keeps_prefixes_of_chains(name, lengths):
    for rows in (1, 4.5, 8, 16, 64):
        trees = random_chains(np.random.default_rng(1), lengths)
        kept = policy(name, rows).allocate(trees)
        assert len(kept) == len(trees)
        for part, whole in zip(kept, trees, strict=True):
            assert_same(part, whole.first(part.num_nodes))
        if POLICIES[name][1] in ("dvl", "topk"):
            assert sum(num_rows(kept)) == min(round(rows * len(trees)), sum(num_rows(trees)))


@pytest.mark.parametrize("levels", [0, 3], ids=["distinct", "tied"])
def test_chains_get_what_the_allocators_of_scores_say(levels):
    rng = np.random.default_rng(levels)
    for num_requests in (1, 3, 8, 32):
        trees = random_chains(rng, rng.integers(0, 16, num_requests).tolist(), levels)
        scores, limits = padded(trees)
        for rows in (1, 3, 6, 8, 12):
            budget = rows * num_requests
            assert num_rows(policy("dvl", rows).allocate(trees)) == allocate(scores, budget, 16, limits).tolist()
            assert num_rows(policy("topk", rows).allocate(trees)) == allocate_topk(scores, budget, 16, limits).tolist()
            assert num_rows(policy("seed", rows).allocate(trees)) == seed_lengths(scores, limits).tolist()


def test_full_and_uniform():
    rng = np.random.default_rng(0)
    trees = [random_tree(rng, 20), *random_chains(rng, [15, 2, 0])]
    assert num_rows(policy("full", 1).allocate(trees)) == [21, 16, 3, 1]
    for rows in range(1, 17):
        kept = policy("uniform", rows).allocate(trees)
        assert num_rows(kept) == [rows, rows, min(rows, 3), 1]
        for part, whole in zip(kept, trees, strict=True):
            assert_same(part, whole.first(part.num_nodes))


@pytest.mark.parametrize("name", ["full", "uniform", "topk", "shared", "gap", "random"])
def test_policies_for_any_tree_keep_ancestors(name):
    rng = np.random.default_rng(2)
    for levels, monotone in itertools.product((0, 2), (True, False)):
        trees = [random_tree(rng, size, levels, monotone) for size in (59, 1, 30, 0, 7)]
        for rows in (1, 2, 8, 20, 64):
            for part, whole in zip(policy(name, rows).allocate(trees), trees, strict=True):
                assert_part(part, whole)


@pytest.mark.parametrize("levels", [0, 2], ids=["distinct", "tied"])
def test_shared_budget_is_spent_on_the_best_closed_set_of_nodes(levels):
    """By trying every closed set of two small trees."""
    rng = np.random.default_rng(levels)
    for _ in range(25):
        trees = [random_tree(rng, int(size), levels) for size in rng.integers(0, 7, 2)]
        closed = []
        for tree in trees:
            sets = itertools.product((False, True), repeat=tree.num_nodes)
            masks = [np.array([True, *some]) for some in sets]
            closed.append([mask for mask in masks if mask[tree.parents[1:][mask[1:]]].all()])
        for rows in (1, 2, 2.5, 4):
            budget = min(round(rows * 2), sum(num_rows(trees)))
            best = max(
                sum(float(tree.scores[mask].sum()) for tree, mask in zip(trees, masks, strict=True))
                for masks in itertools.product(*closed)
                if sum(int(mask.sum()) for mask in masks) == budget
            )
            kept = policy("shared", rows).allocate(trees)
            assert sum(num_rows(kept)) == budget
            assert sum(float(tree.scores.sum()) for tree in kept) == pytest.approx(best, abs=1e-5)


def test_a_node_counts_as_its_worst_ancestor():
    """The good child of a bad parent does not pull the parent in; the request's other branch does better."""
    tree = small_tree([-1, 0, 1, 0], [0, 0.2, 0.9, 0.5])
    assert policy("shared", 2).allocate([tree])[0].tokens.tolist() == [1, 4]
    assert policy("shared", 3).allocate([tree])[0].tokens.tolist() == [1, 2, 4]
    assert policy("shared", 4).allocate([tree])[0].tokens.tolist() == [1, 2, 3, 4]


def test_ties_between_nodes_go_to_the_lower_request_then_the_lower_node():
    trees = [chain_tree(i, [5, 6, 7], [0.5, 0.5, 0.5]) for i in range(3)]
    assert num_rows(policy("shared", 2).allocate(trees)) == [4, 1, 1]
    fork = small_tree([-1, 0, 0], [0, 0.5, 0.5])
    assert policy("shared", 2).allocate([fork])[0].tokens.tolist() == [1, 2]


def test_roots_come_before_nodes_of_infinite_score():
    trees = [chain_tree(0, [5, 6], [np.inf, np.inf]), chain_tree(1, [7], [-np.inf])]
    assert num_rows(policy("shared", 1).allocate(trees)) == [1, 1]
    assert num_rows(policy("shared", 2).allocate(trees)) == [3, 1]


def test_oracle_scores_give_every_request_what_it_can_use():
    """Scores are 1 for what would be accepted; with rows for all of it, none is lost."""
    accepted = [0, 15, 3, 7]
    trees = [chain_tree(i, list(range(15)), (np.arange(15) < n).astype(float).tolist()) for i, n in enumerate(accepted)]
    kept = policy("oracle", 8).allocate(trees)
    assert [min(n, rows - 1) for n, rows in zip(accepted, num_rows(kept), strict=True)] == accepted


@pytest.mark.parametrize("name", ["seed", "dvl", "oracle", "product"])
def test_branched_trees_are_refused_by_policies_for_chains(name):
    trees = [root_tree(3), random_tree(np.random.default_rng(0), 9)]
    with pytest.raises(ValueError, match="tree 1 branches"):
        policy(name).allocate(trees)


@pytest.mark.parametrize("name", ["seed", "dvl", "topk"])
def test_nan_is_refused(name):
    trees = [chain_tree(0, [1] * 15, [0.5] * 15), chain_tree(1, [1] * 15, [0.5] * 3 + [float("nan")] * 12)]
    with pytest.raises(ValueError, match=r"the draft's scores are not finite: (tree|chain) 1 has"):
        policy(name, 4).allocate(trees)


def test_rising_scores_are_refused_where_lengths_depend_on_them():
    trees = [chain_tree(0, [1, 2], [0.5, 0.6])]
    with pytest.raises(ValueError, match=r"chain 0 has score 0.6\d* at candidate 2, allowed: finite, not rising"):
        policy("dvl").allocate(trees)


def test_lengths_are_decided_without_any_draw_and_twice_the_same():
    trees = random_chains(np.random.default_rng(0), [15, 4, 15])
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    for name in POLICIES:
        first, second = (policy(name, 5).allocate(trees) for _ in range(2))
        assert num_rows(first) == num_rows(second)
    random_scorer(3)(signals(rows=2))
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[2]
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])


def test_the_drafted_trees_are_left_alone():
    trees = [random_tree(np.random.default_rng(0), 12), chain_tree(1, [2, 3], [0.5, 0.4])]
    copies = [DraftTree(*(a.copy() for a in (t.tokens, t.parents, t.depths, t.scores))) for t in trees]
    policy("shared", 3).allocate(trees)
    policy("dvl", 1).allocate(trees[1:])
    for tree, copy in zip(trees, copies, strict=True):
        assert_same(tree, copy)


def test_budget_is_rows_times_requests_rounded():
    trees = random_chains(np.random.default_rng(0), [15] * 5)
    for rows, total in ((1, 5), (1.5, 8), (2.1, 10), (2.3, 12), (8, 40)):
        assert sum(num_rows(allocate_nodes(trees, rows))) == total


@pytest.mark.parametrize("rows", [0, 0.99, 64.5, -1, float("nan"), float("inf"), "8", None, [8], True, 8j])
def test_rows_out_of_range_are_refused(rows):
    with pytest.raises(ValueError, match=r"rows is .*, allowed 1..64"):
        build_policy("full", rows)


@pytest.mark.parametrize("seed", [1.5, "a", None, True, -1, [1]])
def test_seeds_that_are_no_whole_numbers_are_refused(seed):
    for make in (random_scorer, lambda s: build_policy("full", seed=s), lambda s: build_policy("random", seed=s)):
        with pytest.raises(ValueError, match=r"seed is .*, allowed >= 0 \(whole numbers\)"):
            make(seed)


def test_numbers_of_numpy_are_numbers():
    assert build_policy("random", np.float32(2.5), seed=np.int64(3)).rows == 2.5


def test_unknown_names_are_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"policy is 'best', allowed full, uniform, .*shared"):
        build_policy("best")
    for name in (None, 3, ["full"], {}):
        with pytest.raises(ValueError, match=r"policy is .*, allowed full, uniform"):
            build_policy(name)
    with pytest.raises(ValueError, match=r"scorer is 3, allowed: one of product"):
        build_policy("dvl", scorer=3)
    with pytest.raises(ValueError, match=r"wants scorer 'luck'; allowed: one of product, minimum, gap, random"):
        build_policy("dvl", scorer="luck")
    for name, (scorer, _) in POLICIES.items():
        if scorer in OUTSIDE:
            with pytest.raises(ValueError, match=f"policy '{name}' wants scorer '{scorer}'"):
                build_policy(name)


def test_the_table_is_consistent_and_a_scorer_can_be_overridden():
    assert OUTSIDE == ["oracle", "predictor"]
    assert {allocator for _, allocator in POLICIES.values()} == set(ALLOCATORS)
    assert {scorer for scorer, _ in POLICIES.values() if scorer} == {*SCORERS, *OUTSIDE}
    assert build_policy("full").scorer is None and build_policy("shared").scorer is None
    assert build_policy("product").scorer is product_scores
    assert build_policy("dvl", scorer="minimum").scorer is minimum_scores
    assert build_policy("full", scorer=no_scores).scorer is no_scores
    assert build_policy("dvl", 6, no_scores) == BudgetPolicy("dvl", ALLOCATORS["dvl"], 6, no_scores)


def signals(rows: int = 3, length: int = 15, vocab_size: int = 301, dtype: torch.dtype = torch.float32) -> Signals:
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(rows, length, vocab_size, generator=generator)).to(dtype)
    requests = [DraftRequest(i, np.arange(10 + i), length, length) for i in range(rows)]
    return Signals(requests, logits.argmax(-1), torch.randn(rows, length, 8, generator=generator), logits)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scorers_never_rise(name, dtype):
    for rows, vocab_size in ((1, 9), (3, 301), (2, 8000)):
        scores = SCORERS[name](0)(signals(rows, vocab_size=vocab_size, dtype=dtype))
        assert scores.shape == (rows, 15) and scores.dtype == np.float32
        assert np.isfinite(scores).all() and (np.diff(scores, axis=1) <= 0).all() and (scores >= 0).all()
        if name != "gap":
            assert (scores <= 1).all()


def test_scorers_follow_their_formulas():
    given = signals()
    probs = given.logits.double().softmax(-1).max(-1).values.numpy()
    np.testing.assert_allclose(product_scores(given), np.cumprod(probs, 1), rtol=1e-4)
    np.testing.assert_allclose(minimum_scores(given), np.minimum.accumulate(probs, 1), rtol=1e-5)
    best = given.logits.sort(-1, descending=True).values.numpy()
    np.testing.assert_array_equal(gap_scores(given), np.minimum.accumulate(best[..., 0] - best[..., 1], 1))


def test_probabilities_are_those_of_the_drafted_tokens():
    given = signals()
    second = given.logits.topk(2).indices[..., 1]
    probs = given.logits.double().softmax(-1).gather(-1, second[..., None])[..., 0].numpy()
    other = Signals(given.requests, second, given.hidden, given.logits)
    np.testing.assert_allclose(minimum_scores(other), np.minimum.accumulate(probs, 1), rtol=1e-4)


def test_random_scores_depend_on_seed_and_request_alone():
    given = signals(rows=3)
    scores = random_scorer(7)(given)
    alone = Signals(given.requests[1:2], given.tokens[1:2], given.hidden[1:2], given.logits[1:2])
    np.testing.assert_array_equal(random_scorer(7)(alone)[0], scores[1])
    assert not np.array_equal(random_scorer(8)(given), scores)
    assert len({tuple(row) for row in scores.tolist()}) == 3
    with pytest.raises(ValueError, match="seed is -1"):
        random_scorer(-1)
