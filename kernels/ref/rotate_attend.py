"""From the merged product of a layer to attended values, in plain torch."""

from __future__ import annotations

import torch

from kernels.ref.rotate_write import check_rotate_write, rotate_write
from kernels.ref.tile_attention import tile_attention_tensors
from kernels.tile_attention_checks import check_attention


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
    """`rotate_write`, and then attention of the rotated queries over the cache.

    Args:
        qkv, q_weight, k_weight, eps, cos, sin, kv, layer, slot_of_row, kv_row, num_heads: see
            `kernels.ref.rotate_write`.
        slots, starts, context_len, ancestors, scale, max_rows, max_context, variant: see
            `kernels.tile_attention.attend_rows`. Row i of a request r is row starts[r] + i, whose place in the cache is
            (slots[r], context_len[r] + i): `slot_of_row` and `kv_row` say the same, row by row. If a request has more
            than `max_rows` rows, none of its results means anything.

    Returns:
        [M, H, D] in the dtype of `qkv`, zero in rows of no request.

    Raises:
        ValueError: as those two do.
    """
    check_rotate_write(qkv, q_weight, k_weight, cos, sin, kv, layer, slot_of_row, kv_row, starts, num_heads)
    raw = qkv[:, : num_heads * kv.shape[5]].unflatten(1, (num_heads, kv.shape[5]))
    k_cache, v_cache, rows = kv[layer, 0], kv[layer, 1], (slots, starts, context_len, ancestors)
    check_attention(raw, k_cache, v_cache, *rows, scale, max_rows, max_context, variant)
    query = rotate_write(qkv, q_weight, k_weight, eps, cos, sin, kv, layer, slot_of_row, kv_row, starts, num_heads)
    return tile_attention_tensors(query, k_cache, v_cache, *rows, scale)
