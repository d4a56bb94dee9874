"""The one attention function that transformers calls for packed rows.

It is registered under a name of its own; the rows and the cache travel as keyword arguments of the model call, so
nothing is stored on the model and two engines can share one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface

from workbench.batch import DeviceRows
from workbench.kernel_path import register_operators
from workbench.models.cache import SlotCache
from workbench.models.forwards import NormAhead
from workbench.models.packed import PackedRows

ATTENTION_NAME = "workbench_packed"

#: Shapes of a tile that can be asked for.
TILE_VARIANTS = ("paper", "rows16", "rows128", "packed")


@dataclass(frozen=True)
class PlainCall:
    """One forward in plain torch, one request after another: what every layer's attention needs to know."""

    rows: PackedRows
    cache: SlotCache
    fast = False

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes keys and values [M, Hk, D] of the rows and attends: query [M, H, D] -> [M, H, D]."""
        from kernels.ref.tile_attention import tile_attention  # its folder is on the path by now, see `register`

        rows = self.rows
        self.cache.write(module.layer_idx, rows.slot_of_row, rows.kv_row, key, value)
        keys, values = self.cache.layer(module.layer_idx)
        masks = rows.additive_masks(query.dtype)
        return tile_attention(query, keys, values, rows.slots, rows.starts, rows.kv_len, masks, scale)


@dataclass(frozen=True)
class TileCall:
    """One forward through the Triton kernels, all requests in one launch; see `kernels.tile_attention`.

    Attributes:
        rows: the packed rows.
        kv: all layers of a `SlotCache`.
        variant: tile, see `attention_by_name`.
        fast: run the layers' fast forward, see `workbench.models.forwards`.
        ahead: of the fast forward, from layer to layer.
    """

    rows: DeviceRows
    kv: torch.Tensor
    variant: str
    fast: bool
    ahead: NormAhead = field(default_factory=NormAhead)

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes keys and values [M, Hk, D] of the rows and attends: query [M, H, D] -> [M, H, D]."""
        rows = self.rows
        return torch.ops.workbench.cached_attention(
            query,
            key,
            value,
            self.kv,
            module.layer_number,
            rows.slot_of_row,
            rows.kv_row,
            rows.ancestors,
            rows.slots,
            rows.starts,
            rows.context_len,
            scale,
            rows.max_rows,
            rows.max_context,
            self.variant,
        )


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packed: PlainCall | TileCall | None = None,
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
    rows_first = (x[0].transpose(0, 1) for x in (query, key, value))
    return packed.attend(module, *rows_first, scaling).unsqueeze(0), None


def attention_by_name(name: str, device: torch.device) -> str | None:
    """What a target attends with.

    Args:
        name: "plain", "tile" (the kernels, choosing their own tile), "tile:<variant>", or "auto" for "tile" on a CUDA
            device and "plain" elsewhere.
        device: where the target is.

    Returns:
        The variant of the tile for the kernels; None for plain torch.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        name = "tile" if device.type == "cuda" else "plain"
    kind, _, variant = name.partition(":")
    if name != "plain" and (kind != "tile" or variant not in ("", *TILE_VARIANTS)):
        raise ValueError(f"attention={name!r}; allowed: auto, plain, tile, tile:{', tile:'.join(TILE_VARIANTS)}")
    return None if name == "plain" else variant or "auto"


def register() -> None:
    """Makes `ATTENTION_NAME` known to transformers and our operators to torch; calling it again changes nothing."""
    register_operators()
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
