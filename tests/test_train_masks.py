"""The mask of prefix-shared training: by hand, dense against sparse."""

from __future__ import annotations

import pytest
import torch

from workbench.train.masks import TILE, DenseAttention, FlexAttention, FlexBlocks, dense_mask


def random_blocks(num_rows: int, num_reals: int, num_blocks: int, seed: int = 0):
    """Anchors and starts as packed rows have them, the last row with unused blocks."""
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.stack([torch.randperm(num_reals, generator=generator)[:num_blocks] for _ in range(num_rows)])
    anchors = anchors.sort(1).values
    lengths = torch.randint(1, 90, anchors.shape, generator=generator)
    starts = (anchors - lengths).clamp(min=0)
    unused = num_blocks // 3
    anchors[-1, num_blocks - unused :] = 0
    starts[-1, num_blocks - unused :] = 0
    return anchors, starts


def test_dense_mask_by_hand():
    # One row of 6 places: samples at 0..1 and 2..5; blocks of 2 slots behind places 3 and 5.
    mask = dense_mask(torch.tensor([[3, 5]]), torch.tensor([[2, 2]]), num_reals=6, depth=2)[0]
    assert mask.int().tolist() == [
        [0, 0, 1, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0, 1, 0],
        [0, 0, 1, 1, 1, 0, 0, 0, 1, 1],
    ]


def test_dense_mask_of_bidirectional_blocks_by_hand():
    # As above, but the slots of a block see each other; the root of the second sample's first place has no context.
    mask = dense_mask(torch.tensor([[2, 5]]), torch.tensor([[2, 2]]), num_reals=6, depth=2, causal=False)[0]
    assert mask.int().tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_mask_equals_visibility_in_words(causal):
    """Query by query and key by key: the sample's places before the anchor, and the block's own slots."""
    num_reals, num_blocks, depth = 40, 7, 3
    anchors, starts = random_blocks(2, num_reals, num_blocks)
    mask = dense_mask(anchors, starts, num_reals, depth, causal)
    for row in range(2):
        for query in range(num_blocks * depth):
            block, slot = divmod(query, depth)
            context = set(range(int(starts[row, block]), int(anchors[row, block])))
            own = {num_reals + block * depth + other for other in range(slot + 1 if causal else depth)}
            assert set(mask[row, query].nonzero().squeeze(1).tolist()) == context | own


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("depth, num_blocks", [(8, 32), (4, 64), (6, 64), (16, 24), (48, 8), (128, 1), (256, 2)])
def test_tiles_of_the_sparse_mask_cover_the_dense_one(depth, num_blocks, causal):
    num_reals = 3 * TILE
    anchors, starts = random_blocks(3, num_reals, num_blocks)
    blocks = FlexBlocks(3, num_reals, num_blocks, depth, "cpu", causal)
    blocks.update(anchors.flip(0) * 0, starts * 0)  # an earlier batch must leave no trace
    mask = blocks.update(anchors, starts)
    dense = dense_mask(anchors, starts, num_reals, depth, causal)
    tiled = dense.unflatten(1, (-1, TILE)).unflatten(3, (-1, TILE)).any(2).any(-1)  # [B, query tiles, key tiles]
    # Every listed tile once, though lists are padded: a tile named twice would be attended twice.
    counts, indices = mask.kv_num_blocks[:, 0], mask.kv_indices[:, 0]
    for count, tiles in zip(counts.flatten().tolist(), indices.flatten(0, 1).tolist(), strict=True):
        assert len(set(tiles[:count])) == count
    listed = mask.to_dense()[:, 0].bool()
    assert (listed | ~tiled).all()
    if TILE % depth == 0:
        assert listed.sum() - tiled.sum() <= 0.2 * tiled.sum()  # little is computed in vain
    rows, queries, keys = (torch.arange(n) for n in dense.shape)
    evaluated = mask.mask_mod(rows[:, None, None], torch.tensor(0), queries[:, None], keys)
    assert torch.equal(evaluated, dense)


def attention_inputs(num_rows: int, num_queries: int, num_keys: int, device: str = "cpu"):
    generator = torch.Generator().manual_seed(5)
    shapes = ((num_queries, 6), (num_keys, 2), (num_keys, 2))
    return [torch.randn(num_rows, n, h, 16, generator=generator).to(device) for n, h in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("depth, num_blocks, causal", [(8, 16, True), (16, 8, False), (24, 16, False)])
def test_sparse_and_dense_attention_agree(depth, num_blocks, causal):
    num_reals = 2 * TILE
    anchors, starts = random_blocks(2, num_reals, num_blocks)
    inputs = attention_inputs(2, num_blocks * depth, num_reals + num_blocks * depth)
    blocks = FlexBlocks(2, num_reals, num_blocks, depth, "cpu", causal)
    sparse = FlexAttention(blocks.update(anchors, starts))(*inputs)
    dense = DenseAttention(anchors, starts, num_reals, depth, causal)(*inputs)
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_compiled_sparse_attention_agrees_without_recompiling(causal):
    num_reals, num_blocks, depth = 4 * TILE, 64, 8
    blocks = FlexBlocks(3, num_reals, num_blocks, depth, "cuda", causal)
    inputs = attention_inputs(3, num_blocks * depth, num_reals + num_blocks * depth, "cuda")
    attend = torch.compile(lambda mask, *qkv: FlexAttention(mask)(*qkv), dynamic=False, fullgraph=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            anchors, starts = (t.cuda() for t in random_blocks(3, num_reals, num_blocks, seed))
            mask = blocks.update(anchors, starts)
            dense = DenseAttention(anchors, starts, num_reals, depth, causal)(*inputs)
            # fp32 products run in TF32 on the tensor cores.
            torch.testing.assert_close(attend(mask, *inputs), dense, rtol=1e-2, atol=1e-2)


def test_sizes_that_fill_no_tiles_are_refused():
    with pytest.raises(ValueError, match="num_reals=100"):
        FlexBlocks(1, 100, 16, 8, "cpu")
    with pytest.raises(ValueError, match="depth=72"):
        FlexBlocks(1, 128, 9, 8, "cpu")
