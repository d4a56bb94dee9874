"""Where training text comes from, and a run from text to files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train_setup import VOCAB, tiny_corpus, tiny_model

from workbench.budget.trace import prompt_digest
from workbench.drafters.dart import DartDrafter, dart_taps
from workbench.drafters.dart_files import load_dart
from workbench.models.target import Target
from workbench.train import text as text_module
from workbench.train.dart_recipe import DartRecipe
from workbench.train.data import Corpus, concatenate
from workbench.train.evaluate import record_drafts, summary_rows
from workbench.train.packing import BlockRule
from workbench.train.recipe import training_set
from workbench.train.schedule import TrainConfig
from workbench.train.text import (
    ENVIRONMENT,
    answered_corpus,
    find_shards,
    is_kept_for_predictors,
    kept_for_predictors,
    predictor_corpus,
    shard_corpus,
    split_held_out,
    training_text,
)


def write_shard(path, corpus: Corpus) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez(path, **{name: getattr(corpus, name) for name in corpus.__dataclass_fields__})


def test_shards_are_found_by_argument_then_by_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("WORKBENCH_DATA", raising=False)
    assert find_shards() == []
    write_shard(tmp_path / "one" / "train-000.npz", tiny_corpus(3))
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    assert [p.name for p in find_shards()] == ["train-000.npz"]
    assert find_shards(tmp_path / "one") == find_shards()
    with pytest.raises(ValueError, match="holds no train-"):
        find_shards(tmp_path)


def test_shards_give_the_first_short_samples_of_the_right_vocabulary(tmp_path):
    corpus = tiny_corpus(10)
    for number, part in enumerate((np.arange(6), np.arange(6, 10))):
        write_shard(tmp_path / f"train-{number}.npz", corpus.select(part))
    paths, longest = find_shards(tmp_path), int(np.median(corpus.lengths))
    short = [i for i in range(10) if corpus.lengths[i] <= longest]
    kept = shard_corpus(paths, VOCAB, num_samples=4, max_len=longest)
    assert [kept.sample(i).tolist() for i in range(4)] == [corpus.sample(i).tolist() for i in short[:4]]
    assert shard_corpus(paths, VOCAB, 0, longest).num_samples == len(short)
    with pytest.raises(ValueError, match="the target's vocabulary ends at"):
        shard_corpus(paths, int(corpus.tokens.max()), 0, 99)
    with pytest.raises(ValueError, match="no sample has 1 tokens or fewer and a prompt that is for drafters"):
        shard_corpus(paths, VOCAB, 0, 1)


def test_prompts_kept_for_predictors():
    corpus = Corpus.from_responses([([i % 640, 7, i // 640], [1, 2 + i]) for i in range(1280)])
    kept = kept_for_predictors(corpus)
    assert 20 < kept.sum() < 60  # one in 32 of 1280
    assert kept[:5].tolist() == [
        prompt_digest([i, 7, 0])[0] == "0" and prompt_digest([i, 7, 0])[1] < "8" for i in range(5)
    ]
    turned = kept_for_predictors(corpus.select(np.arange(1280)[::-1]))
    assert turned.tolist() == kept[::-1].tolist()


def prompts_of(corpus: Corpus) -> set[tuple[int, ...]]:
    return {tuple(corpus.sample(i)[: corpus.prompt_len[i]].tolist()) for i in range(corpus.num_samples)}


@pytest.fixture
def shards(tmp_path):
    """Two shards of 300 prompts with two responses each; about one prompt in 32 is for predictors."""
    corpus = Corpus.from_responses([([i // 2 % 60, i // 120, 7], [1, 2 + i % 2]) for i in range(600)])
    for number, part in enumerate((np.arange(300), np.arange(300, 600))):
        write_shard(tmp_path / f"train-{number}.npz", corpus.select(part))
    return tmp_path


def test_drafters_and_predictors_never_share_a_prompt(shards, target, monkeypatch):
    text = training_text(target, str(shards), 0, 64, [], 0, 0)
    kept = predictor_corpus(shards, target)
    every = training_text(target, str(shards), 0, 64, [], 0, 0, leave_out_predictor_prompts=False)
    assert prompts_of(text) | prompts_of(kept) == prompts_of(every) and len(prompts_of(every)) == 300
    assert not prompts_of(text) & prompts_of(kept)
    assert text.num_samples + kept.num_samples == 600 and kept.num_samples == 2 * len(prompts_of(kept)) > 4
    assert all(is_kept_for_predictors(prompt) for prompt in prompts_of(kept))
    assert not any(is_kept_for_predictors(prompt) for prompt in prompts_of(text))
    monkeypatch.setenv("WORKBENCH_DATA", str(shards))
    assert prompts_of(predictor_corpus(ENVIRONMENT, target)) == prompts_of(kept)


def test_what_is_left_out_does_not_count(shards):
    """The number of samples is that of the samples used, and it is met from the next shard if need be."""
    first = shard_corpus(find_shards(shards), VOCAB, 300, 64)
    assert first.num_samples == 300 and not kept_for_predictors(first).any()
    assert prompts_of(first) > prompts_of(shard_corpus(find_shards(shards)[:1], VOCAB, 0, 64))


def test_nothing_is_left_for_a_use(tmp_path, target, monkeypatch):
    of_use = {
        use: [p for p in ([i, 5] for i in range(60)) if is_kept_for_predictors(p) == use] for use in (True, False)
    }
    for use, name in ((True, "drafters"), (False, "predictors")):
        folder = tmp_path / name
        write_shard(folder / "train-0.npz", Corpus.from_responses([(p, [1]) for p in of_use[use]]))
        with pytest.raises(ValueError, match=f"no sample has 64 tokens or fewer and a prompt that is for {name}"):
            shard_corpus(find_shards(folder), VOCAB, 0, 64, name)
    with pytest.raises(ValueError, match="use='drafter'; allowed: drafters, predictors, all"):
        shard_corpus(find_shards(folder), VOCAB, 0, 64, "drafter")
    monkeypatch.delenv("WORKBENCH_DATA", raising=False)
    with pytest.raises(ValueError, match="WORKBENCH_DATA is not set"):
        predictor_corpus(ENVIRONMENT, target)


def test_answered_prompts_are_divided_likewise(target, monkeypatch):
    monkeypatch.setattr(text_module, "is_kept_for_predictors", lambda prompt: prompt == asked[1])
    asked = [target.encode_chat(p.messages()) for p in text_module.load_prompts("maths", limit=3)]
    found = {use: answered_corpus(target, ["maths"], 3, 4, sampled=False, use=use) for use in text_module.USES}
    given = {use: [corpus.sample(i)[:8].tolist() for i in range(corpus.num_samples)] for use, corpus in found.items()}
    assert given == {"drafters": [asked[0], asked[2]], "predictors": [asked[1]], "all": asked}
    with pytest.raises(ValueError, match=r"prompt_sets=\['maths'\], num_prompts=1: none of the 1 prompts is for pred"):
        answered_corpus(target, ["maths"], 1, 4, use="predictors")


class Words:
    """A tokenizer for prompts without a template: one id a character."""

    chat_template = None
    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text][:8]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


@pytest.fixture
def target() -> Target:
    return Target(tiny_model(), Words(), name="tiny", stop_ids=())


def test_the_target_answers_prompts_itself(target, monkeypatch):
    monkeypatch.delenv("WORKBENCH_DATA", raising=False)
    corpus = training_text(target, "", 0, 64, ["maths"], num_prompts=3, max_new_tokens=7)
    assert corpus.sampled.tolist() == [False] * 3 + [True] * 3
    assert set(corpus.prompt_len.tolist()) == {8} and set(corpus.lengths.tolist()) == {15}
    model = tiny_model()
    tokens = torch.from_numpy(corpus.sample(1)).long()
    assert torch.equal(model(tokens[None]).logits[0, 7:-1].argmax(-1), tokens[8:])  # greedy
    again = answered_corpus(target, ["maths"], 3, 7)
    assert np.array_equal(again.tokens, corpus.tokens)
    assert not answered_corpus(target, ["maths"], 1, 4, sampled=False).sampled.any()


def test_a_prompt_and_its_responses_stay_on_one_side():
    pairs = [([i, i + 1], [5, 6, i]) for i in range(10)]
    corpus = concatenate([Corpus.from_responses(pairs), Corpus.from_responses(pairs, sampled=True)])
    train, held = split_held_out(corpus, 0.3)
    prompts = [{tuple(c.sample(i)[:2]) for i in range(c.num_samples)} for c in (train, held)]
    assert len(prompts[0]) == 7 and len(prompts[1]) == 3 and not prompts[0] & prompts[1]
    assert train.num_samples == 14 and held.num_samples == 6
    assert split_held_out(corpus, 0.001)[1].num_samples == 2
    with pytest.raises(ValueError, match=r"held_out=1\.0"):
        split_held_out(corpus, 1.0)
    with pytest.raises(ValueError, match="1 prompts cannot"):
        split_held_out(Corpus.from_responses(pairs[:1]), 0.5)


def test_from_text_to_a_drafter(target, tmp_path):
    train, held = split_held_out(tiny_corpus(12), 0.2)
    recipe = DartRecipe(draft_vocab_size=30, draft_length=3, rows_per_step=3, row_len=32, num_blocks=6)
    teacher = recipe.teacher(target.model)
    data = training_set(teacher, train, recipe.row_len, batch_rows=2)
    run = recipe.run(target.model, data, TrainConfig(steps=4, log_every=2, ema_decay=0.5))
    sizes = run.objective.module.config
    assert (sizes.intermediate_size, sizes.num_key_value_heads, sizes.head_dim, sizes.depth) == (24, 2, 4, 4)
    curve = run.trainer.run()
    run.save(tmp_path, averaged=True)
    with run.trainer.averaged():
        records = list(record_drafts(run.objective.over(teacher), held))
        hits, walks = summary_rows(records, held, recipe.follow, (4, 9), walked=5)
    assert [row["position"] for row in hits] == [1, 2, 3, 4] and [row["num_nodes"] for row in walks] == [4, 9]
    assert len(curve) == 2 and all(np.isfinite(row["kl"]) for row in hits)
    drafter = DartDrafter(load_dart(tmp_path), target.embedding, dart_taps(7))
    assert drafter.model.config == sizes


def test_all_greedy_text_needs_no_sampled_rows(target):
    corpus = tiny_corpus(8)
    recipe = DartRecipe(draft_vocab_size=10, draft_length=3, rows_per_step=4, row_len=24, num_blocks=6)
    teacher = recipe.teacher(target.model)
    for sampled in (False, True):
        data = training_set(teacher, corpus.select(corpus.sampled == sampled), recipe.row_len, batch_rows=2)
        batch = data.batches(recipe, BlockRule(4, root=1)).batch(0)
        assert batch.tokens.shape == (4, 24) and bool((batch.sampled == (batch.used & sampled)).all())


@pytest.mark.parametrize("field, value", [("row_len", 0), ("sampled_share", 1.5), ("gamma", 0.0)])
def test_bad_recipes_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={value}"):
        DartRecipe(**{field: value})
