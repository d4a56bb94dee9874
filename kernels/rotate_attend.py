"""From the merged product of a layer to attended values: one launch where a tile holds all rows of a request.

Its programs share the keys of a request and KV head: each is the only one that reads the new keys and values among its
own, so it can norm, rotate and write them itself, and its queries. Elsewhere `kernels.rotate_write` does so before.

Least traffic of the one launch: that of `kernels.tile_attention`, and the new keys and values written.
"""

from __future__ import annotations

import torch

from kernels.ref.rotate_write import check_rotate_write
from kernels.rotate_write import rotate_write
from kernels.tile_attention import Rotation, launch, tile_of_call
from kernels.tile_attention_checks import check_attention
from kernels.tile_choice import rotates


def rotate_attend(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    ancestors: torch.Tensor | None,
    num_heads: int,
    scale: float,
    max_rows: int,
    max_context: int,
    variant: str = "auto",
) -> torch.Tensor:
    """See `kernels.ref.rotate_attend`; launches follow from the shapes and bounds alone.

    Raises:
        ValueError: see `kernels.ref.rotate_attend`.
    """
    check_rotate_write(qkv, q_weight, k_weight, cos, sin, kv, layer, slot_of_row, kv_row, starts, num_heads)
    num_kv_heads, head_dim = kv.shape[4:]
    raw = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    k_cache, v_cache = kv[layer, 0], kv[layer, 1]
    rows = (slots, starts, context_len, ancestors)
    check_attention(raw, k_cache, v_cache, *rows, scale, max_rows, max_context, variant)
    tile = tile_of_call(raw, num_kv_heads, len(slots), max_rows, max_context, variant)
    if not rotates(tile, num_heads // num_kv_heads, head_dim, max_rows):
        query = rotate_write(qkv, q_weight, k_weight, eps, cos, sin, kv, layer, slot_of_row, kv_row, starts, num_heads)
        return launch(query, k_cache, v_cache, *rows, scale, max_rows, tile)
    rotation = Rotation(q_weight, k_weight, eps, cos, sin)
    return launch(raw, k_cache, v_cache, *rows, scale, max_rows, tile, rotation)
