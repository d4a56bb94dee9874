"""Pruning of DART (arXiv 2601.19278, `tree_search.py` of its repository): from candidates per depth to one draft tree.

    score(path + t) = score(path) + W_l * (G_l * ln(p_l(t) + epsilon) + weight * ln(P(t | context + path) + epsilon))

with W_l = (l + 1)^-level_exponent, G_l = logit_decay^l, P from the n-gram trie, and no n-gram term at level l = 0.
A beam of `beam_width` paths is extended level by level, paths that end in eos after all others; the `num_nodes` best of
ALL extensions are kept. Where the reference breaks ties at random, here the better score goes first, then the shallower
node, then the earlier one, and increments are at most 0. So a node never comes before its parent, and the first n nodes
are the tree of n nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np

from workbench.search import _jit
from workbench.search.threads import SearchThreads
from workbench.search.trie import NgramTrie
from workbench.types import MAX_TREE_ROWS, DraftTree

#: The root is a row of the tree too.
MAX_NODES = MAX_TREE_ROWS - 1


@dataclass(frozen=True)
class PruneConfig:
    """Everything that can be tuned in the search. Defaults are DART's, with the node budget of its paper.

    Attributes:
        beam_width: paths extended at each level, 1..1024.
        num_nodes: nodes kept, the root not counted, 1..63.
        ngram_weight: weight of the n-gram term, 0..100.
        eos_id: token after which a path is extended only if the beam has room left; None for none.
        level_exponent: W_l = (l + 1)^-level_exponent, 0..10.
        logit_decay: G_l = logit_decay^l, above 0 and at most 1.
        epsilon: added to probabilities inside the logarithm, above 0 and below 1.
    """

    beam_width: int = 20
    num_nodes: int = 59
    ngram_weight: float = 0.5
    eos_id: int | None = None
    level_exponent: float = 0.7
    logit_decay: float = 0.9
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        for field in ("beam_width", "num_nodes", "eos_id"):
            value = getattr(self, field)
            self._check(field, isinstance(value, Integral) or (field == "eos_id" and value is None), "an integer")
        self._check("beam_width", 1 <= self.beam_width <= 1024, "1..1024")
        self._check("num_nodes", 1 <= self.num_nodes <= MAX_NODES, f"1..{MAX_NODES}")
        self._check("ngram_weight", 0 <= self.ngram_weight <= 100, "0..100")
        self._check("eos_id", self.eos_id is None or 0 <= self.eos_id < 2**31, "None or 0..2147483647")
        self._check("level_exponent", 0 <= self.level_exponent <= 10, "0..10")
        self._check("logit_decay", 1e-6 <= self.logit_decay <= 1, "1e-06..1")
        self._check("epsilon", 1e-30 <= self.epsilon < 1, "1e-30..1 (1 excluded)")

    def _check(self, field: str, good: bool, allowed: str) -> None:
        if not good:
            raise ValueError(f"{field} is {getattr(self, field)}, allowed {allowed}")

    def flat(self, use_ngrams: bool = True) -> tuple[int, int, float, float, float, float, int]:
        """The fields as compiled code takes them: eos -1 stands for none, weight 0 for no n-gram term."""
        eos_id = -1 if self.eos_id is None else self.eos_id
        weight = float(self.ngram_weight) if use_ngrams else 0.0
        exponent, decay = float(self.level_exponent), float(self.logit_decay)
        return int(self.beam_width), int(self.num_nodes), weight, exponent, decay, float(self.epsilon), int(eos_id)


class TreeArrays(NamedTuple):
    """Trees of R requests in arrays that belong to the caller; of request r the first sizes[r] rows count.

    Attributes:
        tokens, parents, depths: [R, num_nodes + 1] int32, the root first; its parent is -1.
        scores: [R, num_nodes + 1] float32.
        sizes: [R] int64 rows, root included.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray
    sizes: np.ndarray

    @classmethod
    def empty(cls, num_requests: int, num_nodes: int) -> TreeArrays:
        """Room for trees of up to `num_nodes` nodes."""
        rows = (num_requests, num_nodes + 1)
        columns = (np.empty(rows, np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32))
        return cls(*columns, np.empty(rows, np.float32), np.empty(num_requests, np.int64))

    def tree(self, r: int) -> DraftTree:
        """A copy of the tree of request r."""
        return DraftTree(*(column[r, : self.sizes[r]].copy() for column in self[:4]))


