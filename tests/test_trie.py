"""The n-gram trie against counts in a dictionary, the published cases, and damaged files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from reference_search import count_ngrams, probability

from workbench.search.trie import NgramTrie, vocabulary_fingerprint
from workbench.search.trie_format import ALIGNMENT, HEADER_BYTES

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dart_ngram_cases.json").read_text())


def random_sequences(rng: np.random.Generator, vocab: int, offset: int = 0) -> list[np.ndarray]:
    lengths = rng.integers(0, 25, size=int(rng.integers(0, 9)))
    return [offset + rng.integers(0, vocab, size=n) for n in lengths]


@pytest.fixture(scope="module")
def corpus() -> list[np.ndarray]:
    """Zipf-like text over 500 ids: 40,000 tokens in sequences of 100."""
    rng = np.random.default_rng(7)
    ids = np.minimum(rng.zipf(1.3, size=(400, 100)) - 1, 499)
    return list(ids.astype(np.uint16))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_published_cases(case):
    sequences = case["conversations"] if "conversations" in case else case["conversations_A"] + case["conversations_B"]
    trie = NgramTrie.count(sequences, order=case["order"])
    for query in case.get("full_trie_queries", case["queries"]):
        probs, lengths = trie.probability(query["context"], query["tokens"])
        np.testing.assert_allclose(probs, query["probability"], rtol=1e-6, atol=1e-7)
        assert lengths.tolist() == query["matched_context_length"]


def test_threshold_keeps_the_nodes_of_the_reference_with_their_original_counts():
    case = next(case for case in GOLDEN["cases"] if "threshold" in case)
    trie = NgramTrie.count(case["conversations"], order=case["order"], min_count=case["threshold"])
    full = {tuple(path): count for path, count in case["full_nodes"]}
    kept = [tuple(path) for path, _ in case["reduced_nodes"] if path]
    assert trie.num_nodes == len(kept) < len(full) - 1
    assert [trie.frequency(path) for path in kept] == [full[path] for path in kept]


def test_threshold_is_finite_where_the_reference_gives_nan():
    case = GOLDEN["extra"][0]
    trie = NgramTrie.count(case["conversations"], order=case["order"], min_count=case["threshold"])
    assert trie.frequency([7]) == trie.frequency([7, 8]) == 5
    assert trie.frequency([7, 8, 100]) == 0
    results = [trie.probability(query["context"], query["tokens"]) for query in case["queries"]]
    assert [probs[0] for probs, _ in results] == [1.0, 0.0, 0.0]
    assert [lengths[0] for _, lengths in results] == [1, 0, 0]


# Regimes: all windows fit one key; two passes (order 5 of 16 bits); one digit a pass (ids up to 2^31 - 1).
@pytest.mark.parametrize(
    ("vocab", "offset", "vocab_size"),
    [(4, 0, None), (7, 49_000, 49_152), (5, 65_531, None), (6, 2**31 - 6, 2**31)],
    ids=["tiny", "uint16", "edge_of_uint16", "widest"],
)
def test_counts_and_backoff_equal_a_dictionary(vocab, offset, vocab_size):
    rng = np.random.default_rng(vocab)
    for trial in range(80):
        order = 2 + trial % 4
        least = [int(n) for n in rng.integers(1, 4, size=order)] if trial % 3 == 0 else [1] * order
        sequences = random_sequences(rng, vocab, offset)
        trie = NgramTrie.count(sequences, order, min_count=least, vocab_size=vocab_size)
        counts = count_ngrams(sequences, order, least)
        assert trie.num_nodes == len(counts)
        for gram, count in counts.items():
            assert trie.frequency(gram) == count
        tokens = offset + rng.integers(-1, vocab + 1, size=6)
        context = offset + rng.integers(0, vocab, size=int(rng.integers(0, 6)))
        probs, lengths = trie.probability(context, tokens)
        expected = [probability(counts, order, context.tolist(), int(token)) for token in tokens]
        assert list(zip(probs.tolist(), lengths.tolist(), strict=True)) == expected
        assert probs.dtype == np.float32 and lengths.dtype == np.int32


def test_min_count_of_one_length_can_remove_a_suffix():
    sequences = [[1, 2, 3]] * 4 + [[2, 3, 4]] * 2
    trie = NgramTrie.count(sequences, order=3, min_count=(1, 5, 2))
    assert trie.frequency([2, 3]) == 6 and trie.frequency([1, 2]) == 0
    assert trie.frequency([1, 2, 3]) == 0, "an n-gram goes with its prefix"
    probs, lengths = trie.probability([1, 2], [3])
    assert (probs[0], lengths[0]) == (1.0, 1), "back-off goes on to the shorter suffix"
    assert trie.info()["nodes_per_level"] == [4, 1, 1]


def test_counts_beyond_sixteen_bits_are_exact(tmp_path):
    sequences = [np.zeros(70_000, np.int64), np.ones(65_536, np.int64), [0, 1] * 3]
    NgramTrie.count(sequences).save(tmp_path / "large.trie")
    trie = NgramTrie.open(tmp_path / "large.trie")
    assert [trie.frequency([0] * n) for n in (1, 2, 3)] == [70_003, 69_999, 69_998]
    assert [trie.frequency([1] * n) for n in (1, 2, 3)] == [65_539, 65_535, 65_534]
    probs, _ = trie.probability([0], [0, 1])
    np.testing.assert_allclose(probs, [69_999 / 70_003, 3 / 70_003], rtol=1e-6)


@pytest.mark.parametrize("sequences", [[], [[]], [[3]]], ids=["none", "empty", "one_token"])
def test_nearly_empty_tries_answer_and_survive_a_file(sequences, tmp_path):
    trie = NgramTrie.count(sequences, vocab_size=10)
    trie.save(tmp_path / "small.trie")
    for each in (trie, NgramTrie.open(tmp_path / "small.trie", verify=True)):
        probs, lengths = each.probability([3], [3, 4])
        assert not probs.any() and not lengths.any()
        assert each.num_nodes == sum(len(s) for s in sequences)


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40, -(2**62)], ids=str)
def test_bad_ids_are_unseen(corpus, bad):
    trie = NgramTrie.count(corpus)
    seen = trie.probability([1, 0], [0])
    probs, lengths = trie.probability([1, 0], [bad, 0, bad])
    assert (probs[1], lengths[1]) == (seen[0][0], seen[1][0]) and seen[1][0] == 2
    assert not probs[[0, 2]].any() and not lengths[[0, 2]].any()
    assert not trie.probability([0, bad], [0, 1])[0].any()
    assert trie.probability([bad, 0], [0])[1][0] == 1


def test_empty_context_and_no_tokens(corpus):
    trie = NgramTrie.count(corpus)
    assert trie.probability([], [0, 1])[1].tolist() == [0, 0]
    assert trie.probability([0], [])[0].shape == (0,)
    assert trie.frequency([]) == 0
    with pytest.raises(ValueError, match="tokens has 1 axes of float64"):
        trie.probability([0], [0.5])


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1]], {"order": 1}, "order is 1, allowed 2..5"),
        ([[1]], {"order": 6}, "order is 6"),
        ([[1]], {"min_count": 0}, "min_count is 0"),
        ([[1]], {"min_count": (1, 2)}, r"min_count is \(1, 2\)"),
        ([[1]], {"vocab_size": 0}, "allowed 0..-1"),
        ([[]], {"vocab_size": 2**31 + 1}, "vocab_size is 2147483649"),
        ([[1], [5, -2]], {}, r"sequences\[1\] has the id -2"),
        ([[1], [9]], {"vocab_size": 9}, r"sequences\[1\] has the id 9, allowed 0..8"),
        ([[2**31]], {}, "has the id 2147483648"),
        ([[0.5]], {}, "float64"),
        ([[[1, 2]]], {}, "2 axes"),
        ([[1]], {"fingerprint": "é"}, "fingerprint"),
        ([[1]], {"fingerprint": "a" * 65}, "fingerprint"),
    ],
)
def test_count_refuses(sequences, options, message):
    with pytest.raises(ValueError, match=message):
        NgramTrie.count(sequences, **options)


def test_file_gives_back_the_same_trie_byte_for_byte(corpus, tmp_path):
    counted = NgramTrie.count(corpus, order=4, vocab_size=500, fingerprint=vocabulary_fingerprint({"b": 1, "a": 0}))
    counted.save(tmp_path / "a.trie")
    opened = NgramTrie.open(tmp_path / "a.trie", verify=True)
    opened.save(tmp_path / "b.trie")
    NgramTrie.count(corpus[::-1], order=4, vocab_size=500, fingerprint=opened.fingerprint).save(tmp_path / "c.trie")
    first = (tmp_path / "a.trie").read_bytes()
    assert (tmp_path / "b.trie").read_bytes() == first
    assert (tmp_path / "c.trie").read_bytes() == first, "the order of the sequences does not matter"
    assert opened.info() == {**counted.info(), "path": str(tmp_path / "a.trie")}
    assert opened.info()["bytes"] == len(first)
    assert opened.fingerprint == vocabulary_fingerprint({"a": 0, "b": 1}) != vocabulary_fingerprint({"a": 1, "b": 0})
    for array, offset in zip(opened.arrays(), [o for _, _, o in opened.header.layout()[0]], strict=False):
        assert offset % ALIGNMENT == 0 and not array.flags.writeable
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.trie", "b.trie", "c.trie"], "no temporary file stays"


@pytest.mark.parametrize(("vocab_size", "leaf_bytes"), [(500, 4), (100_000, 6)])
def test_bytes_a_node(corpus, vocab_size, leaf_bytes):
    """A leaf costs 4 or 6 bytes, an inner node 4 more; header, padding and overflow entries are the rest."""
    info = NgramTrie.count(corpus, vocab_size=vocab_size).info()
    unigrams, bigrams, trigrams = info["nodes_per_level"]
    assert trigrams > 10_000
    rest = info["bytes"] - leaf_bytes * trigrams - (leaf_bytes + 4) * (unigrams + bigrams)
    assert 0 <= rest <= HEADER_BYTES + 5 * ALIGNMENT
    assert info["bytes_per_node"] < leaf_bytes + 2.0


@pytest.fixture(scope="module")
def exact_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trie") / "small.trie"
    NgramTrie.count([[1, 2, 3, 1, 2], [2, 3, 9], [0] * 66_000], fingerprint="test").save(path)
    return path


@pytest.fixture(scope="module", params=["exact", "quantised"])
def small_file(request, exact_file) -> Path:
    if request.param == "exact":
        return exact_file
    path = exact_file.with_name("quantised.trie")
    NgramTrie.open(exact_file).quantise().save(path)
    return path


def test_every_truncation_is_refused(small_file, tmp_path):
    data = small_file.read_bytes()
    for size in range(len(data)):
        (tmp_path / "cut.trie").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.trie"):
            NgramTrie.open(tmp_path / "cut.trie")
    (tmp_path / "cut.trie").write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="bytes were appended"):
        NgramTrie.open(tmp_path / "cut.trie")


def test_every_damaged_byte_is_refused(small_file, tmp_path):
    data = small_file.read_bytes()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        (tmp_path / "bad.trie").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bad\.trie"):
            NgramTrie.open(tmp_path / "bad.trie", verify=place >= HEADER_BYTES)


def with_header(data: bytes, changes: dict[int, bytes]) -> bytes:
    """The file with header bytes replaced and the header's checksum made right again."""
    body = bytearray(data[: HEADER_BYTES - 4])
    for offset, value in changes.items():
        body[offset : offset + len(value)] = value
    return bytes(body) + struct.pack("<I", zlib.crc32(body)) + data[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"PK\x03\x04", "magic"),
        (8, struct.pack("<I", 2), "version is 2, allowed 1..1"),
        (8, struct.pack("<I", 0), "version is 0"),
        (12, struct.pack("<I", 512), "header size is 512"),
        (16, struct.pack("<I", 6), "order is 6, allowed 2..5"),
        (16, struct.pack("<I", 2), "reserved header field"),
        (20, struct.pack("<I", 4), "bytes of an entry of tokens is 4, allowed 2"),
        (24, struct.pack("<I", 1), "bytes of an entry of counts is 1, allowed 2"),
        (24, struct.pack("<I", 0), "num_overflow is 3, allowed 0"),  # says quantised
        (32, struct.pack("<I", 1), "reserved header field"),
        (36, struct.pack("<Q", 2**33), "vocab_size"),
        (52, struct.pack("<Q", 2**63), "number of nodes"),
        (52, struct.pack("<Q", 11), r"level_sizes\[0\] is 11, allowed 0..10"),
        (60, struct.pack("<Q", 2**32 - 99), "offset of counts"),
        (92, struct.pack("<Q", 2**40), "num_overflow"),
        (100, struct.pack("<Q", 8), "offset of tokens is 8, allowed 256"),
        (108, struct.pack("<Q", 2**64 - 64), "offset of counts"),
        (140, struct.pack("<Q", 1), "stated file size is 1"),
        (152, b"\xff", "fingerprint"),
        (230, b"x", "reserved header field"),
    ],
)
def test_header_fields_out_of_range_are_named(exact_file, tmp_path, offset, value, message):
    (tmp_path / "bad.trie").write_bytes(with_header(exact_file.read_bytes(), {offset: value}))
    with pytest.raises(ValueError, match=message):
        NgramTrie.open(tmp_path / "bad.trie")


