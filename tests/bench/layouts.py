"""Ways to look up the candidates of a level among the children of a node, over the same sorted child lists.

Evidence for what `find_all` of `workbench/search/_jit.py` does. Every variant gets the tokens of all nodes, siblings
ascending, and writes the place of each candidate among the children, or -1. Which one is fastest depends on how many
children there are and on whether the caches hold them. Self-contained: nothing of the search stage is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from numba import njit

compiled = njit(nogil=True, error_model="numpy")

#: Candidates of one query, and contexts that are asked for the same candidates: DART's 25, and its beam.
CANDIDATES, BEAM = 25, 20
VOCAB = 151_936
#: Slots of the small table of candidates that `probe` asks for every child.
PROBE_SLOTS = 128
EMPTY = np.uint64(0xFFFFFFFFFFFFFFFF)
#: More than any cache holds, in 8-byte words.
FLUSH_WORDS = 12 << 20


@compiled
def scalar(keys, node, wanted, table, places):
    """Branchless binary search of one candidate after another."""
    for c in range(wanted.size):
        place, size = 0, keys.size
        while size > 1:
            half = size >> 1
            place += half * np.int64(keys[place + half] <= wanted[c])
            size -= half
        places[c] = place if keys[place] == wanted[c] else -1


@compiled
def lock_step(keys, node, wanted, table, places):
    """Branchless binary search of all candidates at once: they take each step together, so that their loads overlap."""
    places[:] = 0
    size = keys.size
    while size > 1:
        half = size >> 1
        for c in range(wanted.size):
            middle = places[c] + half
            places[c] = middle if keys[middle] <= wanted[c] else places[c]
        size -= half
    for c in range(wanted.size):
        if keys[places[c]] != wanted[c]:
            places[c] = -1


@compiled
def galloping(keys, node, wanted, table, places):
    """Merge of the ascending candidates with the list: doubling steps from the last place, then halving."""
    low = 0
    for c in range(wanted.size):
        token, step = wanted[c], 1
        while low + step < keys.size and keys[low + step] <= token:
            low += step
            step <<= 1
        step = min(step, keys.size - low)
        while step > 1:
            half = step >> 1
            low += half * np.int64(keys[low + half] <= token)
            step -= half
        places[c] = low if keys[low] == token else -1


@compiled
def scan(keys, node, wanted, table, places):
    """Merge of the ascending candidates with the list, one child after another."""
    low = 0
    for c in range(wanted.size):
        while low < keys.size and keys[low] < wanted[c]:
            low += 1
        places[c] = low if low < keys.size and keys[low] == wanted[c] else -1


@compiled
def compare(keys, node, wanted, table, places):
    """Every child with every candidate, in vector instructions."""
    places[:] = -1
    for i in range(keys.size):
        key = keys[i]
        for c in range(wanted.size):
            places[c] = i if wanted[c] == key else places[c]


@compiled
def probe(keys, node, wanted, table, places):
    """Every child is looked up in a small hash table of the candidates, made once for the level."""
    _, slots, numbers = table
    places[:] = -1
    for i in range(keys.size):
        key = keys[i]
        slot = key & (PROBE_SLOTS - 1)
        while slots[slot] >= 0:
            if slots[slot] == key:
                places[numbers[slot]] = i
                break
            slot = (slot + 1) & (PROBE_SLOTS - 1)


@compiled
def hash_of(node, token):
    """Mixes a parent and a token into 64 bits (the finaliser of splitmix64)."""
    key = (np.uint64(node) << np.uint64(20)) ^ np.uint64(token)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


@compiled
def hashing(keys, node, wanted, table, places):
    """One hash table of all (parent, token), half of it empty: 8 bytes an entry, the place and 32 bits of the hash.

    So 16 bytes a node in addition to the sorted lists, which counting, merging and export need.
    """
    slots = table[0]
    mask = np.uint64(slots.size - 1)
    for c in range(wanted.size):
        key = hash_of(node, wanted[c])
        slot, check = key & mask, key >> np.uint64(32)
        places[c] = -1
        while slots[slot] != EMPTY:
            if slots[slot] >> np.uint64(32) == check:
                places[c] = np.int32(slots[slot] & np.uint64(0xFFFFFFFF))
                break
            slot = (slot + np.uint64(1)) & mask


VARIANTS: dict[str, Callable] = {
    "scalar": scalar,
    "lock_step": lock_step,
    "galloping": galloping,
    "scan": scan,
    "compare": compare,
    "probe": probe,
    "hashing": hashing,
}
#: Longest list that a variant is timed on, where its time grows with the list.
LONGEST = {"scan": 1000, "compare": 1000, "probe": 1000}


@compiled
def fill_hash_table(tokens, length, slots):
    """Fills the table of `hashing`: slots [power of two] uint64, EMPTY before."""
    mask = np.uint64(slots.size - 1)
    for place in range(tokens.size):
        key = hash_of(place // length, tokens[place])
        slot = key & mask
        while slots[slot] != EMPTY:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = (key & np.uint64(0xFFFFFFFF00000000)) | np.uint64(place % length)


@compiled
def fill_probe_table(wanted, slots, numbers):
    """Fills the table of `probe`: slots [PROBE_SLOTS] int32, and which candidate is in each."""
    slots[:] = -1
    for c in range(wanted.size):
        slot = wanted[c] & (PROBE_SLOTS - 1)
        while slots[slot] >= 0:
            slot = (slot + 1) & (PROBE_SLOTS - 1)
        slots[slot] = wanted[c]
        numbers[slot] = c


@compiled
def fill_lists(tokens, length, seed):
    """Fills tokens [L * length] int32 with lists of distinct ascending ids, spread evenly over the vocabulary."""
    np.random.seed(seed)
    cell = VOCAB / length
    for place in range(tokens.size):
        first, stop = np.int64(place % length * cell), np.int64((place % length + 1) * cell)
        tokens[place] = first + np.random.randint(0, stop - first)


@cache
def driver(variant: Callable, touch: bool) -> Callable:
    """Compiles the loop over queries: (tokens, length, nodes [S, BEAM], wanted [S, C], slots) -> check sum.

    With `touch`, the first and middle child of all contexts of a beam are read before any is searched, so that these
    cache misses overlap.
    """

    @compiled
    def run(tokens, length, nodes, wanted, slots):
        places = np.empty(wanted.shape[1], np.int32)
        table = (slots, np.empty(PROBE_SLOTS, np.int32), np.empty(PROBE_SLOTS, np.int32))
        total = touched = 0
        for row in range(nodes.shape[0]):
            fill_probe_table(wanted[row], table[1], table[2])
            if touch:
                for node in nodes[row]:
                    touched += tokens[node * length] + tokens[node * length + length // 2]
            for node in nodes[row]:
                variant(tokens[node * length : (node + 1) * length], node, wanted[row], table, places)
                for place in places:
                    total += place
        return total, touched

    return run


def queries(tokens: np.ndarray, length: int, rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Contexts [rows, BEAM] int64, distinct while there are enough, and ascending candidates [rows, C] int32.

    Up to a third of a row's candidates are children of its first context.
    """
    nodes = rng.permutation(max(tokens.size // length, rows * BEAM))[: rows * BEAM] % (tokens.size // length)
    nodes = nodes.reshape(rows, BEAM).astype(np.int64)
    wanted = np.empty((rows, CANDIDATES), np.int32)
    for row, node in enumerate(nodes[:, 0]):
        children = tokens[node * length : (node + 1) * length]
        known = rng.choice(children, min(length, CANDIDATES // 3), replace=False)
        others = rng.permutation(np.setdiff1d(rng.integers(0, VOCAB, 2 * CANDIDATES), known))
        wanted[row] = np.sort(np.concatenate([known, others])[:CANDIDATES])
    return nodes, wanted


def flush_caches() -> None:
    """Writes and reads more than the caches hold, so that what comes next finds nothing in them."""
    np.ones(FLUSH_WORDS).sum()


def measure(
    length: int, num_nodes: int, cold: bool, rows: int = 200, repeats: int = 5, seed: int = 0
) -> Iterator[dict]:
    """Times every variant on child lists of one length, `num_nodes` nodes in all.

    Args:
        length: children of each node.
        num_nodes: of all lists together.
        cold: flush the caches before every run.
        rows: sets of candidates, each asked for in as many contexts as a beam has.
        repeats: runs, of which the best counts; one more goes before.
        seed: of lists and candidates.

    Yields:
        Dicts with variant, touch, children, nodes, ns (a query of 25 candidates).

    Raises:
        ValueError: two variants disagree on what they found.
    """
    tokens = np.empty(num_nodes // length * length, np.int32)
    fill_lists(tokens, length, seed)
    slots = np.full(1 << (2 * tokens.size - 1).bit_length(), EMPTY)
    fill_hash_table(tokens, length, slots)
    nodes, wanted = queries(tokens, length, rows, np.random.default_rng(seed))
    expected = None
    for name, variant in VARIANTS.items():
        if length > LONGEST.get(name, length):
            continue
        for touch in (False, True):
            run, seconds = driver(variant, touch), []
            for _ in range(repeats + 1):
                if cold:
                    flush_caches()
                start = time.perf_counter()
                total, _ = run(tokens, length, nodes, wanted, slots)
                seconds.append(time.perf_counter() - start)
            expected = total if expected is None else expected
            if total != expected:
                raise ValueError(f"variant {name} finds {total}, allowed: what the first one finds, {expected}")
            ns = min(seconds[1:]) / nodes.size * 1e9
            yield {"variant": name, "touch": touch, "children": length, "nodes": tokens.size, "ns": ns}
