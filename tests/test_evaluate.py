"""Hits and walked acceptance, against drafts whose rounds are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from train_setup import CONFIG, Setup

from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie
from workbench.train.evaluate import DraftRecord, Walk, follow, hit_rates, record_drafts, walk_rounds
from workbench.types import DraftTree, chain_tree


def record_of(tokens: list[int], first: int, right: list[int], num_candidates: int = 3, depth: int = 3) -> DraftRecord:
    """A record whose draft after prefix p puts the truth first in its first `right[p]` slots and nowhere else."""
    num_prefixes = len(tokens) - 2 - first
    assert len(right) == num_prefixes
    ids = np.empty((num_prefixes, depth, num_candidates), np.int32)
    for prefix in range(num_prefixes):
        for slot in range(depth):
            place = first + 2 + prefix + slot
            wrong = [900 + c for c in range(num_candidates)]
            good = slot < right[prefix] and place < len(tokens)
            ids[prefix, slot] = [tokens[place], *wrong[1:]] if good else wrong
    probs = np.full(ids.shape, 0.05, np.float32)
    probs[..., 0] = 0.9
    return DraftRecord(0, np.array(tokens, np.int32), first, ids, probs, np.zeros((num_prefixes, depth), np.float32))


def test_truth_and_hits():
    record = record_of([10, 11, 12, 13, 14, 15], 1, [1, 0, 3])
    assert record.truth().tolist() == [[13, 14, 15], [14, 15, -1], [15, -1, -1]]
    rates = hit_rates([record, record], ranks=(1, 3))
    assert rates["count"] == [6, 4, 2]
    assert rates["hit@1"] == pytest.approx([2 / 3, 0, 0]) and rates["hit@3"] == rates["hit@1"]
    with pytest.raises(ValueError, match="records is empty"):
        hit_rates([])


def test_following_a_tree():
    tree = DraftTree(
        np.array([5, 6, 7, 8, 7], np.int32),
        np.array([-1, 0, 0, 2, 1], np.int32),
        np.array([0, 1, 1, 2, 2], np.int32),
        np.zeros(5, np.float32),
    )
    assert [follow(tree, t) for t in ([7, 8, 9], [6, 7], [6, 8], [8], [])] == [2, 2, 1, 0, 0]
    assert follow(chain_tree(1, [2, 3, 4]), [2, 3, 5]) == 2


def test_rounds_are_walked_and_not_averaged():
    # Behind the first root: 12..19. Right: 2 after prefix 0 (gain 3), none at 3 (gain 1), 3 at 4 (gain 4).
    record = record_of(list(range(10, 20)), 0, [2, 9, 9, 0, 3, 0, 0, 0])
    walks, done = walk_rounds([record], None, [1, 9], PruneConfig(beam_width=3))
    assert done == 1 and walks[9] == Walk(tokens=8, rounds=3)
    assert walks[9].tau == pytest.approx(8 / 3)
    # With a single node a round gains at most 2.
    assert walks[1] == Walk(tokens=8, rounds=5)


def test_gain_ends_with_the_response():
    record = record_of([1, 2, 3, 4], 0, [9, 9])  # both tokens behind the root are drafted; nothing is left for a bonus
    walks, _ = walk_rounds([record], None, [9])
    assert walks[9] == Walk(tokens=2, rounds=1)
    assert math.isnan(Walk().tau)


def test_the_trie_reaches_the_search():
    tokens = [1, 2, 3, 4, 5]
    record = record_of(tokens, 0, [1, 0, 0])
    record.ids[0, 1] = [901, 902, 4]  # the truth is last among the candidates
    trie = NgramTrie.count([tokens], order=3)
    without, _ = walk_rounds([record], None, [2], PruneConfig(beam_width=3))
    helped, _ = walk_rounds([record], trie, [2], PruneConfig(beam_width=3))
    assert (without[2].rounds, helped[2].rounds) == (2, 1)


def test_time_limit_is_kept():
    record = record_of([1, 2, 3, 4], 0, [1, 1])
    walks, done = walk_rounds([record] * 5, None, [4], seconds=0.0)
    assert done < 5 and walks[4].rounds <= done * 2


def test_recorded_drafts_are_those_of_the_objective():
    setup = Setup()
    teacher_fed = setup.objective.over(setup.teacher)
    records = list(record_drafts(teacher_fed, setup.corpus, row_multiple=16))
    assert [r.sample for r in records] == list(range(setup.corpus.num_samples))
    batch = setup.table.batch(torch.from_numpy(setup.rows), 30, CONFIG.depth)
    _, metrics = setup.objective.loss(batch)
    rates = hit_rates(records, ranks=(1, DRAFT := CONFIG.draft_vocab_size))
    assert sum(rates["count"]) == int(batch.valid.sum())
    assert rates["kl"] == pytest.approx(metrics["kl"].tolist(), rel=1e-3)
    # With every draft id among the candidates, what is missed is what the draft vocabulary lacks.
    truth = np.concatenate([r.truth() for r in records])[:, 0]
    assert rates[f"hit@{DRAFT}"][0] == pytest.approx(np.isin(truth, setup.ids.numpy()).mean())
    assert all(np.allclose(r.probs.sum(-1), 1.0, atol=1e-5) for r in records)
