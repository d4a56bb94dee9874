"""Records and protocols that every layer shares.

This module knows no algorithm. Dimensions, used with these letters everywhere:
R requests of a round, M packed rows of a round, N drafted nodes of a tree (root not counted), V vocabulary,
H hidden size of the target, K draft depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

#: Stage names of one round, in order. Timers, records and plots use these and no synonyms.
STAGES = ("draft", "search", "allocate", "pack", "verify", "accept", "commit")

#: A tree's rows are bits of one 64-bit word, so no request brings more of them to a round (root included).
MAX_TREE_ROWS = 64


@dataclass(frozen=True)
class DraftTree:
    """A draft as flat arrays; node 0 is the root, the newest token that the target has decided but not yet read.

    Attributes:
        tokens: [N+1] int32, token id of each node, root first.
        parents: [N+1] int32, index of the parent; -1 for the root, and always smaller than the node's own index,
            so every prefix of the node order is closed under ancestors.
        depths: [N+1] int32, 0 for the root.
        scores: [N+1] float32, the drafter's score (higher is better), 0 for the root.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray

    @property
    def num_nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.tokens) - 1

    def first(self, num_nodes: int) -> DraftTree:
        """The tree of the first `num_nodes` drafted nodes (closed under ancestors by construction)."""
        stop = num_nodes + 1
        return DraftTree(self.tokens[:stop], self.parents[:stop], self.depths[:stop], self.scores[:stop])

    def up_to_depth(self, max_depth: int) -> DraftTree:
        """The tree without the nodes deeper than `max_depth`."""
        return self.select(self.depths <= max_depth)

    def select(self, keep: np.ndarray) -> DraftTree:
        """The tree of some of its nodes.

        Args:
            keep: [N+1] bool, closed under ancestors: the root is kept, and the parent of every node that is.
        """
        if keep.all():
            return self
        new_index = np.cumsum(keep) - 1
        parents = self.parents[keep]
        parents = np.where(parents < 0, -1, new_index[parents]).astype(np.int32)
        return DraftTree(self.tokens[keep], parents, self.depths[keep], self.scores[keep])

    @property
    def is_chain(self) -> bool:
        """True when every node but the last has exactly one child."""
        return bool((self.parents == np.arange(-1, len(self.parents) - 1)).all())


def root_tree(token: int) -> DraftTree:
    """The tree with only a root: what autoregressive decoding verifies."""
    zero = np.zeros(1, np.int32)
    return DraftTree(np.array([token], np.int32), np.array([-1], np.int32), zero, np.zeros(1, np.float32))


def chain_tree(root: int, tokens: Sequence[int], scores: Sequence[float] | None = None) -> DraftTree:
    """A chain: every node has one child.

    Args:
        root: token id of the root.
        tokens: drafted token ids in order.
        scores: one score a drafted token, default 0.
    """
    n = len(tokens)
    all_scores = np.zeros(n + 1, np.float32)
    if scores is not None:
        all_scores[1:] = scores
    steps = np.arange(n + 1, dtype=np.int32)
    return DraftTree(np.array([root, *tokens], np.int32), steps - 1, steps, all_scores)


@dataclass(frozen=True)
class Commit:
    """What became final in a prefill chunk or a round, for the drafter to extend its context.

    Attributes:
        slots: cache slot of each request that moved.
        starts: position of the first new committed token of each request.
        tokens: per request, the new committed token ids [n] int64 (their target KV is final).
        next_tokens: per request, the token that follows the last of them (the new root, or the next prompt token).
        taps: [sum of n, number of taps * H] target hidden states of these tokens, requests one after another;
            None when the drafter asked for no taps.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[np.ndarray]
    next_tokens: Sequence[int]
    taps: torch.Tensor | None


@dataclass(frozen=True)
class DraftRequest:
    """One request that wants a draft this round.

    Attributes:
        slot: its cache slot.
        tokens: [C+1] int64, prompt and output so far, the root last.
        max_nodes: most nodes that can be verified (root not counted).
        max_depth: deepest node that can still be useful.
        temperature: sampling temperature of the request, 0 for greedy.
    """

    slot: int
    tokens: np.ndarray
    max_nodes: int
    max_depth: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Signals:
    """What a drafter of chains knows about its drafts besides their tokens, for scorers to judge them by.

    Attributes:
        requests: the R requests that drafted.
        tokens: [R, n] int64, drafted ids.
        hidden: [R, n, H], input of the output head at every drafted position.
        logits: [R, n, V] draft logits.
    """

    requests: Sequence[DraftRequest]
    tokens: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


class Scorer(Protocol):
    """Judges drafted tokens before the target has seen them."""

    def __call__(self, signals: Signals) -> np.ndarray:
        """[R, n] float32, non-increasing along n: the higher, the likelier is position j accepted."""
        ...


class Policy(Protocol):
    """Who decides how much of each draft is verified. Never looks at anything the accept rule will draw.

    Attributes:
        name: how reports call it.
        scorer: fills in the scores of chains; None when those that the drafter gives are used, or none.
        reads_scores: False when lengths do not depend on scores, so that none need be computed.
    """

    name: str
    scorer: Scorer | None
    reads_scores: bool

    def allocate(self, trees: Sequence[DraftTree]) -> list[DraftTree]:
        """The part of each tree that is verified this round, closed under ancestors."""
        ...


class Stopwatch(Protocol):
    """The one timer (workbench.measure.timer.StageTimer) as the lower layers see it."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Adds the time spent inside the block to stage `name` (one of STAGES)."""
        ...


