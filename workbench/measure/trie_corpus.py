"""From a corpus to a trie and the text that was kept back from it, in memory that does not grow with the corpus.

Documents stream from the tokenizer into token shards on disk, every so many of them are kept back, and `count_corpus`
counts the shards. Text that was counted would flatter coverage: every n-gram of it is in the trie.
"""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.measure.search_bench import source_tokens
from workbench.measure.trie_plan import EMBEDDED, PYTHON, WORDS, TriePlan
from workbench.models.embedded import embedded_folder
from workbench.search.corpus import CorpusOptions, Problems, find_inputs, read_tokens
from workbench.search.count_corpus import count_corpus
from workbench.search.quantise import quantise_trie
from workbench.search.trie import NgramTrie, vocabulary_fingerprint

#: Tokens of a shard: small enough that several workers have something to do.
_SHARD_TOKENS = 1 << 21
#: Documents are counted, not kept back, once so many tokens are; more would tell nothing new.
_MOST_HELD_OUT = 1 << 21
#: Counted tokens that stay in memory to time counting by itself.
_MOST_KEPT = 1 << 24


@dataclass
class Source:
    """Token sequences of a corpus, one a document.

    Attributes:
        documents: [T] integer ids each; read once.
        vocab_size: ids are below it; None when unknown.
        fingerprint: of the tokenizer, "" when unknown.
        problems: bad lines, filled while `documents` is read.
    """

    documents: Iterator[np.ndarray]
    vocab_size: int | None = None
    fingerprint: str = ""
    problems: Problems = field(default_factory=lambda: Problems(CorpusOptions()))


@dataclass
class Split:
    """A corpus cut in two.

    Attributes:
        held_out: documents kept back, int32 ids each.
        kept: the first documents that are counted, 16 M tokens at most, int32 ids each.
        documents, tokens: how many are counted.
        largest: id of all documents, -1 when there is none.
    """

    held_out: list[np.ndarray] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    largest: int = -1


@dataclass(frozen=True)
class BuiltTrie:
    """A trie, what it took, and the text to judge it by.

    Attributes:
        trie: opened from its file.
        split: what was counted and what was not.
        row: figures of the build, for the record.
        reports: descriptions of bad lines.
    """

    trie: NgramTrie
    split: Split
    row: dict[str, Any]
    reports: tuple[str, ...]


def build_trie(plan: TriePlan, out: Path, progress: bool = False) -> BuiltTrie:
    """Counts the corpus of a plan, without the documents kept back, and opens the trie.

    Args:
        plan: what to count and how.
        out: trie file to write; shards lie beside it meanwhile, 4 bytes a token.
        progress: show bars.

    Raises:
        ValueError: the corpus holds nothing that can be read, or too few documents to keep some back.
        RuntimeError: see `count_corpus`.
    """
    start = time.perf_counter()
    source = open_source(plan)
    shards = Path(tempfile.mkdtemp(prefix=".shards-", dir=out.parent))
    try:
        split = split_documents(source.documents, shards, plan.held_out, plan.seed, plan.max_tokens)
        read = time.perf_counter()
        counted = count_corpus(
            [shards],
            out,
            plan.order,
            plan.min_count,
            source.vocab_size or split.largest + 1,  # ids that only documents kept back hold are ids too
            source.fingerprint,
            workers=plan.workers,
            memory_mb=plan.memory_mb,
            progress=progress,
        )
        done = time.perf_counter()
    finally:
        shutil.rmtree(shards)
    if plan.quantised:
        quantise_trie(out, out)
    trie = NgramTrie.open(out)
    info = trie.info()
    row = {
        "documents": split.documents,
        "tokens": split.tokens,
        "held_out_documents": len(split.held_out),
        "held_out_tokens": sum(ids.size for ids in split.held_out),
        "bad_lines": source.problems.count,
        "read_s": read - start,
        "count_s": done - read,
        "build_mtok_s": split.tokens / (done - read) / 1e6,
        "spilled": counted.spilled,
        "vocab_size": trie.vocab_size,
        "nodes": trie.num_nodes,
        "mb": info["bytes"] / 1e6,
        "bytes_per_node": info["bytes_per_node"],
    }
    return BuiltTrie(trie, split, row, tuple(source.problems.reports))


