"""DART's objective: training rows against inference rows, the teacher against the target, the loss in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train_setup import CONFIG, DRAFT_VOCAB, ROW, RULE, VOCAB, Setup, tiny_corpus, tiny_model

from workbench.drafters.dart import DartDrafter, dart_taps
from workbench.drafters.dart_files import load_dart, save_dart
from workbench.models.target import Target
from workbench.train.block_objective import fold_scale
from workbench.train.dart_objective import DartLoss, block_states
from workbench.train.dart_recipe import DartRecipe
from workbench.train.masks import DenseAttention
from workbench.train.recipe import training_set
from workbench.train.schedule import TrainConfig
from workbench.train.teacher import Teacher, sample_mask
from workbench.types import Commit


def all_block_logits(setup: Setup, tokens: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """[n-1, d, V_d]: draft logits of every prefix of one sequence by the training forward."""
    anchors = torch.arange(len(tokens) - 1)[None]
    attention = DenseAttention(anchors, torch.zeros_like(anchors), len(tokens), CONFIG.depth)
    embeddings = setup.model.get_input_embeddings()(tokens.roll(-1))[None]
    scaled = taps[None] * setup.scale
    states = block_states(setup.draft, scaled, embeddings, torch.arange(len(tokens))[None], anchors, attention)
    return setup.draft.lm_head(states)[0]


@torch.no_grad()
def test_training_rows_equal_inference_rows(tmp_path):
    setup = Setup()
    tokens = torch.from_numpy(setup.corpus.sample(3)).long()
    taps = setup.teacher.features(tokens[None], torch.arange(len(tokens))[None]).taps[0]
    trained = all_block_logits(setup, tokens, taps)
    save_dart(fold_scale(setup.draft, setup.scale), tmp_path, torch.float32)
    drafter = DartDrafter(load_dart(tmp_path), setup.model.get_input_embeddings(), dart_taps(7))
    session = drafter.session(1, len(tokens))
    for i in range(len(tokens) - 1):
        session.observe(Commit([0], [i], [tokens[i : i + 1].numpy()], [int(tokens[i + 1])], taps[i : i + 1]))
        torch.testing.assert_close(session.logits([0])[0], trained[i], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_token_behind_the_root_cannot_change_a_block():
    setup = Setup()
    tokens = torch.from_numpy(setup.corpus.sample(3)).long()
    positions = torch.arange(len(tokens))[None]
    before = all_block_logits(setup, tokens, setup.teacher.features(tokens[None], positions).taps[0])
    changed = tokens.clone()
    place = 6
    changed[place] = (changed[place] + 1) % VOCAB
    after = all_block_logits(setup, changed, setup.teacher.features(changed[None], positions).taps[0])
    # Block i reads tokens up to its root i + 1.
    assert torch.equal(before[: place - 1], after[: place - 1])
    assert (before[place - 1] - after[place - 1]).abs().max() > 1e-3


@torch.no_grad()
def test_samples_of_a_row_do_not_see_each_other():
    setup = Setup(num_blocks=ROW)
    batch = setup.table.batch(torch.from_numpy(setup.rows), ROW, RULE)
    packed = setup.draft.lm_head(setup.objective.states(batch, setup.store(batch)))
    row, block = 0, int(batch.used[0].sum()) - 1  # the last block of the row lies in its last sample
    place = int(batch.index[row, batch.anchors[row, block]])
    sample = int(np.searchsorted(setup.corpus.offsets, place, side="right")) - 1
    assert setup.corpus.offsets[sample] != batch.index[row, 0]
    tokens = torch.from_numpy(setup.corpus.sample(sample)).long()
    taps = setup.teacher.features(tokens[None], torch.arange(len(tokens))[None]).taps[0]
    alone = all_block_logits(setup, tokens, taps)[place - int(setup.corpus.offsets[sample])]
    torch.testing.assert_close(packed[row, block], alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_teacher_equals_the_target_alone_and_leaves_it_as_it_was():
    setup = Setup()
    target = Target(tiny_model())  # switches the attention implementation
    before = target.model.config._attn_implementation
    teacher = Teacher(target.model, dart_taps(7), chunk_rows=1000)
    batch = setup.table.batch(torch.from_numpy(setup.rows), 3, RULE)
    found, stored = teacher(batch), setup.store(batch)
    assert target.model.config._attn_implementation == before
    for name in ("taps", "hidden", "log_total"):
        mine, theirs = getattr(found, name), getattr(stored, name)
        torch.testing.assert_close(mine[batch.filled], theirs[batch.filled], rtol=1e-4, atol=1e-5)
    sample = 2
    tokens = torch.from_numpy(setup.corpus.sample(sample)).long()
    alone = setup.model(tokens[None], output_hidden_states=True)
    places = [(batch.index == int(setup.corpus.offsets[sample]) + i).nonzero()[-1] for i in range(len(tokens))]
    rows, columns = torch.stack(places).T
    taps = torch.cat([alone.hidden_states[t][0] for t in dart_taps(7)], -1)
    torch.testing.assert_close(found.taps[rows, columns], taps, rtol=1e-4, atol=1e-4)
    logits = alone.logits[0]
    said = setup.model.lm_head(found.hidden)[rows, columns]
    torch.testing.assert_close(said, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.log_total[rows, columns], logits.logsumexp(-1), rtol=1e-4, atol=1e-5)


def test_sample_mask_by_hand():
    mask = sample_mask(torch.tensor([[0, 1, 0, 0]]))[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("weigh_by_mass", [False, True])
def test_objective_equals_a_restatement(weigh_by_mass):
    """Loss = sum over t of gamma^t * mean over supervised rows of KL(target || draft), row by row and in words."""
    settings = DartLoss(gamma=0.5, weigh_by_mass=weigh_by_mass, greedy_temperature=0.7)
    setup = Setup(settings, num_blocks=ROW)
    batch = setup.table.batch(torch.from_numpy(setup.rows[:2]), ROW, RULE)
    loss, metrics = setup.objective.loss(batch)
    corpus, totals = setup.corpus, [[] for _ in range(CONFIG.depth)]
    samples = {int(np.searchsorted(corpus.offsets, p, side="right")) - 1 for p in setup.rows[:2].ravel() if p >= 0}
    with torch.no_grad():
        for sample in samples:
            tokens = torch.from_numpy(corpus.sample(sample)).long()
            out = setup.model(tokens[None], output_hidden_states=True)
            taps = torch.cat([out.hidden_states[t][0] for t in dart_taps(7)], -1)
            drafted = all_block_logits(setup, tokens, taps).log_softmax(-1)
            temperature = 1.0 if corpus.sampled[sample] else 0.7
            for newest in range(int(corpus.prompt_len[sample]) - 1, len(tokens) - 2):
                for slot in range(min(CONFIG.depth, len(tokens) - 2 - newest)):
                    law = out.logits[0, newest + 1 + slot]
                    wanted = (law[setup.ids] / temperature).log_softmax(-1)
                    kl = (wanted.exp() * (wanted - drafted[newest, slot])).sum()
                    mass = law.softmax(-1)[setup.ids].sum() if weigh_by_mass else 1.0
                    totals[slot].append((float(kl), float(kl * mass)))
    expected = sum(0.5**t * np.mean([weighed for _, weighed in rows]) for t, rows in enumerate(totals))
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-4)
    assert metrics["kl"].tolist() == pytest.approx([np.mean([kl for kl, _ in rows]) for rows in totals], rel=1e-4)


def test_gradients_reach_every_parameter_but_not_the_target():
    setup = Setup()
    setup.model.requires_grad_(True)
    loss, _ = setup.objective.loss(setup.batches.batch(0))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in setup.draft.parameters())
    assert all(p.grad is None for p in setup.model.parameters())


def test_states_computed_online_or_stored_give_the_same_loss():
    losses = [Setup(stored=stored).objective.loss(Setup().batches.batch(0))[0] for stored in (True, False)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_compiled_sparse_objective_equals_the_plain_one():
    corpus, model = tiny_corpus(40), tiny_model(hidden_size=64).cuda()  # heads of 16, the least there is
    recipe = DartRecipe(
        draft_vocab_size=DRAFT_VOCAB, draft_length=3, num_kv_heads=2, rows_per_step=2, row_len=128, num_blocks=32
    )
    data = training_set(recipe.teacher(model), corpus, recipe.row_len, batch_rows=2)
    results = []
    for compiled in (False, True):
        run = recipe.run(model, data, TrainConfig(steps=1), compiled=compiled, sparse=compiled)
        loss, metrics = run.objective.loss(run.trainer.batches.batch(0))
        loss.backward()
        results.append((loss, metrics["kl"], *(p.grad for p in run.objective.module.parameters())))
    for plain, fast in zip(*results, strict=True):
        # fp32 products run in TF32 inside the sparse attention.
        assert (plain - fast).norm() <= 1e-2 * plain.norm() + 1e-6
