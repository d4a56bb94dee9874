"""Lengths of a round: the kernel against the loop that the policies run, ties and limits included.

Built to catch: another request chosen between equal scores, a seed rounded to the other side of a half, a budget that
is missed by one, and requests that are not there but get rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, falling_scores, poison_empty, whole

from kernels.allocate import allocate
from kernels.ref.allocate import allocate as reference
from workbench.budget import dvl


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def both(scores: np.ndarray, budget: int, limits: np.ndarray | None = None) -> list[int]:
    """Lengths on which kernel and reference agree."""
    limits = np.full(len(scores), scores.shape[1] + 1) if limits is None else limits
    arguments = (torch.from_numpy(scores).to(DEVICE), whole(limits), whole([budget]))
    got, want = allocate(*arguments).tolist(), reference(*arguments).tolist()
    assert got == want
    return got


def stairs(length: float, count: int = 15) -> np.ndarray:
    """Scores of that sum: ones, a fraction, zeros."""
    return np.clip(length - np.arange(count), 0, 1).astype(np.float32)


def test_worked_example():
    scores = np.stack([stairs(n) for n in (5.3, 10.2, 7.1, 9.0)])
    assert both(scores, 31) == [5, 10, 7, 9]  # the seeds
    assert both(scores, 32) == [6, 10, 7, 9]  # candidate 5 of the first scores 0.3, more than all others


@pytest.mark.parametrize("seed", range(24))
def test_equals_the_compiled_loop(seed):
    rng = np.random.default_rng(seed)
    num_requests, count = int(rng.integers(1, 12)), int(rng.choice([1, 3, 15, 15, 15]))
    scores = falling_scores(rng, num_requests, count, levels=(0, 4, 1)[seed % 3])
    limits = rng.integers(0, count + 2, num_requests) if seed % 2 else np.full(num_requests, count + 1)
    budget = int(rng.integers((limits > 0).sum(), limits.sum() + 3))
    assert both(scores, budget, limits) == dvl.allocate(scores, budget, count + 1, limits).tolist()


@pytest.mark.parametrize("budget", [3, 6, 20, 48])
def test_between_equal_scores_the_lowest_request_moves_first(budget):
    scores = np.full((3, 15), 0.4, np.float32)  # every seed is 6
    assert both(scores, budget) == dvl.allocate(scores, budget).tolist()


def test_zeros_of_both_signs_are_equal():
    scores = np.zeros((4, 3), np.float32)
    scores[::2] = -0.0
    assert both(scores, 7) == dvl.allocate(scores, 7, 4).tolist() == [4, 1, 1, 1]


def test_sixty_four_rows_and_scores_that_are_no_probabilities():
    rng = np.random.default_rng(5)
    scores = falling_scores(rng, 3, 63) * 9 - 4
    for budget in (3, 40, 100, 192):
        assert both(scores, budget) == dvl.allocate(scores, budget, 64).tolist()


def test_a_sum_next_to_a_half_is_rounded_like_the_loop_does():
    tiny = 1.9 * 2.0**-53  # is lost when added to 2.5 - 2^-49, but ten of them together are more than 2^-49
    scores = np.array(
        [
            [1, 1, 0.5, *[0] * 12],
            [1, 1, 0.5 - 2.0**-25, *[0] * 12],  # rounds to 2.5 in float32
            [1, 1, 0.5 - 2.0**-25, 2.0**-25 - 2.0**-49, *[tiny] * 11],
        ],
        np.float32,
    )
    assert dvl.seed_lengths(scores).tolist() == [3, 2, 2]
    assert both(scores, 7) == [3, 2, 2]


def test_the_budget_is_taken_into_what_is_possible():
    scores = falling_scores(np.random.default_rng(2), 3, 15)
    limits = np.array([4, 0, 2])
    assert both(scores, 0, limits) == [1, 0, 1]
    assert both(scores, 1 << 40, limits) == [4, 0, 2]
    assert both(scores, 5, np.zeros(3)) == [0, 0, 0]


def test_broken_scores_still_give_lengths_of_the_right_sum():
    scores = falling_scores(np.random.default_rng(3), 4, 15)
    scores[0, 2], scores[1], scores[2, 0], scores[3, 4:] = np.nan, np.nan, np.inf, 2.0  # the last one rises
    for budget in (4, 20, 64):
        assert sum(both(scores, budget)) == budget


def test_rows_of_the_scores_may_lie_apart():
    wide = torch.from_numpy(falling_scores(np.random.default_rng(4), 3, 20)).to(DEVICE)
    got = allocate(wide[:, :15], whole([16] * 3), whole([24]))
    assert got.tolist() == dvl.allocate(wide[:, :15].cpu().numpy(), 24).tolist()


@pytest.mark.parametrize(
    ("scores", "limits", "budget", "named"),
    [
        (torch.zeros(2, 64), [1, 1], [2], r"scores \[2, 64\]"),
        (torch.zeros(2, 0), [1, 1], [2], r"scores \[2, 0\]"),
        (torch.zeros(2, 3).double(), [1, 1], [2], "float64"),
        (torch.zeros(0, 3), [], [2], "1 request to"),
        (torch.zeros(513, 17), [1] * 513, [2], "16384 scores"),
        (torch.zeros(2, 3), [1], [2], "limits is torch.int64"),
        (torch.zeros(2, 3), [1, 1], [2, 2], "budget is"),
    ],
)
def test_bad_arguments_are_refused(scores, limits, budget, named):
    for function in (allocate, reference):
        with pytest.raises(ValueError, match=named):
            function(scores.to(DEVICE), whole(limits), whole(budget))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_requests", "count"), [(1, 15), (8, 15), (32, 15), (64, 15), (100, 7), (33, 63)])
def test_many_batches(num_requests, count):
    rng = np.random.default_rng(num_requests)
    for case in range(60):
        scores = falling_scores(rng, num_requests, count, levels=(0, 5, 2)[case % 3])
        limits = rng.integers(0, count + 2, num_requests) if case % 2 else np.full(num_requests, count + 1)
        budget = int(rng.integers((limits > 0).sum(), limits.sum() + 1))
        got = allocate(torch.from_numpy(scores).to(DEVICE), whole(limits), whole([budget]))
        assert got.tolist() == dvl.allocate(scores, budget, count + 1, limits).tolist()


@pytest.mark.gpu
def test_replay_sees_new_scores_limits_and_budget():
    rng = np.random.default_rng(0)
    scores, limits, budget = torch.zeros(32, 15, device=DEVICE), whole([16] * 32), whole([256])
    graph, got = captured(lambda: allocate(scores, limits, budget))
    for live in (32, 20, 1):
        new, room = falling_scores(rng, 32, 15), np.where(np.arange(32) < live, 16, 0)
        scores.copy_(torch.from_numpy(new))
        limits.copy_(whole(room))
        budget.fill_(8 * live)
        graph.replay()
        assert got.tolist() == dvl.allocate(new, 8 * live, 16, room).tolist()