@pytest.mark.parametrize("small_file", ["quantised"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({20: struct.pack("<I", 2)}, "bytes of an entry of tokens is 2, allowed 4"),
        ({24: struct.pack("<I", 2)}, "bytes of an entry of tokens is 4, allowed 2"),
        ({24: struct.pack("<I", 1)}, "bytes of an entry of tokens is 4, allowed 2"),
        ({24: struct.pack("<I", 2), 36: struct.pack("<Q", 2**24)}, "offset of starts"),
        ({36: struct.pack("<Q", 2**24 + 1)}, "vocab_size of a quantised trie is 16777217, allowed 1..16777216"),
        ({92: struct.pack("<Q", 1)}, "num_overflow is 1, allowed 0"),
        ({140: struct.pack("<Q", 1)}, "stated file size is 1"),
    ],
)
def test_header_fields_of_a_quantised_file_are_checked(small_file, tmp_path, changes, message):
    (tmp_path / "bad.trie").write_bytes(with_header(small_file.read_bytes(), changes))
    with pytest.raises(ValueError, match=message):
        NgramTrie.open(tmp_path / "bad.trie")


HOSTILE = """
import sys
import numpy as np
from workbench.search.prune import PruneConfig, prune_tree
from workbench.search.trie import NgramTrie
from workbench.search.trie_format import HEADER_BYTES

data = np.fromfile(sys.argv[1], np.uint8)
rng = np.random.default_rng(0)
for trial in range(int(sys.argv[2])):
    bad = data.copy()
    tail = bad[HEADER_BYTES:]
    where = rng.random(tail.size) < (0.05, 0.5, 1.0)[trial % 3]
    tail[where] = rng.integers(0, 256, where.sum()) if trial % 4 else 255
    bad.tofile(sys.argv[3])
    trie = NgramTrie.open(sys.argv[3])
    ids = rng.integers(0, 10, (3, 6))
    for context in ([1, 2], [2, 3], [0, 0], [3, 1]):
        probs, _ = trie.probability(context, range(10))
        assert ((probs >= 0) & (probs <= 1)).all()
        tree = prune_tree(ids, np.full((3, 6), 1 / 6), context, trie, PruneConfig(beam_width=3, num_nodes=8))
        assert np.isfinite(tree.scores).all() and (tree.parents < np.arange(9)).all()
print("survived")
"""


