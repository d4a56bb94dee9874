"""Threads that share the requests of a search out; compiled code runs on them side by side, without the lock.

An object of the caller instead of numba's parallel loops: those share one pool a process, which on some platforms must
not be used by two threads at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral


class SearchThreads:
    """A fixed number of threads; use it as a context or call `close`.

    Args:
        count: threads in all, the caller's included, 1..256.

    Raises:
        ValueError: `count` is out of range or not an integer.
    """

    def __init__(self, count: int) -> None:
        if not isinstance(count, Integral) or not 1 <= count <= 256:
            raise ValueError(f"count is {count!r}, allowed: an integer in 1..256")
        self.count = int(count)
        self._executor: ThreadPoolExecutor | None = None
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        if self.count > 1:
            self._executor = ThreadPoolExecutor(self.count - 1, thread_name_prefix="search")

    def over(self, size: int, work: Callable[[int, int], None]) -> None:
        """Runs work(low, high) over neighbouring parts of 0..size, one a thread; what one raises is raised here."""
        if self._process != os.getpid():
            self._start()  # threads do not survive a fork, and work given to them would never end
        parts = min(self.count, size)
        bounds = [size * i // parts for i in range(parts + 1)] if parts else [0, 0]
        waiting = [self._executor.submit(work, *bounds[i : i + 2]) for i in range(1, parts)]
        try:
            work(*bounds[:2])
        finally:  # the others write into the caller's arrays, so they must have ended in any case
            done = [future.exception() for future in waiting]
        for error in done:
            if error is not None:
                raise error

    def close(self) -> None:
        """Ends the threads."""
        if self._executor is not None:
            self._executor.shutdown()

    def __enter__(self) -> SearchThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
