"""How long look-ups in a trie and searches take: raw samples of queries, cold and warm, and medians of pruning.

Cold is a file that nobody has open and whose pages the operating system was asked to forget: what the first rounds
after a start see. Warm is the same look-ups again. How much of the file was in memory in each case is measured, not
assumed; file systems in memory forget nothing. A call from Python takes longer than a look-up, so several queries share
one; a sample is the time of the call over its queries, and an empty call is timed beside it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from workbench.measure.search_cases import SearchCases
from workbench.measure.statistics import percentiles
from workbench.search import _jit
from workbench.search.prune import PruneConfig, prune_tree, prune_trees
from workbench.search.trie import NgramTrie

_LIKELY = 12
_BATCH = 32


def query_rows(
    trie: NgramTrie, cases: SearchCases, queries: int, per_call: int = 8, repeats: int = 5, seed: int = 0
) -> list[dict[str, Any]]:
    """Times look-ups of C candidates each.

    Rows: what ("spread" contexts, drawn evenly from all of the file, or "text", those of the cases), state ("cold" or
    "warm"), queries, per_call, median_us, p95_us, p99_us (of a query), empty_us (an empty call, over `per_call`),
    in_memory (share of the file's pages before the first query, None where it cannot be had), samples_us (raw).

    Args:
        trie: opened from a file, which is copied next to itself for the cold samples.
        cases: contexts and first candidates of the "text" queries.
        queries: at most so many of each kind.
        per_call: queries that share a call.
        repeats: passes over the warm ones.
        seed: of the contexts.

    Raises:
        ValueError: the trie lies in no file, or fewer queries than share a call.
    """
    if trie.path is None or not 1 <= per_call <= queries:
        raise ValueError(f"trie.path={trie.path}, {per_call} of {queries} queries a call; allowed: a file, 1 or more")
    spread = spread_queries(trie, queries, cases.ids.shape[2], seed)
    text = cases.contexts[:queries], cases.ids[:queries, 0].astype(np.int32)
    with tempfile.TemporaryDirectory(prefix=".cold-", dir=trie.path.parent) as folder:
        copy = Path(shutil.copyfile(trie.path, Path(folder) / trie.path.name))
        trie.probabilities(text[0][:1], text[1][:1])  # compiles
        forget_pages(copy)
        before = in_memory(copy)
        opened = NgramTrie.open(copy)
        cold = query_samples(opened, *spread, per_call)
        after = in_memory(copy)
        warm = [query_samples(opened, *spread, per_call) for _ in range(repeats)]
        known = [query_samples(opened, *text, per_call) for _ in range(repeats + 1)][1:]
        empty = median(query_samples(opened, np.full_like(spread[0], -1), spread[1][:, :0], per_call))
        del opened
    head = {"queries": queries, "per_call": per_call, "empty_us": empty}
    return [
        {"what": "spread", "state": "cold", **head, "in_memory": before, **_summary([cold])},
        {"what": "spread", "state": "warm", **head, "in_memory": after, **_summary(warm)},
        {"what": "text", "state": "warm", **head, "in_memory": after, **_summary(known)},
    ]


def query_us(trie: NgramTrie, cases: SearchCases, repeats: int = 51, most: int = 400) -> float:
    """Median microseconds of a query of C candidates, when up to `most` cases share a call, over and over.

    What so few contexts touch of a trie stays in the nearer caches, as in `make bench-search`.
    """
    contexts, tokens = cases.contexts[:most], cases.ids[:most, 0].astype(np.int32)
    probs, lengths = np.empty(tokens.shape, np.float32), np.empty(tokens.shape, np.int32)
    seconds = []
    for _ in range(repeats + 1):  # the first pass compiles and touches pages
        begin = perf_counter()
        trie.probabilities(contexts, tokens, probs, lengths)
        seconds.append(perf_counter() - begin)
    return 1e6 * median(seconds[1:]) / len(tokens)


def query_samples(trie: NgramTrie, contexts: np.ndarray, tokens: np.ndarray, per_call: int) -> list[float]:
    """Microseconds of a query, one sample for every full call: contexts [Q, order - 1], tokens [Q, C]."""
    probs, lengths = np.empty((per_call, tokens.shape[1]), np.float32), np.empty((per_call, tokens.shape[1]), np.int32)
    samples = []
    for first in range(0, len(tokens) - per_call + 1, per_call):
        part = slice(first, first + per_call)
        begin = perf_counter()
        trie.probabilities(contexts[part], tokens[part], probs, lengths)
        samples.append(1e6 * (perf_counter() - begin) / per_call)
    return samples


def spread_queries(trie: NgramTrie, queries: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Contexts drawn evenly from all stored n-grams of length order - 1, with candidates; up to 12 of them follow.

    Returns:
        Contexts [Q, order - 1] int64 and candidates [Q, C] int32.

    Raises:
        ValueError: the trie holds no such n-gram.
    """
    sizes, arrays, rng = trie.header.level_sizes, trie.arrays(), np.random.default_rng(seed)
    length = trie.order - 1
    if sizes[length - 1] == 0:
        raise ValueError(f"the trie holds no n-gram of length {length}, allowed: one or more")
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    nodes = rng.integers(firsts[length - 1], firsts[length], queries)
    contexts = np.empty((queries, length), np.int64)
    for place in range(length - 1, -1, -1):
        contexts[:, place] = [_jit.token_at(arrays, node) for node in nodes.tolist()]
        if place:  # the parent is the last node whose children begin at or before this one
            starts = arrays[2][firsts[place - 1] : firsts[place] + 1]
            nodes = firsts[place - 1] + np.searchsorted(starts, nodes.astype(starts.dtype), side="right") - 1
    tokens = rng.integers(0, trie.vocab_size, (queries, width), np.int32)
    for row, context in zip(tokens, contexts, strict=True):
        likely = trie.continuations(context, min(_LIKELY, width))[0]
        row[: likely.size] = likely
    return contexts, rng.permuted(tokens, axis=1)


def forget_pages(path: Path) -> None:
    """Asks the operating system to drop a file from memory; pages that someone has mapped stay."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())  # what is not written yet cannot be dropped
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(path: Path) -> float | None:
    """Share of a file's pages that the operating system holds in memory; None where it does not tell."""
    mincore = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None
    if mincore is None:
        return None
    with path.open("rb+") as file, mmap.mmap(file.fileno(), 0) as data:
        pages = -(-len(data) // mmap.PAGESIZE)
        flags, start = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(data)
        size = ctypes.c_size_t(len(data))
        failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), size, flags)
        del start  # a map with a pointer into it cannot be closed
        return None if failed else float((np.frombuffer(flags, np.uint8) & 1).mean())


