"""Import and export of published tries: against counting, against a dictionary, and with damaged files."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_setup import published_words, random_levels, write_published
from reference_search import count_ngrams

from workbench.search import published_export, published_read, published_trie, trie_stream
from workbench.search.ngram_count import Level
from workbench.search.published_read import published_info
from workbench.search.trie import NgramTrie
from workbench.search.trie_stream import TrieWriter, spill_folder

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dart_ngram_cases.json").read_text())
EXAMPLE = next(case for case in GOLDEN["extra"] if case["name"] == "trie_file_bytes")
EXAMPLE_BYTES = bytes.fromhex(EXAMPLE["file_hex"])
MEMORY = 64  # MiB, enough for every small file

corpora = st.lists(st.lists(st.integers(0, 6), max_size=12), max_size=6)
orders = st.integers(2, 5)


def levels_of(counts: dict[tuple[int, ...], int], order: int) -> list[Level]:
    """Levels of a dictionary of counts, without code of the package."""
    levels, above = [], {(): 0}
    for length in range(1, order + 1):
        grams = sorted(gram for gram in counts if len(gram) == length)
        columns = ([g[-1] for g in grams], [counts[g] for g in grams], [above[g[:-1]] for g in grams])
        levels.append(Level(*(np.array(column, np.int64) for column in columns)))
        above = {gram: i for i, gram in enumerate(grams)}
    return levels


def save_levels(path: Path, levels: list[Level], vocab_size: int, total: int) -> bytes:
    with spill_folder(path, None) as spills:
        writer = TrieWriter(spills, len(levels), vocab_size)
        for level in levels:
            writer.append(level)
            writer.end_level()
        writer.finish(path, total)
    return path.read_bytes()


def imported(place: Path, data: bytes | np.ndarray, **options) -> bytes:
    (place / "published.trie").write_bytes(data if isinstance(data, bytes) else data.tobytes())
    options = {"memory_mb": MEMORY, **options}
    trie = NgramTrie.import_dart(place / "published.trie", place / "imported.trie", **options)
    NgramTrie.open(trie.path, verify=True)
    assert not [path for path in place.iterdir() if path.name.startswith(".")], "no temporary file stays"
    return (place / "imported.trie").read_bytes()


def counted(folder: Path, *args, **options) -> bytes:
    NgramTrie.count(*args, **options).save(folder / "counted.trie")
    return (folder / "counted.trie").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("published")


def test_the_published_example(folder):
    assert len(EXAMPLE_BYTES) == EXAMPLE["file_size"]
    expected = counted(folder, EXAMPLE["conversations"], order=2)
    assert imported(folder, EXAMPLE_BYTES) == expected
    NgramTrie.count(EXAMPLE["conversations"], order=2).export_dart(folder / "exported.trie")
    assert (folder / "exported.trie").stat().st_size == EXAMPLE["file_size"]
    assert imported(folder, (folder / "exported.trie").read_bytes()) == expected
    assert published_info(folder / "exported.trie")["root_frequency"] == 3
    assert published_info(folder / "exported.trie")["num_nodes"] == 4
    assert published_info(folder / "imported.trie") is None


def test_progress(folder, capsys):
    imported(folder, EXAMPLE_BYTES, progress=True)
    NgramTrie.open(folder / "imported.trie").export_dart(folder / "exported.trie", progress=True)
    shown = capsys.readouterr().err
    assert "read published.trie: 100%" in shown and "sort: 100%" in shown and "export: 100%" in shown


def test_exported_bytes_are_breadth_first(folder):
    NgramTrie.count([[5, 6, 5]], order=2).export_dart(folder / "exported.trie")
    nodes = [(0, 0, 3, [(5, 1), (6, 2)]), (5, 0, 2, [(6, 3)]), (6, 0, 1, [(5, 4)]), (6, 1, 1, []), (5, 2, 1, [])]
    expected = struct.pack("<QQ", 2, 5)
    for token, parent, count, children in nodes:
        expected += struct.pack("<iQiQ", token, parent, count, len(children))
        expected += b"".join(struct.pack("<iQ", *child) for child in children)
    assert (folder / "exported.trie").read_bytes() == expected


@settings(max_examples=60, deadline=None)
@given(corpora, orders, st.integers(0, 2**32 - 1))
def test_import_equals_counting_whatever_the_numbering(folder, corpus, order, seed):
    levels = levels_of(count_ngrams(corpus, order), order)
    total = sum(map(len, corpus))
    words = published_words(levels, total, np.random.default_rng(seed))
    assert words.nbytes == 36 * (1 + sum(level.tokens.size for level in levels)) + 4
    expected = counted(folder, corpus, order=order)
    assert imported(folder, words) == expected
    trie = NgramTrie.open(folder / "imported.trie")
    counts = count_ngrams(corpus, order)
    assert trie.num_nodes == len(counts) and all(trie.frequency(gram) == n for gram, n in counts.items())


@settings(max_examples=60, deadline=None)
@given(corpora, orders, st.integers(1, 3), st.booleans())
def test_round_trip(folder, corpus, order, min_count, mapped):
    trie = NgramTrie.count(corpus, order, min_count)
    trie.save(folder / "first.trie")
    trie = NgramTrie.open(folder / "first.trie") if mapped else trie
    trie.export_dart(folder / "exported.trie")
    data = (folder / "exported.trie").read_bytes()
    # The vocabulary may be wider than the ids that are left.
    assert imported(folder, data, vocab_size=trie.vocab_size) == (folder / "first.trie").read_bytes()


@pytest.mark.parametrize(("vocab", "sizes"), [(300, [300, 5_000, 40_000]), (90_000, [9_000, 5, 20_000, 9_000, 50_000])])
def test_many_chunks_and_parts(folder, monkeypatch, vocab, sizes):
    """Buffers, chunks and parts so small that every boundary falls inside something."""
    levels = random_levels(sizes, vocab, np.random.default_rng(3))
    words = published_words(levels, -15, np.random.default_rng(4))
    vocab_size = 1 + max(int(level.tokens.max()) for level in levels)
    expected = save_levels(folder / "expected.trie", levels, vocab_size, int(levels[0].counts.sum()))
    assert imported(folder, words) == expected
    monkeypatch.setattr(published_read, "_READ_WORDS", 1009)
    monkeypatch.setattr(published_trie, "_CHUNK", 777)
    monkeypatch.setattr(published_trie, "_check_memory", lambda *_: 997)
    monkeypatch.setattr(trie_stream, "_MAX_GAP", 13)
    monkeypatch.setattr(trie_stream, "_COPY_BYTES", 1001)
    assert imported(folder, words) == expected
    assert NgramTrie.open(folder / "imported.trie").info()["nodes_per_level"] == [level.tokens.size for level in levels]
    monkeypatch.undo()
    NgramTrie.open(folder / "expected.trie").export_dart(folder / "whole.trie")
    monkeypatch.setattr(published_export, "_CHUNK", 50)
    NgramTrie.open(folder / "expected.trie").export_dart(folder / "exported.trie")
    assert (folder / "exported.trie").read_bytes() == (folder / "whole.trie").read_bytes()
    assert imported(folder, (folder / "exported.trie").read_bytes()) == expected


@pytest.mark.parametrize(
    ("root", "expected"), [(9, 9), (20, 20), (8, 9), (-15, 9), (0, 9), (2**31 - 1, 2**31 - 1)], ids=str
)
def test_root_frequency_gives_the_tokens_counted_if_it_can(folder, root, expected):
    levels = levels_of({(1,): 9, (1, 1): 8}, 2)
    imported(folder, published_words(levels, root, np.random.default_rng(0)))
    assert NgramTrie.open(folder / "imported.trie").info()["total_tokens"] == expected


def test_root_frequency_beyond_32_bits_is_unwrapped(folder):
    counts = {(i,): 2**31 - 1 for i in range(5)}
    levels, total = levels_of(counts, 2), 5 * (2**31 - 1) + 77
    expected = save_levels(folder / "expected.trie", levels, 5, total)
    NgramTrie.open(folder / "expected.trie").export_dart(folder / "exported.trie")
    assert imported(folder, (folder / "exported.trie").read_bytes()) == expected


def test_counts_the_published_format_cannot_hold_are_refused(folder):
    save_levels(folder / "large.trie", levels_of({(0,): 5, (1,): 2**31}, 2), 2, 2**31 + 5)
    with pytest.raises(ValueError, match=r"large\.trie: count of node 1 is 2147483648, allowed up to 2147483647"):
        NgramTrie.open(folder / "large.trie").export_dart(folder / "none.trie")
    assert not list(folder.glob("*none.trie*"))


def test_thresholded_by_the_published_builder(folder):
    """Its thresholding leaves frequencies of 0 and a negative root."""
    case = GOLDEN["extra"][0]
    counts = {tuple(path): count for path, count in case["reduced_nodes"] if path}
    root = next(count for path, count in case["reduced_nodes"] if not path)
    assert root < 0 and set(counts.values()) == {0}
    words = published_words(levels_of(counts, case["order"]), root, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"node 1: freq is 0, allowed 1 or more"):
        imported(folder, words)
    imported(folder, words, low_counts="raise")
    trie = NgramTrie.open(folder / "imported.trie")
    assert trie.frequency([7, 8]) == 1 and trie.probability([7], [8])[0].tolist() == [1.0]


def changed(place: int, form: str, value: int) -> bytes:
    data = bytearray(EXAMPLE_BYTES)
    struct.pack_into(form, data, place, value)
    return bytes(data)


# Places in the example: node 0 at 16 with children 3 at 40 and 1 at 52, node 1 at 64 with a child at 88, node 2 at 100,
# node 3 at 124 with a child at 148, node 4 at 160.
BROKEN = [
    (changed(0, "<Q", 1), "order is 1, allowed 2..5"),
    (changed(0, "<Q", 6), "order is 6, allowed 2..5"),
    (changed(8, "<Q", 0), "node_count is 0, allowed 1..4294967296"),
    (changed(8, "<Q", 2**63), "node_count is 9223372036854775808"),
    (changed(8, "<Q", 4), "file size is 184, allowed 36 * node_count + 4 = 148: bytes were appended"),
    (changed(8, "<Q", 6), "file size is 184, allowed 36 * node_count + 4 = 220: truncated"),
    (changed(16, "<i", 3), "node 0: token is 3, allowed 0 for the root"),
    (changed(20, "<Q", 1), "node 0: parent_id is 1, allowed 0 for the root"),
    (changed(32, "<Q", 5), "node 0: n_children is 5, allowed what is left of the 4 nodes"),
    (changed(32, "<Q", 2**64 - 1), "node 0: n_children is 18446744073709551615"),
    (changed(40, "<i", -1), "node 0: child_token is -1, allowed 0..2147483647"),
    (changed(44, "<Q", 0), "node 0: child_id is 0, allowed over the node's own number, up to 4"),
    (changed(44, "<Q", 5), "node 0: child_id is 5"),
    (changed(44, "<Q", 2**63), "node 0: child_id is 9223372036854775808"),
    (changed(44, "<Q", 1), "node 0: child_id is 1, allowed a node that is no other's child"),
    (changed(40, "<i", 7), "node 3: parent_id is 0, allowed the node that lists it as child, with the same token"),
    (changed(64, "<i", -5), "node 1: token is -5, allowed 0..2147483647"),
    (changed(68, "<Q", 1), "node 1: parent_id is 1, allowed below the node's own number"),
    (changed(68, "<Q", 2**64 - 1), "node 1: parent_id is 18446744073709551615"),
    (changed(76, "<i", 0), "node 1: freq is 0, allowed 1 or more"),
    (changed(104, "<Q", 0), "node 2: parent_id is 0, allowed the node that lists it as child"),
    (changed(128, "<Q", 2), "node 3: depth is 3, allowed up to the order, 2"),
    (changed(176, "<Q", 1), "node 4: n_children is 1, allowed what is left of the 4 nodes that have a parent"),
    (b"", "file size is 0, allowed at least 40"),
    (b"PK\x03\x04" * 50, "foreign file"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN, ids=[message[:40] for _, message in BROKEN])
def test_errors_name_file_node_field_and_what_is_allowed(tmp_path, data, message):
    with pytest.raises(ValueError) as caught:
        imported(tmp_path, data)
    assert str(caught.value).startswith(f"published trie {tmp_path / 'published.trie'}: ")
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["published.trie"], "nothing else stays"


def test_a_token_twice_among_siblings_is_refused_with_its_node(folder):
    levels = levels_of({(1,): 4, (2,): 4, (2, 3): 1, (2, 4): 1}, 2)
    levels[1].tokens[1] = 3
    words = published_words(levels, 8, np.random.default_rng(0))
    with pytest.raises(ValueError, match=r"node [12]: child_token 3 is there twice, allowed once") as caught:
        imported(folder, words)
    node = int(str(caught.value).split("node ")[1].split(":")[0])
    listed = {int(words[place + 1]): int(words[place]) for place in (10, 13)}
    assert listed[node] == 2


def test_options_out_of_range(folder):
    for options, message in (
        ({"vocab_size": 6}, "node 0: child_token is 6, allowed 0..5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": 2**31 + 1}, "vocab_size is 2147483649"),
        ({"low_counts": "drop"}, "low_counts is 'drop', allowed: 'refuse', 'raise'"),
        ({"memory_mb": 8}, "memory_mb is 8, allowed for .*: at least 37"),
        ({"folder": folder / "none"}, "folder of temporary files is"),
        ({"fingerprint": "é"}, "fingerprint"),
    ):
        with pytest.raises(ValueError, match=message):
            imported(folder, EXAMPLE_BYTES, **options)
    assert NgramTrie.import_dart(folder / "published.trie", folder / "t.trie", 7, "name").fingerprint == "name"


def refused_or_sound(folder: Path, data: bytes) -> bool:
    try:
        imported(folder, data, memory_mb=2048)
    except ValueError:
        return False
    return True


def test_truncated_and_flipped_bytes_never_crash(folder):
    corpus = [[1, 2, 3, 1, 2], [4, 4, 4, 0]]
    levels = levels_of(count_ngrams(corpus, 3), 3)
    data = published_words(levels, 9, np.random.default_rng(1)).tobytes()
    assert refused_or_sound(folder, data)
    assert not any(refused_or_sound(folder, data[:size]) for size in range(len(data)))
    frequencies = 0
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        frequencies += refused_or_sound(folder, bytes(damaged))
    nodes = (len(data) - 4) // 36
    # Only a frequency can change unnoticed, and the order when it becomes larger: there are no checksums.
    assert 0 < frequencies <= 4 * nodes + 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_fuzzed_words_never_crash(folder, data):
    """Fields, not bytes: values that are nearly right come further."""
    words = np.frombuffer(EXAMPLE_BYTES, np.uint32).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        value = data.draw(st.one_of(st.integers(0, 8), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1])))
        words[data.draw(st.integers(0, words.size - 1))] = value
    refused_or_sound(folder, words.tobytes())


HOSTILE = """
import sys
import numpy as np
from workbench.search.trie import NgramTrie