def open_source(plan: TriePlan) -> Source:
    """The documents that a plan names.

    corpus: "python" is the source of the standard library and installed packages, else a file or folder as
    `count_corpus` takes them. tokenizer: "words" numbers the words of Python source as they come; "embedded", a
    tokenizer.json or the folder of one; "" for files of tokens.

    Raises:
        ValueError: nothing that can be read.
    """
    if plan.tokenizer == WORDS:
        sequences, vocab_size = source_tokens(plan.max_tokens or 2**62)
        return Source(iter(sequences), vocab_size)
    vocabulary: dict[str, int] = {}
    suffixes, path = (".py",) if plan.corpus == PYTHON else plan.suffixes, None
    if plan.tokenizer:
        path = _tokenizer_file(plan.tokenizer)
        from tokenizers import Tokenizer  # files of tokens need none

        vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    options = CorpusOptions(tokenizer=None if path is None else str(path), text_suffixes=suffixes)
    files = _python_files() if plan.corpus == PYTHON else find_inputs([Path(plan.corpus).expanduser()], options)
    problems = Problems(options)
    return Source(
        _documents(files, options, problems),
        max(vocabulary.values()) + 1 if vocabulary else None,
        vocabulary_fingerprint(vocabulary) if vocabulary else "",
        problems,
    )


def split_documents(
    documents: Iterable[np.ndarray], folder: Path, share: float, seed: int = 0, max_tokens: int = 0
) -> Split:
    """Writes documents as token shards into `folder` and keeps some back, evenly spread.

    Args:
        documents: [T] ids each.
        folder: exists; receives `00000.npz` and so on.
        share: of the documents to keep back, above 0 and below 1; 2 M tokens at most.
        seed: which ones.
        max_tokens: stop after the document that reaches this many; 0 for all.

    Raises:
        ValueError: an id is out of range, nothing is left to count, or nothing was kept back.
    """
    split, shard, total, held_out = Split(), _Shard(folder), 0, 0
    offset = np.random.default_rng(seed).random()
    for number, wide in enumerate(documents):
        ids = _narrow(wide)
        total += ids.size
        split.largest = max(split.largest, int(ids.max(initial=-1)))
        chosen = int((number + 1) * share + offset) > int(number * share + offset)
        if chosen and held_out < _MOST_HELD_OUT:
            split.held_out.append(ids)
            held_out += ids.size
        else:
            if split.tokens < _MOST_KEPT:
                split.kept.append(ids)
            split.documents, split.tokens = split.documents + 1, split.tokens + ids.size
            shard.add(ids)
        if max_tokens and total >= max_tokens:
            break
    shard.write()
    if not split.tokens or not held_out:
        found = f"{split.documents} documents to count and {len(split.held_out)} to keep back"
        raise ValueError(f"held_out={share} leaves {found}; allowed: at least one of each, with text")
    return split


class _Shard:
    """Token shards of a folder, one open at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._documents: list[np.ndarray] = []
        self._size = 0
        self._written = 0

    def add(self, ids: np.ndarray) -> None:
        """Adds a document."""
        self._documents.append(ids)
        self._size += ids.size
        if self._size >= _SHARD_TOKENS:
            self.write()

    def write(self) -> None:
        """Writes what has been added since the last time, if anything."""
        if self._documents:
            offsets = np.cumsum([0, *(ids.size for ids in self._documents)])
            path = self._folder / f"{self._written:05}.npz"
            np.savez(path, tokens=np.concatenate(self._documents), offsets=offsets)
            self._documents, self._size, self._written = [], 0, self._written + 1


def _narrow(ids: np.ndarray) -> np.ndarray:
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        raise ValueError(f"the corpus holds ids {ids.min()}..{ids.max()}, allowed 0..{2**31 - 1}")
    return ids.astype(np.int32)


def _documents(files: list[Path], options: CorpusOptions, problems: Problems) -> Iterator[np.ndarray]:
    for _, (tokens, bounds) in read_tokens(files, options, problems):
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if last > first:
                yield tokens[first:last]


def _python_files() -> list[Path]:
    folders = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))
    return list(dict.fromkeys(path for folder in folders for path in sorted(folder.rglob("*.py"))))


def _tokenizer_file(name: str) -> Path:
    path = embedded_folder() if name == EMBEDDED else Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"tokenizer={name!r}: there is no file {path.name}")
    return path
