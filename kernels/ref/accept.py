"""How far down the trees of a round the target agrees, one request after another: the truth for `kernels.accept`."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from kernels.tensor_checks import require_device, require_int64

#: Rows of a tree; its ancestor bits fill an int64.
MAX_TREE_ROWS = 64


class AcceptedPaths(NamedTuple):
    """Outcome of a round.

    Attributes:
        path: [R, P] int64, accepted rows of each request, counted within it: the root's 0 first, increasing; -1 behind
            the last.
        num_accepted: [R] int64, accepted drafted tokens, the root not counted.
        bonus: [R] int64, the target's token after the last accepted row; 0 for a request without rows.
        place: [M] int64, the same as `path` seen from the rows: where on its path a row stands; -1 for other rows.
    """

    path: torch.Tensor
    num_accepted: torch.Tensor
    bonus: torch.Tensor
    place: torch.Tensor


def check_trees(
    tokens: torch.Tensor, ancestors: torch.Tensor, starts: torch.Tensor, choices: torch.Tensor, max_rows: int
) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape or type than `accept` documents.
    """
    if starts.ndim != 1 or len(starts) < 2:
        raise ValueError(f"starts is {list(starts.shape)}; expected [R + 1] with R at least 1")
    require_int64(len(tokens), tokens=tokens, ancestors=ancestors, choices=choices)
    require_int64(len(starts), starts=starts)
    require_device(tokens.device, ancestors=ancestors, choices=choices, starts=starts)
    if not 1 <= max_rows <= MAX_TREE_ROWS:
        raise ValueError(f"max_rows is {max_rows}, allowed 1..{MAX_TREE_ROWS}")


def accept(
    tokens: torch.Tensor, ancestors: torch.Tensor, starts: torch.Tensor, choices: torch.Tensor, max_rows: int
) -> AcceptedPaths:
    """From the root on, follows the child whose token is the target's choice for as long as there is one.

    Args:
        tokens: [M] int64, drafted token of each row; that of a root is not looked at.
        ancestors: [M] int64 of 64 bits, bit j for row j of the same request: the root, the other ancestors and the row
            itself. Parents come before children.
        starts: [R+1] int64, first row of each request; one without rows is not there.
        choices: [M] int64, the target's token after each row, as `choose` gives them.
        max_rows: most rows of a request, 1..64; the P of the result.

    Returns:
        See `AcceptedPaths`. Of siblings with equal tokens the first is followed. A choice of -1 equals no token, so
        that it ends the path and becomes the bonus token.

    Raises:
        ValueError: see `check_trees`.
    """
    check_trees(tokens, ancestors, starts, choices, max_rows)
    places = starts.tolist()
    path = torch.full((len(places) - 1, max_rows), -1, dtype=torch.int64, device=tokens.device)
    num_accepted, bonus = torch.zeros_like(path[:, 0]), torch.zeros_like(path[:, 0])
    place = torch.full_like(tokens, -1)
    for r, (first, stop) in enumerate(pairwise(places)):
        if first == stop:
            continue
        found = _walk(tokens[first:stop].tolist(), ancestors[first:stop].tolist(), choices[first:stop].tolist())
        path[r, : len(found)] = torch.tensor(found, device=path.device)
        num_accepted[r] = len(found) - 1
        bonus[r] = choices[first + found[-1]]
        place[first + path[r, : len(found)]] = torch.arange(len(found), device=place.device)
    return AcceptedPaths(path, num_accepted, bonus, place)


def _walk(tokens: list[int], ancestors: list[int], choices: list[int]) -> list[int]:
    path = [0]
    for row in range(1, len(tokens)):
        node = path[-1]
        # A child sees what its parent sees, and itself; as an unsigned number, since the last bit is the sign.
        own = (ancestors[row] ^ ancestors[node]) % 2**64
        if own == 1 << row and tokens[row] == choices[node]:
            path.append(row)
    return path
