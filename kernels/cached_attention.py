"""One layer's step over packed rows as one operator: their keys and values go into the slot cache, then they attend.

It takes the cache of all layers and the number of one of them. Views of single layers would share storage, and
compilers that make a program free of side effects copy such inputs; one whole tensor that is written in place they
leave where it is. Two kernels do the work, `kernels.kv_write` and `kernels.tile_attention`.
"""

from __future__ import annotations

import torch

from kernels.kv_write import kv_write
from kernels.tile_attention import tile_attention


# Registered at import, as torch finds operators by name: a compiled model refers to `workbench::cached_attention`.
@torch.library.custom_op("workbench::cached_attention", mutates_args=("kv",))
def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    layer: torch.Tensor,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    ancestors: torch.Tensor | None,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    max_rows: int,
    max_context: int,
    variant: str = "auto",
) -> torch.Tensor:
    """Writes keys and values of the rows into a layer of the cache and attends over context and own ancestors.

    Args:
        query: [M, H, D].
        key, value: [M, Hk, D], keys rotated.
        kv: [layers, 2, slots, L, Hk, D], written in place.
        layer: [] int64 on the CPU, which of them. A tensor, since compilers make constants of whole numbers, and one
            compiled layer is to serve all of them.
        slot_of_row, kv_row: see `kernels.kv_write.kv_write`.
        ancestors, slots, starts, context_len, scale, max_rows, max_context, variant: see
            `kernels.tile_attention.tile_attention`.

    Returns:
        [M, H, D] in the dtype of `query`, zero in rows of no request.

    Raises:
        ValueError: see the two operators; or no such layer.
    """
    index = int(layer)
    if kv.dim() != 6 or kv.shape[1] != 2 or not 0 <= index < kv.shape[0]:
        raise ValueError(f"layer={index} of kv {list(kv.shape)}; expected [layers, 2, slots, L, Hk, D] with that layer")
    k_cache, v_cache = kv[index, 0], kv[index, 1]
    kv_write(key, value, k_cache, v_cache, slot_of_row, kv_row, starts)
    return tile_attention(
        query, k_cache, v_cache, slots, starts, context_len, ancestors, scale, max_rows, max_context, variant
    )


@cached_attention.register_fake
def _cached_attention_fake(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
