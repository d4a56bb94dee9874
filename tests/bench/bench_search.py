"""Benchmarks of the search stage, run by `make bench-search` and by nothing else.

Two tries: n-grams of Python source, which fit into the caches, and a generated one of a gigabyte or more, where caches
are flushed before every round. Times are the best round's, since anything else on the machine only adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import layouts
import numpy as np
import pytest
from figures import Figures, Subject

from workbench.measure.search_bench import corpus_speed
from workbench.search.prune import PruneConfig, TreeArrays, prune_into
from workbench.search.threads import SearchThreads
from workbench.search.trie import NgramTrie

ROUNDS = 25
#: Children of a node, and whether the caches are flushed.
LISTS = [(length, cold) for cold in (False, True) for length in (1, 4, 16, 32, 1000, 100_000)]


def timed(benchmark: Any, work: Callable[[], object], items: int, cold: bool = False, rounds: int = ROUNDS) -> dict:
    """Seconds an item, of the best and of the middle round; one more round goes before."""
    benchmark.pedantic(work, setup=layouts.flush_caches if cold else None, rounds=rounds, warmup_rounds=1)
    stats = benchmark.stats.stats
    benchmark.extra_info["items"] = items
    return {"best": stats.min / items, "median": stats.median / items}


@pytest.mark.parametrize(("what", "share"), [("batch", 1), ("small batch", 10)])
def test_query(benchmark: Any, subject: Subject, figures: Figures, what: str, share: int) -> None:
    """Many queries of 25 candidates in one call; of a small batch, the nearer caches hold what it reads."""
    contexts, tokens = (array[: len(array) // share] for array in (subject.contexts, subject.tokens))
    probs, lengths = np.empty(tokens.shape, np.float32), np.empty(tokens.shape, np.int32)

    def work() -> None:
        subject.trie.probabilities(contexts, tokens, probs, lengths)

    found = timed(benchmark, work, len(tokens), subject.cold)
    add_query(figures, subject, what, found, lengths)


def test_query_alone(benchmark: Any, subject: Subject, figures: Figures) -> None:
    """One query a call, as a researcher writes it."""
    lengths = []

    def work() -> None:
        lengths[:] = [subject.trie.probability(*pair)[1] for pair in zip(subject.contexts, subject.tokens, strict=True)]

    found = timed(benchmark, work, len(subject.tokens), subject.cold, rounds=3)
    add_query(figures, subject, "one a call", found, np.stack(lengths))


def add_query(figures: Figures, subject: Subject, what: str, found: dict, lengths: np.ndarray) -> None:
    """A row of times, and of the shares of candidates that matched behind two tokens, one or none."""
    shares = {f"matched_{m}": float((lengths == m).mean()) for m in range(subject.trie.order)}
    row = {"what": what, "queries": len(lengths), "us": found["best"] * 1e6, "median_us": found["median"] * 1e6}
    figures.add("query", **subject.head, **row, **shares)


@pytest.mark.parametrize(("requests", "threads"), [(1, 1), (8, 1), (8, 2), (32, 1), (32, 2)])
def test_tree(benchmark: Any, subject: Subject, figures: Figures, requests: int, threads: int) -> None:
    """Trees of DART's size, `requests` of them in one call."""
    contexts, ids, probs = subject.cases
    ids, count = ids.astype(np.int32), len(ids) // requests * requests
    out, config = TreeArrays.empty(requests, PruneConfig().num_nodes), PruneConfig()
    lengths = np.full(requests, contexts.shape[1])
    parts = [slice(low, low + requests) for low in range(0, count, requests)]

    with SearchThreads(threads) as pool:
        shared = pool if threads > 1 else None

        def work() -> None:
            for part in parts:
                arrays = (ids[part], probs[part], contexts[part], lengths)
                prune_into(*arrays, subject.trie, config, out, threads=shared)

        found = timed(benchmark, work, count, subject.cold)
    assert (out.sizes == config.num_nodes + 1).all()
    row = {"requests": requests, "threads": threads, "ms": found["best"] * 1e3, "median_ms": found["median"] * 1e3}
    figures.add("tree", **subject.head, **row)


def test_open(benchmark: Any, subject: Subject, figures: Figures) -> None:
    """Mapping the file."""
    found = timed(benchmark, lambda: NgramTrie.open(subject.trie.path), 1)
    info = subject.trie.info()
    row = {"bytes": info["bytes"], "ms": found["best"] * 1e3, "median_ms": found["median"] * 1e3}
    figures.add("open", **subject.head, **row)
    figures.add("size", **subject.head, nodes=info["num_nodes"], bytes_per_node=info["bytes_per_node"])


def test_count(benchmark: Any, source: tuple, figures: Figures) -> None:
    """Counting in memory on one thread, and from files to a trie file."""
    sequences, _, vocab_size = source
    tokens = sum(map(len, sequences))
    found = timed(benchmark, lambda: NgramTrie.count(sequences, vocab_size=vocab_size), tokens, rounds=5)
    speeds = {key: 1e-6 / value for key, value in found.items()}
    figures.add("count", what="memory", tokens=tokens, count_mtok_s=speeds["best"], median_mtok_s=speeds["median"])
    files = corpus_speed(sequences, vocab_size=vocab_size, repeats=2)
    median = files["tokens"] / files["median_seconds"] / 1e6
    figures.add("count", what="files", tokens=tokens, count_mtok_s=files["count_mtok_s"], median_mtok_s=median)


@pytest.mark.parametrize(("length", "cold"), LISTS)
def test_layouts(figures: Figures, length: int, cold: bool) -> None:
    """Ways to look candidates up in a list of children; the trie is not used."""
    for row in layouts.measure(length, 16_000_000 if cold else max(30_000, 2 * length), cold):
        figures.add("layout", in_cache=not cold, **row)
