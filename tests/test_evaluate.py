"""Hits and walked acceptance, against drafts whose rounds are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from train_setup import CONFIG, RULE, VOCAB, DFlashSetup, Setup, tiny_model

from workbench.budget.table import build_policy
from workbench.decode.engine import SamplingConfig, generate
from workbench.drafters.ar import ArDrafter
from workbench.drafters.dflash import DFlashDrafter
from workbench.models.target import Target
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie
from workbench.train.data import Corpus
from workbench.train.dflash_recipe import DFlashRecipe
from workbench.train.evaluate import (
    DraftRecord,
    Walk,
    follow,
    follow_chain,
    follow_pruned,
    hit_rates,
    record_drafts,
    summary_rows,
    walk_rounds,
)
from workbench.train.recipe import training_set
from workbench.train.schedule import TrainConfig
from workbench.types import DraftTree, chain_tree

PRUNED = follow_pruned(prune=PruneConfig(beam_width=3))


def record_of(tokens: list[int], first: int, right: list[int], num_candidates: int = 3, depth: int = 3) -> DraftRecord:
    """A record whose draft after prefix p puts the truth first in its first `right[p]` slots and nowhere else."""
    num_prefixes = len(tokens) - 1 - first
    assert len(right) == num_prefixes
    ids = np.empty((num_prefixes, depth, num_candidates), np.int32)
    for prefix in range(num_prefixes):
        for slot in range(depth):
            place = first + 1 + prefix + slot
            wrong = [900 + c for c in range(num_candidates)]
            good = slot < right[prefix] and place < len(tokens)
            ids[prefix, slot] = [tokens[place], *wrong[1:]] if good else wrong
    probs = np.full(ids.shape, 0.05, np.float32)
    probs[..., 0] = 0.9
    return DraftRecord(0, np.array(tokens, np.int32), first, ids, probs, np.zeros((num_prefixes, depth), np.float32))


def test_truth_and_hits():
    record = record_of([10, 11, 12, 13, 14, 15], 2, [1, 0, 3])
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
    record = record_of(list(range(10, 20)), 1, [2, 9, 9, 0, 3, 0, 0, 0])
    walks, done = walk_rounds([record], PRUNED, [1, 9])
    assert done == 1 and walks[9] == Walk(tokens=8, rounds=3)
    assert walks[9].tau == pytest.approx(8 / 3)
    # With a single node a round gains at most 2.
    assert walks[1] == Walk(tokens=8, rounds=5)


def test_gain_ends_with_the_response():
    record = record_of([1, 2, 3, 4], 1, [9, 9])  # both tokens behind the root are drafted; nothing is left for a bonus
    walks, _ = walk_rounds([record], follow_pruned(), [9])
    assert walks[9] == Walk(tokens=2, rounds=1)
    assert math.isnan(Walk().tau)


def test_the_trie_reaches_the_search():
    tokens = [1, 2, 3, 4, 5]
    record = record_of(tokens, 1, [1, 0, 0])
    record.ids[0, 1] = [901, 902, 4]  # the truth is last among the candidates
    trie = NgramTrie.count([tokens], order=3)
    without, _ = walk_rounds([record], PRUNED, [2])
    helped, _ = walk_rounds([record], follow_pruned(trie, PruneConfig(beam_width=3)), [2])
    assert (without[2].rounds, helped[2].rounds) == (2, 1)


def test_time_limit_is_kept():
    record = record_of([1, 2, 3, 4], 1, [1, 1])
    walks, done = walk_rounds([record] * 5, follow_pruned(), [4], seconds=0.0)
    assert done < 5 and walks[4].rounds <= done * 2


def test_recorded_drafts_are_those_of_the_objective():
    setup = Setup()
    teacher_fed = setup.objective.over(setup.teacher)
    records = list(record_drafts(teacher_fed, setup.corpus, row_multiple=16))
    assert [r.sample for r in records] == list(range(setup.corpus.num_samples))
    batch = setup.table.batch(torch.from_numpy(setup.rows), 30, RULE)
    _, metrics = setup.objective.loss(batch)
    rates = hit_rates(records, ranks=(1, DRAFT := CONFIG.draft_vocab_size))
    assert sum(rates["count"]) == int(batch.valid.sum())
    assert rates["kl"] == pytest.approx(metrics["kl"].tolist(), rel=1e-3)
    # With every draft id among the candidates, what is missed is what the draft vocabulary lacks.
    truth = np.concatenate([r.truth() for r in records])[:, 0]
    assert rates[f"hit@{DRAFT}"][0] == pytest.approx(np.isin(truth, setup.ids.numpy()).mean())
    assert all(np.allclose(r.probs.sum(-1), 1.0, atol=1e-5) for r in records)


def test_a_chain_is_followed_to_its_first_error():
    # Behind the first root: 12..19. Right: 2 after prefix 0, none at 3, 3 at 4.
    record = record_of(list(range(10, 20)), 1, [2, 9, 9, 0, 3, 0, 0, 0])
    record.ids[3, 1, 0] = 16  # right again behind the error: of no use
    agree = follow_chain(record)
    assert [agree(p, 3) for p in (0, 1, 3, 4, 7)] == [2, 3, 0, 3, 0] and agree(1, 2) == 2 and agree(4, 0) == 0
    walks, _ = walk_rounds([record], follow_chain, [1, 3])
    assert walks[3] == Walk(tokens=8, rounds=3) and walks[1] == Walk(tokens=8, rounds=5)


@pytest.mark.parametrize("shifted", [False, True])
def test_recorded_dflash_drafts_are_those_of_the_objective(shifted):
    setup = DFlashSetup(shifted=shifted)
    teacher_fed = setup.objective.over(setup.teacher)
    records = list(record_drafts(teacher_fed, setup.corpus, row_multiple=16, batch_rows=5, num_blocks=4))
    batch = setup.table.batch(torch.from_numpy(setup.rows), 30, setup.objective.rule)
    _, metrics = setup.objective.loss(batch)
    rates = hit_rates(records, ranks=(1, VOCAB))
    assert sum(rates["count"]) == int(batch.valid.sum())
    assert rates["ce"] == pytest.approx(metrics["ce"].tolist(), rel=1e-3)
    assert rates["hit@1"] == pytest.approx(metrics["agree"].tolist(), abs=1e-6)
    for record in records:
        assert record.first == setup.corpus.prompt_len[record.sample] and record.measure == "ce"
    # Samples side by side and prefixes in parts change nothing.
    for one, other in zip(records, record_drafts(teacher_fed, setup.corpus, row_multiple=16), strict=True):
        assert one.sample == other.sample and np.array_equal(one.ids[..., 0], other.ids[..., 0])
        np.testing.assert_allclose(one.measured, other.measured, rtol=1e-3, atol=1e-4)


def test_samples_without_a_draft_are_passed_over():
    setup = Setup()
    corpus = Corpus.from_responses([([1, 2], [3]), ([1, 2], [3, 4]), ([], [5, 6, 7]), ([1, 2, 3], [])])
    records = list(record_drafts(setup.objective.over(setup.teacher), corpus, batch_rows=3))
    # Without a prompt the first token has no state before it, so the second is the first root.
    assert [(r.sample, r.first, len(r.ids)) for r in records] == [(1, 2, 1), (2, 1, 1)]
    assert list(record_drafts(setup.objective.over(setup.teacher), corpus.select(np.array([0, 3])))) == []
    flash = DFlashSetup()
    records = list(record_drafts(flash.objective.over(flash.teacher), corpus, batch_rows=3))
    assert [(r.sample, r.first, len(r.ids)) for r in records] == [(1, 2, 1), (2, 0, 2)]


def test_summary_of_a_greedy_half():
    setup = DFlashSetup()
    records = list(record_drafts(setup.objective.over(setup.teacher), setup.corpus))
    hits, walks = summary_rows(records, setup.corpus, follow_chain, (1, 4), walked=3)
    assert [row["position"] for row in hits] == [1, 2, 3, 4] and {"hit@1", "hit@25", "ce", "prefixes"} <= set(hits[0])
    greedy = [r for r in records if not setup.corpus.sampled[r.sample]][:3]
    assert [row["num_nodes"] for row in walks] == [1, 4]
    assert all(row["tokens"] == sum(len(r.ids) for r in greedy) for row in walks)


def test_walked_rounds_are_the_rounds_of_decoding():
    """Walking the recorded drafts of a network trained for a moment tells how many rounds decoding takes."""
    model = tiny_model()
    target = Target(model, name="tiny")
    prompts = [[int(t) for t in np.random.default_rng(i).integers(3, VOCAB, 4)] for i in range(6)]
    sampling = SamplingConfig(max_new_tokens=20, stop_ids=())
    answers = generate(target, ArDrafter(), prompts, sampling)
    corpus = Corpus.from_responses([(p, a.token_ids) for p, a in zip(prompts, answers, strict=True)])
    recipe = DFlashRecipe(
        num_layers=1, num_taps=2, block_size=5, rows_per_step=2, row_len=48, num_blocks=12, mask_token_id=1
    )
    data = training_set(recipe.teacher(model), corpus, recipe.row_len)
    run = recipe.run(model, data, TrainConfig(steps=60, learning_rate=1e-2, warmup_steps=5))
    run.trainer.run()
    records = list(record_drafts(run.objective.over(recipe.teacher(model)), corpus))
    walks, _ = walk_rounds(records, recipe.follow, (4,))
    drafter = DFlashDrafter(run.export(), target.embedding, target.lm_head, build_policy("full"))
    decoded = generate(target, drafter, prompts, sampling, slots=3)
    assert [d.token_ids for d in decoded] == [a.token_ids for a in answers]
    assert walks[4].rounds == sum(len(d.rounds) for d in decoded)
    assert 1.5 < walks[4].tau < 5.0, "otherwise this test would show little"