def prune_tree(
    topk_ids: np.ndarray,
    topk_probs: np.ndarray,
    context: Sequence[int] | np.ndarray,
    trie: NgramTrie | None,
    config: PruneConfig,
) -> DraftTree:
    """One tree from the candidates of one request; see `prune_trees`, this is its case R = 1.

    Args:
        topk_ids: [K, C] integer token ids of each level.
        topk_probs: [K, C] their probabilities, already soft-maxed in float32.
        context: tokens so far, the root last; the last order - 1 of them are used.
        trie: n-gram counts, None for no n-gram term.
        config: tunables.
    """
    return prune_trees(np.asarray(topk_ids)[None], np.asarray(topk_probs)[None], [context], trie, config)[0]


def prune_trees(
    topk_ids: np.ndarray,
    topk_probs: np.ndarray,
    contexts: Sequence[Sequence[int] | np.ndarray],
    trie: NgramTrie | None,
    config: PruneConfig,
) -> list[DraftTree]:
    """Prunes the candidates of R requests in one compiled call that does not hold the interpreter lock.

    Args:
        topk_ids: [R, K, C] integer token ids of each level.
        topk_probs: [R, K, C] their probabilities, already soft-maxed in float32; NaN counts as 0.
        contexts: per request the tokens so far, the root last.
        trie: n-gram counts, None for no n-gram term.
        config: tunables.

    Returns:
        R trees of at most `config.num_nodes` nodes, best score first.

    Raises:
        ValueError: shapes disagree, a context is empty, or an id is outside [0, 2^31).
    """
    ids, probs = np.asarray(topk_ids), np.asarray(topk_probs)
    if ids.ndim != 3 or ids.shape != probs.shape or 0 in ids.shape[1:] or len(contexts) != len(ids):
        raise ValueError(
            f"topk_ids {ids.shape}, topk_probs {probs.shape}, {len(contexts)} contexts, "
            "allowed: twice [R, K >= 1, C >= 1], and R contexts"
        )
    tails, lengths = context_tails(contexts, 1 if trie is None else trie.order - 1)
    out = TreeArrays.empty(len(ids), config.num_nodes)
    prune_into(ids, probs, tails, lengths, trie, config, out)
    return [out.tree(r) for r in range(len(ids))]


def prune_into(
    topk_ids: np.ndarray,
    topk_probs: np.ndarray,
    contexts: np.ndarray,
    context_lens: np.ndarray,
    trie: NgramTrie | None,
    config: PruneConfig,
    out: TreeArrays,
    levels: np.ndarray | None = None,
    limits: np.ndarray | None = None,
    threads: SearchThreads | None = None,
) -> None:
    """`prune_trees` from arrays into arrays: nothing is converted that has the right type, no object a request is made.

    Args:
        topk_ids: [R, K, C] integers; int32 is taken as it is.
        topk_probs: [R, K, C] floats; float32 is taken as it is.
        contexts: [R, G] int64, right-aligned: the last context_lens[r] entries of row r count, the root last.
        context_lens: [R] integers, 1..G.
        trie: n-gram counts, None for no n-gram term.
        config: tunables.
        out: written; rows beyond a tree's size are left as they are.
        levels: [R] integers, levels each request may use, 0..K; all when None.
        limits: [R] integers, most rows of each tree, root included, 0 or more; num_nodes + 1 when None.
        threads: shares the requests out; all on the caller's thread when None.

    Raises:
        ValueError: shapes or types disagree, or an id or a length is out of range.
    """
    _check_into(topk_ids, topk_probs, contexts, context_lens, config, out)
    num_requests, num_levels = topk_ids.shape[:2]
    each = {"levels": (levels, num_levels), "limits": (limits, config.num_nodes + 1)}
    levels, limits = (_per_request(name, given, num_requests, most) for name, (given, most) in each.items())
    ids, probs = np.ascontiguousarray(topk_ids, np.int32), np.ascontiguousarray(topk_probs, np.float32)
    settings = config.flat(use_ngrams=trie is not None)
    arrays = _no_trie() if trie is None else trie.arrays()
    per_request = (ids, probs, contexts, context_lens, levels, limits)

    def work(low: int, high: int) -> None:
        _jit.prune_batch(*(x[low:high] for x in per_request), arrays, settings, tuple(x[low:high] for x in out))

    if threads is None:
        work(0, num_requests)
    else:
        threads.over(num_requests, work)


