"""What a training is asked for, checked before anything expensive runs.

Knows the parameters of notebook `02_train_drafter` by name; what depends on the target is `Recipe.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.train.checkpoint import read_checkpoint
from workbench.train.recipe import Recipe
from workbench.train.schedule import TrainConfig
from workbench.train.table import build_recipe
from workbench.train.text import check_held_out

_LEAST = {"num_samples": 0, "num_prompts": 1, "max_new_tokens": 1, "walked": 1, "seed": 0}
_LOOP = ("learning_rate", "weight_decay", "warmup_steps", "ema_decay", "log_every")
_SAVE_EVERY = 500


@dataclass(frozen=True)
class TrainingPlan:
    """What the parameters come to.

    Attributes:
        recipe: of the method.
        config: settings of the training loop.
    """

    recipe: Recipe
    config: TrainConfig

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> TrainingPlan:
        """The plan of a notebook's parameters.

        Raises:
            ValueError: a value out of range, values that contradict each other, a name that is unknown, or a file to
                resume from that is no checkpoint.
        """
        for name, least in _LEAST.items():
            if params[name] < least:
                raise ValueError(f"{name}={params[name]} must be at least {least}")
        check_held_out(params["held_out"])
        plan = cls(build_recipe(params["method"], params), _config(params))
        if params["resume"]:
            read_checkpoint(params["resume"])
        return plan


def _config(params: Mapping[str, Any]) -> TrainConfig:
    num_steps, seconds = params["num_steps"], params["seconds"]
    if min(num_steps, seconds) < 0 or bool(num_steps) == bool(seconds):
        raise ValueError(f"num_steps={num_steps}, seconds={seconds}; allowed: one of them above 0, the other 0")
    return TrainConfig(
        steps=num_steps or None,
        seconds=seconds or None,
        **{name: params[name] for name in _LOOP},
        save_every=_SAVE_EVERY,
        bfloat16=params["device"].startswith("cuda"),
    )
