"""Seconds of named spans of a CUDA stream, from events between them, without waiting while they are set."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used here."""

    def record(self, stream: torch.Stream) -> None:
        """Marks the place that the stream has been filled to."""
        ...

    def synchronize(self) -> None:
        """Waits until the stream has come to the mark."""
        ...

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds to a later mark; both have been reached."""
        ...


class StreamMarks:
    """A line of events; what passes on the stream between two of them belongs to the name given with the first.

    While a stream has nothing to do, its time passes at the pace of the host, so host work counts as long as the
    device waits for it. Events that have been read are used again.

    Args:
        current_stream: the stream to mark, asked anew for every mark.
        make_event: a new event that takes the time.
    """

    def __init__(self, current_stream: Callable[[], torch.Stream], make_event: Callable[[], Event]) -> None:
        self._current_stream, self._make_event = current_stream, make_event
        self._line: list[tuple[Event, str | None]] = []
        self._pool: list[Event] = []

    @classmethod
    def of_device(cls, device: torch.device | str) -> StreamMarks:
        """Marks on the current stream of a CUDA device."""
        return cls(lambda: torch.cuda.current_stream(device), lambda: torch.cuda.Event(enable_timing=True))

    def mark(self, name: str | None) -> None:
        """From here on the time of the stream is `name`'s; None for nobody's."""
        event = self._pool.pop() if self._pool else self._make_event()
        event.record(self._current_stream())
        self._line.append((event, name))

    def read(self) -> dict[str, float]:
        """Seconds by name up to the newest mark, since the last call; waits until the stream has come to it."""
        line, seconds = self._line, {}
        if not line:
            return seconds
        line[-1][0].synchronize()
        for (begin, name), (end, _) in pairwise(line):
            if name is not None:
                seconds[name] = seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
            self._pool.append(begin)
        del line[:-1]
        return seconds

    def clear(self) -> None:
        """Forgets all marks, without waiting."""
        self._pool += [event for event, _ in self._line]
        self._line = []
