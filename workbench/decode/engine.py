"""The one decoding loop: draft -> search -> allocate -> pack -> verify -> accept -> commit.

A single stream is a batch with one request, a chain is a tree with one child a node, autoregressive decoding is a
drafter that proposes nothing. The engine knows no method; it is handed a drafter.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm.auto import tqdm

from workbench.decode.captured import MAX_SLOTS, CapturedRound
from workbench.decode.eager import EagerRound, bucket
from workbench.decode.graphs import GraphReport
from workbench.decode.live import LiveRequest, Request
from workbench.decode.prefill import CapturedPrefill, EagerPrefill
from workbench.decode.round import Outcome, Round, RoundParts
from workbench.decode.rows import Workspace
from workbench.decode.sampling import SamplingConfig, choose
from workbench.decode.stopping import stop_rules
from workbench.measure.timer import StageTimer
from workbench.models.target import Target
from workbench.types import MAX_TREE_ROWS, Commit, Drafter, GenerateResult, RoundStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenEvent:
    """Tokens that a request emitted in one round (or its first token, from prefill).

    Attributes:
        request: index in order of submission.
        token_ids: new token ids.
        text: text that became final with them.
        stats: record of the round; None for prefill.
    """

    request: int
    token_ids: list[int]
    text: str
    stats: RoundStats | None


@dataclass(frozen=True)
class FinishEvent:
    """A request ended."""

    request: int
    result: GenerateResult


Event = TokenEvent | FinishEvent


class Engine:
    """Decodes any number of requests, up to `slots` of them at once.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes tokens.
        slots: requests that run side by side; waiting ones enter as others finish.
        max_len: most tokens (prompt and output) of a request; default the context limit of the target. Memory of the
            KV cache grows with slots * max_len.
        trace: keep every verified tree and accepted path in the round records.
        prefill_chunk: most prompt tokens of a request in one prefill forward.
        row_bucket: rounds are filled up with sentinel rows to a multiple of this, so that few sizes occur.
        graphs: run rounds on the device as CUDA graphs (`workbench.decode.captured`; on a CPU uncaptured, with
            attention "tile"). None does so on a CUDA device where target and drafter can.

    Raises:
        ValueError: slots, max_len, prefill_chunk or row_bucket out of range, or a drafter whose trees are too large.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        slots: int = 1,
        max_len: int | None = None,
        trace: bool = False,
        prefill_chunk: int = 1024,
        row_bucket: int = 1,
        graphs: bool | None = None,
    ) -> None:
        limit = target.context_limit if max_len is None else max_len
        for name, value in (("slots", slots), ("prefill_chunk", prefill_chunk), ("row_bucket", row_bucket)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        if not 1 <= limit <= target.context_limit:
            raise ValueError(f"max_len={max_len} outside 1..{target.context_limit} (context limit of the target)")
        if not 0 <= drafter.max_nodes < MAX_TREE_ROWS:
            raise ValueError(f"drafter {drafter.name!r}: max_nodes={drafter.max_nodes} outside 0..{MAX_TREE_ROWS - 1}")
        self.target, self.drafter, self.trace = target, drafter, trace
        self.max_len, self.prefill_chunk = limit, prefill_chunk
        # A tree's rows lie behind the committed context until the accepted ones are moved together.
        self._cache = target.new_cache(slots, limit + drafter.max_nodes)
        workspace = Workspace(
            slots, bucket(slots * (1 + drafter.max_nodes), row_bucket), self._cache.max_len, target.device
        )
        self._session = drafter.session(slots, limit)
        self._timer = StageTimer(target.device)
        parts = RoundParts(target, drafter, self._cache, self._session, workspace, self._timer, row_bucket)
        self._rounds, self._prefills = _ways(parts, self._cache.max_len, min(prefill_chunk, limit), graphs)
        self._waiting: deque[tuple[int, Request]] = deque()
        self._live: dict[int, LiveRequest] = {}
        self._free = list(range(slots))[::-1]
        self._submitted = 0
        self._interrupted = False

    def submit(self, request: Request) -> int:
        """Queues a request and returns its index.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, a prompt longer than the limit, or a request
                that shares prompt and seed with an unfinished one under the accept rule "rejection".
            RuntimeError: see `step`.
        """
        self._require_whole()
        prompt, vocab = request.prompt_ids, self.target.vocab_size
        if not prompt:
            raise ValueError("prompt_ids is empty; at least one token is needed")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"prompt_ids has values in {min(prompt)}..{max(prompt)}; allowed are 0..{vocab - 1}")
        if len(prompt) > self.max_len:
            raise ValueError(f"prompt of {len(prompt)} tokens exceeds the limit of {self.max_len} (prompt and output)")
        self._require_own_draws(request)
        index = self._submitted
        self._submitted += 1
        self._waiting.append((index, request))
        return index

    def _require_own_draws(self, request: Request) -> None:
        sampling = request.sampling
        if sampling.greedy or sampling.accept_rule == "match":
            return
        others = [r for _, r in self._waiting] + [x.request for x in self._live.values()]
        if any((r.stream, r.sampling.seed) == (request.stream, sampling.seed) for r in others):
            raise ValueError(
                f"seed={sampling.seed}: an unfinished request has the same prompt and seed; under accept_rule "
                "'rejection' give each its own seed"
            )

    def _require_whole(self) -> None:
        if self._interrupted:
            raise RuntimeError("an earlier step was interrupted or failed; make a new engine and submit again")

    def prepare(self) -> None:
        """Captures what rounds may need, so that no later round has to wait for it; nothing to do without graphs.

        Raises:
            RuntimeError: requests are live, or see `step`.
        """
        self._require_whole()
        if self._live:
            raise RuntimeError("requests are live; prepare an engine before its first step or after its last")
        if isinstance(self._rounds, CapturedRound):
            self._rounds.prepare()
            self._prefills.prepare()
            self._timer.reset()

    @property
    def graph_report(self) -> GraphReport | None:
        """What the graphs of this engine cost; None without."""
        return self._rounds.pool.report if isinstance(self._rounds, CapturedRound) else None

    @property
    def searches(self) -> str | None:
        """Where rounds search draft trees, "device" or "host"; None for drafters without a search."""
        if not hasattr(self.drafter, "search"):
            return None
        return "device" if isinstance(self._rounds, CapturedRound) and self._rounds.searches else "host"

    @property
    def busy(self) -> bool:
        """True while a request waits or runs."""
        return bool(self._waiting or self._live)

    def stream(self) -> Iterator[Event]:
        """Events until nothing is left to do; requests may be submitted in between."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[Event]:
        """Lets waiting requests in and prefills them; otherwise runs one round over all live requests.

        Raises:
            RuntimeError: an earlier step did not come to its end, so caches and drafter may disagree.
        """
        self._require_whole()
        self._interrupted = True
        events = self._admit() if self._waiting and self._free else self._round()
        self._interrupted = False
        return events

    def _admit(self) -> list[Event]:
        entered: list[LiveRequest] = []
        events: list[Event] = []
        while self._waiting and self._free:
            index, request = self._waiting.popleft()
            room = self.max_len - len(request.prompt_ids)
            rules = stop_rules(request.sampling, self.target.stop_ids, room, self.target.decode)
            live = LiveRequest.enter(index, self._free[-1], request, rules)
            if room == 0:
                live.finish_reason = "context"
                events.append(FinishEvent(index, live.result()))
                continue
            self._free.pop()
            self._live[live.slot] = live
            entered.append(live)
        if entered:
            events += self._prefill(entered)
        return events

    def _prefill(self, entered: list[LiveRequest]) -> list[Event]:
        with self._timer.stage("prefill"):
            while pending := [x for x in entered if x.prefilled < x.prompt_len]:
                self._prefill_chunk(pending)
        seconds = self._timer.take()["prefill"]
        events: list[Event] = []
        for live in entered:
            live.prefill_s = seconds / len(entered)
            events += self._emit(live, live.extend([int(live.tokens[live.prompt_len])]), None)
        return events

    def _prefill_chunk(self, pending: list[LiveRequest]) -> None:
        ends = [min(x.prefilled + self.prefill_chunk, x.prompt_len) for x in pending]
        chunks = [x.tokens[x.prefilled : end] for x, end in zip(pending, ends, strict=True)]
        starts = [x.prefilled for x in pending]
        slots = [x.slot for x in pending]
        out = self._prefills.run(chunks, slots, starts)
        for i, (live, end) in enumerate(zip(pending, ends, strict=True)):
            live.prefilled = end
            if end == live.prompt_len:
                live.tokens[end] = choose(out.logits[i : i + 1], np.array([end]), live.request.sampling)[0]
        following = [int(x.tokens[end]) for x, end in zip(pending, ends, strict=True)]
        self._session.observe(Commit(slots, starts, chunks, following, out.taps))

    def _round(self) -> list[Event]:
        live = sorted(self._live.values(), key=lambda x: x.slot)
        if not live:
            return []
        result = self._rounds.run(live)
        stage_s = self._timer.take()
        events: list[Event] = []
        for x, outcome in zip(live, result.outcomes, strict=True):
            got = outcome.accepted
            tokens = [*outcome.tree.tokens[list(got.path[1:])].tolist(), got.bonus]
            events += self._emit(x, x.extend(tokens), self._stats(outcome, stage_s, len(live), result.num_rows))
        return events

    def _stats(self, outcome: Outcome, stage_s: dict[str, float], num_requests: int, num_rows: int) -> RoundStats:
        tree, got = outcome.tree, outcome.accepted
        return RoundStats(
            num_drafted=outcome.num_drafted,
            num_verified=len(tree.tokens),
            num_accepted=got.num_accepted,
            num_emitted=0,
            stage_s=stage_s,
            num_requests=num_requests,
            num_scheduled=num_rows,
            max_depth=int(tree.depths.max()),
            tree=tree if self.trace else None,
            path=got.path if self.trace else None,
        )

    def _emit(self, live: LiveRequest, tokens: list[int], stats: RoundStats | None) -> list[Event]:
        if stats is not None:
            stats.num_emitted = len(tokens)
            live.rounds.append(stats)
        events: list[Event] = [TokenEvent(live.index, tokens, live.new_text(), stats)]
        if live.finish_reason:
            del self._live[live.slot]
            self._free.append(live.slot)
            events.append(FinishEvent(live.index, live.result()))
        return events


def _ways(
    parts: RoundParts, max_context: int, max_chunk: int, graphs: bool | None
) -> tuple[Round, EagerPrefill | CapturedPrefill]:
    """How an engine runs rounds and prefills."""
    if graphs is None and parts.target.device.type == "cuda":
        able = hasattr(parts.session, "on_device") and parts.workspace.max_requests <= MAX_SLOTS
        if parts.target.tiled and not able:
            logger.warning(
                "drafter %r with %d slots: rounds run without CUDA graphs",
                parts.drafter.name,
                parts.workspace.max_requests,
            )
        graphs = able and parts.target.tiled
    if not graphs:
        return EagerRound(parts), EagerPrefill(parts)
    rounds = CapturedRound(parts, max_context)
    return rounds, CapturedPrefill(parts, rounds.pool, max_chunk, max_context)


#: A prompt: token ids, a user message, or a conversation of {"role", "content"} messages.
Prompt = Sequence[int] | str | Sequence[dict[str, str]]


def prompt_ids(target: Target, prompt: Prompt) -> tuple[int, ...]:
    """Token ids of a prompt; text and conversations go through the chat template of the target.

    Raises:
        ValueError: an empty prompt, or something that is none of the three forms.
    """
    if isinstance(prompt, str):
        return tuple(target.encode_chat([{"role": "user", "content": prompt}]))
    if not isinstance(prompt, Sequence | np.ndarray):
        raise ValueError(f"prompt {prompt!r:.80} must be text, token ids or a list of role/content messages")
    items = list(prompt)
    if items and all(isinstance(m, dict) for m in items):
        return tuple(target.encode_chat(items))
    if not items or any(isinstance(t, bool) or not isinstance(t, int | np.integer) for t in items):
        raise ValueError(f"prompt {prompt!r:.80} must be text, token ids or a list of role/content messages")
    return tuple(int(t) for t in items)


def generate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    slots: int = 1,
    trace: bool = False,
    progress: bool = False,
) -> list[GenerateResult]:
    """Completes prompts, `slots` of them at a time.

    Args:
        target: the model.
        drafter: from `load_method`.
        prompts: see `Prompt`.
        sampling: one configuration for all, or one a prompt; default greedy, 128 tokens. Requests with one seed draw
            the same random numbers at the same positions; give each its own seed where they must be independent.
        slots: requests that run side by side.
        trace: keep the draft tree of every round.
        progress: show a bar over finished prompts.

    Returns:
        One result a prompt, in order.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one text; give a list of prompts")
    requests = requests_of(target, prompts, sampling)
    if not requests:
        return []
    engine = Engine(target, drafter, min(slots, len(requests)), min(longest(requests), target.context_limit), trace)
    return complete(engine, requests, progress)


