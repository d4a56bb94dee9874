"""Drafters whose acceptance is known beforehand; they bound what an engine can do and test it from both ends.

`oracle` drafts the target's own greedy continuation, `anti` avoids it at every place, `coin` is right at each place
with a chosen probability, `scripted` drafts what it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from workbench.budget.table import build_policy
from workbench.drafters.ar import refuse_path
from workbench.drafters.host_drafts import HostDrafts
from workbench.models.reference import greedy_continuation
from workbench.models.target import Target
from workbench.types import Commit, DraftRequest, DraftTree, Policy, Signals, Stopwatch, chain_tree

#: (target, text, number of tokens) -> what the target puts behind the text
Continuation = Callable[[Target, Sequence[int], int], Iterator[int]]


class _Greedy:
    """The target's greedy continuation behind a text that grows by what was committed."""

    def __init__(self, target: Target, continuation: Continuation) -> None:
        self._target = target
        self._continuation = continuation
        self._known: list[int] = []
        self._source: Iterator[int] = iter(())

    def after(self, tokens: np.ndarray, count: int) -> list[int]:
        """The next `count` tokens behind `tokens`; recomputed when `tokens` left the known continuation."""
        text = tokens.tolist()
        if self._known[: len(text)] != text:
            self._known = list(text)
            self._source = self._continuation(self._target, text, self._target.context_limit - len(text))
        while len(self._known) < len(text) + count:
            token = next(self._source, None)
            if token is None:
                break
            self._known.append(token)
        return self._known[len(text) : len(text) + count]


class OracleScorer:
    """Knows how much of each chain greedy verification accepts: score 1 up to there, 0 behind.

    Costs real target steps for every draft, so this bounds what a predictor can reach and is no method to time.

    Args:
        target: whose greedy continuation is the truth.
        continuation: see `ForesightDrafter`.
    """

    def __init__(self, target: Target, continuation: Continuation = greedy_continuation) -> None:
        self._target, self._continuation = target, continuation
        self._greedy: dict[int, _Greedy] = {}

    def __call__(self, signals: Signals) -> np.ndarray:
        """See `Scorer`."""
        drafted = signals.tokens.cpu().numpy()
        scores = np.zeros(drafted.shape, np.float32)
        for row, request in enumerate(signals.requests):
            greedy = self._greedy.setdefault(request.slot, _Greedy(self._target, self._continuation))
            truth = greedy.after(request.tokens, drafted.shape[1])
            scores[row, : len(truth)] = np.cumprod(drafted[row, : len(truth)] == truth)
        return scores


class ForesightSession:
    """Chains made from the target's own continuation, changed where `is_right` says so."""

    def __init__(self, drafter: ForesightDrafter) -> None:
        self._drafter = drafter
        self._greedy: dict[int, _Greedy] = {}

    def observe(self, commit: Commit) -> None:
        """A request that starts forgets what its slot knew."""
        for slot, start in zip(commit.slots, commit.starts, strict=True):
            if start == 0:
                self._greedy[slot] = _Greedy(self._drafter.target, self._drafter.continuation)

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """One chain a request."""
        with timer.stage("draft"):
            return [self._chain(r) for r in requests]

    def on_device(self) -> HostDrafts:
        """Everything stays on the host."""
        return HostDrafts(self)

    def _chain(self, request: DraftRequest) -> DraftTree:
        count = min(request.max_nodes, request.max_depth)
        truth = self._greedy[request.slot].after(request.tokens, count) if count > 0 else []
        position = len(request.tokens)
        vocab = self._drafter.target.vocab_size
        drafted = [t if self._drafter.is_right(position + i) else (t + 1) % vocab for i, t in enumerate(truth)]
        return chain_tree(int(request.tokens[-1]), drafted, self._drafter.accuracy ** np.arange(1, len(drafted) + 1))


