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

    On a CUDA device the end of a stage waits for the work it queued, so asynchronous kernels are charged to the stage
    that launched them; this costs a synchronisation a stage. On a CPU a stage costs about half a microsecond.

    Attributes:
        seconds: stage name -> seconds since the last `reset` or `take`; only stages that ran.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._synchronise = str(device).startswith("cuda")
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

    def begin(self, name: str) -> None:
        """Starts stage `name` and pauses the one that is running."""
        now = perf_counter()
        if self._open:
            self._add(self._open[-1], now - self._mark)
        self._open.append(name)
        self._mark = now

    def end(self) -> None:
        """Ends the running stage and resumes the one around it."""
        if self._synchronise:
            import torch  # on a CPU the timer needs no torch

            torch.cuda.synchronize(self._device)
        now = perf_counter()
        self._add(self._open.pop(), now - self._mark)
        self._mark = now

    def reset(self) -> None:
        """Forgets all seconds; stages that are open keep running from now."""
        self.seconds = {}
        self._mark = perf_counter()

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call, and resets."""
        taken = self.seconds
        self.reset()
        return taken

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
