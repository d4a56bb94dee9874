"""The one look of the host at a round on the device."""

from __future__ import annotations

import numpy as np
import torch

from workbench.batch import DeviceRows, DraftTrees
from workbench.decode.accept import Accepted
from workbench.types import DraftTree


def tree_fields(trees: DraftTrees) -> torch.Tensor:
    """What the host wants to know of searched trees, for the end of an outcome: [R + 3 * R * (N+1)] int64.

    Tokens are left out, since they are among the packed rows. Scores go as their bits, to be read in the same copy.
    """
    bits = trees.scores.view(torch.int32).to(torch.int64)
    return torch.cat([trees.sizes, trees.parents.flatten(), trees.depths.flatten(), bits.flatten()])


class Reading:
    """A round's outcome on the host.

    Args:
        outcome: what `CapturedRound._verify` returns, and `tree_fields` behind it if the device made the trees.
        rows: those it ran.

    Raises:
        FloatingPointError: the target's logits were not finite.
    """

    def __init__(self, outcome: torch.Tensor, rows: DeviceRows) -> None:
        num_rows, num_requests = len(rows.tokens), len(rows.slots)
        host = outcome.cpu().numpy()
        paths = num_requests * rows.max_rows
        sizes = np.cumsum([num_rows, num_requests + 1, num_requests, num_requests, paths])
        self._tokens, self._starts, self._num_accepted, self._bonus, path, trees = np.split(host, sizes)
        self._path = path.reshape(num_requests, -1)
        self._sizes, columns = trees[:num_requests], trees[num_requests:]
        self._columns = columns.reshape(3, num_requests, -1) if len(columns) else None
        if (self._bonus < 0).any():
            raise FloatingPointError("the target's logits are not finite (NaN or infinity)")

    def accepted(self, r: int) -> Accepted:
        """What was kept of a request."""
        return Accepted(tuple(self._path[r, : self._num_accepted[r] + 1].tolist()), int(self._bonus[r]))

    def chain(self, r: int) -> DraftTree:
        """The verified chain of a request."""
        tokens = self._verified(r)
        steps = np.arange(len(tokens), dtype=np.int32)
        return DraftTree(tokens, steps - 1, steps, np.zeros(len(tokens), np.float32))

    def tree(self, r: int) -> DraftTree:
        """The verified part of the tree that the device made for a request."""
        tokens = self._verified(r)
        parents, depths, bits = self._columns[:, r, : len(tokens)].astype(np.int32)
        return DraftTree(tokens, parents, depths, bits.view(np.float32))

    def num_drafted(self, r: int) -> int:
        """Nodes of the tree that the device made for a request, before a policy left some out."""
        return int(self._sizes[r]) - 1

    def _verified(self, r: int) -> np.ndarray:
        """[rows of the request] int32 tokens."""
        return self._tokens[self._starts[r] : self._starts[r + 1]].astype(np.int32)
