"""What no policy can change: a draft belongs to its request, and ends where the request must end."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.types import DraftRequest, DraftTree


def within_limits(trees: Sequence[DraftTree], requests: Sequence[DraftRequest], vocab_size: int) -> list[DraftTree]:
    """Cuts each tree to its request's own limits, before a policy divides what is left.

    Nodes deeper than `max_depth` cannot be emitted before the request ends; of the rest the first `max_nodes` stay.

    Raises:
        ValueError: a tree that does not start at the request's newest token, or holds ids outside 0..vocab_size-1.
    """
    kept = []
    for tree, request in zip(trees, requests, strict=True):
        if int(tree.tokens[0]) != int(request.tokens[-1]):
            raise ValueError(f"slot {request.slot}: draft starts at token {tree.tokens[0]}, not {request.tokens[-1]}")
        if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
            raise ValueError(f"slot {request.slot}: draft holds ids outside 0..{vocab_size - 1}")
        kept.append(tree.up_to_depth(request.max_depth).first(request.max_nodes))
    return kept
