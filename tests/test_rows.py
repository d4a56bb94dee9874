"""Packing: ancestor bits, positions, cache rows."""

import numpy as np
import pytest
import torch

from workbench.decode.rows import Workspace, pack_chunks
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


def test_pack_lays_requests_behind_each_other():
    branched = DraftTree(
        np.array([7, 8, 9], np.int32), np.array([-1, 0, 0]), np.array([0, 1, 1], np.int32), np.zeros(3, np.float32)
    )
    rows = Workspace(3, 6, 99, CPU).pack([branched, root_tree(5), chain_tree(1, [2])], [2, 0, 3], [10, 0, 4])
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


def test_offsets_of_the_worked_example():
    trees = [chain_tree(1, [2] * (k - 1)) for k in (6, 10, 7, 9)]
    space = Workspace(5, 48, 0, CPU)
    assert space.pack(trees, range(4), [3] * 4).starts == (0, 6, 16, 23, 32)
    assert space.starts.tolist() == [0, 6, 16, 23, 32, 32]  # a request that is not there has no rows
    assert space.context_len.tolist() == [3, 3, 3, 3, 0]


def test_every_field_follows_the_same_mapping():
    rng = np.random.default_rng(0)
    lengths = [1, 16, 5, 60, 2]
    trees = [chain_tree(i, rng.integers(0, 50, n - 1).tolist()) for i, n in enumerate(lengths)]
    slots, contexts = [4, 0, 2, 1, 3], [0, 7, 500, 1, 33]
    space = Workspace(5, 100, 777, CPU)
    rows = space.pack(trees, slots, contexts, num_rows=100)
    row = 0
    for tree, slot, context in zip(trees, slots, contexts, strict=True):
        for j, token in enumerate(tree.tokens):
            assert rows.tokens[row] == token
            assert rows.positions[row] == rows.kv_row[row] == context + j
            assert rows.slot_of_row[row] == slot
            assert space.ancestors[row].item() & (1 << 64) - 1 == (1 << (j + 1)) - 1
            row += 1
    assert rows.num_live == row == 84
    tail = slice(row, 100)
    assert not rows.tokens[tail].any() and not rows.positions[tail].any() and not rows.slot_of_row[tail].any()
    assert (rows.kv_row[tail] == 777).all()


def test_a_workspace_keeps_its_addresses_and_forgets_the_last_round():
    space = Workspace(3, 40, 9, CPU)
    addresses = [t.data_ptr() for t in (space.tokens, space.positions, space.slot_of_row, space.kv_row, space.starts)]
    space.pack([chain_tree(7, [7] * 15)] * 2, [0, 1], [4, 4], num_rows=40)
    rows = space.pack([root_tree(1)], [2], [6], num_rows=3)
    found = [t.data_ptr() for t in (rows.tokens, rows.positions, rows.slot_of_row, rows.kv_row, space.starts)]
    assert found == addresses
    assert rows.tokens.tolist() == [1, 0, 0] and rows.kv_row.tolist() == [6, 9, 9]
    assert space.starts.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("requests", "num_rows", "message"),
    [(0, None, "0 requests outside 1..2"), (3, None, "3 requests"), (2, 3, "num_rows=3 outside 4"), (2, 9, "..8")],
)
def test_a_workspace_refuses_what_does_not_fit(requests, num_rows, message):
    space = Workspace(2, 8, 0, CPU)
    with pytest.raises(ValueError, match=message):
        space.pack([chain_tree(1, [2])] * requests, range(requests), [0] * requests, num_rows)
    with pytest.raises(ValueError, match="max_rows=0"):
        Workspace(1, 0, 0, CPU)
