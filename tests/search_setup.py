"""What the tests of the search kernel share: kinds of tries, random calls, and what the host's search makes of them."""

from __future__ import annotations

import numpy as np
import torch
from decision_setup import DEVICE, whole
from test_prune import random_case

from kernels.ref.ngrams import DeviceTrie
from kernels.ref.prune import DraftTrees, PruneSettings
from workbench.search.device_trie import device_trie
from workbench.search.encode import ancestor_masks
from workbench.search.prune import PruneConfig, prune_trees
from workbench.search.trie import NgramTrie


class CodedTrie(NgramTrie):
    """A quantised trie, made from an exact one: counts 1..254 have codes 255..2, larger ones share code 1."""

    @classmethod
    def of(cls, exact: NgramTrie) -> CodedTrie:
        trie = cls(exact.header, exact.arrays()[:5])
        tokens, counts, starts, *_ = exact.arrays()
        trie._coded = tokens.astype(np.uint32) << 8 | (256 - np.minimum(counts, 255).astype(np.uint32))
        trie._starts, trie._values = starts, np.array([0.0, 700.9, *range(254, 0, -1)])
        for array in (trie._coded, trie._values):
            array.flags.writeable = False
        return trie

    def arrays(self) -> tuple:
        counts, *overflow = (np.zeros(0, dtype) for dtype in (np.uint8, np.uint32, np.uint64))
        for array in (counts, *overflow):
            array.flags.writeable = False
        return (self._coded, counts, self._starts, *overflow, *super().arrays()[5:7], self._values)


def overflowing(exact: NgramTrie, rng: np.random.Generator) -> NgramTrie:
    """The same n-grams, a third of them with counts beyond 16 bits."""
    tokens, counts, starts, *_ = exact.arrays()
    counts = counts.copy()
    nodes = np.flatnonzero(rng.random(counts.size) < 0.3).astype(np.uint32)
    counts[nodes] = 65535
    many = rng.integers(65535, 2**34, nodes.size).astype(np.uint64)
    return NgramTrie(exact.header, [tokens, counts, starts, nodes, many])


def empty_trees(num_requests: int, num_nodes: int) -> DraftTrees:
    whole_fields = [torch.full((num_requests, num_nodes + 1), -7, device=DEVICE) for _ in range(4)]
    scores = torch.full((num_requests, num_nodes + 1), -7.0, device=DEVICE)
    sizes = torch.full((num_requests,), -7, device=DEVICE)
    return DraftTrees(*whole_fields[:3], scores, whole_fields[3], sizes)


class Case:
    """Arguments of one call, and what the compiled search makes of them."""

    def __init__(self, ids, probs, contexts, trie: NgramTrie | None, config: PruneConfig, reach: int = 4) -> None:
        self.ids, self.probs = np.asarray(ids, np.int64), np.asarray(probs, np.float32)
        self.contexts, self.trie, self.config = contexts, trie, config
        self.levels = np.full(len(self.ids), self.ids.shape[1])
        self.limits = np.full(len(self.ids), config.num_nodes + 1)
        self.reach = reach

    def arguments(self) -> dict:
        tails = np.full((len(self.ids), self.reach), -1)
        for r, context in enumerate(self.contexts):
            tail = context[-self.reach :]
            tails[r, self.reach - len(tail) :] = tail
        return {
            "ids": whole(self.ids),
            "probs": torch.from_numpy(self.probs).to(DEVICE),
            "tails": whole(tails),
            "levels": whole(self.levels),
            "limits": whole(self.limits),
            "trie": None if self.trie is None else device_trie(self.trie, DEVICE),
            "settings": PruneSettings(*self.config.flat()),
            "out": empty_trees(len(self.ids), self.config.num_nodes),
        }

    def wanted(self) -> list[tuple]:
        trees = []
        for r, (limit, depth) in enumerate(zip(self.limits, self.levels, strict=True)):
            if limit <= 0 or depth == 0:
                trees.append(None if limit <= 0 else ([self.contexts[r][-1]], [-1], [0], [0.0], [1]))
                continue
            ids, probs, context = self.ids[r : r + 1, :depth], self.probs[r : r + 1, :depth], self.contexts[r]
            tree = prune_trees(ids, probs, [context], self.trie, self.config)[0].first(self.config.num_nodes)
            tree = tree.first(min(int(limit) - 1, tree.num_nodes))
            bits = ancestor_masks(tree.parents).view(np.int64)
            trees.append(tuple(f.tolist() for f in (tree.tokens, tree.parents, tree.depths, tree.scores, bits)))
        return trees

    def check(self, *functions) -> list[tuple]:
        wanted = self.wanted()
        for function in functions:
            arguments = self.arguments()
            function(**arguments)
            compare(arguments["out"], wanted)
        return wanted


