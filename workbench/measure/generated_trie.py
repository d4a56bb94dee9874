"""Tries of any size for benchmarks, written in seconds: no corpus, but the shape that tries of text have.

Order 3. Low token ids are the frequent ones, as in byte-pair vocabularies: they have the most children (Zipf's law),
and are the likeliest children. What follows a pair of tokens is one token for most pairs, thousands for a few. Counts
are as a corpus would give them: that of an n-gram is the sum over its continuations, plus 1 for half of them, whose
last occurrence ends its sequence. Everything is a function of the seed and a node's number, so nothing is kept in
memory and a node does not depend on the chunk it was written in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from workbench.jit import compiled
from workbench.search.ngram_count import Level
from workbench.search.trie_format import MAX_NODES, TrieHeader
from workbench.search.trie_stream import TrieWriter, spill_folder

_ORDER = 3
#: Quantiles of a distribution; consecutive pairs of tokens take them all in turn, in a scrambled order.
_QUANTILES = 1 << 16
#: Exponents of the power laws: children by rank of a token, children of a pair, occurrences of a triple.
_TOKEN_POWER, _PAIR_POWER, _TRIPLE_POWER = 0.9, 0.75, 0.9
#: Tokens whose ranks differ by less than this have about as many children.
_FLAT_RANKS = 10
#: Nodes for each token, at least; tries smaller than this many times the vocabulary hold a part of it.
_NODES_PER_TOKEN = 16
_CHUNK = 1 << 21


def write_generated_trie(
    path: str | Path,
    megabytes: float = 1024.0,
    vocab_size: int = 151_936,
    seed: int = 0,
    quantised: bool = False,
    folder: str | Path | None = None,
) -> TrieHeader:
    """Writes a trie of order 3 of at least `megabytes` (2^20 bytes) and hardly more.

    Args:
        path: of the trie file.
        megabytes: 0.01 or more.
        vocab_size: token ids are below it, 64 or more.
        seed: 0..2^32 - 1; equal arguments give equal bytes.
        quantised: keep counts as codes of 8 bits.
        folder: for temporary files, about as large as the trie; beside it when None.

    Raises:
        ValueError: an argument is out of range, or a trie of that size needs more nodes than the format or the
            vocabulary allows.
    """
    for name, value, low, high in (
        ("megabytes", megabytes, 0.01, 2.0**20),
        ("vocab_size", vocab_size, 64, 2**24),
        ("seed", seed, 0, 2**32 - 1),
    ):
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}, allowed {low}..{high}")
    kids, pair_kids = _shape(int(megabytes * 2**20), vocab_size, quantised)
    triple_counts = _power_law(_TRIPLE_POWER)
    firsts = np.cumsum(kids) - kids
    counts = np.empty(kids.size, np.int64)
    _token_counts(firsts, kids, seed, pair_kids, triple_counts, counts)
    roots = np.empty(kids.size, np.int64)
    _spread(seed, roots, vocab_size, 1)
    with spill_folder(Path(path), folder) as spills:
        writer = TrieWriter(spills, _ORDER, vocab_size, quantised=quantised)
        writer.append(Level(roots, counts, np.zeros(kids.size, np.int64)))
        writer.end_level()
        for low, high in _runs(kids):
            writer.append(_pairs(low, kids[low:high], int(firsts[low]), vocab_size, seed, pair_kids, triple_counts))
        num_pairs = writer.level_size
        writer.end_level()
        step = _CHUNK // 8
        for low in range(0, num_pairs, step):
            high = min(low + step, num_pairs)
            writer.append(_triples(low, high, vocab_size, seed, pair_kids, triple_counts))
        writer.end_level()
        return writer.finish(Path(path), int(counts.sum()))


def _shape(file_bytes: int, vocab_size: int, quantised: bool) -> tuple[np.ndarray, np.ndarray]:
    """Children of every token of level 1, [n] int64, and the quantiles of the children of a pair."""
    pair_kids = np.minimum(_power_law(_PAIR_POWER), vocab_size // 2)
    num_tokens = min(vocab_size, file_bytes // 8 // _NODES_PER_TOKEN)
    weights = (np.arange(num_tokens) + _FLAT_RANKS) ** -_TOKEN_POWER

    def kids_of(scale: float) -> np.ndarray:
        return np.clip(np.rint(weights * scale), 1, vocab_size // 2).astype(np.int64)

    def bytes_of(scale: float) -> int:
        num_pairs = int(kids_of(scale).sum())
        sizes = (num_tokens, num_pairs, _num_triples(num_pairs, pair_kids))
        if sum(sizes) > MAX_NODES:
            return 2**62
        return TrieHeader(_ORDER, vocab_size, sizes, 0, 0, "", quantised=quantised).layout()[1]

    low, high = 0.0, float(vocab_size) * num_tokens
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if bytes_of(middle) >= file_bytes else (middle, high)
    if not file_bytes <= bytes_of(high) < 2**62:
        raise ValueError(f"megabytes is {file_bytes / 2**20:.2f}, allowed less with vocab_size={vocab_size}")
    return kids_of(high), pair_kids


def _power_law(power: float) -> np.ndarray:
    """Quantiles of u^-power for u in 0..1, rounded down, int64."""
    return np.floor(((np.arange(_QUANTILES) + 0.5) / _QUANTILES) ** -power).astype(np.int64)


def _num_triples(num_pairs: int, pair_kids: np.ndarray) -> int:
    """Children of the first `num_pairs` pairs."""
    whole, rest = divmod(num_pairs, _QUANTILES)
    return whole * int(pair_kids.sum()) + _sum_kids(0, rest, pair_kids)


def _runs(kids: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of parents that have about `_CHUNK` children."""
    ends = np.cumsum(kids)
    low = 0
    while low < kids.size:
        done = ends[low] - kids[low]
        high = max(low + 1, int(np.searchsorted(ends, done + _CHUNK, side="right")))
        yield low, high
        low = high


