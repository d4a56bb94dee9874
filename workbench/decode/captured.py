"""The round on the device: draft, decision and verification as CUDA graphs over buffers that never move.

    host: stage the requests -> | draft | decision: scores, lengths, packing | verify: target, accept, commit | -> read

There is one set of graphs for every bucket of requests. Boundaries between requests, and the requests themselves,
change inside the buffers; nothing is captured anew for them (DScale, arXiv 2609.37532: fixed-address graphs). Where the
draft holds the search too and the policy looks at no scores, trees need no decision, so one graph is the whole round:

    host: stage the requests -> | draft, search, packing, target, accept, commit | -> read

Trees that are searched or cut on the host are packed there, between the draft graph and the verify graph. Without CUDA
the same work runs uncaptured.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial

import torch

from workbench.batch import NUM_TAIL, AcceptedRows, Batch, Chains, DeviceRows, Drafted, DraftTrees
from workbench.budget.limits import within_limits
from workbench.budget.on_device import device_decision, rows_of_bucket, rows_of_each
from workbench.budget.policy import round_budget
from workbench.decode.accept import Accepted
from workbench.decode.eager import EagerRound
from workbench.decode.graphs import GraphPool, request_buckets
from workbench.decode.live import LiveRequest
from workbench.decode.reading import Reading, tree_fields
from workbench.decode.round import Outcome, RoundParts, RoundResult
from workbench.decode.staging import Staging
from workbench.kernel_path import kernel
from workbench.types import DraftRequest, DraftTree

logger = logging.getLogger(__name__)

#: Requests that the packing kernel takes.
MAX_SLOTS = 256


class CapturedRound:
    """See `workbench.decode.round.Round`. A round in which a request samples otherwise than by "match" runs eagerly.

    Stages: "draft" is the draft graph; "allocate" the decision, with packing where the device packs; "verify" the graph
    of target, choice, acceptance, compaction and the drafter's commit; "accept" the host's wait and its one look;
    "commit" what the host keeps. A search on the device is part of "draft"; a round that is one graph is in "verify"
    whole, with its draft.

    Args:
        parts: what it works on; the target attends through the kernels.
        max_context: bound on committed tokens.
        capture: False launches every kernel by itself, to see what graphs are worth; a collection captures those of
            "draft", "decide", "verify" and "round" that it names. Where a round can be one graph it is run by its
            pieces unless that is named, or everything is captured.

    Attributes:
        pool: the graphs, what they cost, and how many rounds could not run on the device.
        searches: True if the draft trees of its rounds are made on the device.

    Raises:
        ValueError: a drafter without a device session, a target with plain attention, more than `MAX_SLOTS` slots, or
            decisions captured over drafts that are not.
    """

    def __init__(self, parts: RoundParts, max_context: int, capture: bool | Collection[str] = True) -> None:
        target, drafter = parts.target, parts.drafter
        if not hasattr(parts.session, "on_device"):
            raise ValueError(f"drafter {drafter.name!r} has no part that runs on the device; take graphs=False")
        if not target.tiled:
            raise ValueError("the target attends in plain torch; take attention='tile' for rounds on the device")
        self._parts, self._eager = parts, EagerRound(parts)
        self._session = parts.session.on_device()
        slots = parts.workspace.max_requests
        if slots > MAX_SLOTS:
            raise ValueError(f"slots={slots} must be at most {MAX_SLOTS} for rounds on the device; take graphs=False")
        kinds = set(capture) if isinstance(capture, Collection) else set()
        if "decide" in kinds and "draft" not in kinds and not self._session.on_host:
            raise ValueError(
                f"capture={sorted(kinds)}: a captured decision needs captured drafts, whose place is fixed"
            )
        self._staging = Staging(slots, max_context, target.device)
        self._max_rows, self._max_context = 1 + drafter.max_nodes, max_context
        self._decide = device_decision(drafter.policy, self._max_rows) if drafter.max_nodes else None
        self.searches = getattr(self._session, "searches", False)
        self._rows_of_tree = rows_of_each(drafter.policy, self._max_rows) if self.searches else None
        self._in_one = self._rows_of_tree is not None and (capture is True or "round" in kinds)
        self._buckets = request_buckets(slots)
        self._sampling: dict[int, tuple[float, int]] = {}
        self.pool = GraphPool(target.device, capture)

    @property
    def num_eager(self) -> int:
        """Rounds that ran without graphs."""
        return self.pool.report.eager_rounds

    @torch.inference_mode()
    def run(self, live: Sequence[LiveRequest]) -> RoundResult:
        """See `workbench.decode.round.Round`."""
        others = [x for x in live if not _on_device(x)]
        if others:
            return self._run_eagerly(live, others[0])
        for x in live:
            self._set_sampling(x)
        requests = [x.draft_request(self._parts.drafter.max_nodes) for x in live]
        limits = [_limit(r, self.searches) for r in requests]
        num_requests = next(b for b in self._buckets if b >= len(live))
        timer, batch = self._parts.timer, self._staging.batch(num_requests)
        if self._in_one:
            self._capture_whole(batch)
        with timer.stage("draft"):
            self._stage(live, requests, limits)
            drafted = None if self._in_one else self._draft(batch)
        if self._rows_of_tree is not None:
            return self._run_searched(live, batch, drafted)
        if self._on_chains(drafted):
            return self._run_chains(live, batch, drafted, limits)
        return self._run_trees(live, requests, num_requests, drafted)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Captures all graphs of all buckets, over rounds without a request."""
        self._staging.stage([], [], [], [], 0)
        for num_requests in self._buckets:
            batch, rows = self._staging.batch(num_requests), self._rows(num_requests)
            self._parts.workspace.clear()
            if self._in_one:
                self._whole_round(batch, rows)
                continue
            drafted = self._draft(batch)
            chains = self._on_chains(drafted)
            if chains or self._rows_of_tree is not None:
                self._decide_rows(batch, drafted, rows)
            self._verify_rows(rows, not chains)

    def _draft(self, batch: Batch) -> Drafted:
        if self._session.on_host:
            return None
        return self.pool.run(("draft", len(batch.slots)), partial(self._session.draft, batch))

    def _on_chains(self, drafted: Drafted) -> bool:
        """True if the device decides how much is verified of such chains."""
        if self._max_rows == 1:
            return True
        return self._decide is not None and isinstance(drafted, Chains)

    def _run_eagerly(self, live: Sequence[LiveRequest], first: LiveRequest) -> RoundResult:
        report = self.pool.report
        report.eager_rounds += 1
        if report.eager_rounds == 1:
            logger.warning(
                "request %d samples with %s: its rounds run eagerly, since the device only knows accept_rule='match' "
                "without top_k and top_p",
                first.index,
                first.request.sampling,
            )
        return self._eager.run(live)

    def _set_sampling(self, x: LiveRequest) -> None:
        settings = (x.request.sampling.temperature, int(x.request.sampling.seed))
        if self._sampling.get(x.slot) != settings:
            self._staging.set_sampling(x.slot, *settings)
            self._sampling[x.slot] = settings

    def _stage(self, live: Sequence[LiveRequest], requests: Sequence[DraftRequest], limits: Sequence[int]) -> None:
        rows = getattr(self._parts.drafter.policy, "rows", 1.0)
        searching = requests if self.searches else ()
        self._staging.stage(
            [x.slot for x in live],
            [x.committed for x in live],
            [int(x.tokens[x.committed]) for x in live],
            limits,
            round_budget(rows, len(live)),
            [max(r.max_depth, 0) for r in searching],
            [r.tokens[-NUM_TAIL:] for r in searching],
        )

    def _run_chains(
        self, live: Sequence[LiveRequest], batch: Batch, drafted: Drafted, limits: Sequence[int]
    ) -> RoundResult:
        """Lengths are decided on the device, so the host learns them with the outcome."""
        rows, timer = self._rows(len(batch.slots)), self._parts.timer
        with timer.stage("allocate"):
            self._decide_rows(batch, drafted, rows)
        with timer.stage("verify"):
            outcome = self._verify_rows(rows, branched=False)
        with timer.stage("accept"):
            read = Reading(outcome, rows)
        with timer.stage("commit"):
            results = [(read.chain(r), read.accepted(r)) for r in range(len(live))]
            self._advance(live, results)
        drafts = 0 if drafted is None else drafted.tokens.shape[1]
        outcomes = [Outcome(min(n - 1, drafts), *result) for n, result in zip(limits, results, strict=True)]
        return RoundResult(outcomes, len(rows.tokens))

    def _run_searched(self, live: Sequence[LiveRequest], batch: Batch, drafted: DraftTrees | None) -> RoundResult:
        """Trees are made and packed on the device, so the host learns them with the outcome.

        None for trees that are drafted by the graph that verifies them.
        """
        rows, timer = self._rows(len(batch.slots)), self._parts.timer
        if drafted is not None:
            with timer.stage("allocate"):
                self._decide_rows(batch, drafted, rows)
        with timer.stage("verify"):
            if drafted is None:
                outcome = self._whole_round(batch, rows)
            else:
                outcome = torch.cat([self._verify_rows(rows, branched=True), tree_fields(drafted)])
        with timer.stage("accept"):
            read = Reading(outcome, rows)
        with timer.stage("commit"):
            results = [(read.tree(r), read.accepted(r)) for r in range(len(live))]
            self._advance(live, results)
        outcomes = [Outcome(read.num_drafted(r), *result) for r, result in enumerate(results)]
        return RoundResult(outcomes, len(rows.tokens))

    def _run_trees(
        self, live: Sequence[LiveRequest], requests: Sequence[DraftRequest], num_requests: int, drafted: Drafted
    ) -> RoundResult:
        """Trees are cut on the host, and most are made there."""
        parts, timer = self._parts, self._parts.timer
        policy = parts.drafter.policy
        proposed = self._session.trees(requests, drafted, timer)
        with timer.stage("allocate"):
            trees = policy.allocate(within_limits(proposed, requests, parts.target.vocab_size))
        rows = self._rows(num_requests)
        with timer.stage("pack"):
            parts.workspace.pack(trees, [x.slot for x in live], [x.committed for x in live], len(rows.tokens))
        with timer.stage("verify"):
            outcome = self._verify_rows(rows, branched=True)
        with timer.stage("accept"):
            read = Reading(outcome, rows)
        with timer.stage("commit"):
            results = [(tree, read.accepted(r)) for r, tree in enumerate(trees)]
            self._advance(live, results)
        outcomes = [Outcome(p.num_nodes, tree, got) for p, (tree, got) in zip(proposed, results, strict=True)]
        return RoundResult(outcomes, len(rows.tokens))

    def _rows(self, num_requests: int) -> DeviceRows:
        """The workspace's rows of a bucket."""
        num_rows = rows_of_bucket(self._parts.drafter.policy, num_requests, self._max_rows)
        return self._parts.workspace.device_rows(num_requests, num_rows, self._max_rows, self._max_context)

    def _decide_rows(self, batch: Batch, drafted: Drafted, rows: DeviceRows) -> None:
        self.pool.run(("decide", len(rows.slots)), partial(self._pack, batch, drafted, rows))

    def _verify_rows(self, rows: DeviceRows, branched: bool) -> torch.Tensor:
        return self.pool.run(("verify", len(rows.slots), len(rows.tokens)), partial(self._verify, rows, branched))

    def _whole_round(self, batch: Batch, rows: DeviceRows) -> torch.Tensor:
        """Everything from the draft on: an outcome with `tree_fields`."""

        def work() -> torch.Tensor:
            trees = self._session.draft(batch)
            self._pack(batch, trees, rows)
            return torch.cat([self._verify(rows, branched=True), tree_fields(trees)])

        return self.pool.run(("round", len(rows.slots)), work)

    def _capture_whole(self, batch: Batch) -> None:
        """Captures a bucket's whole round over nobody, since it cannot be run twice for the same requests.

        A capture runs its work once before; then the round's commit would lie under the draft of its repetition.
        """
        num_requests = len(batch.slots)
        if self.pool.captures and ("round", num_requests) not in self.pool.report.captures:
            self._staging.stage([], [], [], [], 0)
            self._whole_round(batch, self._rows(num_requests))

    def _pack(self, batch: Batch, drafted: Drafted, rows: DeviceRows) -> None:
        """Fills the workspace with as much of every draft as the policy lets pass."""
        device, dead_row = batch.slots.device, self._parts.cache.max_len
        self._parts.workspace.copy_requests(batch)
        fields = (rows.tokens, rows.positions, rows.slot_of_row, rows.kv_row, rows.ancestors, rows.starts)
        if isinstance(drafted, DraftTrees):
            kept = drafted._replace(sizes=drafted.sizes.clamp(max=self._rows_of_tree))
            pack = kernel("pack_trees", device)
            pack(kept, batch.slots, batch.context_len, dead_row, _chain_rows()(*fields))
            return
        drafts = batch.anchors[:, None] if drafted is None else drafted.tokens
        lengths = batch.limits if drafted is None else self._decide(drafted, batch)
        pack = kernel("pack", device)
        pack(lengths, batch.anchors, drafts, batch.slots, batch.context_len, dead_row, _chain_rows()(*fields))

    def _verify(self, rows: DeviceRows, branched: bool) -> torch.Tensor:
        """Target, accept rule, and what of both is kept: [M + (R+1) + R + R + R * P] int64, see `Reading`."""
        parts, device = self._parts, rows.tokens.device
        out = parts.target.forward(rows, parts.cache, parts.drafter.taps)
        staging = self._staging
        choices = kernel("choose", device)(
            out.logits, rows.positions, rows.slot_of_row, staging.temperature, staging.seed
        )
        got = kernel("accept", device)(rows.tokens, rows.ancestors, rows.starts, choices, rows.max_rows)
        if branched:
            kernel("compact", device)(parts.cache.kv, rows.slots, rows.context_len, got.path, got.num_accepted)
        last = rows.starts[:-1] + got.path.amax(1).clamp(min=0)
        last = last.where(rows.starts[1:] > rows.starts[:-1], 0)
        self._session.commit(rows, AcceptedRows(got.place, choices, last, got.num_accepted, got.bonus), out.taps)
        return torch.cat([rows.tokens, rows.starts, got.num_accepted, got.bonus, got.path.flatten()])

    def _advance(self, live: Sequence[LiveRequest], results: Sequence[tuple[DraftTree, Accepted]]) -> None:
        self._session.advance([x.slot for x in live], [len(got.path) for _, got in results])


def _chain_rows() -> type:
    """The record of the rows that the packing kernel fills."""
    from kernels.ref.pack import ChainRows  # its folder is on the path once a kernel was asked for

    return ChainRows


def _limit(request: DraftRequest, branched: bool) -> int:
    """Most rows of a request; a chain has no more than it may be deep."""
    return 1 + (request.max_nodes if branched else min(request.max_nodes, max(request.max_depth, 0)))


def _on_device(x: LiveRequest) -> bool:
    """True if the device can draw what the request samples."""
    sampling = x.request.sampling
    return sampling.greedy or (sampling.accept_rule == "match" and sampling.top_k == 0 and sampling.top_p == 1.0)