good = np.fromfile(sys.argv[1], np.uint32)
rng = np.random.default_rng(0)
for trial in range(300):
    bad = good.copy()
    where = rng.integers(4 * (trial % 2 == 0), good.size, 1 + trial % 3)
    bad[where] = rng.choice([0, 1, 2, 3, 4, 5, 6, 2**31 - 1, 2**31, 2**32 - 1], where.size)
    bad.tofile(sys.argv[2])
    try:
        NgramTrie.import_dart(sys.argv[2], sys.argv[3], memory_mb=64)
    except ValueError:
        pass
print("survived")
"""


def test_hostile_fields_never_index_out_of_bounds(tmp_path):
    """Interpreted, an index outside an array is an error, which the compiled loops could only survive."""
    (tmp_path / "good").write_bytes(EXAMPLE_BYTES)
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        HOSTILE,
        *(str(tmp_path / name) for name in ("good", "bad", "out")),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "survived" in done.stdout, done.stderr


MEASURE = """
import resource, sys
from workbench.search.trie import NgramTrie
unit = 2**20 if sys.platform == "darwin" else 2**10
NgramTrie.import_dart(sys.argv[1], sys.argv[3], memory_mb=64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
NgramTrie.import_dart(sys.argv[2], sys.argv[3], memory_mb=int(sys.argv[4]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit)
"""


@pytest.mark.slow
def test_memory_stays_within_the_budget(tmp_path):
    """A file of over 200 MB within 64 MiB, and the result is right."""
    rng = np.random.default_rng(0)
    levels = random_levels([40_000, 1_000_000, 4_960_000], 151_936, rng)
    total = int(levels[0].counts.sum())
    write_published(tmp_path / "large.trie", levels, total, 1)
    (tmp_path / "small.trie").write_bytes(EXAMPLE_BYTES)
    assert (tmp_path / "large.trie").stat().st_size > 200e6
    # A process counts what its parent held when it was started, hence one between that holds nothing.
    between = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
    command = [sys.executable, "-c", between, sys.executable, "-c", MEASURE]
    command += [str(tmp_path / name) for name in ("small.trie", "large.trie", "o.trie")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([*command, "64"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 5 < float(done.stdout) <= 64
    vocab_size = 1 + max(int(level.tokens.max()) for level in levels)
    assert (tmp_path / "o.trie").read_bytes() == save_levels(tmp_path / "e.trie", levels, vocab_size, total)