def _pairs(
    parent: int, kids: np.ndarray, first: int, vocab_size: int, seed: int, pair_kids: np.ndarray, table: np.ndarray
) -> Level:
    """The children of tokens `parent`..., which have `kids` [n]; `first` is the number of their first child."""
    size = int(kids.sum())
    tokens, counts, parents = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    _fill_pairs(parent, kids, first, vocab_size, seed, pair_kids, table, tokens, counts, parents)
    return Level(tokens, counts, parents)


def _triples(low: int, high: int, vocab_size: int, seed: int, pair_kids: np.ndarray, table: np.ndarray) -> Level:
    """The children of pairs low..high-1."""
    size = _sum_kids(low, high, pair_kids)
    tokens, counts, parents = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    _fill_triples(low, high, vocab_size, seed, pair_kids, table, tokens, counts, parents)
    return Level(tokens, counts, parents)


@compiled
def _mix(seed, a, b):
    """64 random bits of three numbers (two rounds of splitmix64's finaliser; its constants)."""
    key = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(a)
    for number in (np.uint64(b), np.uint64(1)):
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = (key ^ (key >> np.uint64(31))) + number
    return key


@compiled
def _kids_of_pair(pair, pair_kids):
    """Children of a pair; an odd factor near the golden ratio visits all quantiles, spread out."""
    return pair_kids[(pair * 40503 + 12345) & (_QUANTILES - 1)]


@compiled
def _sum_kids(low, high, pair_kids):
    """Children of pairs low..high-1."""
    total = 0
    for pair in range(low, high):
        total += _kids_of_pair(pair, pair_kids)
    return total


@compiled
def _triple_count(seed, pair, child, table):
    """Occurrences of a triple."""
    return table[_mix(seed, pair, child) >> np.uint64(48)]


@compiled
def _pair_count(seed, pair, pair_kids, table):
    """Occurrences of a pair: those of its triples, and for half of the pairs one more."""
    total = np.int64(_mix(seed, pair, -1) & np.uint64(1))
    for child in range(_kids_of_pair(pair, pair_kids)):
        total += _triple_count(seed, pair, child, table)
    return total


@compiled
def _token_counts(firsts, kids, seed, pair_kids, table, counts):
    """Fills counts [n] int64 with those of the tokens; children of token i are the kids[i] pairs from firsts[i] on."""
    for token in range(kids.size):
        total = np.int64(_mix(seed, token, -2) & np.uint64(1))
        for pair in range(firsts[token], firsts[token] + kids[token]):
            total += _pair_count(seed, pair, pair_kids, table)
        counts[token] = total


@compiled
def _spread(key, tokens, vocab_size, power):
    """Fills tokens [k] with ascending distinct ids; their density falls as id^(1/power - 1)."""
    last = -1
    for child in range(tokens.size):
        share = (child + (_mix(key, child, 3) >> np.uint64(40)) / 2.0**24) / tokens.size
        token = np.int64(vocab_size * share**power)
        token = min(max(token, last + 1), vocab_size - tokens.size + child)
        tokens[child] = token
        last = token


@compiled
def _fill_pairs(parent, kids, first, vocab_size, seed, pair_kids, table, tokens, counts, parents):
    """Fills one chunk of level 2; see `_pairs`."""
    place = 0
    for row in range(kids.size):
        _spread(_mix(seed, parent + row, 4), tokens[place : place + kids[row]], vocab_size, 3)
        for _ in range(kids[row]):
            counts[place] = _pair_count(seed, first + place, pair_kids, table)
            parents[place] = parent + row
            place += 1


@compiled
def _fill_triples(low, high, vocab_size, seed, pair_kids, table, tokens, counts, parents):
    """Fills the chunk of level 3 below pairs low..high-1."""
    place = 0
    for pair in range(low, high):
        size = _kids_of_pair(pair, pair_kids)
        _spread(_mix(seed, pair, 5), tokens[place : place + size], vocab_size, 3)
        for child in range(size):
            counts[place] = _triple_count(seed, pair, child, table)
            parents[place] = pair
            place += 1
