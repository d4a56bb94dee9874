"""Compiled inner loops of the allocators. Nothing here checks arguments; the callers (`dvl.py`, `policy.py`) do."""

from __future__ import annotations

import numpy as np

from workbench.jit import compiled

#: Rounding of a scorer may let scores rise by this much; they are then held level.
TOLERANCE = 1e-6


@compiled
def hold_level(scores, limits, held):
    """Writes the running minimum of scores [N, C] to `held`; -1, or the first place that is not finite or rises."""
    for i in range(scores.shape[0]):
        lowest = np.float32(np.inf)
        for j in range(min(scores.shape[1], limits[i] - 1)):
            if not np.isfinite(scores[i, j]) or scores[i, j] > lowest + TOLERANCE:
                return i * scores.shape[1] + j
            lowest = min(lowest, scores[i, j])
            held[i, j] = lowest
    return -1


@compiled
def fill_seeds(scores, limits, lengths):
    """Writes the seed lengths [N]."""
    for i in range(scores.shape[0]):
        total = 0.0
        for j in range(limits[i] - 1):
            total += np.float64(scores[i, j])
        # Bounded before it becomes an integer, which a large float may not.
        lengths[i] = min(limits[i], np.int64(np.floor(min(max(total, 1.0), 1e6) + 0.5)))


@compiled
def move_ends(scores, limits, rows, lengths):
    """Grows or shrinks `lengths` in place to a sum of `rows`, which must be possible; the number of moves."""
    missing = rows
    for i in range(lengths.size):
        missing -= lengths[i]
    moves = abs(missing)
    while missing > 0:
        chosen = -1
        for i in range(lengths.size):
            if lengths[i] < limits[i] and (
                chosen < 0 or scores[i, lengths[i] - 1] > scores[chosen, lengths[chosen] - 1]
            ):
                chosen = i
        lengths[chosen] += 1
        missing -= 1
    while missing < 0:
        chosen = -1
        for i in range(lengths.size):
            if lengths[i] > 1 and (chosen < 0 or scores[i, lengths[i] - 2] < scores[chosen, lengths[chosen] - 2]):
                chosen = i
        lengths[chosen] -= 1
        missing += 1
    return moves


@compiled
def path_minimum(scores, parents, starts, values):
    """Lowest score on the path from a root's child to each node, infinity for roots; trees one after another.

    Args:
        scores, parents: of all trees; parents count within a tree.
        starts: [R+1] first row of each tree, and the end.
        values: [rows] float32, written.

    Returns:
        -1, or the first row with a NaN.
    """
    for tree in range(starts.size - 1):
        first = starts[tree]
        values[first] = np.inf
        for row in range(first + 1, starts[tree + 1]):
            if np.isnan(scores[row]):
                return row
            values[row] = min(scores[row], values[first + parents[row]])
            # No node goes before a root.
            values[row] = min(values[row], np.float32(3e38))
    return -1


@compiled
def spread_chains(scores, parents, starts, table):
    """Writes the scores of trees that are chains to `table` [R, longest]; -1, or the first tree that is none."""
    for tree in range(starts.size - 1):
        first = starts[tree]
        for node in range(1, starts[tree + 1] - first):
            if parents[first + node] != node - 1:
                return tree
            table[tree, node - 1] = scores[first + node]
    return -1