def requests_of(
    target: Target, prompts: Sequence[Prompt], sampling: SamplingConfig | Sequence[SamplingConfig] | None = None
) -> list[Request]:
    """Requests for prompts; see `generate`.

    Raises:
        ValueError: a bad prompt, or another number of sampling configurations than prompts.
    """
    config = SamplingConfig() if sampling is None else sampling
    configs = [config] * len(prompts) if isinstance(config, SamplingConfig) else list(config)
    if len(configs) != len(prompts):
        raise ValueError(f"sampling has {len(configs)} entries for {len(prompts)} prompts")
    return [Request(prompt_ids(target, p), c) for p, c in zip(prompts, configs, strict=True)]


def longest(requests: Sequence[Request]) -> int:
    """Most tokens that one of the requests can come to, prompt and output."""
    return max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)


def complete(engine: Engine, requests: Sequence[Request], progress: bool = False) -> list[GenerateResult]:
    """Runs requests through an idle engine to their end; results in order."""
    places = {engine.submit(request): place for place, request in enumerate(requests)}
    results: dict[int, GenerateResult] = {}
    with tqdm(total=len(requests), disable=not progress, desc=engine.drafter.name, unit="prompt") as bar:
        for event in engine.stream():
            if isinstance(event, FinishEvent):
                results[places[event.request]] = event.result
                bar.update()
    return [results[i] for i in range(len(requests))]
