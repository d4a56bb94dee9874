"""Counting a corpus of any size into a trie file, in bounded memory, by several processes or a cluster.

Documents stream into a buffer; a full one is counted (`ngram_count.py`) and spilled as a complete small trie. At the
end the small tries are merged and rare n-grams dropped, so counts are exact and the file is the same, byte for byte,
whatever the memory, the number of workers and which of them got which file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from workbench.search.chunk_buffer import ChunkBuffer
from workbench.search.corpus import CorpusOptions, Problems, find_inputs, read_tokens
from workbench.search.ngram_count import Level, TokenChunk, check_order, count_levels, key_words
from workbench.search.trie_format import MAX_VOCAB, read_header
from workbench.search.trie_merge import merge_tries, threshold_trie
from workbench.search.trie_stream import TrieWriter, atomic_file, check_target, spill_folder

_PIECE = 1 << 18
#: Working memory of a merge for each n-gram of a trie that is loaded, and of most of them at once.
_MERGE_BYTES = 200
_MERGE_PIECE = 1 << 14
_MAX_OPEN = 64
_MIN_CHUNK = 256
_MAX_CHUNK = 2**30


@dataclass(frozen=True)
class PartSettings:
    """What counting one part of the files needs; goes to other processes and machines.

    Attributes:
        order: longest n-gram.
        chunk_tokens: tokens that are counted at once.
        vocab_size: ids are below it; None allows all and takes the largest + 1.
        fingerprint: which tokenizer the ids belong to.
        spill_dir: folder for the small tries; on a cluster one that all machines see.
        corpus: how files are read.
    """

    order: int
    chunk_tokens: int
    vocab_size: int | None
    fingerprint: str
    spill_dir: str
    corpus: CorpusOptions


@dataclass(frozen=True)
class PartResult:
    """Counts of a part of the files.

    Attributes:
        tries: paths of the small tries.
        problems: bad lines.
        reports: the first of these.
    """

    tries: tuple[str, ...]
    problems: int
    reports: tuple[str, ...]


@dataclass(frozen=True)
class CorpusCount:
    """What was counted.

    Attributes:
        files: input files.
        tokens: tokens counted.
        spilled: small tries that were merged.
        problems: bad lines that were left out.
        reports: "file, line n: what is wrong" of the first ones.
    """

    files: int
    tokens: int
    spilled: int
    problems: int
    reports: tuple[str, ...]


def count_corpus(
    inputs: Sequence[str | Path],
    out: str | Path,
    order: int = 3,
    min_count: int | Sequence[int] = 1,
    vocab_size: int | None = None,
    fingerprint: str = "",
    options: CorpusOptions | None = None,
    workers: int = 1,
    memory_mb: float = 1024.0,
    cluster: str | object | None = None,
    spill_dir: str | Path | None = None,
    progress: bool = False,
) -> CorpusCount:
    """Counts every n-gram of length 1..order inside one document and writes the trie.

    Args:
        inputs: files, and folders of files; see `corpus.py`.
        out: trie file to write; the folder must exist.
        order: longest n-gram, 2..5.
        min_count: least number of occurrences that is kept, for all lengths or one for each, as in `NgramTrie.count`.
        vocab_size: ids are below it; the largest id + 1 when None.
        fingerprint: which tokenizer the ids belong to.
        options: how inputs are read.
        workers: files are read and counted by this many processes (1: by this one); on a cluster, tasks that share a
            machine.
        memory_mb: working memory of all workers together, beyond the interpreters and, in each, what is being read: a
            document or a token shard (.npz; an array in .npy is mapped, not loaded).
        cluster: address of a Dask scheduler, or a client with `map` and `gather`; None counts here. Inputs,
            tokenizer and `spill_dir` need the same paths on all its machines.
        spill_dir: folder for temporary files, a few times as large as the trie; beside `out` when None.
        progress: show a bar.

    Raises:
        ValueError: an argument, an input or an id is out of range; a bad line if `options` say so.
        RuntimeError: an optional package is missing, or a worker process died.
    """
    min_counts = check_order(order, min_count)
    check_resources(workers, memory_mb)
    if vocab_size is not None:
        _check("vocab_size", vocab_size, 1, MAX_VOCAB)
    options = options or CorpusOptions()
    out = Path(out)
    files = find_inputs(inputs, options)
    if options.tokenizer is not None:  # other processes may have another working directory
        options = replace(options, tokenizer=str(Path(options.tokenizer).resolve()))
    memory = memory_mb * 2**20
    parent = out.parent if spill_dir is None else Path(spill_dir)
    check_target(out)
    if not parent.is_dir():
        raise ValueError(f"folder of spills is {str(parent)!r}, allowed: an existing folder")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.spill-", dir=parent) as spill:
        chunk = chunk_tokens(memory / workers, order, vocab_size)
        settings = PartSettings(order, chunk, vocab_size, fingerprint, str(Path(spill).resolve()), options)
        parts = split_files(files, 1 if workers == 1 and cluster is None else 4 * workers)
        results = _count_parts(parts, settings, workers, cluster, progress)
        tries = [path for result in results for path in result.tries]
        tokens = _merge(tries, out, min_counts, memory, spill, progress)
    reports = [report for result in results for report in result.reports][: options.max_reports]
    return CorpusCount(len(files), tokens, len(tries), sum(result.problems for result in results), tuple(reports))


def check_resources(workers: int, memory_mb: float) -> None:
    """Raises a ValueError if one is out of range."""
    _check("workers", workers, 1, 4096)
    _check("memory_mb", memory_mb, 1e-3, 2**30)


def chunk_tokens(memory_bytes: float, order: int, vocab_size: int | None) -> int:
    """Tokens that can be counted at once when every n-gram occurs once."""
    words, _, _ = key_words(MAX_VOCAB - 1 if vocab_size is None else vocab_size - 1, order)
    sorting = 4 + 16 * words
    levels = 4 + 8 * words + 5 + 16 * order
    return int(np.clip(memory_bytes // max(sorting, levels), _MIN_CHUNK, _MAX_CHUNK))


def split_files(files: Sequence[Path], parts: int) -> list[list[Path]]:
    """The files in up to `parts` lists of similar total size."""
    lists: list[list[Path]] = [[] for _ in range(min(parts, len(files)))]
    sizes = [0] * len(lists)
    for path in sorted(files, key=lambda file: -file.stat().st_size):
        smallest = sizes.index(min(sizes))
        lists[smallest].append(path)
        sizes[smallest] += path.stat().st_size + 1
    return lists


def count_part(files: Sequence[Path], settings: PartSettings) -> PartResult:
    """Counts files into small tries in the spill folder. What a process of a pool or a cluster runs."""
    problems = Problems(settings.corpus)
    buffer = ChunkBuffer(settings.chunk_tokens, settings.order)
    tries: list[str] = []
    for path, (tokens, bounds) in read_tokens(files, settings.corpus, problems):
        for chunk in buffer.add(tokens, bounds, settings.vocab_size, f"input {str(path)!r}"):
            tries.append(_spill(chunk, settings))
    if len(buffer) or not tries:
        tries.append(_spill(buffer.take(), settings))
    return PartResult(tuple(tries), problems.count, tuple(problems.reports))


def _spill(chunk: TokenChunk, settings: PartSettings) -> str:
    """Counts a chunk into a trie file with a name of its own, since a cluster may run a part twice."""
    levels = count_levels(chunk, settings.order)
    vocab_size = max(chunk.largest, 0) + 1 if settings.vocab_size is None else settings.vocab_size
    path = Path(settings.spill_dir) / f"{uuid.uuid4().hex}.trie"
    with spill_folder(path, None) as spills:
        writer = TrieWriter(spills, settings.order, vocab_size, settings.fingerprint)
        for level in levels:
            for first in range(0, level.tokens.size, _PIECE):
                part = slice(first, first + _PIECE)
                writer.append(Level(level.tokens[part], level.counts[part], level.parents[part]))
            writer.end_level()
        writer.finish(path, int(chunk.counted.sum()))
    return str(path)


def _count_parts(
    parts: list[list[Path]], settings: PartSettings, workers: int, cluster: str | object | None, progress: bool
) -> list[PartResult]:
    if cluster is not None:
        return _on_cluster(cluster, parts, settings)
    bar = {"total": len(parts), "desc": "count", "unit": "part", "disable": not progress}
    if workers == 1:
        return [count_part(part, settings) for part in tqdm(parts, **bar)]
    # New interpreters: a tokenizer's threads do not survive a fork.
    with ProcessPoolExecutor(min(workers, len(parts)), get_context("spawn"), _one_thread) as pool:
        return list(tqdm(pool.map(count_part, parts, [settings] * len(parts)), **bar))


def _one_thread() -> None:
    """In a worker process: the tokenizer keeps to one thread, the other cores have workers of their own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _on_cluster(cluster: str | object, parts: list[list[Path]], settings: PartSettings) -> list[PartResult]:
    paths = [[path.resolve() for path in part] for part in parts]
    if not isinstance(cluster, str):
        return cluster.gather(cluster.map(count_part, paths, [settings] * len(paths), pure=False))
    try:
        from distributed import Client
    except ImportError:
        raise RuntimeError("a scheduler needs the package 'distributed'; it comes with the extra 'cluster'") from None
    with Client(cluster) as client:
        return client.gather(client.map(count_part, paths, [settings] * len(paths), pure=False))


