"""Settings of a training run and its learning-rate schedule: linear warm-up, then cosine to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run.

    Attributes:
        steps: length of the run; None when it is limited by `seconds`.
        seconds: length of the run by the clock; the schedule then follows elapsed / seconds, so a repeated or resumed
            run is not bitwise the same. None when limited by `steps`.
        learning_rate, betas, weight_decay, clip_norm: AdamW and the gradient's largest norm.
        warmup_steps: steps of the linear warm-up.
        ema_decay: decay of the averaged weights, 0 for none.
        log_every, save_every: steps between records and between checkpoints (0: only at the end).
        bfloat16: run the forward under bfloat16 autocast, master weights stay fp32.

    Raises:
        ValueError: a field outside its range, or not exactly one of `steps` and `seconds`.
    """

    steps: int | None = None
    seconds: float | None = None
    learning_rate: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_steps: int = 100
    ema_decay: float = 0.0
    log_every: int = 100
    save_every: int = 0
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ValueError(f"steps={self.steps}, seconds={self.seconds}: set exactly one of them")
        limits = {
            "steps": (1, math.inf),
            "seconds": (0.0, math.inf),
            "learning_rate": (0.0, 10.0),
            "weight_decay": (0.0, 10.0),
            "clip_norm": (1e-6, math.inf),
            "warmup_steps": (0, math.inf),
            "ema_decay": (0.0, 0.999999),
            "log_every": (1, math.inf),
            "save_every": (0, math.inf),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value} outside {low}..{high}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in 0..1 (1 excluded)")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the run that is over before step `step` starts, 0..1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, elapsed_s / self.seconds) if self.seconds else 1.0

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of step `step` (from 0)."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.learning_rate * warm * 0.5 * (1.0 + math.cos(math.pi * progress))
