"""Generated tries: valid files of the size asked for, counts as in a corpus, the same bytes for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from workbench.measure.generated_trie import write_generated_trie
from workbench.search.trie import NgramTrie
from workbench.search.trie_reader import TrieReader


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> NgramTrie:
    """A trie of half a megabyte, over the vocabulary that files of a gigabyte have."""
    path = tmp_path_factory.mktemp("generated") / "small.trie"
    write_generated_trie(path, 0.5)
    return NgramTrie.open(path, verify=True)


def levels(path) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokens, counts and parents of every length, as a reader that checks them finds them."""
    with TrieReader.open(path) as reader:
        for level in range(1, reader.header.order + 1):
            chunks = list(reader.chunks(level, 10_000))
            yield tuple(np.concatenate([getattr(c, name) for c in chunks]) for name in ("tokens", "counts", "parents"))


@pytest.mark.parametrize(
    ("megabytes", "vocab_size", "quantised"),
    [(0.01, 64, False), (0.5, 151_936, False), (0.5, 151_936, True), (3.3, 700, False), (2, 65_536, False)],
)
def test_the_file_is_valid_and_hardly_larger_than_asked_for(tmp_path, megabytes, vocab_size, quantised):
    path = tmp_path / "a.trie"
    header = write_generated_trie(path, megabytes, vocab_size, quantised=quantised)
    trie = NgramTrie.open(path, verify=True)
    assert trie.header == header
    assert (trie.order, trie.vocab_size, header.quantised) == (3, vocab_size, quantised)
    assert megabytes <= path.stat().st_size / 2**20 <= 1.02 * megabytes + 0.05
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.trie"]


def test_siblings_ascend_and_counts_cover_those_of_continuations(small):
    (roots, root_counts, _), (_, pair_counts, pair_parents), (_, counts, parents) = levels(small.path)
    assert (np.diff(roots) > 0).all()
    for above, below, of in ((root_counts, pair_counts, pair_parents), (pair_counts, counts, parents)):
        spare = above - np.bincount(of, below, above.size).astype(np.int64)
        assert set(spare.tolist()) == {0, 1}
        assert np.bincount(of, minlength=above.size).min() >= 1
    assert small.header.total_tokens == root_counts.sum()


def test_shape_is_that_of_text(small):
    (_, root_counts, _), (pairs, _, pair_parents), (tokens, counts, parents) = levels(small.path)
    children = np.bincount(pair_parents)
    assert children[:10].mean() > 5 * children.mean()
    assert (np.diff(children) <= 0).mean() > 0.9
    of_pairs = np.bincount(parents)
    assert 0.3 < (of_pairs == 1).mean() < 0.7 and of_pairs.max() > 500
    assert 0.5 < (counts == 1).mean() < 0.8 and counts.max() > 1000
    for drawn in (pairs, tokens):
        assert np.median(drawn) < 0.3 * small.vocab_size < drawn.max()
    assert root_counts[:10].sum() > 10 * root_counts[-10:].sum()


def test_same_seed_same_bytes_whatever_the_chunks(tmp_path, monkeypatch):
    made = {}
    for name, seed, chunk in (("a", 3, 1 << 21), ("b", 3, 999), ("c", 4, 1 << 21)):
        monkeypatch.setattr("workbench.measure.generated_trie._CHUNK", chunk)
        write_generated_trie(tmp_path / name, 0.2, 5_000, seed)
        made[name] = (tmp_path / name).read_bytes()
    assert made["a"] == made["b"] != made["c"]


def test_look_ups_find_what_is_stored(small):
    (roots, root_counts, _), (pairs, pair_counts, pair_parents), (tokens, counts, parents) = levels(small.path)
    for place in np.linspace(0, tokens.size - 1, 50).astype(int):
        pair = parents[place]
        context = [roots[pair_parents[pair]], pairs[pair]]
        assert small.frequency([*context, tokens[place]]) == counts[place]
        probs, lengths = small.probability(context, tokens[place : place + 1])
        assert (probs[0], lengths[0]) == (pytest.approx(counts[place] / pair_counts[pair], rel=1e-6), 2)
    assert small.frequency(roots[-1:]) == root_counts[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"megabytes": 0.001}, "megabytes is 0.001, allowed 0.01"),
        ({"megabytes": 1, "vocab_size": 63}, "vocab_size is 63, allowed 64"),
        ({"megabytes": 1, "seed": -1}, "seed is -1, allowed 0"),
        ({"megabytes": 50, "vocab_size": 64}, "allowed less with vocab_size=64"),
        ({"megabytes": 200_000}, "allowed less with vocab_size=151936"),
    ],
)
def test_bad_arguments_name_what_is_allowed(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write_generated_trie(tmp_path / "a.trie", **options)
    assert not list(tmp_path.iterdir())
