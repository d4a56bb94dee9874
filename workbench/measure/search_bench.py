"""How fast n-grams are counted, in memory and from files to a trie file; texts and checks of the search benchmarks.

The corpus that goals refer to is about six million word-level tokens of Python source, which every machine that runs
this has: the standard library and the installed packages.
"""

from __future__ import annotations

import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from workbench.measure.records import Check
from workbench.search import _jit
from workbench.search.count_corpus import count_corpus
from workbench.search.trie import NgramTrie

T = TypeVar("T")

#: A word, a sign, or a line's end with the indentation that follows.
_WORD = re.compile(r"\w+|[^\w\s]|\n[ \t]*")


def source_tokens(limit: int, folders: Sequence[str | Path] | None = None) -> tuple[list[np.ndarray], int]:
    """Word-level tokens of Python source.

    Args:
        limit: stop after the file that reaches this many tokens.
        folders: searched for .py files in this order; the standard library and installed packages when None.

    Returns:
        [T] int32 ids of every file, numbered by first occurrence, and the size of the vocabulary.

    Raises:
        ValueError: the folders hold no source.
    """
    if folders is None:
        folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    numbers: dict[str, int] = {}
    sequences: list[np.ndarray] = []
    total = 0
    for path in _source_files(folders):
        words = _WORD.findall(path.read_text(encoding="utf-8", errors="replace"))
        if words:
            sequences.append(np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32))
            total += len(words)
        if total >= limit:
            break
    if not sequences:
        raise ValueError(f"folders are {[str(folder) for folder in folders]}, allowed: folders that hold .py files")
    return sequences, len(numbers)


def count_speed(
    sequences: Sequence[np.ndarray], order: int = 3, vocab_size: int | None = None, repeats: int = 5
) -> dict[str, float]:
    """Times `NgramTrie.count` on one thread.

    Returns:
        tokens, seconds (best), median_seconds, count_mtok_s (million tokens a second, of the best), nodes and
        bytes_per_node of the trie.
    """
    trie, seconds = _timed(lambda: NgramTrie.count(sequences, order, vocab_size=vocab_size), repeats)
    info = trie.info()
    nodes = {"nodes": info["num_nodes"], "bytes_per_node": info["bytes_per_node"]}
    return _speeds(info["total_tokens"], seconds) | nodes


def corpus_speed(
    sequences: Sequence[np.ndarray],
    order: int = 3,
    vocab_size: int | None = None,
    workers: int = 1,
    memory_mb: float = 1024.0,
    files: int = 4,
    repeats: int = 3,
) -> dict[str, float]:
    """Times `count_corpus` from token shards on disk to a trie file, processes and merging included.

    Returns:
        As `count_speed`, without the trie, and spilled: how many pieces were merged.
    """
    with tempfile.TemporaryDirectory() as name:
        shards = Path(name) / "shards"
        shards.mkdir()
        for number in range(files):
            some = sequences[number::files]
            if some:
                bounds = np.cumsum([0, *(len(ids) for ids in some)])
                np.savez(shards / f"{number}.npz", tokens=np.concatenate(some), offsets=bounds)
        options = {"order": order, "vocab_size": vocab_size, "workers": workers, "memory_mb": memory_mb}
        counted, seconds = _timed(lambda: count_corpus([shards], Path(name) / "out.trie", **options), repeats)
    return _speeds(counted.tokens, seconds) | {"spilled": counted.spilled}


def walk_text(trie: NgramTrie, num_tokens: int, walk: int = 12, seed: int = 0) -> np.ndarray:
    """A text for a trie without a corpus: random walks from n-grams that are spread evenly over its last level.

    Args:
        trie: holds n-grams of full length.
        num_tokens: length of the text.
        walk: longest walk; one ends earlier where nothing follows its last tokens.
        seed: of everything random.

    Returns:
        [num_tokens] int64.

    Raises:
        ValueError: the trie holds no n-gram of full length.
    """
    arrays, starts = trie.arrays(), trie.arrays()[2]
    ends = np.cumsum(trie.header.level_sizes)
    if ends[-1] == ends[-2]:
        raise ValueError(f"level sizes of the trie are {trie.header.level_sizes}, allowed: the last one above 0")
    rng = np.random.default_rng(seed)
    text: list[int] = []
    while len(text) < num_tokens:
        node, path = int(rng.integers(ends[-2], ends[-1])), []
        for _ in range(trie.order):
            path.insert(0, _jit.token_at(arrays, node))
            # The last one whose children begin at or before it; a number of another type would have the array copied.
            node = int(np.searchsorted(starts, starts.dtype.type(node), side="right")) - 1
        while len(path) < walk:
            low, high = _jit.children_of(arrays, _jit.walk(arrays, np.array(path[1 - trie.order :], np.int64)))
            if low == high:
                break
            path.append(_jit.token_at(arrays, rng.integers(low, high)))
        text += path
    return np.array(text[:num_tokens], np.int64)


def search_checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Check]:
    """The figures with a goal, out of the rows of a search benchmark.

    Args:
        rows: with `table`: "tree" (trie, counts, requests, threads, ms), "query" (trie, counts, what, us), "count"
            (what, count_mtok_s), "size" (counts, bytes_per_node), "open" (ms). Goals of time hold for exact counts and
            the trie that fits into the caches, and `query_us` for so few contexts that what they touch of it stays
            there; many contexts (`query_us_spread`) and the large trie are checks without a goal.
    """

    def pick(table: str, field: str, **wanted: Any) -> list[float]:
        found = [row for row in rows if row["table"] == table and wanted.items() <= row.items()]
        return [row[field] for row in found]

    def worst(values: list[float]) -> float | None:
        return max(values, default=None)

    tree = {"counts": "exact", "requests": 1, "threads": 1}
    query, few = {"counts": "exact", "what": "batch"}, {"counts": "exact", "what": "small batch"}
    return {
        "tree_ms": Check(worst(pick("tree", "ms", trie="source", **tree)), 0.2, "<="),
        "query_us": Check(worst(pick("query", "us", trie="source", **few)), 0.7, "<="),
        "query_us_spread": Check(worst(pick("query", "us", trie="source", **query)), None, "<="),
        "count_mtok_s": Check(worst(pick("count", "count_mtok_s", what="memory")), 20.0, ">="),
        "bytes_per_node": Check(worst(pick("size", "bytes_per_node", counts="exact")), 9.0, "<="),
        "bytes_per_node_quantised": Check(worst(pick("size", "bytes_per_node", counts="quantised")), 6.0, "<="),
        "open_ms": Check(worst(pick("open", "ms")), 50.0, "<="),
        "tree_ms_large": Check(worst(pick("tree", "ms", trie="generated", **tree)), None, "<="),
        "query_us_large": Check(worst(pick("query", "us", trie="generated", **query)), None, "<="),
    }


def _source_files(folders: Sequence[str | Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            if path not in seen:  # the folder of packages may lie inside that of the standard library
                seen.add(path)
                yield path


def _timed(function: Callable[[], T], repeats: int) -> tuple[T, list[float]]:
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, allowed 1 or more")
    function()  # compiles, and touches the memory
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return result, seconds


def _speeds(tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    return {
        "tokens": tokens,
        "seconds": min(seconds),
        "median_seconds": statistics.median(seconds),
        "count_mtok_s": tokens / min(seconds) / 1e6,
    }
