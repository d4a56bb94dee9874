"""Numbered lines of plain and compressed files; a compressed file that was cut off is noticed."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

_READ_BYTES = 1 << 14


class BrokenFile(Exception):
    """A compressed file is damaged or ends too early.

    Attributes:
        line: number of the line that could not be read.
    """

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1. They end in a line feed alone: other separators may stand inside a string.

    Raises:
        BrokenFile: the rest cannot be read.
        RuntimeError: the format's package is missing.
    """
    number = 0
    with contextlib.ExitStack() as stack:
        damaged, file = _open(path, stack)
        try:
            for number, line in enumerate(file, 1):
                yield number, line
        except damaged as error:
            raise BrokenFile(number + 1, str(error)) from error


def missing_package(path: Path, package: str) -> RuntimeError:
    """The error to raise when a format's package is not installed."""
    return RuntimeError(f"input {str(path)!r} needs the package {package!r}; it comes with the extra 'corpus'")


def _open(path: Path, stack: contextlib.ExitStack) -> tuple[tuple[type[Exception], ...], BinaryIO]:
    """(errors of a damaged file, its uncompressed bytes)."""
    if path.suffix == ".gz":
        return (EOFError, zlib.error, gzip.BadGzipFile), stack.enter_context(gzip.open(path))
    raw = stack.enter_context(path.open("rb"))
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise missing_package(path, "zstandard") from None
        reader = io.BufferedReader(_ZstdReader(raw, zstandard), 1 << 17)
        return (EOFError, zstandard.ZstdError), stack.enter_context(reader)
    return (), raw


class _ZstdReader(io.RawIOBase):
    """Uncompressed bytes of any number of frames. The package's own reader takes a cut frame for a complete one."""

    def __init__(self, file: BinaryIO, zstandard: ModuleType) -> None:
        self._file = file
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = None
        self._packed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: memoryview) -> int:
        while not self._ready:
            self._packed = self._packed or self._file.read(_READ_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the file ended inside a compressed frame")
                return 0
            self._frame = self._frame or self._new_frame()
            self._ready = memoryview(self._frame.decompress(self._packed))
            self._packed = b""
            if self._frame.eof:
                self._packed = self._frame.unused_data
                self._frame = None
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size
