"""Tries with counts of 8 bits: against exact ones, in memory and streamed, in files, in export and in pruning."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_search import count_ngrams, prune

from workbench.search.count_codes import MAX_COUNT_ERROR, decode_counts, encode_counts
from workbench.search.ngram_count import Level
from workbench.search.prune import PruneConfig, prune_tree
from workbench.search.quantise import quantise_trie
from workbench.search.trie import NgramTrie
from workbench.search.trie_merge import merge_tries, threshold_trie
from workbench.search.trie_reader import TrieReader
from workbench.search.trie_stream import TrieWriter, spill_folder

#: Most by which a ratio of two counts grows.
WORST_RATIO = (1 + MAX_COUNT_ERROR) / (1 - MAX_COUNT_ERROR)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(scope="module")
def exact() -> NgramTrie:
    """Zipf-like text over 500 ids of a vocabulary of 100,000; counts up to 23,000."""
    ids = np.minimum(np.random.default_rng(7).zipf(1.5, size=(500, 100)) - 1, 499)
    return NgramTrie.count(list(ids), order=4, vocab_size=100_000, fingerprint="name")


# Repetition brings counts beyond the exact codes; ids at the ends of the widest vocabulary use all bits of a token.
ids = st.sampled_from([0, 1, 2, 3, 2**24 - 2, 2**24 - 1])
sequences = st.lists(st.lists(ids, max_size=9).flatmap(lambda part: st.integers(1, 60).map(lambda n: part * n)))


@settings(max_examples=80, deadline=None)
@given(sequences, st.integers(2, 5), st.integers(1, 3), st.lists(ids, max_size=6), st.integers(1, 9))
def test_counts_and_probabilities_are_within_the_stated_error(folder, corpus, order, least, context, chunk):
    counted = NgramTrie.count(corpus, order, least, vocab_size=2**24, fingerprint="f")
    counted.save(folder / "exact")
    counted.quantise().save(folder / "whole")
    header = quantise_trie(folder / "exact", folder / "streamed", chunk=chunk)
    assert (folder / "streamed").read_bytes() == (folder / "whole").read_bytes()
    trie = NgramTrie.open(folder / "streamed", verify=True)
    assert trie.header == header and trie.num_nodes == counted.num_nodes
    counts = count_ngrams(corpus, order, [least] * order)
    for gram, count in counts.items():
        assert trie.frequency(gram) == decode_counts(encode_counts(np.array(count)))
        assert abs(trie.frequency(gram) - count) <= MAX_COUNT_ERROR * count
        assert len(gram) == 1 or trie.frequency(gram) <= trie.frequency(gram[:-1])
    tokens = [-1, 0, 1, 2, 3, 4, 2**24 - 2, 2**24 - 1, 2**24, 3]
    probs, lengths = counted.probability(context, tokens)
    close, matched = trie.probability(context, tokens)
    assert matched.tolist() == lengths.tolist()
    assert (close <= np.minimum(probs * WORST_RATIO, 1) * (1 + 1e-6)).all()
    assert (close >= probs / WORST_RATIO * (1 - 1e-6)).all()


def test_every_probability_of_a_larger_trie(exact):
    """Small counts, the most frequent, stay exact, so the mean error is far below the bound."""
    trie = exact.quantise()
    probs, lengths, close = [], [], []
    for first in range(40):
        for last in range(40):
            p, matched = exact.probability([3, first, last], range(500))
            q, same = trie.probability([3, first, last], range(500))
            np.testing.assert_array_equal(same, matched)
            probs, lengths, close = [*probs, p], [*lengths, matched], [*close, q]
    probs, close = np.concatenate(probs), np.concatenate(close)
    error = np.abs(close[probs > 0] / probs[probs > 0] - 1)
    assert set(np.unique(np.concatenate(lengths))) == {0, 1, 2, 3}
    assert 0.02 < error.max() <= WORST_RATIO - 1 + 1e-6 and error.mean() < 0.03
    assert not close[probs == 0].any()


def test_continuations(exact):
    trie = exact.quantise()
    for context in ([0], [1, 0], [0, 0, 1], [498, 1]):
        tokens, probs = trie.continuations(context, 500)
        known, expected = exact.continuations(context, 500)
        assert sorted(tokens) == sorted(known) and (np.diff(probs) <= 0).all()
        np.testing.assert_allclose(probs[np.argsort(tokens)], expected[np.argsort(known)], rtol=WORST_RATIO - 1)
        matched, lengths = trie.probability(context, tokens)
        np.testing.assert_allclose(matched[lengths == lengths.max()], probs[lengths == lengths.max()], rtol=1e-6)
    assert [len(part) for part in trie.continuations([499_999], 3)] == [0, 0]


@pytest.mark.parametrize("bad", [-1, -(2**56) + 4, -(2**62), 2**24, 2**31, 2**56, 2**62], ids=str)
def test_bad_ids_are_unseen_and_hide_no_others(bad):
    """Entries hold ids shifted above the codes; shifted, -2^56 + 4 would wrap around and look like a real id."""
    trie = NgramTrie.count([[0, 1, 2, 3]] * 2).quantise()
    for context in ([0], [bad, 0]):
        probs, lengths = trie.probability(context, [1, bad, 0])
        assert probs.tolist() == [1.0, 0.0, 0.0] and lengths.tolist() == [1, 0, 0]
    assert trie.probability([0, bad], [1])[1][0] == 0
    assert trie.frequency([bad]) == trie.frequency([0, bad]) == 0 < trie.frequency([0, 1])


@pytest.mark.parametrize("corpus", [[], [[]], [[3]], [[2**24 - 1]]], ids=["none", "empty", "one_token", "last_token"])
def test_nearly_empty_tries(corpus, folder):
    trie = NgramTrie.count(corpus, vocab_size=2**24)
    trie.save(folder / "exact")
    quantise_trie(folder / "exact", folder / "small")
    trie.quantise().save(folder / "whole")
    assert (folder / "small").read_bytes() == (folder / "whole").read_bytes()
    opened = NgramTrie.open(folder / "small", verify=True)
    assert opened.num_nodes == sum(map(len, corpus))
    assert not opened.probability([3], [3, 4])[0].any()
    assert all(opened.frequency(gram) == 1 for gram in corpus if gram)


def test_file_gives_back_the_same_trie(exact, folder):
    exact.save(folder / "exact")
    trie = NgramTrie.open(folder / "exact").quantise()
    trie.save(folder / "a")
    opened = NgramTrie.open(folder / "a", verify=True)
    opened.save(folder / "b")
    assert (folder / "b").read_bytes() == (folder / "a").read_bytes()
    info = opened.info()
    assert info == {**trie.info(), "path": str(folder / "a")}
    assert info == {
        **exact.info(),
        "counts": "quantised",
        "max_count_error": 1 / 24,
        **{field: info[field] for field in ("bytes", "bytes_per_node", "path")},
    }
    assert exact.info()["counts"] == "exact" and exact.info()["max_count_error"] == 0
    assert info["bytes"] == (folder / "a").stat().st_size
    inner = exact.num_nodes - exact.header.level_sizes[-1]
    assert 0 <= info["bytes"] - 4 * exact.num_nodes - 4 * inner <= 256 + 5 * 64
    tokens, counts, starts, nodes, large, _, _, code_counts = opened.arrays()
    assert [array.dtype.str for array in (tokens, starts)] == ["<u4", "<u4"]
    assert counts.dtype == np.uint8 and counts.size == nodes.size == large.size == 0
    assert code_counts.dtype == np.float64 and code_counts.shape == (256,) and code_counts[0] == 0
    assert not any(array.flags.writeable for array in opened.arrays() if isinstance(array, np.ndarray))


def test_writer_and_reader_give_back_levels(folder):
    """Counts up to the largest code's and beyond, in a trie that is written as quantised from the start."""
    levels = [
        Level(np.array([0, 2**24 - 1]), np.array([7, 2**40]), np.zeros(2, np.int64)),
        Level(np.array([5, 2, 3]), np.array([7, 2**32, 25]), np.array([0, 1, 1])),
    ]
    with spill_folder(folder / "t", None) as spills:
        writer = TrieWriter(spills, 2, 2**24, "f", quantised=True)
        for level in levels:
            writer.append(level)
            writer.end_level()
        writer.finish(folder / "t", 9)
        with pytest.raises(ValueError, match="vocab_size of a quantised trie is 16777217"):
            TrieWriter(spills, 2, 2**24 + 1, quantised=True)
    with TrieReader.open(folder / "t", allow_quantised=True) as reader:
        for number, level in enumerate(levels, 1):
            (chunk,) = reader.chunks(number, 10)
            for field in ("tokens", "parents"):
                assert getattr(chunk, field).tolist() == getattr(level, field).tolist()
            assert chunk.counts.tolist() == decode_counts(encode_counts(level.counts)).tolist()
    trie = NgramTrie.open(folder / "t")
    assert trie.frequency([2**24 - 1]) == 6_241_639_607
    assert trie.frequency([2**24 - 1, 2]) == pytest.approx(2**32, rel=MAX_COUNT_ERROR)
    assert trie.probability([2**24 - 1], [2])[0] == pytest.approx(2**32 / 6_241_639_607, rel=MAX_COUNT_ERROR)