def prune_rows(
    trie: NgramTrie | None,
    cases: SearchCases,
    tree_sizes: Sequence[int],
    beam_widths: Sequence[int],
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Times the search by beam width and tree size, everything else as DART has it.

    Rows: beam_width, num_nodes, cases, ms and p95_ms (a call for one request, median over cases and passes), batch_ms
    (a tree, when 32 requests share a call; None with fewer cases), mean_depth (of the deepest node).

    Args:
        trie: n-grams, None to search without.
        cases: requests.
        tree_sizes, beam_widths: all pairs are timed.
        repeats: passes over the cases; one more goes before.
    """
    return [
        _prune_row(trie, cases, PruneConfig(beam_width=beam, num_nodes=size), repeats)
        for beam in beam_widths
        for size in tree_sizes
    ]


def _prune_row(trie: NgramTrie | None, cases: SearchCases, config: PruneConfig, repeats: int) -> dict[str, Any]:
    requests = list(zip(cases.ids, cases.probs, cases.contexts, strict=True))
    depths = [int(prune_tree(*request, trie, config).depths.max()) for request in requests]  # compiles
    samples = []
    for _ in range(repeats):
        for request in requests:
            begin = perf_counter()
            prune_tree(*request, trie, config)
            samples.append(1e3 * (perf_counter() - begin))
    batches = []
    firsts = [*range(0, len(requests) - _BATCH + 1, _BATCH)]
    for first in firsts[:1] + firsts * repeats:
        part = slice(first, first + _BATCH)
        begin = perf_counter()
        prune_trees(cases.ids[part], cases.probs[part], cases.contexts[part], trie, config)
        batches.append(1e3 * (perf_counter() - begin) / _BATCH)
    return {
        "beam_width": config.beam_width,
        "num_nodes": config.num_nodes,
        "cases": len(requests),
        "ms": median(samples),
        "p95_ms": percentiles(samples, [95])[0],
        "batch_ms": median(batches[1:]) if batches else None,
        "mean_depth": sum(depths) / len(depths),
    }


def _summary(passes: Sequence[Sequence[float]]) -> dict[str, Any]:
    samples = [sample for samples in passes for sample in samples]
    middle, high, highest = percentiles(samples, (50, 95, 99))
    return {"median_us": middle, "p95_us": high, "p99_us": highest, "samples_us": [round(s, 4) for s in samples]}
