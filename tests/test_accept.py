"""The accept walk: hand-made trees, and the exact law of what it emits."""

from collections import defaultdict
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from workbench.decode.accept import accept_greedy, accept_sampling, walk
from workbench.decode.sampling import SamplingConfig
from workbench.types import DraftTree, chain_tree, root_tree


def tree_of(tokens, parents):
    parents = np.array(parents, np.int32)
    depths = np.zeros(len(parents), np.int32)
    for i in range(1, len(parents)):
        depths[i] = depths[parents[i]] + 1
    return DraftTree(np.array(tokens, np.int32), parents, depths, np.zeros(len(parents), np.float32))


def one_hot_logits(choices, vocab=10):
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).float()


def test_walk_takes_the_matching_branch():
    #        0(9) -> 1(4) -> 3(5)
    #             -> 2(6) -> 4(5) -> 5(7)
    tree = tree_of([9, 4, 6, 5, 5, 7], [-1, 0, 0, 1, 2, 4])
    got = accept_greedy(tree, one_hot_logits([6, 0, 5, 0, 7, 3]))
    assert (got.path, got.bonus, got.num_accepted) == ((0, 2, 4, 5), 3, 3)


def test_walk_stops_at_the_first_disagreement():
    tree = chain_tree(1, [2, 3, 4])
    got = accept_greedy(tree, one_hot_logits([2, 8, 4, 5]))
    assert (got.path, got.bonus) == ((0, 1), 8)


def test_root_only_tree_gives_the_bonus_alone():
    got = walk(root_tree(3), np.array([7]))
    assert (got.path, got.bonus) == ((0,), 7)


def test_of_equal_siblings_the_first_is_taken():
    tree = tree_of([0, 5, 5, 6], [-1, 0, 0, 2])
    assert walk(tree, np.array([5, 1, 1, 1])).path == (0, 1)


def test_emitted_law_is_the_targets_exactly():
    """Enumerates every outcome of the target's draws at every node with exact fractions.

    The target is a Markov chain with rational rows; whatever the tree offers, the first two emitted tokens (the
    second one continued by the target itself when the round emitted only one) must have the chain's own law.
    """
    third = Fraction(1, 6)
    law = {0: (third, 2 * third, 3 * third), 1: (4 * third, third, third), 2: (Fraction(0), third, 5 * third)}
    trees = [
        tree_of([0, 1, 2, 1], [-1, 0, 0, 1]),
        tree_of([0, 2, 2, 0], [-1, 0, 1, 1]),
        tree_of([0, 0, 1, 2, 0], [-1, 0, 0, 0, 2]),
        root_tree(0),
    ]
    expected = {(a, b): law[0][a] * law[a][b] for a in range(3) for b in range(3)}
    for tree in trees:
        got = defaultdict(Fraction)
        for choices in product(range(3), repeat=len(tree.tokens)):
            weight = Fraction(1)
            for node, choice in enumerate(choices):
                weight *= law[int(tree.tokens[node])][choice]
            accepted = walk(tree, np.array(choices))
            emitted = [*tree.tokens[list(accepted.path[1:])].tolist(), accepted.bonus]
            if len(emitted) > 1:
                got[tuple(emitted[:2])] += weight
            else:
                for b in range(3):
                    got[emitted[0], b] += weight * law[emitted[0]][b]
        assert {k: v for k, v in got.items() if v} == {k: v for k, v in expected.items() if v}


def test_acceptance_probability_is_the_mass_of_the_offered_siblings():
    tree = tree_of([0, 1, 3], [-1, 0, 0])
    probs = torch.tensor([0.1, 0.25, 0.15, 0.3, 0.2])
    logits = probs.log().expand(3, -1)
    config = SamplingConfig(temperature=1.0, seed=4)
    n = 4000
    hits = sum(accept_sampling(tree, logits, position, config).num_accepted > 0 for position in range(n))
    assert hits / n == pytest.approx(0.55, abs=0.03)  # 4 standard deviations
