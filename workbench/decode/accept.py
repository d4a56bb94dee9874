"""The accept rule: how far down a draft tree the target agrees.

There is one walk. It asks for the target's token after a node and follows it for as long as the tree offers it; the
first token that is not offered is the bonus token. Greedy decoding answers with argmaxes. Sampling answers with draws
from the target's distribution ("match": the emitted tokens are the target's own draws and the law is exact by
construction; z-lab/dflash verifies this way), or with the outcome of rejecting the offered tokens one by one
("rejection": DScale's rule, exact speculative sampling with one-hot proposals). A node's children are accepted with
the sum of their target probabilities under both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.decode.sampling import (
    SamplingConfig,
    argmax_tokens,
    choose,
    inverse_cdf,
    position_generator,
    target_probs,
)
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


def walk(tree: DraftTree, choose_after: Callable[[int, Sequence[int]], int]) -> Accepted:
    """Follows the target's tokens down the tree.

    Args:
        tree: the verified tree.
        choose_after: (node, tokens of its children) -> the target's token after it. Asked for accepted nodes only.
    """
    children: dict[int, dict[int, int]] = {}
    for node in range(1, len(tree.tokens)):  # of equal siblings the first wins
        children.setdefault(int(tree.parents[node]), {}).setdefault(int(tree.tokens[node]), node)
    path = [0]
    while True:
        offered = children.get(path[-1], {})
        token = choose_after(path[-1], list(offered))
        if token not in offered:
            return Accepted(tuple(path), token)
        path.append(offered[token])


def accept_choices(tree: DraftTree, choices: np.ndarray) -> Accepted:
    """Accepts while the drafted token is the target's; `choices` [N+1], the target's token after each node."""
    return walk(tree, lambda node, _: int(choices[node]))


def accept_greedy(tree: DraftTree, logits: torch.Tensor) -> Accepted:
    """Accepts while the drafted token is the target's argmax; `logits` [N+1, V], row i after node i."""
    return accept_choices(tree, argmax_tokens(logits))


def accept_sampling(
    tree: DraftTree, logits: torch.Tensor, root_position: int, config: SamplingConfig, stream: int = 0
) -> Accepted:
    """Accepts by the rule of the request.

    Args:
        tree: the verified tree.
        logits: [N+1, V], row i after node i.
        root_position: position of the root in the sequence.
        config: temperature, filters, seed and accept rule of the request.
        stream: see `position_generator`.
    """
    if config.accept_rule == "match":
        return accept_choices(tree, choose(logits, root_position + tree.depths + 1, config))
    probs = target_probs(logits, config)
    positions = (root_position + tree.depths + 1).tolist()

    def choose_after(node: int, offered: Sequence[int]) -> int:
        return _reject(probs[node], offered, position_generator(config.seed, positions[node], stream))

    return walk(tree, choose_after)


def _reject(probs: torch.Tensor, offered: Sequence[int], generator: np.random.Generator) -> int:
    """The token after one node: each offered one is taken with its probability among what is left, else it is removed.

    Args:
        probs: [V] float64 target probabilities.
        offered: drafted ids, all different.
        generator: of this position.
    """
    left = probs.clone()
    for token in offered:
        if generator.random() * float(left.sum()) < float(left[token]):
            return token
        left[token] = 0.0
    return int(inverse_cdf(left[None], torch.tensor([generator.random()], dtype=left.dtype, device=left.device))[0])