def _merge(
    tries: Sequence[str], out: Path, min_counts: tuple[int, ...], memory: float, spill: str, progress: bool
) -> int:
    """Merges tries, deletes them, drops rare n-grams and writes `out`; returns the tokens counted."""
    at_once = int(np.clip(memory // (_MERGE_BYTES * _MERGE_PIECE), 2, _MAX_OPEN))
    while len(tries) > 1:
        groups = [tries[first : first + at_once] for first in range(0, len(tries), at_once)]
        tries = [_merged(group, memory, spill, progress) for group in groups]
    if max(min_counts) > 1:
        piece = max(_MIN_CHUNK, int(memory // _MERGE_BYTES))
        threshold_trie(tries[0], out, min_counts, folder=spill, chunk=piece, progress=progress)
    else:
        _move(Path(tries[0]), out)
    return read_header(out).total_tokens


def _merged(tries: Sequence[str], memory: float, spill: str, progress: bool) -> str:
    if len(tries) == 1:
        return tries[0]
    path = f"{spill}/{uuid.uuid4().hex}.trie"
    piece = max(_MIN_CHUNK, int(memory // (_MERGE_BYTES * len(tries))))
    merge_tries(tries, path, chunk=piece, progress=progress)
    for name in tries:
        os.unlink(name)
    return path


def _move(source: Path, target: Path) -> None:
    """Puts a finished file in its place, atomically also from another file system."""
    if source.stat().st_dev != target.parent.stat().st_dev:
        with source.open("rb") as data, atomic_file(target) as file:
            shutil.copyfileobj(data, file, 1 << 22)
    else:
        os.replace(source, target)


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, allowed {low}..{high}")
