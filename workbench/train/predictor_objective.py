"""Trains DScale's acceptance predictor on a recorded trace (arXiv 2609.37532, section on the predictor).

Loss: binary cross-entropy, mean over positions, plus 0.02 times the squared error of the sum of the probabilities
(before they are made to fall) as an estimate of the accepted length. Rows whose draft was cut short are left out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from workbench.budget.features import BATCH_SIZE, feature_size
from workbench.budget.predictor import AcceptancePredictor, fold_standardisation, running_minimum
from workbench.budget.trace import Trace
from workbench.train.data import RowOrder
from workbench.train.schedule import TrainConfig
from workbench.train.trainer import Trainer

#: A feature that varies less than this share of (1 + its mean) is taken as constant: float16 rounds to about as much.
_CONSTANT = 1e-3
#: Rows scored at once.
_CHUNK = 8192


@dataclass(frozen=True)
class PredictorRecipe:
    """Settings of a run.

    Attributes:
        epochs: passes over the rows; the weights of the epoch with the lowest validation loss are kept.
        batch_size: rows of a step.
        learning_rate, weight_decay: of AdamW, with warm-up and cosine.
        length_weight: weight of the squared error of the expected length.
        use_live_count: let the network see how many requests were live. It has no bearing on what becomes of one
            draft, and a trace of one concurrency would teach nonsense about others, so by default it is shut out.
        seed: of weights and order.

    Raises:
        ValueError: a field outside its range.
    """

    epochs: int = 30
    batch_size: int = 1024
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    length_weight: float = 0.02
    use_live_count: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("length_weight", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        self.schedule(1)

    def schedule(self, num_rows: int) -> TrainConfig:
        """Settings of the training loop: one record an epoch."""
        steps = max(1, num_rows // self.batch_size)
        return TrainConfig(
            steps=self.epochs * steps,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=(0.9, 0.99),
            warmup_steps=min(50, steps),
            log_every=steps,
        )


@dataclass(frozen=True)
class LabelledRows:
    """Features with their accepted lengths, on one device.

    Attributes:
        features: [S, F] float16 as recorded.
        accepted: [S] int64.
    """

    features: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def of(cls, trace: Trace, device: torch.device | str = "cpu") -> LabelledRows:
        """The rows of a trace whose whole draft was verified.

        Raises:
            ValueError: the trace has no features or other ones, or no such row.
        """
        _check_features(trace)
        trace = trace.select(trace.uncensored)
        if not len(trace):
            raise ValueError("the trace has no row whose whole draft was verified")
        accepted = torch.from_numpy(trace.accepted.astype(np.int64))
        return cls(torch.from_numpy(trace.features).to(device), accepted.to(device))

    def __len__(self) -> int:
        """S."""
        return len(self.accepted)


class RowBatches:
    """Batches of labelled rows, reshuffled every epoch."""

    def __init__(self, rows: LabelledRows, batch_size: int, seed: int) -> None:
        self._rows = rows
        self._order = RowOrder([np.arange(len(rows))], [batch_size], seed)
        self.identity = f"{self._order.identity} accepted {int(rows.accepted.sum())}"

    def batch(self, step: int) -> LabelledRows:
        """The rows of step `step`."""
        index = torch.from_numpy(self._order.rows(step)).to(self._rows.accepted.device)
        return LabelledRows(self._rows.features[index], self._rows.accepted[index])


def predictor_loss(
    logits: torch.Tensor, accepted: torch.Tensor, length_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy, squared error of the expected length times its weight), both scalars.

    Args:
        logits: [S, n] of "at least j are accepted", j = 1..n.
        accepted: [S] int64.
        length_weight: see `PredictorRecipe`.
    """
    hits = (accepted[:, None] > torch.arange(logits.shape[1], device=logits.device)).float()
    length = functional.mse_loss(logits.sigmoid().sum(1), accepted.float())
    return functional.binary_cross_entropy_with_logits(logits, hits), length_weight * length


