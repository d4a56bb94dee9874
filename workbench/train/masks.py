"""Who may attend whom in prefix-shared masked training, defined once and used by both attention paths.

A packed row holds T real places and A draft blocks of d slots. Block b belongs to the prefix that ends at place
`anchors[b]`: its slot 0 stands for that place itself, its slots 1..d-1 are masks. Queries are the A * d slots; keys are
the T real places followed by the A * d slots. A slot attends the real places of its own sample before its anchor, and
slots of its own block: those up to itself in a causal block (DART, paper arXiv 2601.19278, figure 4), all of them in a
bidirectional one (DFlash, paper arXiv 2602.06036). That is exactly what it sees when drafting after that prefix. Reals
never attend slots and blocks never attend each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

#: Queries and keys a tile of the sparse path covers.
TILE = 128

#: attention(query [B, A*d, n_h, D], key and value [B, T + A*d, n_kv, D]) -> [B, A*d, n_h * D]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_mask_function(
    anchors: torch.Tensor, starts: torch.Tensor, num_reals: int, depth: int, causal: bool = True
) -> MaskFunction:
    """The one definition: `allowed(row, head, query, key)`, True where the query may attend the key.

    Args:
        anchors: [B, A] int64, place of every block's slot 0.
        starts: [B, A] int64, place where the sample of that place begins.
        num_reals: T.
        depth: d, slots of a block.
        causal: a slot attends the slots of its block up to itself; otherwise all of them.
    """

    def allowed(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block = query // depth
        context = (key >= starts[row, block]) & (key < anchors[row, block])
        slot = key - num_reals
        last = query if causal else block * depth + depth - 1
        own = (slot >= block * depth) & (slot <= last)
        return torch.where(key < num_reals, context, own)

    return allowed


def dense_mask(
    anchors: torch.Tensor, starts: torch.Tensor, num_reals: int, depth: int, causal: bool = True
) -> torch.Tensor:
    """[B, A*d, T + A*d] bool, the definition evaluated everywhere."""
    num_rows, num_blocks = anchors.shape
    device = anchors.device
    rows = torch.arange(num_rows, device=device)[:, None, None]
    queries = torch.arange(num_blocks * depth, device=device)[:, None]
    keys = torch.arange(num_reals + num_blocks * depth, device=device)
    allowed = block_mask_function(anchors, starts, num_reals, depth, causal)
    return allowed(rows, torch.zeros_like(rows), queries, keys)


class DenseAttention:
    """Attention under a dense mask: any device, any size, memory of rows * queries * keys.

    Args: as `block_mask_function`.
    """

    def __init__(
        self, anchors: torch.Tensor, starts: torch.Tensor, num_reals: int, depth: int, causal: bool = True
    ) -> None:
        self._mask = dense_mask(anchors, starts, num_reals, depth, causal).unsqueeze(1)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Attention`."""
        return _attend(query, key, value, lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, self._mask))


class FlexBlocks:
    """Makes the sparse path's block mask for a new batch without a recompile.

    The mask function reads two buffers of fixed address that `update` overwrites, and the tiles are found from the
    range of anchors in each query tile instead of by evaluating the mask everywhere.

    Args:
        num_rows, num_reals, num_blocks, depth: B, T, A, d; T and A * d multiples of 128.
        device: of the batches.
        causal: see `block_mask_function`.

    Raises:
        ValueError: sizes that do not fill whole tiles.
    """

    def __init__(
        self,
        num_rows: int,
        num_reals: int,
        num_blocks: int,
        depth: int,
        device: torch.device | str,
        causal: bool = True,
    ) -> None:
        for name, size in (("num_reals", num_reals), ("num_blocks * depth", num_blocks * depth)):
            if size % TILE:
                raise ValueError(f"{name}={size} is no multiple of {TILE}, the tile of the sparse attention")
        self._num_reals, self._depth, self._causal = num_reals, depth, causal
        self._anchors = torch.zeros(num_rows, num_blocks, dtype=torch.int64, device=device)
        self._starts = torch.zeros_like(self._anchors)
        self._allowed = block_mask_function(self._anchors, self._starts, num_reals, depth, causal)

    def update(self, anchors: torch.Tensor, starts: torch.Tensor) -> BlockMask:
        """Block mask of a batch; it stays valid until the next call."""
        self._anchors.copy_(anchors)
        self._starts.copy_(starts)
        counts, indices = self._tiles(anchors, starts)
        num_queries, num_reals = anchors.shape[1] * self._depth, self._num_reals
        return BlockMask.from_kv_blocks(
            counts.unsqueeze(1).to(torch.int32),
            indices.unsqueeze(1).to(torch.int32),
            BLOCK_SIZE=TILE,
            mask_mod=self._allowed,
            seq_lengths=(num_queries, num_reals + num_queries),
        )

    def _tiles(self, anchors: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(number of key tiles of every query tile [B, tiles], the tiles themselves [B, tiles, all key tiles])."""
        num_queries, num_reals, depth = anchors.shape[1] * self._depth, self._num_reals, self._depth
        device = anchors.device
        tiles = torch.arange(num_queries // TILE, device=device)
        first = (tiles * TILE) // depth
        last = (tiles * TILE + TILE - 1) // depth
        # A tile's blocks form a window of at most TILE // depth + 2 consecutive ones.
        window = first[:, None] + torch.arange(TILE // depth + 2, device=device)
        window = torch.minimum(window, last[:, None])  # [tiles, window]
        has_context = starts[:, window] < anchors[:, window]
        low = torch.where(has_context, starts[:, window], num_reals).amin(-1) // TILE
        high = torch.where(has_context, anchors[:, window] - 1, -1).amax(-1)
        num_context = torch.where(high >= 0, high // TILE - low + 1, 0)  # [B, tiles]
        # A block may straddle query tiles; a later one then sees slots of the earlier, and if not causal, the reverse.
        own_low = (first * depth + num_reals) // TILE
        last_slot = tiles * TILE if self._causal else (last + 1) * depth - 1
        num_own = (last_slot + num_reals) // TILE - own_low + 1
        order = torch.arange((num_reals + num_queries) // TILE, device=device)
        context = low[..., None] + order
        own = own_low[:, None] + order - num_context[..., None]
        counts = num_context + num_own
        indices = torch.where(order < num_context[..., None], context, own)
        return counts, torch.where(order < counts[..., None], indices, 0)


class FlexAttention:
    """Attention under a block mask; fast when compiled on CUDA.

    Args:
        mask: from `FlexBlocks.update`.
    """

    def __init__(self, mask: BlockMask) -> None:
        self._mask = mask

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Attention`."""
        return _attend(query, key, value, lambda q, k, v: flex_attention(q, k, v, block_mask=self._mask))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attention) -> torch.Tensor:
    """Brings heads forward, repeats K/V heads for grouped queries, attends, and joins the heads."""
    # Under autocast normed queries and keys come in fp32 beside values in half precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    share = query.shape[2] // key.shape[2]
    if share > 1:
        key, value = key.repeat_interleave(share, dim=2), value.repeat_interleave(share, dim=2)
    out = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return out.transpose(1, 2).flatten(2)