@pytest.mark.parametrize("interpreted", [False, True], ids=["compiled", "interpreted"])
def test_hostile_array_contents_are_never_read_out_of_bounds(small_file, tmp_path, interpreted):
    """Interpreted, an index outside an array is an error, so that run proves what the compiled one can only survive."""
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"} if interpreted else dict(os.environ)
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-W", "ignore", "-c", HOSTILE, str(small_file), "60", str(tmp_path / "hostile.trie")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr


def test_continuations_are_the_children_of_the_longest_known_suffix():
    trie = NgramTrie.count([[1, 2, 3], [1, 2, 4], [1, 2, 4], [5, 2, 6], [2, 7]], order=3)
    for context in ([1, 2], [0, 1, 2], (9, 9, 1, 2)):
        tokens, probs = trie.continuations(context, 5)
        assert tokens.tolist() == [4, 3]
        np.testing.assert_allclose(probs, [2 / 3, 1 / 3])
    tokens, probs = trie.continuations([8, 2], 2)  # (8, 2) is unknown, so the suffix (2) decides; ties by id
    assert tokens.tolist() == [4, 3]
    np.testing.assert_allclose(probs, [2 / 5, 1 / 5])
    assert [len(part) for part in trie.continuations([9], 3)] == [0, 0]
    assert [len(part) for part in trie.continuations([], 3)] == [0, 0]
    with pytest.raises(ValueError, match="limit is 0"):
        trie.continuations([1], 0)