def test_what_needs_exact_counts_refuses(exact, folder):
    exact.save(folder / "exact")
    quantise_trie(folder / "exact", folder / "small")
    kept = (folder / "small").read_bytes()
    for work in (
        lambda: merge_tries([folder / "exact", folder / "small"], folder / "small"),
        lambda: threshold_trie(folder / "small", folder / "small", 2),
        lambda: quantise_trie(folder / "small", folder / "small"),
        NgramTrie.open(folder / "small").quantise,
    ):
        with pytest.raises(ValueError, match="quantised, allowed: a trie with exact counts"):
            work()
    with pytest.raises(ValueError, match="chunk is 0"):
        quantise_trie(folder / "exact", folder / "small", chunk=0)
    assert (folder / "small").read_bytes() == kept
    wide = NgramTrie.count([[2**24]])
    wide.save(folder / "wide")
    for work in (wide.quantise, lambda: quantise_trie(folder / "wide", folder / "small")):
        with pytest.raises(ValueError, match=r"vocab_size of a quantised trie is 16777217, allowed 1\.\.16777216"):
            work()
    quantise_trie(folder / "exact", folder / "exact")
    assert (folder / "exact").read_bytes() == kept, "a file may be replaced"
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (2 << 8, "count of node 4 is 0, allowed 1 or more"),
        (3 << 8 | 1, "token of node 4 is 3, allowed 0..2"),
        (1 << 8 | 1, "token of node 4 is 1, allowed over its sibling's 1"),
    ],
    ids=["no_count", "token", "siblings"],
)
def test_damage_is_named_in_export(folder, entry, message):
    NgramTrie.count([[0, 1], [0, 2], [1]], order=2).quantise().save(folder / "good")
    data = bytearray((folder / "good").read_bytes())
    offset = NgramTrie.open(folder / "good").header.layout()[0][0][2] + 4 * 4
    assert struct.unpack_from("<I", data, offset) == (2 << 8 | 1,)
    struct.pack_into("<I", data, offset, entry)
    (folder / "bad").write_bytes(data)
    with pytest.raises(ValueError, match=f"bad: {message}"):
        NgramTrie.open(folder / "bad").export_dart(folder / "out")


