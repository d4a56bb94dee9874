"""How good a draft network is, without decoding: hits by position, and walked acceptance along recorded responses.

The target's greedy responses are known, so the rounds of greedy decoding can be walked: prune the draft after a prefix,
follow the response through the tree, add the bonus token, and go on from there. Averaging over all prefixes instead
would flatter the draft, since rounds start more often where the last one failed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from workbench.drafters.dart import NUM_CANDIDATES
from workbench.search.prune import PruneConfig, prune_tree
from workbench.search.trie import NgramTrie
from workbench.train.dart_objective import DartObjective
from workbench.train.data import Corpus
from workbench.train.packing import TokenTable
from workbench.types import DraftTree


@dataclass(frozen=True)
class DraftRecord:
    """Drafts after every prefix of one response.

    Attributes:
        sample: its number in the corpus.
        tokens: [n] int32, prompt and response.
        first: place of the first newest real row; draft p follows the root at place first + p + 1.
        ids: [P, d, C] int32 candidates, best first, as target ids.
        probs: [P, d, C] fp32, soft-maxed over the candidates.
        kl: [P, d] fp32, divergence from the target inside the draft vocabulary; NaN where nothing is drafted.
    """

    sample: int
    tokens: np.ndarray
    first: int
    ids: np.ndarray
    probs: np.ndarray
    kl: np.ndarray

    def truth(self) -> np.ndarray:
        """[P, d] int32, the token that each slot should draft; -1 behind the end."""
        num_prefixes, depth = self.kl.shape
        places = self.first + 2 + np.arange(num_prefixes)[:, None] + np.arange(depth)
        padded = np.append(self.tokens, np.full(depth, -1, self.tokens.dtype))
        return padded[np.minimum(places, len(padded) - 1)]


@torch.no_grad()
def record_drafts(objective: DartObjective, corpus: Corpus, row_multiple: int = 64) -> Iterator[DraftRecord]:
    """Drafts after every prefix of every response, one sample at a time.

    Args:
        objective: network and target; its feature source must be asked for `corpus` (a `Teacher` always can).
        corpus: samples; those with fewer than two response tokens are passed over.
        row_multiple: rows are padded to a multiple of this, to see few shapes.
    """
    table = TokenTable(corpus, objective.device)
    depth = objective.module.config.depth
    for sample in range(corpus.num_samples):
        length = int(corpus.lengths[sample])
        first = max(0, int(corpus.prompt_len[sample]) - 1)
        num_prefixes = length - 2 - first
        if num_prefixes < 1:
            continue
        padded = -(-length // row_multiple) * row_multiple
        row = torch.full((1, padded), -1, device=objective.device)
        row[0, :length] = torch.arange(length, device=objective.device) + int(corpus.offsets[sample])
        batch = table.batch(row, num_prefixes, depth)
        ids, probs, kl = objective.candidates(batch, NUM_CANDIDATES)
        yield DraftRecord(
            sample,
            corpus.sample(sample),
            first,
            ids[0].to(torch.int32).cpu().numpy(),
            probs[0].cpu().numpy(),
            torch.where(batch.valid, kl, torch.nan)[0].cpu().numpy(),
        )


def hit_rates(records: Sequence[DraftRecord], ranks: Sequence[int] = (1, 10, 25)) -> dict[str, list[float]]:
    """Share of prefixes whose true token is among the best k candidates, by draft position.

    Returns:
        `hit@k` [d] for each k, `kl` [d] mean divergence, `count` [d] prefixes.
    """
    if not records:
        raise ValueError("records is empty; nothing to rate")
    truth = np.concatenate([r.truth() for r in records])
    found = np.concatenate([r.ids for r in records]) == truth[..., None]
    valid = truth >= 0
    counts = valid.sum(0)
    divided = np.maximum(counts, 1)
    rates = {f"hit@{k}": ((found[..., :k].any(-1) & valid).sum(0) / divided).tolist() for k in ranks}
    kl = np.nansum(np.concatenate([r.kl for r in records]), axis=0) / divided
    return rates | {"kl": kl.tolist(), "count": counts.tolist()}


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


def follow(tree: DraftTree, truth: Sequence[int]) -> int:
    """Number of drafted tokens that agree with the truth, from the root down."""
    node = 0
    for depth, token in enumerate(truth):
        children = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not len(children):
            return depth
        node = int(children[0])
    return len(truth)


def walk_rounds(
    records: Sequence[DraftRecord],
    trie: NgramTrie | None,
    num_nodes: Sequence[int],
    prune: PruneConfig | None = None,
    seconds: float | None = None,
) -> tuple[dict[int, Walk], int]:
    """Walks greedy decoding over recorded responses.

    Args:
        records: drafts along greedy responses.
        trie: n-gram counts; None for none.
        num_nodes: tree sizes, the root not counted; each is walked for itself.
        prune: other settings of the search.
        seconds: stop after the record during which this time is over.

    Returns:
        (pooled rounds of every tree size, number of records walked).
    """
    config = replace(prune or PruneConfig(), num_nodes=max(num_nodes))
    walks = {n: Walk() for n in num_nodes}
    started = time.perf_counter()
    for done, record in enumerate(records):
        if seconds is not None and time.perf_counter() - started > seconds:
            return walks, done
        truth = record.truth()
        trees: dict[int, DraftTree] = {}
        for size, walk in walks.items():
            prefix = 0
            while prefix < len(truth):
                if prefix not in trees:
                    context = record.tokens[: record.first + prefix + 2]
                    trees[prefix] = prune_tree(record.ids[prefix], record.probs[prefix], context, trie, config)
                left = truth[prefix][truth[prefix] >= 0]
                accepted = follow(trees[prefix].first(size), left.tolist())
                # Behind the last token there is no bonus to count.
                gained = min(accepted + 1, len(truth) - prefix)
                walk.tokens += gained
                walk.rounds += 1
                prefix += gained
    return walks, len(records)


def summary_rows(
    records: Sequence[DraftRecord],
    corpus: Corpus,
    num_nodes: Sequence[int],
    walked: int,
    trie: NgramTrie | None = None,
    prune: PruneConfig | None = None,
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Rows for tables.

    Args:
        records: drafts of `corpus`.
        corpus: tells which responses are greedy.
        num_nodes, trie, prune: see `walk_rounds`.
        walked: greedy responses that are walked.

    Returns:
        (one row a draft position: hit@1, hit@10, hit@25, kl, prefixes; one row a tree size: tau, rounds, tokens).
    """
    rates = hit_rates(records)
    prefixes = rates.pop("count")
    hits = [
        {"position": t + 1, **{name: values[t] for name, values in rates.items()}, "prefixes": count}
        for t, count in enumerate(prefixes)
    ]
    greedy = [r for r in records if not corpus.sampled[r.sample]][:walked]
    walks, _ = walk_rounds(greedy, trie, num_nodes, prune)
    return hits, [{"num_nodes": n, "tau": w.tau, "rounds": w.rounds, "tokens": w.tokens} for n, w in walks.items()]
