"""The accept rule: how far down a draft tree the target agrees.

There is one walk. It is told the target's own token after every node and follows it for as long as the tree offers
it; the first token that is not offered is the bonus token. Greedy decoding hands it argmaxes. Sampling hands it
draws from the target's distribution, so the emitted tokens are the target's own draws and the law is exact by
construction; a node is accepted with the sum of the target probability over its offered siblings, which is what
sequential rejection of one-hot proposals reaches too (DART's and DFlash's rule; z-lab/dflash verifies this way).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from workbench.decode.sampling import SamplingConfig, argmax_tokens, choose
from workbench.types import DraftTree


@dataclass(frozen=True)
class Accepted:
    """Outcome of a round for one request.

    Attributes:
        path: accepted nodes, root first: increasing node indices.
        bonus: the token that the target puts after the last of them; the next root.
    """

    path: tuple[int, ...]
    bonus: int

    @property
    def num_accepted(self) -> int:
        """Accepted drafted tokens."""
        return len(self.path) - 1


def walk(tree: DraftTree, choices: np.ndarray) -> Accepted:
    """Follows the target's tokens down the tree.

    Args:
        tree: the verified tree.
        choices: [N+1] the target's token after each node.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(len(tree.tokens) - 1, 0, -1):  # backwards: of equal siblings the first wins
        children[int(tree.parents[node]), int(tree.tokens[node])] = node
    path = [0]
    while (child := children.get((path[-1], int(choices[path[-1]])))) is not None:
        path.append(child)
    return Accepted(tuple(path), int(choices[path[-1]]))


def accept_greedy(tree: DraftTree, logits: torch.Tensor) -> Accepted:
    """Accepts while the drafted token is the target's argmax; `logits` [N+1, V], row i after node i."""
    return walk(tree, argmax_tokens(logits))


def accept_sampling(tree: DraftTree, logits: torch.Tensor, root_position: int, config: SamplingConfig) -> Accepted:
    """Accepts while the drafted token is the target's draw at its position.

    Args:
        tree: the verified tree.
        logits: [N+1, V], row i after node i.
        root_position: position of the root in the sequence.
        config: temperature, filters and seed of the request.
    """
    return walk(tree, choose(logits, root_position + tree.depths + 1, config))
