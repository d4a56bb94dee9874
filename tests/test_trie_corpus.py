"""What a trie report is asked for, and the way from a corpus to a trie and the text kept back from it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from workbench.measure import trie_corpus
from workbench.measure.parameters import read_parameters
from workbench.measure.trie_corpus import build_trie, open_source, split_documents
from workbench.measure.trie_plan import TriePlan
from workbench.paths import notebooks_dir
from workbench.search.trie import NgramTrie

NOTEBOOK = notebooks_dir() / "03_build_trie.ipynb"


def made_plan(**changes) -> TriePlan:
    """The notebook's defaults, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items()}
    return TriePlan.of(values | changes)


def documents(number: int, size: int = 30) -> list[np.ndarray]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, 50, rng.integers(2, size)).astype(np.int64) for _ in range(number)]


# ---- plan -----------------------------------------------------------------------------------------------------------
def test_one_count_stands_for_all_lengths():
    assert made_plan(order=4, min_count=[2]).min_count == (2, 2, 2, 2)
    assert made_plan(min_count=[1, 2, 3]).min_count == (1, 2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"goal_tree_ms": -1.0}, "goal_tree_ms=-1.0 must be at least 0"),
        ({"held_out": 1.0}, "held_out=1.0; allowed: above 0 and below 1"),
        ({"queries": 4}, "queries=4 must be at least queries_per_call"),
        ({"corpus": "nowhere"}, "corpus='nowhere'; allowed: python"),
        ({"corpus": ".", "tokenizer": "words"}, "allowed with the corpus 'python' only"),
        ({"tokenizer": "nowhere"}, "tokenizer='nowhere'; allowed: embedded, words"),
        ({"tokenizer": ""}, "the corpus 'python' is text"),
        ({"order": 6}, "order is 6"),
        ({"min_count": [1, 2]}, "min_count"),
        ({"tree_sizes": [10, 64]}, "num_nodes is 64, allowed 1..63"),
        ({"beam_widths": [0]}, "beam_width is 0, allowed 1..1024"),
        ({"ngram_weights": [-0.5]}, "ngram_weight is -0.5"),
        ({"tree_sizes": []}, r"tree_sizes=\[\]; allowed: at least one"),
        ({"ngram_weights": [0.5, 0.5]}, "allowed: at least one, each once"),
        ({"suffixes": ["txt"]}, "text_suffixes has 'txt'"),
        ({"corpus": ""}, "corpus=''; allowed: python"),
        ({"memory_mb": float("nan")}, "memory_mb is nan, allowed"),
        ({"memory_mb": 0.0}, "memory_mb is 0.0, allowed"),
        ({"workers": 5000}, "workers is 5000, allowed 1..4096"),
        ({"threads": -1}, "threads=-1 must be at least 0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"goal_tree_ms": float("nan")}, "goal_tree_ms=nan must be at least 0"),
        ({"ablation_trie": "nowhere"}, "ablation_trie='nowhere'; allowed: default, built, or an existing file"),
        ({"prompt_sets": []}, r"prompt_sets=\[\]; allowed: at least one"),
        ({"prompt_sets": ["maths", "maths"]}, "allowed: at least one, each once"),
        ({"num_prompts": 0}, "num_prompts=0 must be at least 1"),
        ({"num_nodes": 64}, "num_nodes is 64, allowed 1..63"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_plans_out_of_range(change, message):
    with pytest.raises(ValueError, match=message):
        made_plan(**change)


# ---- split ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.75])
def test_documents_kept_back_are_spread_evenly(tmp_path, share):
    whole = documents(400)
    split = split_documents(iter(whole), tmp_path, share, seed=2)
    assert split.documents + len(split.held_out) == 400
    assert abs(len(split.held_out) - 400 * share) <= 1
    assert split.tokens == sum(ids.size for ids in split.kept)
    tagged = split_documents([np.array([number]) for number in range(400)], tmp_path, share, seed=2)
    numbers = [int(ids[0]) for ids in tagged.held_out]
    assert np.ptp(np.diff(numbers)) <= 1, "no stretch of the corpus is left out"


def test_the_seed_decides_which(tmp_path):
    held = [split_documents(documents(90), tmp_path, 0.1, seed).held_out for seed in (0, 0, 1)]
    as_lists = [[ids.tolist() for ids in documents] for documents in held]
    assert as_lists[0] == as_lists[1] != as_lists[2]


def test_shards_hold_what_is_counted_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(trie_corpus, "_SHARD_TOKENS", 100)
    monkeypatch.setattr(trie_corpus, "_MOST_KEPT", 150)
    monkeypatch.setattr(trie_corpus, "_MOST_HELD_OUT", 40)
    whole = documents(60)
    split = split_documents(whole, tmp_path, 0.2)
    found = []
    for path in sorted(tmp_path.iterdir()):
        shard = dict(np.load(path))
        found += np.split(shard["tokens"], shard["offsets"][1:-1])
    assert len(list(tmp_path.iterdir())) > 3 and len(found) == split.documents
    assert sum(ids.size for ids in found) == split.tokens
    held_out = [ids.tolist() for ids in split.held_out]
    assert 40 <= sum(map(len, held_out)) < 70, "most of what could be kept back is counted"
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in whole if ids.tolist() not in held_out]
    assert 150 <= sum(ids.size for ids in split.kept) < 180
    assert [ids.tolist() for ids in split.kept] == [ids.tolist() for ids in found[: len(split.kept)]]


def test_it_stops_at_the_limit(tmp_path):
    seen = []
    split = split_documents((seen.append(1) or np.arange(10) for _ in range(99)), tmp_path, 0.5, max_tokens=35)
    assert len(seen) == 4 and split.documents + len(split.held_out) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([np.arange(3)], "held_out=0.4 leaves"),
        ([], "leaves 0 documents to count and 0 to keep back"),
        ([np.arange(0)] * 9, "with text"),
        ([np.array([2**31])] * 9, "allowed 0..2147483647"),
        ([np.array([-1, 4])] * 9, "ids -1..4"),
    ],
)
def test_nothing_to_split(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        split_documents(given, tmp_path, 0.4)


# ---- build ----------------------------------------------------------------------------------------------------------
def test_a_folder_of_tokens_becomes_a_trie(tmp_path):
    corpus, whole = tmp_path / "corpus", documents(50)
    corpus.mkdir()
    for number in range(2):
        some = whole[25 * number : 25 * number + 25]
        np.savez(corpus / f"{number}.npz", tokens=np.concatenate(some), offsets=np.cumsum([0, *map(len, some)]))
    plan = made_plan(corpus=str(corpus), tokenizer="", held_out=0.1, order=2, min_count=[2])
    built = build_trie(plan, tmp_path / "out.trie")
    NgramTrie.count(built.split.kept, 2, min_count=2).save(tmp_path / "wanted.trie")
    assert (tmp_path / "out.trie").read_bytes() == (tmp_path / "wanted.trie").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out.trie", "wanted.trie"]
    row = built.row
    assert row["documents"] + row["held_out_documents"] == 50
    assert row["tokens"] + row["held_out_tokens"] == sum(map(len, whole))
    assert (row["nodes"], row["bad_lines"], built.reports) == (built.trie.num_nodes, 0, ())


def test_ids_that_only_stand_in_documents_kept_back_belong_to_the_vocabulary(tmp_path):
    """Or nothing could be searched behind that text."""
    np.savez(tmp_path / "a.npz", tokens=np.arange(400), offsets=np.arange(0, 401, 20))
    plan = made_plan(corpus=str(tmp_path / "a.npz"), tokenizer="", held_out=0.2)
    found = set()
    for seed in range(6):
        built = build_trie(replace(plan, seed=seed), tmp_path / "out.trie")
        found.add(max(ids.max() for ids in built.split.held_out) == 399)
        assert built.trie.vocab_size == 400
    assert found == {True, False}


def test_counts_as_codes(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(400).reshape(20, 20) % 7)
    plan = made_plan(corpus=str(tmp_path / "a.npy"), tokenizer="", held_out=0.2, quantised=True)
    assert build_trie(plan, tmp_path / "out.trie").trie.header.quantised


def test_text_and_its_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"a": 0, "b": 1, "?": 2, "c": 9}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.md").write_text("a b c")
    (corpus / "b.jsonl").write_text("\n".join([json.dumps({"text": "c a"}), "{", json.dumps("z")]))
    (corpus / "c.txt").write_text("not among the suffixes")
    source = open_source(made_plan(corpus=str(corpus), tokenizer=str(tmp_path), suffixes=[".md"]))
    assert [ids.tolist() for ids in source.documents] == [[0, 1, 9], [9, 0], [2]]
    assert source.vocab_size == 10 and len(source.fingerprint) == 64 and source.problems.count == 1
    with pytest.raises(ValueError, match=r"there is no file tokenizer\.json"):
        open_source(made_plan(corpus=str(corpus), tokenizer=str(corpus)))


def test_source_of_this_machine_by_words():
    source = open_source(made_plan(tokenizer="words", max_tokens=5000))
    found = list(source.documents)
    assert sum(map(len, found)) >= 5000 and max(ids.max() for ids in found) == source.vocab_size - 1
    assert source.fingerprint == ""
