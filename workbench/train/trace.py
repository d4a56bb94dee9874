"""Records traces: a drafter of chains decodes with full-width verification while scorers look on.

Labels must come from full-width verification: a cut draft tells only that its accepted length reached the cut. And they
must come from prompts that the drafter was not trained on (`workbench.train.text.kept_for_predictors`), or the
predictor expects too much of new ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from workbench.budget.confidence import top_logits
from workbench.budget.policy import BudgetPolicy, allocate_full
from workbench.budget.trace import Trace, TracePrompt, prompt_digest
from workbench.decode.engine import Engine, Event, FinishEvent, TokenEvent
from workbench.decode.live import Request
from workbench.decode.sampling import SamplingConfig
from workbench.models.target import Target
from workbench.train.data import Corpus
from workbench.types import Drafter, Policy, Scorer, Signals

#: [R, n, ...] signals to the predictor's input [R, F].
Features = Callable[[Signals], torch.Tensor]


def corpus_requests(
    corpus: Corpus,
    sources: Sequence[str] = (),
    sampled_share: float = 0.1,
    max_new_tokens: int = 256,
    seed: int = 0,
) -> tuple[list[Request], list[str]]:
    """Requests for the distinct prompts of a corpus, in random order, with the names of their prompt sets.

    Args:
        corpus: its responses are not used.
        sources: names of the prompt sets by number; a set without a name gets its number.
        sampled_share: share of the prompts that are decoded at temperature 1, each with a seed of its own; the rest
            is greedy. A sampled output gives a few times as many rows, since less of a draft is accepted.
        max_new_tokens: most tokens of an output.
        seed: of the order.

    Raises:
        ValueError: `sampled_share` outside 0..1.
    """
    if not 0 <= sampled_share <= 1:
        raise ValueError(f"sampled_share={sampled_share} outside 0..1")
    found: dict[tuple[int, ...], int] = {}
    for i in range(corpus.num_samples):
        found.setdefault(tuple(corpus.sample(i)[: corpus.prompt_len[i]].tolist()), int(corpus.source[i]))
    prompts = list(found.items())
    requests, labels = [], []
    for place, index in enumerate(np.random.default_rng(seed).permutation(len(prompts)).tolist()):
        prompt, source = prompts[index]
        # Spread evenly, so that a recording that is stopped early has its share.
        is_sampled = int((place + 1) * sampled_share) > int(place * sampled_share)
        sampling = SamplingConfig(max_new_tokens, temperature=1.0 if is_sampled else 0.0, seed=place)
        requests.append(Request(prompt, sampling))
        labels.append(sources[source] if 0 <= source < len(sources) else str(source))
    return requests, labels


@dataclass(frozen=True)
class RecordedRound:
    """What the recorder saw in one round, R drafts of n tokens.

    Attributes:
        lengths: [R] int64, tokens of every request, the root counted.
        gap: [R] float32, distance from the best to the second logit, mean over the draft.
        scores: by name [R, n] float32.
        features: [R, F] float16, or None.
        num_tokens: n.
    """

    lengths: np.ndarray
    gap: np.ndarray
    scores: dict[str, np.ndarray]
    features: np.ndarray | None
    num_tokens: int


class RecordingScorer:
    """A scorer that keeps what others make of a draft, and itself finds all drafts equal.

    Args:
        features: computes what the predictor sees; None to keep none.
        scorers: by name.
    """

    def __init__(self, features: Features | None = None, scorers: Mapping[str, Scorer] | None = None) -> None:
        self._features, self._scorers = features, dict(scorers or {})
        self._seen: list[RecordedRound] = []

    def __call__(self, signals: Signals) -> np.ndarray:
        """Records; [R, n] zeros."""
        best = top_logits(signals.logits, 2)
        features = None
        if self._features is not None:
            features = self._features(signals).to("cpu", torch.float16).numpy()
        self._seen.append(
            RecordedRound(
                lengths=np.array([len(r.tokens) for r in signals.requests], np.int64),
                gap=(best[..., 0] - best[..., 1]).mean(-1).cpu().numpy(),
                scores={name: np.asarray(scorer(signals), np.float32) for name, scorer in self._scorers.items()},
                features=features,
                num_tokens=signals.tokens.shape[1],
            )
        )
        return np.zeros(tuple(signals.tokens.shape), np.float32)

    def take(self) -> RecordedRound | None:
        """What was seen since the last call; None when no request drafted.

        Raises:
            RuntimeError: more than one round was seen.
        """
        seen, self._seen = self._seen, []
        if len(seen) > 1:
            raise RuntimeError(f"the drafter asked its scorer {len(seen)} times in one round; needed: once")
        return seen[0] if seen else None


@dataclass(frozen=True)
class Recording:
    """A trace with the outputs it comes from.

    Attributes:
        trace: its prompts are the requests, in order.
        outputs: per request the tokens decoded; unfinished where the recording was stopped.
        num_finished: requests that came to their end.
        seconds: wall time.
    """

    trace: Trace
    outputs: list[list[int]]
    num_finished: int
    seconds: float


def collect_trace(
    target: Target,
    drafter_for: Callable[[Policy], Drafter],
    requests: Sequence[Request],
    features: Features | None = None,
    scorers: Mapping[str, Scorer] | None = None,
    labels: Sequence[str] | None = None,
    slots: int = 8,
    max_rows: int | None = None,
    seconds: float | None = None,
    progress: bool = False,
) -> Recording:
    """Decodes requests and records every draft with its accepted length.

    Args:
        target: the model.
        drafter_for: makes the drafter of chains, given the policy that verifies all of a draft and has the recorder
            as its scorer.
        requests: prompts and how to decode them; started in order, `slots` at a time.
        features, scorers: see `RecordingScorer`.
        labels: one a request, see `TracePrompt`; default "".
        slots: requests that run side by side.
        max_rows: stop after the round that reaches so many rows; None for no limit.
        seconds: stop after the round that reaches this wall time; None for no limit.
        progress: show a bar over finished requests.

    Raises:
        ValueError: no request, labels of another number, a limit below 1, a drafter that never drafts, or one that
            goes by another policy.
    """
    names = [""] * len(requests) if labels is None else list(labels)
    if not requests or len(names) != len(requests):
        raise ValueError(f"{len(requests)} requests with {len(names)} labels; needed: at least one, equally many")
    for name, value in (("max_rows", max_rows), ("seconds", seconds)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value} must be above 0, or None for no limit")
    recorder = RecordingScorer(features, scorers)
    drafter = _checked(drafter_for, BudgetPolicy("record", allocate_full, scorer=recorder))
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    engine = Engine(target, drafter, min(slots, len(requests)), min(longest, target.context_limit))
    for request in requests:
        engine.submit(request)
    pairing = _Pairing([len(r.prompt_ids) for r in requests])
    started = time.perf_counter()
    with tqdm(total=len(requests), disable=not progress, desc="trace", unit="prompt") as bar:
        while engine.busy and (max_rows is None or pairing.num_rows < max_rows):
            bar.update(pairing.add(engine.step(), recorder.take()))
            if seconds is not None and time.perf_counter() - started >= seconds:
                break
    prompts = tuple(
        TracePrompt(prompt_digest(r.prompt_ids), name, float(r.sampling.temperature))
        for r, name in zip(requests, names, strict=True)
    )
    trace = pairing.trace(prompts)
    return Recording(trace, pairing.outputs, pairing.num_finished, time.perf_counter() - started)


def _checked(drafter_for: Callable[[Policy], Drafter], policy: Policy) -> Drafter:
    drafter = drafter_for(policy)
    if drafter.policy is not policy:
        raise ValueError(
            f"drafter {drafter.name!r} goes by policy {drafter.policy.name!r}, not by the one it was given"
        )
    return drafter


def mark_prompts(trace: Trace, looped: Sequence[bool]) -> Trace:
    """The trace with one more fact about each of its prompts: whether its output repeats itself."""
    marked = (replace(p, looped=bool(mark)) for p, mark in zip(trace.prompts, looped, strict=True))
    return replace(trace, prompts=tuple(marked))


@dataclass
class _Pairing:
    """Joins what the recorder saw before verification with what came out of it."""

    prompt_lens: list[int]
    outputs: list[list[int]] = field(init=False)
    num_finished: int = 0
    num_rows: int = 0
    rounds: list[tuple[RecordedRound, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [[] for _ in self.prompt_lens]

    def add(self, events: Iterable[Event], seen: RecordedRound | None) -> int:
        """Takes one step of the engine and returns how many requests it finished."""
        rows = []
        finished = 0
        for event in events:
            if isinstance(event, FinishEvent):
                finished += 1
            elif isinstance(event, TokenEvent):
                output, stats = self.outputs[event.request], event.stats
                if stats is not None and stats.num_drafted:
                    length = self.prompt_lens[event.request] + len(output)
                    rows.append((event.request, length, stats.num_verified - 1, stats.num_accepted))
                output.extend(event.token_ids)
        self.num_finished += finished
        lengths = [] if seen is None else seen.lengths.tolist()
        if [row[1] for row in rows] != lengths:
            raise RuntimeError(
                f"the scorer saw requests of {lengths} tokens, the engine decoded drafts of {[r[1] for r in rows]}"
            )
        if seen is not None:
            self.rounds.append((seen, np.array(rows, np.int64).reshape(-1, 4)))
            self.num_rows += len(rows)
        return finished

    def trace(self, prompts: tuple[TracePrompt, ...]) -> Trace:
        """Everything that was taken."""
        if not self.rounds:
            raise ValueError("no draft was recorded; the requests are too short or the drafter never drafts")
        seen = [one for one, _ in self.rounds]
        rows = np.concatenate([outcome for _, outcome in self.rounds])
        columns: dict[str, Any] = {
            "step": np.repeat(np.arange(len(seen)), [len(one.lengths) for one in seen]).astype(np.int32),
            "prompt": rows[:, 0].astype(np.int32),
            "position": (rows[:, 1] - 1).astype(np.int32),
            "limit": rows[:, 2].astype(np.int16),
            "accepted": rows[:, 3].astype(np.int16),
        }
        scores = {name: np.concatenate([one.scores[name] for one in seen]) for name in seen[0].scores}
        features = None
        if seen[0].features is not None:
            features = np.concatenate([one.features for one in seen])
        width = seen[0].num_tokens + 1
        gap = np.concatenate([one.gap for one in seen])
        return Trace(**columns, gap=gap, prompts=prompts, scores=scores, features=features, width=width)
