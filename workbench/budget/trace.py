"""What full-width verification showed: one row for every draft of every request, to fit predictors and replay policies.

Knows neither models nor policies. A file is one safetensors file: the columns as tensors, the prompts in its header.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_FORMAT = "draft-trace-1"
_COLUMNS = {"step": np.int32, "prompt": np.int32, "position": np.int32, "limit": np.int16, "accepted": np.int16}
_GAP, _FEATURES, _SCORES = "gap", "features", "scores."
#: Largest rise inside a row of scores that rounding explains.
_RISE = 1e-6
_MAX_WIDTH = 64


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """SHA-256 in hex of the ids as little-endian int32: one name for a prompt in every file."""
    return hashlib.sha256(np.asarray(prompt_ids, "<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class TracePrompt:
    """A request that was decoded.

    Attributes:
        digest: `prompt_digest` of its prompt.
        label: what reports group it by, such as the prompt set.
        temperature: it was decoded at; 0 for greedy.
        looped: its output repeats itself.
    """

    digest: str
    label: str = ""
    temperature: float = 0.0
    looped: bool = False

    def __post_init__(self) -> None:
        texts = isinstance(self.digest, str) and isinstance(self.label, str)
        number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not texts or not number or not isinstance(self.looped, bool):
            raise ValueError(f"{self} needs a digest and a label (text), a temperature (number) and looped (bool)")
        # Above the largest float an integer of JSON can be, which no float could hold.
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature={self.temperature} must be a finite number from 0 on")


@dataclass(frozen=True, eq=False)
class Trace:
    """S drafts of n = width - 1 tokens each, all of them verified as far as they could be.

    Attributes:
        step: [S] int32, round it belongs to, never falling; rows of one round were decided together.
        prompt: [S] int32, index into `prompts`.
        position: [S] int32, place of the root in its request (tokens of prompt and output before it).
        limit: [S] int16, drafted tokens that were verified; n, or less where the request was about to end.
        accepted: [S] int16, drafted tokens that were accepted, 0..limit.
        gap: [S] float32, distance from the best to the second draft logit, mean over the draft.
        prompts: requests of the trace.
        scores: by name [S, n] float32, what a scorer said of the draft; never rising along a row.
        features: [S, F] float16, what the predictor sees; None when they were not kept.
        width: rows of a full draft, root counted.

    Raises:
        ValueError: columns of different lengths, values out of range, not finite, or rising scores or falling steps.
    """

    step: np.ndarray
    prompt: np.ndarray
    position: np.ndarray
    limit: np.ndarray
    accepted: np.ndarray
    gap: np.ndarray
    prompts: tuple[TracePrompt, ...]
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    features: np.ndarray | None = None
    width: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.width <= _MAX_WIDTH:
            raise ValueError(f"width={self.width} outside 2..{_MAX_WIDTH}")
        for name, kind in _COLUMNS.items():
            _check_array(name, getattr(self, name), np.dtype(kind), (len(self.step),))
        _check_array(_GAP, self.gap, np.dtype(np.float32), (len(self.step),))
        n = self.width - 1
        _check_range("prompt", self.prompt, len(self.prompts) - 1)
        _check_range("position", self.position, np.iinfo(np.int32).max)
        _check_range("step", self.step, np.iinfo(np.int32).max)
        _check_range("limit", self.limit, n)
        _check_range("accepted", self.accepted, n)
        if (self.accepted > self.limit).any():
            raise ValueError(f"accepted exceeds limit in row {int(np.argmax(self.accepted > self.limit))}")
        if (np.diff(self.step) < 0).any():
            raise ValueError(f"step falls behind row {int(np.argmax(np.diff(self.step) < 0))}")
        for name, values in self.scores.items():
            _check_array(f"scores[{name!r}]", values, np.dtype(np.float32), (len(self.step), n))
            if (np.diff(values, axis=1) > _RISE).any():
                raise ValueError(f"scores[{name!r}] rise along a row; they must never do")
        if self.features is not None:
            shape = (len(self.step), self.features.shape[-1] if self.features.ndim == 2 else 0)
            _check_array(_FEATURES, self.features, np.dtype(np.float16), shape)

    def __len__(self) -> int:
        """S."""
        return len(self.step)

    @property
    def uncensored(self) -> np.ndarray:
        """[S] bool, rows whose whole draft was verified.

        Of a shorter one the accepted length is known only when it is short, so keeping those rows alone would favour
        short lengths.
        """
        return self.limit == self.width - 1

    @property
    def labels(self) -> np.ndarray:
        """[S] the label of every row's prompt."""
        return np.array([p.label for p in self.prompts], dtype=object)[self.prompt]

    @property
    def looped(self) -> np.ndarray:
        """[S] bool, rows of outputs that repeat themselves."""
        return np.array([p.looped for p in self.prompts], dtype=bool)[self.prompt]

    @property
    def sampled(self) -> np.ndarray:
        """[S] bool, rows that were decoded at a temperature above 0."""
        return np.array([p.temperature > 0 for p in self.prompts], dtype=bool)[self.prompt]

    def rounds(self) -> list[slice]:
        """The rows of every round, in order."""
        if not len(self):
            return []
        starts = np.flatnonzero(np.diff(self.step, prepend=self.step[0] - 1))
        return [slice(int(a), int(b)) for a, b in zip(starts, [*starts[1:], len(self)], strict=True)]

    def select(self, rows: np.ndarray | slice) -> Trace:
        """The trace of some rows: a bool mask [S], rising indices, or a slice. All prompts stay."""
        columns = {name: getattr(self, name)[rows] for name in (*_COLUMNS, _GAP)}
        scores = {name: values[rows] for name, values in self.scores.items()}
        features = None if self.features is None else self.features[rows]
        return replace(self, **columns, scores=scores, features=features)

    def split_by_prompt(self, share: float, seed: int = 0) -> tuple[Trace, Trace]:
        """(the rest, `share` of the distinct prompts but at least one), no prompt in both.

        Whether a prompt is drawn depends on its digest and the seed, not on the order of the trace.

        Raises:
            ValueError: `share` outside 0..1, or fewer than two distinct prompts.
        """
        if not 0 < share < 1:
            raise ValueError(f"share={share} outside 0..1 (both excluded)")
        used = {self.prompts[i].digest for i in np.unique(self.prompt)}
        order = sorted(used, key=lambda digest: hashlib.sha256(f"{seed}:{digest}".encode()).digest())
        if len(order) < 2:
            raise ValueError(f"the trace has {len(order)} distinct prompts; a split needs at least 2")
        count = min(max(1, round(share * len(order))), len(order) - 1)
        drawn = set(order[:count])
        mask = np.array([p.digest in drawn for p in self.prompts])[self.prompt]
        return self.select(~mask), self.select(mask)

    def with_scores(self, name: str, scores: np.ndarray) -> Trace:
        """The trace with one more kind of scores, or a new version of it: [S, n]."""
        return replace(self, scores={**self.scores, name: np.ascontiguousarray(scores, np.float32)})

    def without_features(self) -> Trace:
        """The trace without its largest column."""
        return replace(self, features=None)

    def save(self, path: str | Path, half_scores: bool = False) -> None:
        """Writes one safetensors file, whole or not at all.

        Args:
            path: the file; its folder is made when missing.
            half_scores: store scores in float16 (order is kept, neighbours may become equal).
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(self, name) for name in (*_COLUMNS, _GAP)}
        kind = np.float16 if half_scores else np.float32
        tensors |= {_SCORES + name: values.astype(kind) for name, values in self.scores.items()}
        if self.features is not None:
            tensors[_FEATURES] = self.features
        prompts = [[p.digest, p.label, p.temperature, p.looped] for p in self.prompts]
        header = {"format": _FORMAT, "width": str(self.width), "prompts": json.dumps(prompts)}
        partial = path.with_name(f".{path.name}.partial")
        save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, partial, metadata=header)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Reads what `save` wrote.

        Raises:
            ValueError: missing, damaged, no trace, an unexpected or missing column, or values out of range.
        """
        try:
            with safe_open(path, framework="np") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, TypeError) as error:
            raise ValueError(f"{path} is no readable trace: {error}") from error
        if header.get("format") != _FORMAT:
            raise ValueError(f"{path} is no trace: its format is {header.get('format')!r}, needed {_FORMAT!r}")
        needed = {*_COLUMNS, _GAP}
        odd = [n for n in tensors if n not in needed | {_FEATURES} and not (n.startswith(_SCORES) and n != _SCORES)]
        if odd or needed - set(tensors):
            raise ValueError(f"{path}: missing {sorted(needed - set(tensors))}, unexpected {sorted(odd)}")
        try:
            scores = {name: _as_scores(name, tensors.pop(name)) for name in list(tensors) if name.startswith(_SCORES)}
            prompts = tuple(TracePrompt(*row) for row in json.loads(header["prompts"]))
            named = {name.removeprefix(_SCORES): values for name, values in scores.items()}
            return cls(**tensors, prompts=prompts, scores=named, width=int(header["width"]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from error


def concatenate(traces: Sequence[Trace]) -> Trace:
    """The rows of all traces, one after another; rounds and prompts are numbered on.

    Raises:
        ValueError: no trace, or traces that differ in width, scores or features.
    """
    if not traces:
        raise ValueError("traces is empty; name at least one trace")
    first = traces[0]
    for trace in traces[1:]:
        if trace.width != first.width or set(trace.scores) != set(first.scores):
            raise ValueError(
                f"traces differ: width {trace.width} with scores {sorted(trace.scores)}, "
                f"width {first.width} with {sorted(first.scores)}"
            )
        if (trace.features is None) != (first.features is None):
            raise ValueError("traces differ: some have features, some have none")
    steps, prompts, next_step, next_prompt = [], [], 0, 0
    for trace in traces:
        steps.append(trace.step + np.int32(next_step))
        prompts.append(trace.prompt + np.int32(next_prompt))
        next_step = int(steps[-1][-1]) + 1 if len(trace) else next_step
        next_prompt += len(trace.prompts)
    kept = {
        name: np.concatenate([getattr(t, name) for t in traces]) for name in ("position", "limit", "accepted", _GAP)
    }
    features = None if first.features is None else np.concatenate([t.features for t in traces])
    return Trace(
        step=np.concatenate(steps),
        prompt=np.concatenate(prompts),
        **kept,
        prompts=tuple(p for t in traces for p in t.prompts),
        scores={name: np.concatenate([t.scores[name] for t in traces]) for name in first.scores},
        features=features,
        width=first.width,
    )


def _as_scores(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype not in (np.float16, np.float32):
        raise ValueError(f"{name} is {values.dtype}; allowed: float16, float32")
    return values.astype(np.float32)


def _check_array(name: str, values: np.ndarray, kind: np.dtype, shape: tuple[int, ...]) -> None:
    if values.dtype != kind or values.shape != shape:
        raise ValueError(f"{name} is {values.dtype} {list(values.shape)}; needed {kind} {list(shape)}")
    if kind.kind == "f" and not np.isfinite(values).all():
        raise ValueError(f"{name} holds NaN or an infinity")


def _check_range(name: str, values: np.ndarray, largest: int) -> None:
    if values.size and (values.min() < 0 or values.max() > largest):
        raise ValueError(f"{name} has values in {values.min()}..{values.max()}; allowed are 0..{largest}")
