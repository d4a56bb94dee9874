"""What verification and display derive from a draft tree: ancestor masks, token paths, leaf rows."""

from __future__ import annotations

import numpy as np

from workbench.types import MAX_TREE_ROWS, DraftTree


def ancestor_masks(parents: np.ndarray) -> np.ndarray:
    """[N+1] uint64, bit j of row i set if row i may attend row j: the root, its other ancestors and itself.

    Args:
        parents: [N+1] parent of each row, -1 for the root, parents before children.

    Raises:
        ValueError: more than 64 rows, or a parent that does not come before its child.
    """
    if len(parents) > MAX_TREE_ROWS:
        raise ValueError(f"a tree has {len(parents)} rows, allowed up to {MAX_TREE_ROWS}")
    masks: list[int] = []
    for row, parent in enumerate(np.asarray(parents).tolist()):
        if parent >= row or (parent < 0) != (row == 0):
            raise ValueError(f"parents[{row}]={parent}: the root has -1, every other parent comes before its child")
        masks.append(1 << row | (masks[parent] if row else 0))
    return np.array(masks, np.uint64)


def ancestor_matrix(parents: np.ndarray) -> np.ndarray:
    """[N+1, N+1] bool, the bits of `ancestor_masks` unpacked: True where a row may attend."""
    columns = np.arange(len(parents), dtype=np.uint64)
    return (ancestor_masks(parents)[:, None] >> columns & np.uint64(1)).astype(bool)


def token_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """Per row the drafted tokens from below the root down to it; () for the root."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return paths


def leaf_rows(tree: DraftTree) -> np.ndarray:
    """[leaves, deepest + 1] int32, for every leaf the rows from the root to it, padded with -1.

    Leaves are in lexicographic order of their token paths, as in the reference's retrieve table.
    """
    parents = tree.parents.tolist()
    paths = token_paths(tree)
    leaves = sorted(set(range(len(parents))) - set(parents), key=paths.__getitem__)
    table = np.full((len(leaves), int(tree.depths.max()) + 1), -1, np.int32)
    for line, row in enumerate(leaves):
        while row >= 0:
            table[line, tree.depths[row]] = row
            row = parents[row]
    return table
