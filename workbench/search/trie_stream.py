"""Writing tries larger than memory chunk by chunk, with temporary files for what grows."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from workbench.search._jit import CODE_BITS, COUNT_OVERFLOW
from workbench.search.count_codes import encode_counts
from workbench.search.ngram_count import Level
from workbench.search.trie_format import (
    ARRAY_NAMES,
    HEADER_BYTES,
    MAX_NODES,
    TrieHeader,
    pack_header,
)

_COPY_BYTES = 1 << 22
_MAX_GAP = 1 << 18


class Spill:
    """A temporary file of one dtype: appended to in order, read anywhere."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.size = 0
        self._path = path
        self._file = path.open("w+b", buffering=0)

    def append(self, values: np.ndarray) -> None:
        """Writes `values`, converted to the dtype, behind what is there."""
        values = np.ascontiguousarray(values, self.dtype).reshape(-1)
        self._file.seek(self.size * self.dtype.itemsize)
        data = memoryview(values).cast("B")
        while data:  # an unbuffered write may be partial
            data = data[self._file.write(data) :]
        self.size += values.size

    def read(self, low: int, high: int) -> np.ndarray:
        """Entries low..high-1."""
        self._file.seek(low * self.dtype.itemsize)
        return np.fromfile(self._file, self.dtype, high - low)

    def copy_to(self, file: object) -> None:
        """Writes everything into an open binary file."""
        self._file.seek(0)
        while data := self._file.read(_COPY_BYTES):
            file.write(data)

    def drop(self) -> None:
        """Closes and deletes the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class SpillFolder:
    """Makes spills in one folder and drops those that are left at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spills: list[Spill] = []

    def new(self, dtype: str) -> Spill:
        """An empty spill."""
        spill = Spill(self._folder / str(len(self._spills)), dtype)
        self._spills.append(spill)
        return spill

    def close(self) -> None:
        """Drops every spill."""
        for spill in self._spills:
            spill.drop()


def check_target(path: Path) -> None:
    """Refuses a file to write that could not take its place in the end, or would replace a device.

    Raises:
        ValueError: the folder does not exist, or `path` exists and is no file.
    """
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ValueError(f"file to write is {str(path)!r}, allowed: a file, or a new name in an existing folder")


@contextmanager
def spill_folder(target: Path, folder: str | Path | None) -> Iterator[SpillFolder]:
    """A place for temporary files in `folder` (beside `target` when None) that is gone afterwards, also on errors."""
    check_target(target)
    parent = target.parent if folder is None else Path(folder)
    if not parent.is_dir():
        raise ValueError(f"folder of temporary files is {str(parent)!r}, allowed: an existing folder")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=parent) as name:
        spills = SpillFolder(Path(name))
        try:
            yield spills
        finally:
            spills.close()


@contextmanager
def atomic_file(path: Path) -> Iterator[object]:
    """An open binary file that becomes `path` when the block ends well; else an older file stays as it is.

    Raises:
        ValueError: see `check_target`.
    """
    check_target(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        os.chmod(temporary, 0o644)  # mkstemp makes files private; a trie is data to share
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class TrieWriter:
    """Writes a trie from its n-grams in trie order: all of length 1, then all of length 2, and so on.

    What it writes is the file that `NgramTrie.save` writes for the same n-grams, byte for byte.

    Args:
        spills: where temporary files go; about as large as the trie.
        order: longest n-gram.
        vocab_size: token ids are below it.
        fingerprint: which tokenizer the ids belong to.
        quantised: keep counts as codes of 8 bits; the vocabulary then has up to 2^24 tokens.
    """

    def __init__(
        self, spills: SpillFolder, order: int, vocab_size: int, fingerprint: str = "", quantised: bool = False
    ) -> None:
        self._fields = {"order": order, "vocab_size": vocab_size, "fingerprint": fingerprint, "quantised": quantised}
        places, _ = TrieHeader(level_sizes=(0,) * order, num_overflow=0, total_tokens=0, **self._fields).layout()
        self._spills = {name: spills.new(dtype.str) for name, (dtype, _, _) in zip(ARRAY_NAMES, places, strict=True)}
        self._sizes = [0]
        self._num_nodes = 0
        self._next_parent = 0

    @property
    def level_size(self) -> int:
        """N-grams of the present length so far."""
        return self._sizes[-1]

    def append(self, chunk: Level) -> None:
        """Adds n-grams of the present length; parents (indices in the level above) ascend, siblings by token.

        Raises:
            ValueError: there are more than the format holds.
        """
        size = chunk.tokens.size
        if size == 0:
            return
        if self._num_nodes + size > MAX_NODES:
            raise ValueError(f"number of nodes is over {self._num_nodes}, allowed 0..{MAX_NODES}")
        self._start_parents(chunk.parents, int(chunk.parents[-1]) + 1)
        if self._fields["quantised"]:
            self._spills["tokens"].append(chunk.tokens.astype(np.uint32) << CODE_BITS | encode_counts(chunk.counts))
        else:
            large = np.flatnonzero(chunk.counts >= COUNT_OVERFLOW)
            self._spills["tokens"].append(chunk.tokens)
            self._spills["counts"].append(np.minimum(chunk.counts, COUNT_OVERFLOW))
            self._spills["overflow_nodes"].append(self._num_nodes + large)
            self._spills["overflow_counts"].append(chunk.counts[large])
        self._num_nodes += size
        self._sizes[-1] += size

    def end_level(self) -> None:
        """Goes on to n-grams that are one token longer."""
        if len(self._sizes) > 1:
            self._start_parents(np.zeros(0, np.int64), self._sizes[-2])
        self._sizes.append(0)
        self._next_parent = 0

    def finish(self, path: Path, total_tokens: int) -> TrieHeader:
        """Writes the file, atomically. Every level has been ended.

        Raises:
            ValueError: a field of the header is out of range.
        """
        self._spills["starts"].append(np.array([self._num_nodes]))
        num_overflow = self._spills["overflow_nodes"].size
        fields = {
            **self._fields,
            "level_sizes": tuple(self._sizes[: self._fields["order"]]),
            "num_overflow": num_overflow,
            "total_tokens": total_tokens,
        }
        header = TrieHeader(**fields)
        with atomic_file(path) as file:
            file.write(bytes(HEADER_BYTES))
            for spill, (_, _, offset) in zip(self._spills.values(), header.layout()[0], strict=True):
                file.write(bytes(offset - file.tell()))
                spill.copy_to(file)
                spill.drop()
            header = TrieHeader(**fields, data_crc=_crc_behind_header(file))
            file.seek(0)
            file.write(pack_header(header))
        return header

    def _start_parents(self, parents: np.ndarray, stop: int) -> None:
        """Notes where the children of parents up to stop - 1 begin, given the parents of the next nodes."""
        if len(self._sizes) == 1:
            return
        for low in range(self._next_parent, stop, _MAX_GAP):
            wanted = np.arange(low, min(low + _MAX_GAP, stop))
            self._spills["starts"].append(self._num_nodes + np.searchsorted(parents, wanted))
        self._next_parent = max(self._next_parent, stop)


def _crc_behind_header(file: object) -> int:
    file.flush()
    file.seek(HEADER_BYTES)
    crc = 0
    while data := file.read(_COPY_BYTES):
        crc = zlib.crc32(data, crc)
    return crc
