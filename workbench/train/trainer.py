"""The one training loop. It knows an objective (a module and its loss of a batch) and no drafter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from tqdm.auto import tqdm

from workbench.train.checkpoint import read_checkpoint, write_checkpoint
from workbench.train.schedule import TrainConfig


class Objective(Protocol):
    """What is trained.

    Attributes:
        module: its parameters that require gradients are trained, in fp32.
        identity: text that differs when anything differs that the parameters do not show (settings, draft ids, ...);
            a checkpoint is resumed only under the same one.
    """

    module: nn.Module
    identity: str

    def loss(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(scalar loss, metrics by name: detached tensors of any shape, averaged between records)."""
        ...


class Batches(Protocol):
    """Batches as a function of the step, so that a resumed run sees the same ones.

    Attributes:
        identity: text that differs when the batches do.
    """

    identity: str

    def batch(self, step: int) -> Any:
        """The batch of step `step` (from 0)."""
        ...


class Trainer:
    """AdamW with warm-up, cosine, clipping, averaged weights and bitwise resume (when limited by steps).

    Args:
        objective: module and loss.
        batches: where data comes from.
        config: settings.

    Attributes:
        step: steps done.
        elapsed_s: training seconds so far, the time before a resume included.
        records: one dict every `log_every` steps: step, seconds, learning_rate, loss, grad_norm and the metrics.
    """

    def __init__(self, objective: Objective, batches: Batches, config: TrainConfig) -> None:
        self.objective, self.batches, self.config = objective, batches, config
        self._parameters = {n: p for n, p in objective.module.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise ValueError("the objective's module has no parameter that requires a gradient")
        self._device = next(iter(self._parameters.values())).device
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=self._device.type == "cuda",
        )
        self._average = [p.detach().clone() for p in self._parameters.values()] if config.ema_decay else []
        self.step = 0
        self.elapsed_s = 0.0
        self.records: list[dict[str, Any]] = []
        self._sums: dict[str, torch.Tensor] = {}
        self._summed = 0

    @property
    def finished(self) -> bool:
        """True at the end of the run."""
        return self.config.progress(self.step, self.elapsed_s) >= 1.0

    def warm_up(self) -> None:
        """One forward and backward without an update, so that compiling is not charged to the clock."""
        self._backward(self.batches.batch(self.step))
        self._optimizer.zero_grad(set_to_none=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def run(
        self,
        until: int | None = None,
        checkpoint: str | Path | None = None,
        on_record: Callable[[Trainer, dict[str, Any]], None] | None = None,
        progress: bool = False,
    ) -> list[dict[str, Any]]:
        """Trains to the end of the run.

        Args:
            until: stop earlier, after this step (a later `run` goes on).
            checkpoint: file written every `save_every` steps and at the end.
            on_record: called with every record, which it may extend. Its time is not charged to the run.
            progress: show a bar.

        Returns:
            All records of the run.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        config = self.config
        with tqdm(total=config.steps, initial=self.step, desc="train", disable=not progress) as bar:
            while not self.finished and (until is None or self.step < until):
                self.train_step()
                bar.update()
                if self.step % config.log_every == 0 or self.finished:
                    record = self.take_record()
                    bar.set_postfix(loss=f"{record['loss']:.3f}")
                    if on_record is not None:
                        on_record(self, record)
                if checkpoint is not None and config.save_every and self.step % config.save_every == 0:
                    self.save(checkpoint)
        if checkpoint is not None:
            self.save(checkpoint)
        return self.records

    def train_step(self) -> None:
        """One update. Several trainers may take turns; each counts its own time."""
        start = time.perf_counter()
        config = self.config
        rate = config.rate(self.step, config.progress(self.step, self.elapsed_s))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, metrics = self._backward(self.batches.batch(self.step))
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), config.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self._average:
            # A fixed decay would remember the random start for too long.
            decay = min(config.ema_decay, self.step / (self.step + 10))
            torch._foreach_lerp_(self._average, list(self._parameters.values()), 1.0 - decay)
        self._add({"loss": loss, "grad_norm": norm, **metrics})
        self.elapsed_s += time.perf_counter() - start

    def take_record(self) -> dict[str, Any]:
        """Record of the steps since the last one; waits for the device.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """
        start = time.perf_counter()
        means = {name: (total / self._summed).tolist() for name, total in self._sums.items()}
        self.elapsed_s += time.perf_counter() - start
        self._sums, self._summed = {}, 0
        if not math.isfinite(means.get("loss", 0.0)):
            raise FloatingPointError(f"loss is {means['loss']} at step {self.step}")
        rate = self._optimizer.param_groups[0]["lr"]
        record = {"step": self.step, "seconds": round(self.elapsed_s, 3), "learning_rate": rate, **means}
        self.records.append(record)
        return record

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The module holds the averaged weights inside the block (its own ones without averaging)."""
        own = [p.detach().clone() for p in self._parameters.values()] if self._average else []
        try:
            self._set(self._average)
            yield
        finally:
            self._set(own)

    def save(self, path: str | Path) -> None:
        """Writes everything that a later `load` needs to go on as if nothing had happened.

        Raises:
            FloatingPointError: the loss is no longer finite; an older checkpoint is kept.
        """
        if not all(bool(torch.isfinite(total).all()) for total in self._sums.values()):
            raise FloatingPointError(f"loss or gradient is not finite before step {self.step}; nothing was saved")
        tensors = {f"parameter.{n}": p for n, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        for name, value in zip(self._parameters, self._average, strict=False):
            tensors[f"average.{name}"] = value
        tensors |= {f"sum.{name}": total for name, total in self._sums.items()}
        tensors["random.cpu"] = torch.get_rng_state()
        if self._device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state(self._device)
        state = {
            "config": asdict(self.config) | {"betas": list(self.config.betas)},
            "objective": self.objective.identity,
            "batches": self.batches.identity,
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "summed": self._summed,
            "records": self.records,
        }
        write_checkpoint(path, tensors, state)

    def load(self, path: str | Path) -> None:
        """Continues the run of a checkpoint.

        Raises:
            ValueError: it is unreadable, or of another configuration, objective, data or module.
        """
        tensors, state = read_checkpoint(path)
        mine = asdict(self.config) | {"betas": list(self.config.betas)}
        changed = [name for name in mine if state.get("config", {}).get(name) != mine[name]]
        if changed:
            raise ValueError(f"{path} was trained with another {', '.join(changed)}; resume with the same settings")
        for name, identity in (("objective", self.objective.identity), ("batches", self.batches.identity)):
            if state.get(name) != identity:
                raise ValueError(
                    f"{path} was trained with another {name}: {state.get(name)!r:.200}, this run has {identity!r:.200}"
                )
        shapes = {n[len("parameter.") :]: t.shape for n, t in tensors.items() if n.startswith("parameter.")}
        if shapes != {n: p.shape for n, p in self._parameters.items()}:
            raise ValueError(f"{path} holds the parameters of another module")
        self._check_complete(path, tensors, state)
        self._set([tensors[f"parameter.{n}"] for n in self._parameters])
        for name, parameter in self._parameters.items():
            keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"optimizer.{k}.{name}" in tensors]
            moments = {k: tensors[f"optimizer.{k}.{name}"].clone() for k in keys}
            # AdamW keeps its step counter on the CPU unless it is fused.
            self._optimizer.state[parameter] = {
                k: v if k == "step" and self._device.type == "cpu" else v.to(self._device) for k, v in moments.items()
            }
        self._average = [tensors[f"average.{n}"].to(self._device) for n in self._parameters] if self._average else []
        self._sums = {n[len("sum.") :]: t.to(self._device) for n, t in tensors.items() if n.startswith("sum.")}
        torch.set_rng_state(tensors["random.cpu"])
        if "random.cuda" in tensors and self._device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], self._device)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        self._summed, self.records = state["summed"], state["records"]

    def _check_complete(self, path: str | Path, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Nothing is applied before everything is known to be there."""
        kinds = ["average"] * bool(self._average)
        kinds += ["optimizer.exp_avg", "optimizer.exp_avg_sq"] * bool(state.get("step"))
        wanted = {f"{kind}.{n}": p.shape for kind in kinds for n, p in self._parameters.items()}
        bad = [name for name, shape in wanted.items() if name not in tensors or tensors[name].shape != shape]
        types = (("step", int), ("elapsed_s", float), ("summed", int), ("records", list))
        bad += [name for name, kind in types if not isinstance(state.get(name), kind)]
        bad += ["random.cpu"] * ("random.cpu" not in tensors)
        if bad:
            raise ValueError(f"{path} is damaged: {', '.join(bad[:3])} missing or of another form ({len(bad)} in all)")

    def _backward(self, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.config.bfloat16):
            loss, metrics = self.objective.loss(batch)
        loss.backward()
        return loss.detach(), metrics

    def _add(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            value = value.detach().float()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._summed += 1

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters.values(), values, strict=False):
            parameter.copy_(value)
