"""Attention of packed rows over the slot cache: one Triton kernel family, routed by how many rows a request brings.

    out[i, h] = sum over visible keys j of softmax_j(scale * q[i, h] . k[j, h // group]) * v[j, h // group]

A row sees the committed context of its request and those of the request's own rows that its ancestor bits name
(without bits: causally, any number of rows). A program owns one tile of (row, query head) pairs of one KV head and
walks over that head's keys with a running softmax in float32. The paths differ in the shape of that tile:

    rows16    16 rows of one query head: DScale's verify tile (arXiv 2609.37532, path-aware routing)
    rows128   128 rows of one query head: prefill, and verification as DFlash does it
    packed    rows x the query heads of one KV head, 16 to 128 pairs, so keys and values are read once a KV head; the
              keys are split over several programs where there are fewer programs than the device can hold, and a
              second kernel joins the parts by their log-sum-exp
    paper     rows16 up to 16 rows a request, else rows128
    auto      packed up to 64 rows a request, else rows128

Least traffic of a call: sum over requests of (context + rows) * 2 * Hk * D elements, each read once.
Decisions on the host rest on sizes alone, so a call can be captured in a CUDA graph and replayed over other metadata.

Keys and values are written before, by `kernels.kv_write`: programs of one launch have no order among each other, so a
kernel that wrote the cache could not read it back without a barrier over the whole grid. Only where one tile holds all
rows of a request and KV head can its programs write them themselves, see `kernels.rotate_attend`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernels.overlap import overlap_options
from kernels.ref.tile_attention import tile_attention_tensors
from kernels.tile_attention_checks import check_attention
from kernels.tile_attention_device import attend, combine
from kernels.tile_choice import Tile, choose_tile, rotates


@dataclass(frozen=True)
class Rotation:
    """What a tile needs to norm and rotate its own queries and keys, see `kernels.ref.rotate_write`.

    Attributes:
        q_weight, k_weight: [D] of the norms of query and key heads, or None.
        eps: of the norms.
        cos, sin: [M, D / 2 or more] of each row.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor


