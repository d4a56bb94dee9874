"""The accept walk: hand-made trees, and the exact law of what it emits."""

from collections import defaultdict
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from workbench.decode.accept import accept_choices, accept_greedy, accept_sampling
from workbench.decode.sampling import SamplingConfig, position_generator, uniforms
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
    got = accept_choices(root_tree(3), np.array([7]))
    assert (got.path, got.bonus) == ((0,), 7)


def test_of_equal_siblings_the_first_is_taken():
    tree = tree_of([0, 5, 5, 6], [-1, 0, 0, 2])
    assert accept_choices(tree, np.array([5, 1, 1, 1])).path == (0, 1)


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
            accepted = accept_choices(tree, np.array(choices))
            emitted = [*tree.tokens[list(accepted.path[1:])].tolist(), accepted.bonus]
            if len(emitted) > 1:
                got[tuple(emitted[:2])] += weight
            else:
                for b in range(3):
                    got[emitted[0], b] += weight * law[emitted[0]][b]
        assert {k: v for k, v in got.items() if v} == {k: v for k, v in expected.items() if v}


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_acceptance_probability_is_the_mass_of_the_offered_siblings(rule):
    tree = tree_of([0, 1, 3], [-1, 0, 0])
    probs = torch.tensor([0.1, 0.25, 0.15, 0.3, 0.2])
    logits = probs.log().expand(3, -1)
    config = SamplingConfig(temperature=1.0, seed=4, accept_rule=rule)
    n = 4000
    hits = sum(accept_sampling(tree, logits, position, config).num_accepted > 0 for position in range(n))
    assert hits / n == pytest.approx(0.55, abs=0.03)  # 4 standard deviations


@pytest.mark.parametrize("children", [[], [1], [3, 1], [0, 2, 4], [4, 3, 2, 1, 0]])
def test_rejection_keeps_the_law_whatever_is_offered(children):
    """First emitted token over many positions against the target's probabilities, chi-square."""
    probs = torch.tensor([0.1, 0.25, 0.15, 0.3, 0.2], dtype=torch.float64)
    tree = tree_of([0, *children], [-1] + [0] * len(children))
    logits = probs.log().expand(len(tree.tokens), -1)
    config = SamplingConfig(temperature=1.0, seed=11, accept_rule="rejection")
    counts = np.zeros(5)
    for position in range(5000):
        got = accept_sampling(tree, logits, position, config)
        counts[tree.tokens[got.path[1]] if got.num_accepted else got.bonus] += 1
    assert chisquare(counts, probs.numpy() * 5000).pvalue > 1e-3


def test_rejection_never_takes_a_token_outside_top_p_and_always_one_of_certainty():
    config = SamplingConfig(temperature=1.0, top_p=0.5, seed=0, accept_rule="rejection")
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log().expand(2, -1)  # token 0 alone reaches one half
    for position in range(50):
        assert accept_sampling(chain_tree(5, [1]), logits, position, config).path == (0,)
        assert accept_sampling(chain_tree(5, [0]), logits, position, config).path == (0, 1)


def test_an_unknown_accept_rule_is_refused():
    with pytest.raises(ValueError, match="accept_rule='typical'; allowed: match, rejection"):
        SamplingConfig(accept_rule="typical")


def test_draws_of_a_position_never_come_from_another():
    """Four draws use up one count of the generator; more of them must not run into the next position's."""
    draws = [position_generator(7, position).random(40) for position in range(6)]
    draws.append(uniforms(7, range(1, 300)))
    flat = np.concatenate(draws)
    assert len(np.unique(flat)) == len(flat)
