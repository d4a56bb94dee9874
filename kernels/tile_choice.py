"""How a call of `kernels.tile_attention` is cut into tiles, from sizes that are known on the host."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kernels.ref.tile_attention import MAX_MASKED_ROWS
from kernels.tile_attention_device import MIN_BLOCKS

_MAX_SPLITS = 32
#: Where heads are longer, tiles of many rows that rotate no longer fit the registers.
_MAX_ROTATED_DIM = 128


@dataclass(frozen=True)
class Tile:
    """How one call is cut up and launched.

    Attributes:
        heads: query heads in a tile, 1 or the whole group of a KV head.
        rows: (row, head) pairs in a tile, a power of two from 16.
        keys: keys in a step of the running softmax, a power of two from 16.
        splits: programs that share the keys of a tile.
        num_warps, num_stages: of the tile kernel.
    """

    heads: int
    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def choose_tile(
    variant: str,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    num_requests: int,
    max_rows: int,
    max_context: int,
    element_size: int,
    num_sms: int,
) -> Tile:
    """The tile of a call, from static sizes only.

    Args:
        variant: one of `kernels.tile_attention_checks.VARIANTS`.
        group: query heads of one KV head.
        num_requests, max_rows, max_context: bounds that the call was made for, not what is live in it.
        element_size: bytes of an element of the cache.
        num_sms: multiprocessors of the device.

    Returns:
        What `launch` takes.
    """
    if variant == "auto":
        variant = "packed" if max_rows <= MAX_MASKED_ROWS else "rows128"
    elif variant == "paper":
        variant = "rows16" if max_rows <= 16 else "rows128"
    heads = group if variant == "packed" else 1
    rows = {"rows16": 16, "rows128": 128}.get(variant) or min(max(triton.next_power_of_2(max_rows * group), 16), 128)
    if rows == 32:
        rows = 64  # whose four warps hold 16 rows each, all keys of them: they need not talk to each other
    keys = 64 if head_dim <= 128 else 32
    if element_size == 4:  # no matrix unit computes in full float32, and larger tiles would not fit the registers
        rows, keys = 16, keys // 2
    splits, stages = 1, 2 if keys < 64 else 3
    if variant == "packed":
        programs = num_requests * num_kv_heads * triton.cdiv(max_rows * heads, rows)
        # One program a multiprocessor: a second one gains less than joining the parts costs.
        room = num_sms // max(programs, 1)
        parts = triton.cdiv(max_context + max_rows, keys) // MIN_BLOCKS.value
        splits = _power_of_2_below(min(room, parts, _MAX_SPLITS))
        if rows == 64 and num_sms < programs <= 2 * num_sms:
            keys = 32  # then two programs fit a multiprocessor, and all of them run at once
    return Tile(heads, rows, keys, splits, num_warps=8 if rows == 128 else 4, num_stages=stages)


def _power_of_2_below(value: int) -> int:
    """The largest power of two up to `value`, at least 1: few different kernels get compiled."""
    return 1 << max(value.bit_length() - 1, 0)


def rotates(tile: Tile, group: int, head_dim: int, max_rows: int) -> bool:
    """Whether `launch` with this tile can take a `Rotation`: one tile holds all rows of a request and KV head.

    Of its programs, which share the keys, each writes the new rows among its own keys and reads no others, so none
    waits for another.
    """
    whole = tile.heads == group and max_rows * group <= tile.rows
    return whole and 16 <= head_dim <= _MAX_ROTATED_DIM and head_dim == triton.next_power_of_2(head_dim)
