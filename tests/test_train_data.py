"""Training text: corpora, shards, draft vocabulary, packing, the order of rows, and what is supervised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train_setup import CONFIG, ROW, RULE, Setup, tiny_corpus

from workbench.train.data import (
    Corpus,
    RowOrder,
    concatenate,
    frequent_ids,
    load_shards,
    pack_best_fit,
    token_counts,
)


def test_selecting_and_joining_samples():
    corpus = tiny_corpus(6)
    picked = corpus.select(np.array([4, 1]))
    assert picked.num_samples == 2 and picked.sampled.tolist() == [True, False]
    for new, old in enumerate((4, 1)):
        assert picked.sample(new).tolist() == corpus.sample(old).tolist()
        assert picked.prompt_len[new] == corpus.prompt_len[old]
    both = concatenate([corpus.select(corpus.sampled), corpus.select(~corpus.sampled)])
    assert sorted(map(tuple, (both.sample(i) for i in range(6)))) == sorted(map(tuple, map(corpus.sample, range(6))))
    assert concatenate([Corpus.from_responses([]), corpus]).num_samples == 6


def test_contradicting_arrays_are_refused():
    corpus = tiny_corpus(2)
    with pytest.raises(ValueError, match="prompt_len must lie"):
        Corpus(*[getattr(corpus, n) for n in ("tokens", "offsets")], corpus.prompt_len + 99, *[corpus.sampled] * 3)
    with pytest.raises(ValueError, match="offsets must rise"):
        Corpus(corpus.tokens[:-1], corpus.offsets, corpus.prompt_len, *[corpus.sampled] * 3)
    with pytest.raises(ValueError, match="looped has 1 entries"):
        Corpus(corpus.tokens, corpus.offsets, corpus.prompt_len, corpus.sampled, corpus.looped[:1], corpus.source)


def test_shards_are_read_and_bad_ones_refused(tmp_path):
    corpus = tiny_corpus(5)
    arrays = {name: getattr(corpus, name) for name in corpus.__dataclass_fields__}
    arrays |= {"tokens": corpus.tokens.astype(np.uint16), "sampled": corpus.sampled.astype(np.uint8)}
    np.savez(tmp_path / "a.npz", **arrays)
    twice = load_shards([tmp_path / "a.npz", tmp_path / "a.npz"])
    assert twice.num_samples == 10 and twice.sample(7).tolist() == corpus.sample(2).tolist()
    del arrays["looped"]
    np.savez(tmp_path / "b.npz", **arrays)
    (tmp_path / "c.npz").write_bytes(b"no zip")
    for name, words in (("b", "lacks looped"), ("c", "no readable"), ("d", "no readable")):
        with pytest.raises(ValueError, match=words):
            load_shards([tmp_path / f"{name}.npz"])
    with pytest.raises(ValueError, match="paths is empty"):
        load_shards([])


def test_draft_vocabulary_is_the_most_frequent_response_ids():
    greedy = Corpus.from_responses([([7, 7, 7, 7], [3, 3, 2]), ([], [2, 9])])
    corpus = concatenate([greedy, Corpus.from_responses([([1], [9, 9, 9, 9])], sampled=True)])
    assert token_counts(corpus, 10, sampled_weight=0.5).tolist() == [0, 0, 2, 2, 0, 0, 0, 0, 0, 3]
    assert frequent_ids(token_counts(corpus, 10), 3).tolist() == [2, 3, 9]
    assert frequent_ids(np.array([5.0, 5, 5]), 2).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"draft vocabulary of 4 outside 1\.\.3"):
        frequent_ids(np.zeros(3), 4)


@pytest.mark.parametrize("row_len", [20, 33])
def test_packing_keeps_every_sample_once_and_wastes_little(row_len):
    lengths = np.random.default_rng(1).integers(1, 21, 300)
    rows = pack_best_fit(lengths, row_len)
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert all(lengths[row].sum() <= row_len for row in rows)
    assert lengths.sum() / (len(rows) * row_len) > 0.95
    with pytest.raises(ValueError, match="a sample has 20 tokens; rows have 19"):
        pack_best_fit(lengths, 19)


def test_row_order_visits_every_row_once_an_epoch_and_keeps_the_mix():
    order = RowOrder([np.arange(7), np.arange(100, 103)], [3, 1], seed=2)
    steps = [order.rows(s) for s in range(7)]
    assert all((rows[:3] < 100).all() and rows[3] >= 100 for rows in steps)
    assert sorted(np.concatenate([r[:3] for r in steps]).tolist()) == sorted(list(range(7)) * 3)
    again = RowOrder([np.arange(7), np.arange(100, 103)], [3, 1], seed=2)
    assert np.array_equal(again.rows(6), steps[6]) and np.array_equal(order.rows(2), steps[2])
    with pytest.raises(ValueError, match="cannot give 1 rows"):
        RowOrder([np.arange(3), np.arange(0)], [1, 1])


def test_blocks_supervise_response_tokens_only():
    setup = Setup(num_blocks=ROW)
    corpus, depth = setup.corpus, CONFIG.depth
    batch = setup.table.batch(torch.from_numpy(setup.rows), ROW, RULE)
    expected = set()
    for sample in range(corpus.num_samples):
        length, prompt = int(corpus.lengths[sample]), int(corpus.prompt_len[sample])
        for newest in range(prompt - 1, length - 2):  # the root newest + 1 is a response token, and one follows it
            drafted = tuple(newest + 2 + s < length for s in range(depth))
            expected.add((int(corpus.offsets[sample]) + newest, drafted))
    found = set()
    for row, block in batch.used.nonzero().tolist():
        place = int(batch.index[row, batch.anchors[row, block]])
        found.add((place, tuple(batch.valid[row, block].tolist())))
    assert found == expected and int(batch.used.sum()) == len(expected)


def test_drawn_blocks_are_ascending_distinct_and_repeatable():
    setup = Setup(num_blocks=5)
    one, two, other = setup.batches.batch(3), setup.batches.batch(3), setup.batches.batch(4)
    assert torch.equal(one.anchors, two.anchors) and not torch.equal(one.anchors, other.anchors)
    assert one.used.all() and (one.anchors.diff(dim=1) > 0).all()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"not a zip"])
def test_damaged_shards_are_named(tmp_path, content):
    shard = tmp_path / "train-000.npz"
    shard.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-000\.npz is no readable \.npz shard"):
        load_shards([shard])