class DraftSession(Protocol):
    """State of one drafter for one engine: created by `Drafter.session`, never shared.

    A session that also has `on_device() -> workbench.batch.DeviceSession` can take part in rounds on the device.
    """

    def observe(self, commit: Commit) -> None:
        """Extends the drafter's context. A slot whose `start` is 0 begins a new request."""
        ...

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """One tree a request, with that request's root; times its own `draft` and `search` stages."""
        ...


class Drafter(Protocol):
    """Anything that proposes tokens. Holds weights and settings only; all state is in its sessions.

    Attributes:
        name: key of the table it comes from.
        taps: target hidden states it reads, as indices into `hidden_states` of transformers
            (0 embeddings, i the residual stream entering layer i); empty for none.
        max_nodes: most nodes a tree of its may have, root not counted.
        policy: decides how much of its drafts is verified.
    """

    name: str
    taps: tuple[int, ...]
    max_nodes: int
    policy: Policy

    def session(self, slots: int, max_len: int) -> DraftSession:
        """New state for an engine of `slots` requests of up to `max_len` tokens each."""
        ...


@dataclass
class RoundStats:
    """What one round did for one request.

    Attributes:
        num_drafted: nodes proposed by the drafter, root not counted.
        num_verified: rows the target ran for the request, root counted.
        num_accepted: drafted tokens that were accepted.
        num_emitted: tokens added to the output (num_accepted + 1, less what a stop cut off).
        stage_s: seconds of every stage of this round, shared by the requests of the round. Rounds on the device put
            more into "verify", see `workbench.decode.captured.CapturedRound`.
        num_requests: requests in the round.
        max_depth: depth of the deepest verified node.
        tree, path: the verified tree and its accepted nodes (root first); only with tracing on.
        num_scheduled: rows the target ran for all requests of the round, sentinels counted.
    """

    num_drafted: int
    num_verified: int
    num_accepted: int
    num_emitted: int
    stage_s: dict[str, float]
    num_requests: int = 1
    max_depth: int = 0
    tree: DraftTree | None = None
    path: tuple[int, ...] | None = None
    num_scheduled: int = 0


@dataclass
class GenerateResult:
    """Output of one request.

    Attributes:
        token_ids: generated ids, cut exactly at the first stop (a stop id is kept, and is the last).
        text: decoded output without special tokens, cut before a stop string.
        finish_reason: "stop" (stop id or string), "length" (max_new_tokens) or "context" (context limit).
        prompt_len: prompt tokens.
        rounds: one record a round; the first token comes from prefill and belongs to no round.
        prefill_s: its share of the seconds of the prefill it entered with.
        total_s: seconds from its entry into a slot to its end.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_len: int
    rounds: list[RoundStats] = field(default_factory=list)
    prefill_s: float = 0.0
    total_s: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean of accepted + 1 over the rounds: the field's acceptance length tau, bonus included; NaN without any."""
        if not self.rounds:
            return float("nan")
        return sum(r.num_accepted + 1 for r in self.rounds) / len(self.rounds)

    @property
    def acceptance_by_depth(self) -> list[float]:
        """See `acceptance_by_depth`, over the rounds of this request."""
        return acceptance_by_depth(self.rounds)


def acceptance_by_depth(rounds: Sequence[RoundStats]) -> list[float]:
    """Entry d-1: share of the rounds that verified a node of depth d in which one of that depth was accepted."""
    rates = []
    for depth in range(1, max((r.max_depth for r in rounds), default=0) + 1):
        offered = [r.num_accepted >= depth for r in rounds if r.max_depth >= depth]
        rates.append(sum(offered) / len(offered))
    return rates
