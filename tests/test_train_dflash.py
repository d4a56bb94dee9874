"""DFlash's objective: training blocks against inference blocks, visibility, the loss in words, recipes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from train_setup import FLASH, HIDDEN, ROW, VOCAB, DFlashSetup, tiny_corpus, tiny_model

from workbench.drafters.dflash import DFlashDrafter
from workbench.drafters.dflash_files import load_dflash, save_dflash
from workbench.train.block_objective import fold_scale
from workbench.train.dflash_objective import DFlashLoss, block_states
from workbench.train.dflash_recipe import DFlashRecipe, unused_id
from workbench.train.masks import DenseAttention
from workbench.train.recipe import training_set
from workbench.train.schedule import TrainConfig
from workbench.train.table import RECIPES, build_recipe
from workbench.train.trainer import Trainer
from workbench.types import Commit

BOTH = pytest.mark.parametrize("shifted", [False, True])


def all_block_states(setup: DFlashSetup, tokens: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """[n, slots, H]: states of a block at every place of one sequence by the training forward."""
    anchors, config = torch.arange(len(tokens))[None], setup.config
    attention = DenseAttention(anchors, torch.zeros_like(anchors), len(tokens), config.block_size, causal=False)
    block = torch.full((1, len(tokens), config.block_size), config.mask_token_id)
    block[0, :, 0] = tokens
    embeddings = setup.model.get_input_embeddings()(block)
    return block_states(setup.draft, taps[None] * setup.scale, embeddings, anchors, anchors, attention)[0]


def drafting(setup: DFlashSetup, states: torch.Tensor) -> torch.Tensor:
    return states if setup.config.shifted else states[:, 1:]


@BOTH
@torch.no_grad()
def test_training_blocks_equal_inference_blocks(tmp_path, shifted):
    """Rounds of uneven length on two requests at once: same inputs of the head and same logits at every round start."""
    setup = DFlashSetup(shifted=shifted)
    save_dflash(fold_scale(setup.draft, setup.scale), tmp_path, torch.float32)
    drafter = DFlashDrafter(
        load_dflash(tmp_path), setup.embedding_module, setup.model.lm_head, SimpleNamespace(scorer=None)
    )
    session = drafter.session(2, ROW)
    sequences = [torch.from_numpy(setup.corpus.sample(i)).long() for i in (3, 7)]
    taps = [setup.taps_of(tokens) for tokens in sequences]
    trained = [drafting(setup, all_block_states(setup, *pair)) for pair in zip(sequences, taps, strict=True)]
    ends, compared = [0, 0], 0
    for step in range(1, 20):
        moved = [(i, ends[i], ends[i] + 1 + (step * (3 + i)) % 4) for i in (0, 1)]
        moved = [(i, start, stop) for i, start, stop in moved if stop < len(sequences[i])]
        if not moved:
            break
        commit = Commit(
            [i for i, _, _ in moved],
            [start for _, start, _ in moved],
            [sequences[i][start:stop].numpy() for i, start, stop in moved],
            [int(sequences[i][stop]) for i, _, stop in moved],
            torch.cat([taps[i][start:stop] for i, start, stop in moved]),
        )
        session.observe(commit)
        hidden, logits = session.draft(commit.slots, commit.next_tokens)
        for row, (i, _, stop) in enumerate(moved):
            ends[i] = stop
            torch.testing.assert_close(hidden[row], trained[i][stop], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logits[row], setup.model.lm_head(trained[i][stop]), rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared >= 6


@torch.no_grad()
def test_a_block_sees_its_anchor_and_what_lies_before_it_only():
    setup = DFlashSetup()
    tokens = torch.from_numpy(setup.corpus.sample(3)).long()
    taps = setup.taps_of(tokens)
    before, place = all_block_states(setup, tokens, taps), 6
    changed = tokens.clone()
    changed[place] = (changed[place] + 1) % VOCAB
    after = all_block_states(setup, changed, setup.taps_of(changed))
    assert torch.equal(before[:place], after[:place])
    assert (before[place] - after[place]).abs().max() > 1e-3
    # The target states of the anchor are not known when it is drafted from.
    taps[place] += 1.0
    after = all_block_states(setup, tokens, taps)
    assert torch.equal(before[: place + 1], after[: place + 1])
    assert (before[place + 1] - after[place + 1]).abs().max() > 1e-3


@torch.no_grad()
def test_slots_of_a_block_see_each_other_in_both_directions():
    setup = DFlashSetup()
    anchors = torch.tensor([[4]])
    attention = DenseAttention(anchors, torch.zeros_like(anchors), 8, FLASH.block_size, causal=False)
    embeddings, positions = torch.randn(1, 1, FLASH.block_size, HIDDEN), torch.arange(8)[None]
    inputs = setup.draft, torch.randn(1, 8, len(FLASH.taps) * HIDDEN)
    before = block_states(*inputs, embeddings, positions, anchors, attention)
    embeddings[..., -1, :] += 1.0
    after = block_states(*inputs, embeddings, positions, anchors, attention)
    assert ((before - after).abs().amax(-1) > 1e-4).all()


@torch.no_grad()
def test_samples_of_a_row_do_not_see_each_other():
    setup = DFlashSetup(num_blocks=ROW)
    batch = setup.table.batch(torch.from_numpy(setup.rows), ROW, setup.objective.rule)
    packed = setup.objective.states(batch, setup.store(batch))
    row, block = 0, int(batch.used[0].sum()) - 1  # the last block of the row lies in its last sample
    place = int(batch.index[row, batch.anchors[row, block]])
    sample = int(np.searchsorted(setup.corpus.offsets, place, side="right")) - 1
    assert setup.corpus.offsets[sample] != batch.index[row, 0]
    tokens = torch.from_numpy(setup.corpus.sample(sample)).long()
    alone = all_block_states(setup, tokens, setup.taps_of(tokens))[place - int(setup.corpus.offsets[sample])]
    torch.testing.assert_close(packed[row, block], alone, rtol=1e-4, atol=1e-4)


@BOTH
def test_anchors_and_labels_in_words(shifted):
    """An anchor is a response token with a response token behind it; draft k says the k-th token behind it."""
    setup = DFlashSetup(shifted=shifted)
    corpus, num_drafts = setup.corpus, setup.config.num_drafts
    batch = setup.table.batch(torch.from_numpy(setup.rows), ROW, setup.objective.rule)
    expected = {}
    for sample in range(corpus.num_samples):
        start, stop = int(corpus.offsets[sample]), int(corpus.offsets[sample + 1])
        for place in range(start + int(corpus.prompt_len[sample]), stop - 1):
            expected[place] = corpus.tokens[place + 1 : min(stop, place + 1 + num_drafts)].tolist()
    found = {}
    for row, block in batch.used.nonzero().tolist():
        valid = batch.valid[row, block]
        assert not (valid.int().diff() > 0).any()
        found[int(batch.index[row, batch.anchors[row, block]])] = batch.labels[row, block][valid].tolist()
    assert found == expected


@BOTH
def test_objective_equals_a_restatement(shifted):
    """Loss = sum of exp(-(k - 1) / gamma) * cross-entropy over all supervised drafts / sum of the weights."""
    setup = DFlashSetup(DFlashLoss(gamma=3.0), shifted=shifted)
    batch = setup.table.batch(torch.from_numpy(setup.rows[:2]), ROW, setup.objective.rule)
    loss, metrics = setup.objective.loss(batch)
    corpus, num_drafts = setup.corpus, setup.config.num_drafts
    costs, hits, total, weights = [[] for _ in range(num_drafts)], [[] for _ in range(num_drafts)], 0.0, 0.0
    samples = {int(np.searchsorted(corpus.offsets, p, side="right")) - 1 for p in setup.rows[:2].ravel() if p >= 0}
    for sample in samples:
        tokens = torch.from_numpy(corpus.sample(sample)).long()
        with torch.no_grad():
            states = drafting(setup, all_block_states(setup, tokens, setup.taps_of(tokens)))
            laws = setup.model.lm_head(states).log_softmax(-1)
        for anchor in range(int(corpus.prompt_len[sample]), len(tokens) - 1):
            for k in range(1, min(num_drafts, len(tokens) - 1 - anchor) + 1):
                cost = -float(laws[anchor, k - 1, tokens[anchor + k]])
                costs[k - 1].append(cost)
                hits[k - 1].append(int(laws[anchor, k - 1].argmax()) == int(tokens[anchor + k]))
                weight = math.exp(-(k - 1) / 3.0)
                total, weights = total + weight * cost, weights + weight
    assert float(loss.detach()) == pytest.approx(total / weights, rel=1e-4)
    assert metrics["ce"].tolist() == pytest.approx([np.mean(c) for c in costs], rel=1e-4)
    assert metrics["agree"].tolist() == pytest.approx([np.mean(h) for h in hits], abs=1e-6)


def test_gradients_reach_every_parameter_but_not_the_target():
    setup = DFlashSetup()
    setup.model.requires_grad_(True)
    loss, _ = setup.objective.loss(setup.batches.batch(0))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in setup.draft.parameters())
    assert all(p.grad is None for p in setup.model.parameters())


def test_training_learns_one_batch():
    setup = DFlashSetup(num_blocks=4)
    batch = setup.batches.batch(0)
    config = TrainConfig(steps=200, warmup_steps=10, learning_rate=1e-2, log_every=100)
    records = Trainer(setup.objective, SimpleNamespace(batch=lambda step: batch, identity=""), config).run()
    assert records[-1]["loss"] < 0.3 * records[0]["loss"]
    assert len(records[0]["ce"]) == FLASH.num_drafts and min(records[-1]["agree"]) > 0.6


def test_a_store_of_taps_keeps_nothing_else():
    setup = DFlashSetup()
    batch = setup.batches.batch(0)
    found, online = setup.store(batch), setup.teacher(batch)
    assert found.hidden is None and found.log_total is None and online.hidden is None
    assert found.taps.shape[-1] == len(FLASH.taps) * HIDDEN
    torch.testing.assert_close(found.taps[batch.filled], online.taps[batch.filled], rtol=1e-4, atol=1e-5)


def test_loss_settings_are_checked():
    with pytest.raises(ValueError, match=r"gamma=0\.0 outside"):
        DFlashLoss(gamma=0.0)


def words(special: dict[int, bool], length: int, eos: int = 2) -> SimpleNamespace:
    """A tokenizer of which only the ids are known."""

    class Ids(SimpleNamespace):
        def __len__(self) -> int:
            return length

    tokens = {i: SimpleNamespace(special=is_special) for i, is_special in special.items()}
    return Ids(added_tokens_decoder=tokens, bos_token_id=1, eos_token_id=eos, pad_token_id=None, unk_token_id=None)


def test_masks_take_an_id_that_no_text_has():
    counts = np.zeros(20, np.int64)
    assert unused_id(words({}, 18), 20, counts) == 18  # the embedding has rows that the tokenizer does not use
    special = {1: True, 2: True, 5: True, 6: True, 7: True, 8: False, 19: True}
    counts[[7, 19]] = 1
    assert unused_id(words(special, 20), 20, counts) == 6  # 7 and 19 occur, 8 is no special token
    counts[[5, 6]] = 1
    with pytest.raises(ValueError, match="no special id that the training text lacks"):
        unused_id(words(special, 20), 20, counts)  # bos and eos do not occur, yet are no masks
    with pytest.raises(ValueError, match="mask_token_id=-1 needs a tokenizer"):
        unused_id(None, 20, counts)


def tiny_run(recipe: DFlashRecipe, tokenizer=None):
    model = tiny_model()
    data = training_set(recipe.teacher(model), tiny_corpus(), recipe.row_len, batch_rows=2)
    return recipe.run(model, data, TrainConfig(steps=2, log_every=1, ema_decay=0.5), tokenizer)


RECIPE = DFlashRecipe(num_layers=2, num_taps=2, block_size=4, rows_per_step=2, row_len=ROW, num_blocks=3)


def test_recipe_makes_a_run_that_saves_what_it_trained(tmp_path):
    run = tiny_run(RECIPE, words({}, VOCAB - 1))
    run.trainer.run()
    run.save(tmp_path, averaged=True)
    model = load_dflash(tmp_path)
    config = model.config
    assert (config.mask_token_id, config.taps, config.num_drafts) == (VOCAB - 1, (2, 5), 3)
    assert (config.rope_theta, config.num_target_layers) == (10000.0, 7)
    with run.trainer.averaged():
        wanted = run.objective.module.norm.weight.bfloat16().float()
    assert torch.equal(model.norm.weight, wanted)
    assert run.num_parameters == sum(p.numel() for p in model.parameters())


def test_recipe_of_given_sizes():
    run = tiny_run(replace(RECIPE, mask_token_id=3, shifted=True, num_kv_heads=4, intermediate_size=9, num_taps=1))
    config = run.objective.module.config
    assert (config.mask_token_id, config.num_drafts, config.num_key_value_heads) == (3, 4, 4)
    assert (config.intermediate_size, config.taps) == (9, (4,))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"mask_token_id": -2}, "mask_token_id=-2"),
        ({"gamma": -1.0}, "gamma=-1.0 outside"),
        ({"num_kv_heads": -1}, "num_kv_heads=-1 must be at least 0"),
        ({"rows_per_step": 0}, "rows_per_step=0 must be at least 1"),
        ({"sampled_share": 1.5}, "sampled_share=1.5 outside"),
    ],
)
def test_bad_recipes_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DFlashRecipe(**fields)


def test_recipes_by_name():
    params = {"num_layers": 5, "draft_vocab_size": 99, "gamma": 0.0, "num_blocks": 7, "learning_rate": 1.0}
    dart, dflash = (build_recipe(name, params) for name in RECIPES)
    assert (dart.draft_vocab_size, dart.gamma, dart.num_blocks) == (99, 0.6, 7)
    assert (dflash.num_layers, dflash.gamma, dflash.num_blocks) == (5, 7.0, 7)
    assert build_recipe("dflash", {"gamma": 4.0}).gamma == 4.0
    with pytest.raises(ValueError, match="method='medusa'; allowed: dart, dflash"):
        build_recipe("medusa", params)


@pytest.mark.gpu
def test_compiled_sparse_objective_equals_the_plain_one():
    corpus, model = tiny_corpus(40), tiny_model(hidden_size=64).cuda()  # heads of 16, the least there is
    recipe = replace(RECIPE, block_size=16, row_len=128, num_blocks=16, mask_token_id=3)
    data = training_set(recipe.teacher(model), corpus, recipe.row_len, batch_rows=2)
    results = []
    for compiled in (False, True):
        run = recipe.run(model, data, TrainConfig(steps=1), compiled=compiled, sparse=compiled)
        loss, metrics = run.objective.loss(run.trainer.batches.batch(0))
        loss.backward()
        results.append((loss, metrics["ce"], *(p.grad for p in run.objective.module.parameters())))
    for plain, fast in zip(*results, strict=True):
        # fp32 products run in TF32 inside the sparse attention.
        assert (plain - fast).norm() <= 1e-2 * plain.norm() + 1e-6
