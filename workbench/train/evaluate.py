"""How good a draft network is, without decoding: hits by position, and walked acceptance along recorded responses.

The target's greedy responses are known, so the rounds of greedy decoding can be walked: make the tree or chain of the
draft behind a root, follow the response through it, add the bonus token, and go on from there. Averaging over all roots
instead would flatter the draft, since rounds start more often where the last one failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.drafters.dart_state import NUM_CANDIDATES
from workbench.search.prune import PruneConfig, prune_tree
from workbench.search.trie import NgramTrie
from workbench.train.block_objective import BlockObjective
from workbench.train.data import Corpus
from workbench.train.packing import TokenTable
from workbench.types import DraftTree


@dataclass(frozen=True)
class DraftRecord:
    """Drafts behind every root of one response.

    Attributes:
        sample: its number in the corpus.
        tokens: [n] int32, prompt and response.
        first: place of the first root; draft p follows the root at place first + p.
        ids: [P, d, C] int32 candidates, best first, as target ids.
        probs: [P, d, C] fp32, soft-maxed over the candidates.
        measured: [P, d] fp32, `measure` of every drafted token; NaN where nothing is drafted.
        measure: what that is: "kl", divergence from the target inside the draft vocabulary, or "ce", cross-entropy of
            the token that followed.
    """

    sample: int
    tokens: np.ndarray
    first: int
    ids: np.ndarray
    probs: np.ndarray
    measured: np.ndarray
    measure: str = "kl"

    def truth(self) -> np.ndarray:
        """[P, d] int32, the token that each position should draft; -1 behind the end."""
        num_prefixes, depth = self.measured.shape
        places = self.first + 1 + np.arange(num_prefixes)[:, None] + np.arange(depth)
        padded = np.append(self.tokens, np.full(depth, -1, self.tokens.dtype))
        return padded[np.minimum(places, len(padded) - 1)]


@torch.no_grad()
def record_drafts(
    objective: BlockObjective,
    corpus: Corpus,
    row_multiple: int = 64,
    num_candidates: int = NUM_CANDIDATES,
    batch_rows: int = 1,
    num_blocks: int = 64,
) -> Iterator[DraftRecord]:
    """Drafts behind every root of every response, in the order of the samples.

    Args:
        objective: network and target; its feature source must be asked for `corpus` (a `Teacher` always can).
        corpus: samples; those with fewer than two response tokens are passed over.
        row_multiple: rows are padded to a multiple of this, to see few shapes.
        num_candidates: C, candidates of a position that are kept.
        batch_rows: samples drafted side by side.
        num_blocks: blocks of a sample drafted at once.
    """
    table, rule = TokenTable(corpus, objective.device), objective.rule
    # The first root is the first response token, or the first token that has an anchor.
    first = np.maximum(corpus.prompt_len, rule.root)
    counts = corpus.lengths - 1 - first
    samples = np.flatnonzero(counts > 0)
    for group in np.split(samples, range(batch_rows, len(samples), batch_rows)):
        padded = -(-int(corpus.lengths[group].max(initial=1)) // row_multiple) * row_multiple
        steps = np.arange(padded)
        places = np.where(steps < corpus.lengths[group, None], corpus.offsets[group, None] + steps, -1)
        rows = torch.from_numpy(places).to(objective.device)
        found = None
        parts: list[tuple[np.ndarray, ...]] = []
        for skip in range(0, int(counts[group].max(initial=0)), num_blocks):
            batch = table.batch(rows, num_blocks, rule, skip=skip)
            found = objective.features(batch) if found is None else found
            ids, probs, measured = objective.candidates(batch, found, num_candidates)
            measured = torch.where(batch.valid, measured, torch.nan)
            parts.append((ids.to(torch.int32).cpu().numpy(), probs.cpu().numpy(), measured.cpu().numpy()))
        for row, sample in enumerate(group.tolist()):
            count = int(counts[sample])
            mine = [np.concatenate([part[row] for part in kind])[:count] for kind in zip(*parts, strict=True)]
            yield DraftRecord(sample, corpus.sample(sample), int(first[sample]), *mine, objective.measure)


def hit_rates(records: Sequence[DraftRecord], ranks: Sequence[int] = (1, 10, 25)) -> dict[str, list[float]]:
    """Share of prefixes whose true token is among the best k candidates, by draft position.

    Returns:
        `hit@k` [d] for each k, the records' `measure` [d] in the mean, `count` [d] prefixes.
    """
    if not records:
        raise ValueError("records is empty; nothing to rate")
    truth = np.concatenate([r.truth() for r in records])
    found = np.concatenate([r.ids for r in records]) == truth[..., None]
    valid = truth >= 0
    counts = valid.sum(0)
    divided = np.maximum(counts, 1)
    rates = {f"hit@{k}": ((found[..., :k].any(-1) & valid).sum(0) / divided).tolist() for k in ranks}
    measured = np.nansum(np.concatenate([r.measured for r in records]), axis=0) / divided
    return rates | {records[0].measure: measured.tolist(), "count": counts.tolist()}


@dataclass
class Walk:
    """Pooled rounds of one setting.

    Attributes:
        tokens: tokens gained, bonus included.
        rounds: rounds walked.
    """

    tokens: int = 0
    rounds: int = 0

    @property
    def tau(self) -> float:
        """Tokens a round; NaN without rounds."""
        return self.tokens / self.rounds if self.rounds else float("nan")


#: Of a record: (prefix, drafted nodes) -> how many drafted tokens agree with the response.
Agreement = Callable[[int, int], int]
#: How the rounds of a method are followed along a record.
Follow = Callable[[DraftRecord], Agreement]


def follow(tree: DraftTree, truth: Sequence[int]) -> int:
    """Number of drafted tokens that agree with the truth, from the root down."""
    node = 0
    for depth, token in enumerate(truth):
        children = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not len(children):
            return depth
        node = int(children[0])
    return len(truth)


def follow_pruned(trie: NgramTrie | None = None, prune: PruneConfig | None = None) -> Follow:
    """Trees as DART's search makes them.

    Args:
        trie: n-gram counts; None for none.
        prune: settings of the search; its `num_nodes` is the largest tree that can be asked for.
    """
    config = prune or PruneConfig()

    def of_record(record: DraftRecord) -> Agreement:
        truth = record.truth()
        trees: dict[int, DraftTree] = {}

        def agree(prefix: int, num_nodes: int) -> int:
            if prefix not in trees:
                context = record.tokens[: record.first + prefix + 1]
                trees[prefix] = prune_tree(record.ids[prefix], record.probs[prefix], context, trie, config)
            return follow(trees[prefix].first(num_nodes), truth[prefix][truth[prefix] >= 0].tolist())

        return agree

    return of_record


def follow_chain(record: DraftRecord) -> Agreement:
    """The chain of the best candidates."""
    agreed = np.cumprod(record.ids[..., 0] == record.truth(), axis=1).sum(axis=1).tolist()
    return lambda prefix, num_nodes: min(num_nodes, agreed[prefix])


def walk_rounds(
    records: Sequence[DraftRecord],
    follow: Follow,
    num_nodes: Sequence[int],
    seconds: float | None = None,
) -> tuple[dict[int, Walk], int]:
    """Walks greedy decoding over recorded responses.

    Args:
        records: drafts along greedy responses.
        follow: `follow_chain`, or from `follow_pruned`.
        num_nodes: tree sizes, the root not counted; each is walked for itself.
        seconds: stop after the record during which this time is over.

    Returns:
        (pooled rounds of every tree size, number of records walked).
    """
    walks = {n: Walk() for n in num_nodes}
    started = time.perf_counter()
    for done, record in enumerate(records):
        if seconds is not None and time.perf_counter() - started > seconds:
            return walks, done
        agree, num_prefixes = follow(record), len(record.measured)
        for size, walk in walks.items():
            prefix = 0
            while prefix < num_prefixes:
                # Behind the last token there is no bonus to count.
                gained = min(agree(prefix, size) + 1, num_prefixes - prefix)
                walk.tokens += gained
                walk.rounds += 1
                prefix += gained
    return walks, len(records)


def summary_rows(
    records: Sequence[DraftRecord],
    corpus: Corpus,
    follow: Follow,
    num_nodes: Sequence[int],
    walked: int,
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Rows for tables.

    Args:
        records: drafts of `corpus`.
        corpus: tells which responses are greedy.
        follow, num_nodes: see `walk_rounds`.
        walked: greedy responses that are walked.

    Returns:
        (one row a draft position: hit@1, hit@10, hit@25, kl or ce, prefixes; one row a tree size: tau, rounds, tokens).
    """
    rates = hit_rates(records)
    prefixes = rates.pop("count")
    hits = [
        {"position": t + 1, **{name: values[t] for name, values in rates.items()}, "prefixes": count}
        for t, count in enumerate(prefixes)
    ]
    greedy = [r for r in records if not corpus.sampled[r.sample]][:walked]
    walks, _ = walk_rounds(greedy, follow, num_nodes)
    return hits, [{"num_nodes": n, "tau": w.tau, "rounds": w.rounds, "tokens": w.tokens} for n, w in walks.items()]
