"""DART's search as work on the device, for graphs to capture."""

from __future__ import annotations

import numpy as np
import torch

from workbench.batch import Batch, Candidates, DraftTrees
from workbench.kernel_path import add_own_kernels, kernel
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie
from workbench.types import DraftTree

#: Where the search of rounds on the device runs; "auto" is for builders.
SEARCHES = ("auto", "host", "device")


def resolve_search(search: str, device: torch.device) -> str:
    """ "host" or "device": what an option means where the drafter runs.

    Raises:
        ValueError: not one of `SEARCHES`.
    """
    if search not in SEARCHES:
        raise ValueError(f"search={search!r}; allowed: {', '.join(SEARCHES)}")
    if search == "auto":
        return "device" if device.type == "cuda" else "host"
    return search


class DeviceSearch:
    """`workbench.search.prune.prune_trees` by its kernel; holds a copy of the trie on the device.

    Args:
        trie: n-gram counts; None searches without them.
        config: settings of the search.
        device: where candidates are.

    Raises:
        RuntimeError: the trie does not fit into the device's memory.
    """

    def __init__(self, trie: NgramTrie | None, config: PruneConfig, device: torch.device) -> None:
        add_own_kernels()
        # After the path is known.
        from kernels.ref.prune import PruneSettings
        from workbench.search.device_trie import device_trie

        self._prune = kernel("prune", device)
        try:
            self._trie = None if trie is None else device_trie(trie, device)
        except torch.OutOfMemoryError as error:
            raise RuntimeError(f"the trie does not fit into the memory of {device}; take search='host'") from error
        self._settings = PruneSettings(*config.flat(use_ngrams=trie is not None))

    def __call__(self, candidates: Candidates, batch: Batch) -> DraftTrees:
        """A tree for every request of a bucket; reads nothing on the host.

        Raises:
            ValueError: the round was staged without tails and depths.
        """
        if batch.tails is None or batch.depths is None:
            raise ValueError("the batch has no tails or depths, which a search on the device needs")
        num_requests, num_levels, _ = candidates.ids.shape
        places, device = (num_requests, self._settings.num_nodes + 1), candidates.ids.device
        out = DraftTrees(
            *(torch.empty(places, dtype=torch.int64, device=device) for _ in range(3)),
            scores=torch.empty(places, dtype=torch.float32, device=device),
            ancestors=torch.empty(places, dtype=torch.int64, device=device),
            sizes=torch.empty(num_requests, dtype=torch.int64, device=device),
        )
        levels = batch.depths.clamp(max=num_levels)
        self._prune(
            candidates.ids, candidates.probs, batch.tails, levels, batch.limits, self._trie, self._settings, out
        )
        return out


def trees_on_host(trees: DraftTrees, num_requests: int) -> list[DraftTree]:
    """The first requests' trees, all fields in one copy; scores travel as their bits."""
    bits = trees.scores.view(torch.int32).to(torch.int64)
    joined = torch.cat([trees.sizes[:, None], trees.tokens, trees.parents, trees.depths, bits], dim=1)[:num_requests]
    host = joined.cpu().numpy().astype(np.int32)
    tokens, parents, depths, bits = np.split(host[:, 1:], 4, axis=1)
    columns = (tokens, parents, depths, np.ascontiguousarray(bits).view(np.float32))
    return [DraftTree(*(column[r, :size] for column in columns)) for r, size in enumerate(host[:, 0].tolist())]
