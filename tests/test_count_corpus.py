"""Counting corpora in pieces: the same bytes as counting at once, however the work is cut."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_search import count_ngrams

from workbench.search import count_corpus as module
from workbench.search.chunk_buffer import ChunkBuffer
from workbench.search.corpus import CorpusOptions
from workbench.search.count_corpus import chunk_tokens, count_corpus, split_files
from workbench.search.ngram_count import TokenChunk, count_levels
from workbench.search.trie import NgramTrie


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray]:
    """Zipf-like text over 700 ids, documents of 0 to 2,000 tokens and one of 9,000."""
    rng = np.random.default_rng(3)
    sizes = [*rng.integers(0, 2000, 30), 0, 1, 2, 9000]
    return [np.minimum(rng.zipf(1.3, size) - 1, 699).astype(np.int64) for size in sizes]


@pytest.fixture(scope="module")
def folder(documents, tmp_path_factory) -> Path:
    """The documents in five shards of different sizes and one plain array."""
    folder = tmp_path_factory.mktemp("corpus")
    np.save(folder / "z.npy", documents[-1].astype(np.uint16))
    for number, part in enumerate(np.array_split(np.arange(len(documents) - 1), [1, 2, 7, 20])):
        some = [documents[index] for index in part]
        np.savez(folder / f"{number}.npz", tokens=np.concatenate(some), offsets=np.cumsum([0, *map(len, some)]))
    return folder


def saved(sequences, path: Path, **options) -> bytes:
    NgramTrie.count(sequences, **options).save(path)
    return path.read_bytes()


@pytest.mark.parametrize(("workers", "min_count"), [(1, 1), (1, 2), (1, (3, 1, 2)), (3, 1), (3, (3, 1, 2))], ids=str)
def test_same_bytes_for_any_number_of_workers(documents, folder, tmp_path, workers, min_count):
    whole = saved(documents, tmp_path / "whole.trie", min_count=min_count, fingerprint="f")
    counted = count_corpus([folder], tmp_path / "x.trie", min_count=min_count, fingerprint="f", workers=workers)
    assert (tmp_path / "x.trie").read_bytes() == whole
    assert (counted.files, counted.tokens, counted.problems) == (6, sum(map(len, documents)), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole.trie", "x.trie"], "nothing temporary stays"


@pytest.mark.parametrize("order", [2, 3, 5])
@pytest.mark.parametrize(("memory_mb", "least_parts"), [(0.5, 4), (0.05, 30)])
def test_same_bytes_in_tiny_memory(documents, folder, tmp_path, order, memory_mb, least_parts):
    whole = saved(documents, tmp_path / "whole.trie", order=order, min_count=2, vocab_size=700)
    options = {"order": order, "min_count": 2, "vocab_size": 700, "memory_mb": memory_mb}
    counted = count_corpus([folder], tmp_path / "x.trie", **options)
    assert (tmp_path / "x.trie").read_bytes() == whole
    assert counted.spilled >= least_parts


@pytest.mark.parametrize("capacity", [256, 257, 1000, 8999, 9000, 9001])
def test_same_bytes_for_any_chunk(documents, folder, tmp_path, monkeypatch, capacity):
    monkeypatch.setattr(module, "chunk_tokens", lambda *_: capacity)
    whole = saved(documents, tmp_path / "whole.trie", order=4)
    files = sorted(folder.iterdir())
    count_corpus(files[::-1], tmp_path / "x.trie", order=4)
    assert (tmp_path / "x.trie").read_bytes() == whole


sequences_of_ids = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8)


@settings(max_examples=150, deadline=None)
@given(sequences_of_ids, st.integers(1, 9), st.integers(1, 5), st.sampled_from([0, 40_000, 2**31 - 4]))
def test_cut_sequences_count_every_ngram_once(sequences, capacity, order, offset):
    buffer = ChunkBuffer(capacity, order)
    chunks: list[dict] = []

    def note(chunk: TokenChunk) -> None:
        assert chunk.counted.sum() <= capacity
        counts = {}
        grams: list[tuple[int, ...]] = []
        for level in count_levels(chunk, order):
            below = [
                (*(grams[parent] if grams else ()), int(token))
                for parent, token in zip(level.parents, level.tokens, strict=True)
            ]
            assert below == sorted(set(below))
            counts |= dict(zip(below, level.counts.tolist(), strict=True))
            grams = below
        chunks.append(counts)

    for start in range(0, len(sequences), 3):
        some = [np.array(ids, np.int64) + offset for ids in sequences[start : start + 3]]
        bounds = np.cumsum([0, *map(len, some)])
        for chunk in buffer.add(np.concatenate(some), bounds, None, "test"):
            note(chunk)
    note(buffer.take())
    total: dict[tuple[int, ...], int] = {}
    for counts in chunks:
        for gram, count in counts.items():
            total[gram] = total.get(gram, 0) + count
    assert total == count_ngrams([[token + offset for token in ids] for ids in sequences], order, [1] * order)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_counted_over_all_workers(tmp_path, tokenizer_file, workers):
    good = ["a b a b", "b b", "a"]
    for number in range(5):
        lines = [json.dumps({"text": text}) for text in good]
        (tmp_path / f"{number}.jsonl").write_text("\n".join([*lines[:2], "{", lines[2]]))
    options = CorpusOptions(tokenizer_file, eos_id=2, max_reports=3)
    counted = count_corpus([tmp_path], tmp_path / "x.trie", workers=workers, options=options)
    assert (counted.problems, len(counted.reports), counted.tokens) == (5, 3, 5 * 10)
    assert all(", line 3: not JSON" in report for report in counted.reports)
    trie = NgramTrie.open(tmp_path / "x.trie", verify=True)
    assert (trie.frequency([0, 1]), trie.frequency([1, 2]), trie.frequency([0, 1, 2])) == (10, 10, 5)
    with pytest.raises(ValueError, match=", line 3: not JSON"):
        strict = CorpusOptions(tokenizer_file, on_error="raise")
        count_corpus([tmp_path], tmp_path / "y.trie", workers=workers, options=strict)
    assert not list(tmp_path.glob("*y.trie*")), "nothing stays after an error"


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="b"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))
    return str(path)


class InProcessClient:
    """Stands for a Dask client: runs the parts here, in reverse."""

    def map(self, function, *arguments, pure):
        assert pure is False, "a part writes files: its result must not be reused"
        return [(function, values) for values in zip(*arguments, strict=True)]

    def gather(self, futures):
        return [function(*values) for function, values in futures[::-1]][::-1]


def test_same_bytes_from_a_client(documents, folder, tmp_path):
    whole = saved(documents, tmp_path / "whole.trie")
    counted = count_corpus([folder], tmp_path / "x.trie", workers=2, cluster=InProcessClient())
    assert (tmp_path / "x.trie").read_bytes() == whole and counted.spilled >= 5


@pytest.mark.parametrize("package", ["distributed"] * (importlib.util.find_spec("distributed") is not None))
def test_same_bytes_from_two_dask_workers(documents, folder, tmp_path, package):
    from distributed import LocalCluster

    whole = saved(documents, tmp_path / "whole.trie")
    quiet = {"dashboard_address": None, "local_directory": str(tmp_path / "dask")}
    with LocalCluster(n_workers=2, threads_per_worker=1, **quiet) as cluster:
        address = cluster.scheduler_address
        count_corpus([folder], tmp_path / "x.trie", workers=2, cluster=address)
    assert (tmp_path / "x.trie").read_bytes() == whole


def test_a_missing_dask_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(RuntimeError, match="needs the package 'distributed'"):
        count_corpus([folder], tmp_path / "x.trie", cluster="tcp://nowhere:1")


def test_an_empty_corpus_gives_an_empty_trie(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(0, np.int64))
    counted = count_corpus([tmp_path / "x.npy"], tmp_path / "x.trie")
    assert counted.tokens == 0
    assert (tmp_path / "x.trie").read_bytes() == saved([], tmp_path / "y.trie")


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_ids_out_of_range_name_the_file(tmp_path, bad):
    np.save(tmp_path / "x.npy", np.array([1, 2, bad]))
    with pytest.raises(ValueError, match=rf"x\.npy' has the id {bad}, allowed 0\.\.{2**31 - 1}"):
        count_corpus([tmp_path / "x.npy"], tmp_path / "x.trie")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": 6}, "order is 6"),
        ({"min_count": 0}, "min_count is 0"),
        ({"min_count": (1, 2)}, "min_count"),
        ({"workers": 0}, "workers is 0"),
        ({"memory_mb": 0}, "memory_mb is 0"),
        ({"vocab_size": 2**31 + 1}, "vocab_size"),
        ({"vocab_size": 5}, "allowed 0..4"),
        ({"spill_dir": "no-such-folder"}, "folder of spills is"),
    ],
)
def test_arguments_are_checked(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        count_corpus([folder], tmp_path / "x.trie", **options)


def test_files_are_shared_out_by_size(tmp_path):
    for size in (5, 100, 60, 50, 0):
        (tmp_path / f"{size}.txt").write_bytes(bytes(size))
    lists = split_files(sorted(tmp_path.iterdir()), 2)
    assert sorted(sum(path.stat().st_size for path in part) for part in lists) == [105, 110]
    assert len(split_files(sorted(tmp_path.iterdir()), 9)) == 5


def test_memory_sets_the_chunk():
    assert chunk_tokens(1 << 30, 3, 50_000) > 10_000_000
    assert chunk_tokens(1 << 30, 5, None) < chunk_tokens(1 << 30, 3, None) < chunk_tokens(1 << 30, 3, 50_000)
    assert chunk_tokens(1, 3, None) == 256