def launch(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    max_rows: int,
    tile: Tile,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """`tile_attention` with a tile of the caller's choice; arguments are taken as checked.

    With a `rotation`, `query` holds raw heads, in whose rows those of raw keys and values follow; the tiles write the
    rotated keys and the values into the cache.

    Raises:
        ValueError: a rotation and a tile that cannot, see `kernels.tile_choice.rotates`.
    """
    num_rows, num_heads, head_dim = query.shape
    num_requests = slots.shape[0]
    if rotation is not None and not rotates(tile, num_heads // k_cache.shape[2], head_dim, max_rows):
        raise ValueError(f"{tile} does not rotate {max_rows} rows of {num_heads} heads of {head_dim}")
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if num_rows == 0 or num_requests == 0:
        return out.zero_()
    split = tile.splits > 1
    parts = out.new_empty((tile.splits, *out.shape), dtype=torch.float32) if split else out
    lse = out.new_empty((tile.splits, num_rows, num_heads), dtype=torch.float32) if split else out
    dim = max(triton.next_power_of_2(head_dim), 16)
    group = num_heads // k_cache.shape[2]
    tiles = triton.cdiv(max_rows * tile.heads, tile.rows)
    # Heads first: programs that run at the same time read neighbouring pieces of the same cache rows.
    attend[(num_heads // tile.heads, num_requests, tiles * tile.splits)](
        query,
        k_cache,
        v_cache,
        slots,
        starts,
        context_len,
        slots if ancestors is None else ancestors,
        parts,
        lse,
        *_given(rotation, query),
        scale * math.log2(math.e),
        0.0 if rotation is None else float(rotation.eps),
        num_rows,
        tile.splits,
        *k_cache.shape[:2],
        *query.stride()[:2],
        *((0, 0) if rotation is None else (rotation.cos.stride(0), rotation.sin.stride(0))),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_HEADS=num_heads,
        GROUP=group,
        HEADS=tile.heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_ROWS=tile.rows,
        BLOCK_KEYS=tile.keys,
        NEW_ROWS=0 if rotation is None else triton.next_power_of_2(max_rows),
        Q_NORM=rotation is not None and rotation.q_weight is not None,
        K_NORM=rotation is not None and rotation.k_weight is not None,
        CAUSAL=ancestors is None,
        SPLIT=split,
        ZERO_BLOCK=triton.next_power_of_2(tile.heads * head_dim),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **overlap_options(query.device),
    )
    if split:
        heads = max(min(triton.next_power_of_2(num_heads), 1024 // dim), 1)
        combine[(num_rows, triton.cdiv(num_heads, heads))](
            parts,
            lse,
            starts,
            out,
            num_rows,
            num_requests,
            SPLITS=tile.splits,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            BLOCK_HEADS=heads,
            num_warps=4,
            **overlap_options(query.device),
        )
    return out


def _given(rotation: Rotation | None, stand_in: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of a rotation, with `stand_in` where there is none to read."""
    if rotation is None:
        return (stand_in,) * 4
    q_weight, k_weight = (stand_in if w is None else w for w in (rotation.q_weight, rotation.k_weight))
    return q_weight, k_weight, rotation.cos, rotation.sin


def attend_rows(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    max_rows: int,
    max_context: int,
    variant: str = "auto",
) -> torch.Tensor:
    """Attention of packed rows by the kernels of this module; as an operator, on a CPU by the plain reference.

    Metadata are int64 tensors on the device of `query`; their contents are not checked, as nothing here waits for the
    device. Only the keys that a row may see are read, whatever else the cache holds.

    Args:
        query: [M, H, D] float32, float16 or bfloat16; rows of request r are starts[r]..starts[r+1]-1.
        k_cache, v_cache: [slots, L, Hk, D] of that dtype, H a multiple of Hk; row context_len[r] + i of a request's
            slot holds its row i already.
        slots: [R] cache slot of each request.
        starts: [R+1] first row of each request; equal neighbours: a request without rows.
        context_len: [R] committed cache rows of each request.
        ancestors: [M] 64 bits, bit j: the row sees row j of its request, itself included; None: causal.
        scale: factor on the scores, above 0.
        max_rows: rows of the longest request or more, up to 64 with `ancestors`; what lies beyond is not computed.
        max_context: bound on context_len that the number of splits is chosen for; has no effect on the result.
        variant: one of `kernels.tile_attention_checks.VARIANTS`.

    Returns:
        [M, H, D] in the dtype of `query`, zero in rows of no request, and in those whose scores all overflow to -inf.
        Query head h reads KV head h // (H / Hk).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, unknown variant, sizes out of range.
    """
    check_attention(
        query, k_cache, v_cache, slots, starts, context_len, ancestors, scale, max_rows, max_context, variant
    )
    tile = tile_of_call(query, k_cache.shape[2], slots.shape[0], max_rows, max_context, variant)
    return launch(query, k_cache, v_cache, slots, starts, context_len, ancestors, scale, max_rows, tile)


def tile_of_call(
    query: torch.Tensor, num_kv_heads: int, num_requests: int, max_rows: int, max_context: int, variant: str
) -> Tile:
    """`choose_tile` on the device of `query` [M, H, D]."""
    return choose_tile(
        variant,
        query.shape[1] // num_kv_heads,
        num_kv_heads,
        query.shape[2],
        num_requests,
        max_rows,
        max_context,
        query.element_size(),
        _num_sms(query.device),
    )


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# Registered at import, as torch finds operators by name: a compiled model refers to `workbench::tile_attention`. Code
# that nothing traces calls `attend_rows`, which spares the host the way through the dispatcher.
tile_attention = torch.library.custom_op("workbench::tile_attention", attend_rows, mutates_args=())


@tile_attention.register_kernel("cpu")
def attend_rows_plainly(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
    max_rows: int,
    max_context: int,
    variant: str = "auto",
) -> torch.Tensor:
    """`attend_rows` in plain torch, on any device; reads its metadata on the host."""
    check_attention(
        query, k_cache, v_cache, slots, starts, context_len, ancestors, scale, max_rows, max_context, variant
    )
    return tile_attention_tensors(query, k_cache, v_cache, slots, starts, context_len, ancestors, scale)


@tile_attention.register_fake
def _tile_attention_fake(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
