"""Drafting from n-gram counts alone: what the trie of DART knows without a draft network."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from workbench.budget.table import build_policy, build_tree_policy
from workbench.drafters.host_drafts import HostDrafts
from workbench.drafters.trie_option import TRIE, resolve_trie
from workbench.models.target import Target
from workbench.paths import data_dir
from workbench.search.trie import NgramTrie
from workbench.types import MAX_TREE_ROWS, Commit, DraftRequest, DraftTree, Policy, Stopwatch


class NgramDrafter:
    """Best-first trees of the most probable continuations; stateless, so it is its own session.

    Args:
        trie: n-gram counts.
        num_nodes: nodes of a tree, root not counted, 1..63.
        branching: continuations tried behind each node, at least 1.
        policy: decides how much is verified; default everything.

    Raises:
        ValueError: an argument out of range.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, trie: NgramTrie, num_nodes: int = 16, branching: int = 4, policy: Policy | None = None) -> None:
        if not 1 <= num_nodes < MAX_TREE_ROWS:
            raise ValueError(f"num_nodes={num_nodes} outside 1..{MAX_TREE_ROWS - 1}")
        if branching < 1:
            raise ValueError(f"branching={branching} must be at least 1")
        self.trie, self.max_nodes, self.branching = trie, num_nodes, branching
        self.policy = policy or build_policy("full")

    def session(self, slots: int, max_len: int) -> NgramDrafter:
        """Nothing to keep: the context is in the request."""
        return self

    def observe(self, commit: Commit) -> None:
        """Nothing to learn."""

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        """One tree a request."""
        with timer.stage("search"):
            return [self._tree(r) for r in requests]

    def on_device(self) -> HostDrafts:
        """Everything stays on the host."""
        return HostDrafts(self)

    def _tree(self, request: DraftRequest) -> DraftTree:
        """Takes the most probable open node, opens its continuations, and so on; scores are log-probabilities."""
        tail = tuple(request.tokens[-(self.trie.order - 1) :].tolist())
        tokens, parents, depths, scores = [tail[-1]], [-1], [0], [0.0]
        contexts = [tail]
        heap: list[tuple[float, int, int, int]] = []  # (-score, order of discovery, token, parent)
        found = 0
        newest = 0
        while len(tokens) <= request.max_nodes:
            if depths[newest] < request.max_depth:
                ids, probs = self.trie.continuations(contexts[newest], self.branching)
                for token, prob in zip(ids.tolist(), np.log(probs).tolist(), strict=True):
                    heapq.heappush(heap, (-(scores[newest] + prob), found, token, newest))
                    found += 1
            if not heap:
                break
            cost, _, token, parent = heapq.heappop(heap)
            newest = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            scores.append(-cost)
            contexts.append((*contexts[parent], token)[-(self.trie.order - 1) :])
        columns = (tokens, np.int32), (parents, np.int32), (depths, np.int32), (scores, np.float32)
        return DraftTree(*(np.array(values, dtype) for values, dtype in columns))


def build_ngram(
    target: Target,
    path: str | Path | None = None,
    trie: NgramTrie | str | Path = "default",
    num_nodes: int = 16,
    branching: int = 4,
    policy: str = "full",
    rows: float = 8.0,
) -> NgramDrafter:
    """Trees of the most probable continuations by n-gram counts alone.

    Args:
        target: the target.
        path: a saved trie; the same as naming it in `trie`.
        trie: a trie or its file; "default" takes the shipped one of the embedded target.
        num_nodes, branching: see `NgramDrafter`.
        policy, rows: see `workbench.budget.table.build_tree_policy`; "shared" divides `rows` times the requests
            of a round among their trees by score.

    Raises:
        ValueError: no trie is known for the target, or it does not fit it.
    """
    if path is None and trie == "default" and target.name != "embedded":
        raise ValueError(f"trie is unset and none is shipped for target {target.name!r}; name a file")
    if path is not None and trie != "default":
        raise ValueError(f"path={str(path)!r} and trie={trie!r} name two tries; give one of them")
    found = resolve_trie(path or trie, target, data_dir() / "embedded" / "dart" / TRIE)
    if found is None:
        raise ValueError(f"trie={trie!r}: this drafter is nothing without a trie; name a file")
    return NgramDrafter(found, num_nodes, branching, build_tree_policy(policy, rows))
