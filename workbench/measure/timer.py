"""The one timer: seconds of every stage of a round.

Stage names are fixed (`types.STAGES` and "prefill"). Nested stages are exclusive: while an inner stage runs, the outer
one stands still, so the stages of a round sum to the time spent inside any of them and nothing is counted twice.
Knows nothing about decoding.
"""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from workbench.types import STAGES

if TYPE_CHECKING:
    import torch

    from workbench.measure.stream_marks import StreamMarks

#: Names a timer accepts.
TIMED = (*STAGES, "prefill")


class _Stage:
    """The reusable context manager of one stage name."""

    __slots__ = ("_name", "_timer")

    def __init__(self, timer: StageTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._timer.begin(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.end()


class StageTimer:
    """Accumulates seconds by stage name.

    On a CUDA device stages are spans of the current stream between two events: nothing waits before `take` or
    `seconds`, kernels count where they were queued, and host work counts only as far as the stream had nothing to do
    meanwhile. So the stages sum to what passed on the stream. On a CPU a stage costs about half a microsecond.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._seconds: dict[str, float] = {}
        self._marks = _stream_marks(device) if str(device).startswith("cuda") else None
        self._stages = {name: _Stage(self, name) for name in TIMED}
        self._open: list[str] = []
        self._mark = 0.0

    def stage(self, name: str) -> _Stage:
        """A context manager that adds the time spent inside it to stage `name`.

        Raises:
            ValueError: `name` is no stage.
        """
        try:
            return self._stages[name]
        except KeyError:
            raise ValueError(f"stage={name!r} is unknown; allowed: {', '.join(TIMED)}") from None

    @property
    def seconds(self) -> dict[str, float]:
        """Stage name -> seconds since the last `reset` or `take`, of stages that ran; on a CUDA device it waits."""
        if self._marks is not None:
            for name, seconds in self._marks.read().items():
                self._add(name, seconds)
        return self._seconds

    def begin(self, name: str) -> None:
        """Starts stage `name` and pauses the one that is running."""
        if self._marks is None:
            now = perf_counter()
            if self._open:
                self._add(self._open[-1], now - self._mark)
            self._mark = now
        else:
            self._marks.mark(name)
        self._open.append(name)

    def end(self) -> None:
        """Ends the running stage and resumes the one around it."""
        name = self._open.pop()
        if self._marks is None:
            now = perf_counter()
            self._add(name, now - self._mark)
            self._mark = now
        else:
            self._marks.mark(self._open[-1] if self._open else None)

    def reset(self) -> None:
        """Forgets all seconds; stages that are open keep running from now."""
        self._seconds = {}
        if self._marks is None:
            self._mark = perf_counter()
            return
        self._marks.clear()
        if self._open:
            self._marks.mark(self._open[-1])

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, and resets; on a CUDA device it waits once for the newest stage."""
        taken = self.seconds
        self.reset()
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


def _stream_marks(device: torch.device | str) -> StreamMarks:
    from workbench.measure.stream_marks import StreamMarks  # on a CPU the timer needs no torch

    return StreamMarks.of_device(device)
