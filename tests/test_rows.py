"""Packing: ancestor bits, positions, cache rows."""

import numpy as np
import pytest
import torch

from workbench.decode.rows import pack_chunks, pack_trees
from workbench.search.encode import ancestor_masks
from workbench.types import DraftTree, chain_tree, root_tree

CPU = torch.device("cpu")


def test_ancestor_masks_of_a_chain_are_a_lower_triangle():
    bits = ancestor_masks(np.arange(64) - 1)
    assert bits.tolist() == [(1 << (i + 1)) - 1 for i in range(64)]


def test_ancestor_masks_of_a_tree():
    assert ancestor_masks(np.array([-1, 0, 0, 1, 2])).tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101]


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-1, -1], list(range(-1, 64))])
def test_bad_trees_are_refused(parents):
    with pytest.raises(ValueError, match=r"parents\[|up to 64"):
        ancestor_masks(np.array(parents))


def test_pack_trees_lays_requests_behind_each_other():
    branched = DraftTree(
        np.array([7, 8, 9], np.int32), np.array([-1, 0, 0]), np.array([0, 1, 1], np.int32), np.zeros(3, np.float32)
    )
    rows = pack_trees([branched, root_tree(5), chain_tree(1, [2])], [2, 0, 3], [10, 0, 4], CPU)
    assert rows.tokens.tolist() == [7, 8, 9, 5, 1, 2]
    assert rows.positions.tolist() == [10, 11, 11, 0, 4, 5]
    assert rows.kv_row.tolist() == [10, 11, 12, 0, 4, 5]
    assert rows.slot_of_row.tolist() == [2, 2, 2, 0, 3, 3]
    assert rows.starts == (0, 3, 4, 6)
    assert rows.kv_len == (13, 1, 6)
    masks = rows.additive_masks(torch.float32)
    assert masks[1] is None
    assert (masks[0][:, 10:] == 0).tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert (masks[0][:, :10] == 0).all()


def test_pack_chunks_is_causal_and_may_be_long():
    rows = pack_chunks([np.arange(100), np.arange(3)], [0, 1], [0, 6], CPU)
    assert rows.positions.tolist() == [*range(100), 6, 7, 8]
    masks = rows.additive_masks(torch.float32)
    assert masks[0] is None  # plain causal
    assert (masks[1] == 0).sum(-1).tolist() == [7, 8, 9]