class PredictorObjective:
    """The network on standardised features.

    Args:
        rows: training rows; mean and deviation of the features are theirs.
        width: rows of a draft.
        recipe: settings.
    """

    def __init__(self, rows: LabelledRows, width: int, recipe: PredictorRecipe) -> None:
        device = rows.features.device
        with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it is
            torch.default_generator.manual_seed(recipe.seed)
            self.module = AcceptancePredictor(width).to(device)
        self._length_weight = recipe.length_weight
        self._mean, deviation = _moments(rows.features)
        self._varies = deviation > _CONSTANT * (1 + self._mean.abs())
        if not recipe.use_live_count:
            self._varies[feature_size(width) - BATCH_SIZE] = False
        self._deviation = torch.where(self._varies, deviation, 1.0)
        self.identity = f"predictor {asdict(recipe)} mean {self._mean.sum().item()!r}"

    def loss(self, batch: LabelledRows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, its two parts as metrics)."""
        inputs = (batch.features.float() - self._mean) / self._deviation * self._varies
        entropy, length = predictor_loss(self.module(inputs), batch.accepted, self._length_weight)
        return entropy + length, {"cross_entropy": entropy.detach(), "length_error": length.detach()}

    @torch.no_grad()
    def mean_loss(self, rows: LabelledRows) -> float:
        """Loss of all rows."""
        parts = zip(rows.features.split(_CHUNK), rows.accepted.split(_CHUNK), strict=True)
        losses = [self.loss(LabelledRows(x, y))[0].item() * len(y) for x, y in parts]
        return sum(losses) / len(rows)

    @torch.no_grad()
    def export(self) -> AcceptancePredictor:
        """The network of raw features; those that never varied in training count for nothing."""
        model = copy.deepcopy(self.module)
        model.layers[0].weight.mul_(self._varies)
        with torch.random.fork_rng(devices=[]):
            return fold_standardisation(model, self._mean, self._deviation)


@dataclass(frozen=True)
class PredictorRun:
    """What training came to.

    Attributes:
        predictor: of raw features, on the CPU.
        recipe: settings of the run with the lowest validation loss.
        validation_loss, constant_loss: of the predictor, and of the training rows' own rates for every row.
        rows: one table row an epoch of every run: run, weight_decay, learning_rate, epoch, loss, validation_loss.
        num_train, num_validation: rows used.
        validation: the held-back part of the trace, scored as "predictor".
    """

    predictor: AcceptancePredictor
    recipe: PredictorRecipe
    validation_loss: float
    constant_loss: float
    num_train: int
    num_validation: int
    validation: Trace
    rows: list[dict[str, Any]] = field(default_factory=list)


def train_predictor(
    trace: Trace,
    recipes: Sequence[PredictorRecipe] = (PredictorRecipe(),),
    validation_share: float = 0.1,
    split_seed: int = 0,
    device: torch.device | str = "cpu",
    progress: bool = False,
) -> PredictorRun:
    """Trains one network a recipe and keeps the one with the lowest validation loss.

    Args:
        trace: with features.
        recipes: settings to try.
        validation_share, split_seed: share of the distinct prompts that are held back, and how they are drawn.
        device: where to train.
        progress: show a bar.

    Raises:
        ValueError: no recipe, features of another kind, or too few prompts or rows.
    """
    if not recipes:
        raise ValueError("recipes is empty; give at least one")
    _check_features(trace)
    rest, held = trace.split_by_prompt(validation_share, split_seed)
    train, validation = LabelledRows.of(rest, device), LabelledRows.of(held, device)
    best: tuple[float, AcceptancePredictor, PredictorRecipe] | None = None
    table: list[dict[str, Any]] = []
    for number, recipe in enumerate(recipes):
        model, rows = _run(train, validation, trace.width, recipe, progress)
        head = {"run": number, "weight_decay": recipe.weight_decay, "learning_rate": recipe.learning_rate}
        table += [head | row for row in rows]
        loss = min(row["validation_loss"] for row in rows)
        if best is None or loss < best[0]:
            best = loss, model, recipe
    loss, model, recipe = best[0], best[1].cpu(), best[2]
    blind = constant_loss(train, validation, trace.width, recipe.length_weight)
    return PredictorRun(model, recipe, loss, blind, len(train), len(validation), score_trace(held, model), table)


def _run(
    train: LabelledRows, validation: LabelledRows, width: int, recipe: PredictorRecipe, progress: bool
) -> tuple[AcceptancePredictor, list[dict[str, Any]]]:
    objective = PredictorObjective(train, width, recipe)
    batches = RowBatches(train, recipe.batch_size, recipe.seed)
    rows: list[dict[str, Any]] = []
    kept: dict[str, AcceptancePredictor] = {}

    def judge(trainer: Trainer, record: dict[str, Any]) -> None:
        loss = objective.mean_loss(validation)
        if not rows or loss < min(row["validation_loss"] for row in rows):
            kept["best"] = objective.export()
        rows.append({"epoch": len(rows) + 1, "loss": record["loss"], "validation_loss": loss})

    Trainer(objective, batches, recipe.schedule(len(train))).run(on_record=judge, progress=progress)
    return kept["best"], rows


def constant_loss(train: LabelledRows, validation: LabelledRows, width: int, length_weight: float) -> float:
    """Loss on `validation` of predicting the rates of `train` for every row."""
    places = torch.arange(width - 1, device=train.accepted.device)
    rates = (train.accepted[:, None] > places).double().mean(0).clamp(1e-6, 1 - 1e-6)
    logits = rates.logit().float().expand(len(validation), -1)
    return float(sum(predictor_loss(logits, validation.accepted, length_weight)))


@torch.no_grad()
def score_trace(trace: Trace, predictor: AcceptancePredictor, name: str = "predictor") -> Trace:
    """The trace with the predictor's scores as `name`, computed from its features.

    Raises:
        ValueError: the trace has no features or other ones, or drafts of another width than the predictor's.
    """
    _check_features(trace)
    if predictor.width != trace.width:
        raise ValueError(f"the trace has drafts of {trace.width} rows, the predictor is for {predictor.width}")
    device = predictor.layers[0].weight.device
    parts = torch.from_numpy(trace.features).split(_CHUNK)
    scores = [running_minimum(predictor.probabilities(part.to(device).float())).cpu().numpy() for part in parts]
    return trace.with_scores(name, np.concatenate([np.zeros((0, trace.width - 1), np.float32), *scores]))


def _moments(features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation [F] float32, summed in float64."""
    total = sum(part.double().sum(0) for part in features.split(_CHUNK))
    mean = total / len(features)
    squares = sum((part.double() - mean).square().sum(0) for part in features.split(_CHUNK))
    return mean.float(), (squares / len(features)).sqrt().float()


def _check_features(trace: Trace) -> None:
    found = None if trace.features is None else trace.features.shape[1]
    if found != feature_size(trace.width):
        raise ValueError(
            f"the trace has {'no' if found is None else found} features; a predictor for {trace.width} rows needs "
            f"{feature_size(trace.width)}"
        )