def compare(out: DraftTrees, wanted: list[tuple]) -> None:
    sizes = out.sizes.tolist()
    assert sizes == [0 if tree is None else len(tree[0]) for tree in wanted]
    for r, tree in enumerate(wanted):
        if tree is not None:
            tokens, parents, depths, scores, bits = (field[r, : sizes[r]].tolist() for field in out[:5])
            assert (tokens, parents, depths, bits) == (*tree[:3], tree[4]), f"request {r}"
            np.testing.assert_allclose(scores, tree[3], rtol=3e-7)


def variant_of(trie: NgramTrie, kind: int, rng: np.random.Generator) -> NgramTrie:
    """One of the kinds of arrays: int16 entries, int32 entries, counts as codes, counts in the overflow table."""
    return (lambda: trie, lambda: trie, lambda: CodedTrie.of(trie), lambda: overflowing(trie, rng))[kind]()


def mixed_case(rng: np.random.Generator, trial: int) -> Case:
    """Requests of one random shape: kinds of tries, levels, limits and contexts shorter than they may be."""
    ids, probs, context, sequences, order, config = random_case(rng, tied=trial % 2 == 1)
    requests = (1, 1, 2, 5)[trial % 4] if trial % 29 else 0
    shuffled = [rng.permutation(ids.size).reshape(ids.shape) for _ in range(requests)]
    contexts = [rng.permutation(context)[: rng.integers(1, len(context) + 1)].tolist() for _ in range(requests)]
    trie = None
    if trial % 11:
        kind = int(rng.integers(4))
        trie = NgramTrie.count(sequences, order, vocab_size=70_000 if kind == 1 else None)
        trie = variant_of(trie, kind, rng)
    shape = (requests, *ids.shape)
    # Tokens stay in their level: only the probabilities of the requests differ.
    case = Case(
        np.broadcast_to(ids, shape).copy(),
        np.array([probs.flat[order] for order in shuffled], np.float32).reshape(shape),
        contexts,
        trie,
        config,
        reach=int(rng.integers(max(map(len, contexts), default=1), 7)),
    )
    if trial % 3 == 0:
        case.levels = rng.integers(0, ids.shape[0] + 1, requests)
        case.limits = rng.integers(0, config.num_nodes + 2, requests)
    return case


def zipf_case(rng: np.random.Generator, requests: int, trie: NgramTrie, text: np.ndarray, config: PruneConfig) -> Case:
    """DART's shape, 7 levels of 25 candidates, around places of a text, so that many n-grams are known."""
    starts = rng.integers(3, text.size - 10, requests)
    ids = rng.integers(0, 5000, (requests, 7, 25))
    for r, start in enumerate(starts):
        for level in range(7):
            row = rng.permutation(np.unique(np.append(ids[r, level], text[start + level])))
            frequent = np.setdiff1d(np.arange(200), row)  # fills up what was drawn twice
            ids[r, level] = np.append(row, frequent)[:25]
            ids[r, level, rng.integers(4)] = text[start + level]
            ids[r, level, 4:12] = np.setdiff1d(rng.permutation(60), ids[r, level])[:8]
    probs = -np.sort(-rng.dirichlet(np.full(25, 0.2), (requests, 7)))
    return Case(ids, probs, [text[start - 3 : start].tolist() for start in starts], trie, config)


def zipf_text(rng: np.random.Generator, length: int) -> np.ndarray:
    return np.minimum(rng.zipf(1.2, length) - 1, 4999)


#: Entries on both sides of a damaged array.
SURROUND = 500


def surrounded(trie: DeviceTrie, fill: int) -> DeviceTrie:
    """The same arrays as pieces of longer ones."""
    parts = [
        torch.nn.functional.pad(part, (SURROUND, SURROUND), value=fill)[SURROUND : SURROUND + part.numel()]
        for part in trie[:6]
    ]
    return DeviceTrie(*parts, *trie[6:])
