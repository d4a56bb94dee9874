"""The one attention function that transformers calls for packed rows.

It is registered under a name of its own; the rows and the cache travel as keyword arguments of the model call, so
nothing is stored on the model and two engines can share one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AttentionInterface

from workbench.kernel_path import add_own_kernels
from workbench.models.cache import SlotCache
from workbench.models.packed import PackedRows

ATTENTION_NAME = "workbench_packed"


@dataclass(frozen=True)
class PackedCall:
    """What one forward hands to every layer's attention: rows, cache, and the kernel that attends."""

    rows: PackedRows
    cache: SlotCache
    attend: Callable[..., torch.Tensor]


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: PackedCall | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Writes K/V of the rows into the cache and attends over committed context and own ancestors.

    Args:
        query: [1, H, M, D]; key, value: [1, Hk, M, D], keys rotated.
        packed: rows and cache of this forward.

    Returns:
        ([1, M, H, D], None), the shape transformers expects.

    Raises:
        ValueError: the model was called without packed rows.
    """
    if packed is None:
        raise ValueError("this model is adapted for packed rows; call workbench.models.target.Target.forward")
    rows, cache = packed.rows, packed.cache
    index = module.layer_idx
    cache.write(index, rows.slot_of_row, rows.kv_row, key[0].transpose(0, 1), value[0].transpose(0, 1))
    k_cache, v_cache = cache.layer(index)
    out = packed.attend(
        query[0].transpose(0, 1),
        k_cache,
        v_cache,
        rows.slots,
        rows.starts,
        rows.kv_len,
        rows.additive_masks(query.dtype),
        scaling,
    )
    return out.unsqueeze(0), None


def attention_kernel() -> Callable[..., torch.Tensor]:
    """The attention over the slot cache; see `kernels.ref.tile_attention` for its arguments."""
    add_own_kernels()
    from kernels.ref.tile_attention import tile_attention  # after the path is known: another `kernels` may exist

    return tile_attention


def register() -> None:
    """Makes `ATTENTION_NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