def _check_into(
    ids: np.ndarray,
    probs: np.ndarray,
    contexts: np.ndarray,
    context_lens: np.ndarray,
    config: PruneConfig,
    out: TreeArrays,
) -> None:
    """Refuses what compiled code would misread."""
    num_requests = len(ids)
    if ids.ndim != 3 or ids.shape != probs.shape or 0 in ids.shape[1:]:
        raise ValueError(f"topk_ids {ids.shape}, topk_probs {probs.shape}, allowed: twice [R, K >= 1, C >= 1]")
    if ids.dtype.kind not in "iu" or (ids.size and (ids.min() < 0 or ids.max() >= 2**31)):
        raise ValueError(f"topk_ids holds {ids.dtype} outside the ids, allowed 0..2147483647")
    if contexts.ndim != 2 or len(contexts) != num_requests or contexts.dtype != np.int64:
        raise ValueError(f"contexts is {contexts.dtype} {contexts.shape}, allowed: int64 [{num_requests}, G >= 1]")
    if context_lens.shape != (num_requests,) or context_lens.dtype != np.int64:
        raise ValueError(f"context_lens is {context_lens.dtype} {context_lens.shape}, allowed: int64 [{num_requests}]")
    if num_requests and not (context_lens.min() >= 1 and context_lens.max() <= contexts.shape[1]):
        raise ValueError(f"context_lens are {context_lens.tolist()}, allowed 1..{contexts.shape[1]}")
    roots = contexts[:, -1:]
    if ((roots < 0) | (roots >= 2**31)).any():
        raise ValueError(f"contexts end in {roots[:, 0].tolist()}, allowed: root ids in 0..2147483647")
    rows = (num_requests, config.num_nodes + 1)
    wanted = [(rows, np.int32)] * 3 + [(rows, np.float32), ((num_requests,), np.int64)]
    for name, array, (shape, dtype) in zip(TreeArrays._fields, out, wanted, strict=True):
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"out.{name} is {array.dtype} {array.shape}, allowed: contiguous {dtype.__name__} {shape}")
        if not array.flags.writeable:
            raise ValueError(f"out.{name} is read-only, allowed: an array to write into")


def _per_request(name: str, given: np.ndarray | None, num_requests: int, most: int) -> np.ndarray:
    """[R] int64 from what the caller gave, within 0..most."""
    if given is None:
        return np.full(num_requests, most, np.int64)
    if given.shape != (num_requests,) or given.dtype.kind not in "iu" or (given.size and given.min() < 0):
        raise ValueError(f"{name} is {given.tolist()}, allowed: {num_requests} integers of 0 or more")
    return np.minimum(given, most).astype(np.int64)


def context_tails(contexts: Sequence[Sequence[int] | np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The last `length` ids of every context, right-aligned [R, length] int64, and how many there are [R]."""
    tails, lengths = np.full((len(contexts), length), -1, np.int64), np.empty(len(contexts), np.int64)
    for r, context in enumerate(contexts):
        tail = context[-length:]
        if len(tail) == 0 or not 0 <= tail[-1] < 2**31:
            raise ValueError(f"contexts[{r}] ends in {list(tail[-1:])}, allowed: a root id in 0..2147483647")
        tails[r, length - len(tail) :] = tail
        lengths[r] = len(tail)
    return tails, lengths


def _no_trie() -> tuple:
    """Arrays of a trie without nodes, of the type that small vocabularies have, so that both share compiled code."""
    types = (np.uint16, np.uint16, np.uint32, np.uint32, np.uint64, np.float64)
    *arrays, codes = [np.zeros(length, dtype) for length, dtype in zip((0, 0, 1, 0, 0, 0), types, strict=True)]
    for array in (*arrays, codes):
        array.flags.writeable = False
    return (*arrays, 0, 0, codes)