@pytest.mark.parametrize("mapped", [False, True], ids=["memory", "file"])
def test_export_writes_what_the_codes_stand_for(exact, folder, mapped):
    trie = exact.quantise()
    trie.save(folder / "small")
    (NgramTrie.open(folder / "small") if mapped else trie).export_dart(folder / "published")
    back = NgramTrie.import_dart(folder / "published", folder / "back", trie.vocab_size, trie.fingerprint, memory_mb=64)
    assert back.info()["counts"] == "exact" and back.info()["nodes_per_level"] == trie.info()["nodes_per_level"]
    with TrieReader.open(folder / "small", True) as coded, TrieReader.open(folder / "back") as decoded:
        for read in (TrieReader.tokens, TrieReader.counts):
            np.testing.assert_array_equal(read(coded, 0, trie.num_nodes), read(decoded, 0, trie.num_nodes))
    back.quantise().save(folder / "again")
    first, again = (NgramTrie.open(folder / name).arrays()[0] for name in ("small", "again"))
    np.testing.assert_array_equal(first, again)


def test_pruning_equals_the_reference_on_decoded_counts():
    rng = np.random.default_rng(3)
    corpus = [np.minimum(rng.zipf(1.4, 400) - 1, 11) for _ in range(40)]
    trie = NgramTrie.count(corpus).quantise()
    counts = count_ngrams(corpus, 3)
    for gram, count in counts.items():
        counts[gram] = int(decode_counts(encode_counts(np.array(count))))
    config = PruneConfig(beam_width=5, num_nodes=20, eos_id=0)
    for _ in range(40):
        ids = np.stack([rng.choice(14, size=6, replace=False) for _ in range(4)])
        probs = rng.dirichlet(np.ones(6), size=4).astype(np.float32)
        context = rng.integers(0, 12, size=3)
        tree = prune_tree(ids, probs, context, trie, config)
        expected = prune(ids, probs, context.tolist(), counts, 3, config)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        assert paths[1:] == [path for path, _ in expected]
        np.testing.assert_allclose(tree.scores[1:], [score for _, score in expected], rtol=1e-5)