class ForesightDrafter:
    """Right at each place with probability `accuracy`, decided by (seed, position).

    Args:
        target: whose continuation is drafted. Every draft costs real target steps, so this is no method to time.
        name: key of the table.
        accuracy: probability of the target's token at a place; otherwise its neighbour in the vocabulary.
        draft_len: length of the chain.
        seed: key of the choices.
        continuation: where the target's tokens come from; by default they are decoded step by step.
        policy: decides how much is verified; default everything. The scores it sees are powers of `accuracy`.
    """

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        target: Target,
        name: str,
        accuracy: float,
        draft_len: int = 7,
        seed: int = 0,
        continuation: Continuation = greedy_continuation,
        policy: Policy | None = None,
    ) -> None:
        if not 0.0 <= accuracy <= 1.0:
            raise ValueError(f"accuracy={accuracy} outside [0, 1]")
        if draft_len < 1:
            raise ValueError(f"draft_len={draft_len} must be at least 1")
        self.target, self.name, self.accuracy, self.seed = target, name, accuracy, seed
        self.max_nodes, self.continuation = draft_len, continuation
        self.policy = policy or build_policy("full")

    def is_right(self, position: int) -> bool:
        """Whether the draft at this position is the target's token."""
        return np.random.Generator(np.random.Philox(key=self.seed, counter=position)).random() < self.accuracy

    def session(self, slots: int, max_len: int) -> ForesightSession:
        """A session; slots are created as requests enter."""
        return ForesightSession(self)


class ScriptedDrafter:
    """Drafts given chains in turn, whatever the context: round i of a request proposes script[i mod len].

    Args:
        script: token ids of each chain.
    """

    name = "scripted"
    taps: tuple[int, ...] = ()

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        if not script:
            raise ValueError("script is empty; at least one chain of token ids is needed")
        self.script = tuple(tuple(chain) for chain in script)
        self.max_nodes = max(len(chain) for chain in self.script)
        self.policy = build_policy("full")

    def session(self, slots: int, max_len: int) -> ScriptedSession:
        """A session that counts the rounds of every slot."""
        return ScriptedSession(self.script)


class ScriptedSession:
    """Round counters of a scripted drafter."""

    def __init__(self, script: tuple[tuple[int, ...], ...]) -> None:
        self._script = script
        self._round: dict[int, int] = {}

    def observe(self, commit: Commit) -> None:
        """A request that starts begins the script anew."""
        for slot, start in zip(commit.slots, commit.starts, strict=True):
            if start == 0:
                self._round[slot] = 0

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """The next chain of each request's script."""
        with timer.stage("draft"):
            return [self._chain(r) for r in requests]

    def on_device(self) -> HostDrafts:
        """Everything stays on the host."""
        return HostDrafts(self)

    def _chain(self, request: DraftRequest) -> DraftTree:
        turn = self._round[request.slot]
        self._round[request.slot] = turn + 1
        chain = self._script[turn % len(self._script)][: request.max_nodes]
        return chain_tree(int(request.tokens[-1]), chain)


def build_oracle(
    target: Target, path: str | None = None, draft_len: int = 7, continuation: Continuation = greedy_continuation
) -> ForesightDrafter:
    """Always right under greedy decoding."""
    refuse_path(path, "oracle")
    return ForesightDrafter(target, "oracle", 1.0, draft_len, continuation=continuation)


def build_anti(
    target: Target, path: str | None = None, draft_len: int = 7, continuation: Continuation = greedy_continuation
) -> ForesightDrafter:
    """Always wrong under greedy decoding."""
    refuse_path(path, "anti")
    return ForesightDrafter(target, "anti", 0.0, draft_len, continuation=continuation)


def build_coin(
    target: Target,
    path: str | None = None,
    accuracy: float = 0.5,
    draft_len: int = 7,
    seed: int = 0,
    continuation: Continuation = greedy_continuation,
) -> ForesightDrafter:
    """Right at each place with probability `accuracy`."""
    refuse_path(path, "coin")
    return ForesightDrafter(target, "coin", accuracy, draft_len, seed, continuation)


def build_scripted(
    target: Target, path: str | None = None, script: Sequence[Sequence[int]] = ((0, 1, 2), (3,), ())
) -> ScriptedDrafter:
    """Drafts the given chains in turn."""
    refuse_path(path, "scripted")
    bad = [t for chain in script for t in chain if not 0 <= t < target.vocab_size]
    if bad:
        raise ValueError(f"script holds token ids {bad[:5]} outside 0..{target.vocab_size - 1}")
    return ScriptedDrafter(script)
