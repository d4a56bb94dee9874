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

#: Shapes of a tile that can be asked for.
TILE_VARIANTS = ("paper", "rows16", "rows128", "packed")

#: (query [M, H, D], keys and values of one layer's cache, rows, scale) -> [M, H, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PackedRows, float], torch.Tensor]


@dataclass(frozen=True)
class PackedCall:
    """What one forward hands to every layer's attention: rows, cache, and the kernel that attends."""

    rows: PackedRows
    cache: SlotCache
    attend: Attend


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
    out = packed.attend(query[0].transpose(0, 1), k_cache, v_cache, rows, scaling)
    return out.unsqueeze(0), None


def plain_attention() -> Attend:
    """Plain torch, one request after another; any device."""
    add_own_kernels()
    from kernels.ref.tile_attention import tile_attention  # after the path is known: another `kernels` may exist

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PackedRows, scale: float
    ) -> torch.Tensor:
        masks = rows.additive_masks(query.dtype)
        return tile_attention(query, keys, values, rows.slots, rows.starts, rows.kv_len, masks, scale)

    return attend


def tile_attention_of(variant: str) -> Attend:
    """The Triton kernels, all requests in one launch; see `kernels.tile_attention` for the variants."""
    add_own_kernels()
    from kernels.tile_attention import tile_attention

    def attend(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PackedRows, scale: float
    ) -> torch.Tensor:
        m = rows.on_device()
        sizes = (m.max_rows, m.max_context)
        return tile_attention(
            query, keys, values, m.slots, m.starts, m.context_len, m.ancestors, scale, *sizes, variant
        )

    return attend


def attention_by_name(name: str, device: torch.device) -> Attend:
    """The attention of a target.

    Args:
        name: "plain", "tile" (the kernels, choosing their own tile), "tile:<variant>", or "auto" for "tile" on a CUDA
            device and "plain" elsewhere.
        device: where the target is.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        name = "tile" if device.type == "cuda" else "plain"
    kind, _, variant = name.partition(":")
    if name != "plain" and (kind != "tile" or variant not in ("", *TILE_VARIANTS)):
        raise ValueError(f"attention={name!r}; allowed: auto, plain, tile, tile:{', tile:'.join(TILE_VARIANTS)}")
    return plain_attention() if name == "plain" else tile_attention_of(variant or "auto")


def register() -> None:
    """Makes `ATTENTION_NAME` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
