"""From the merged product of a layer to rotated queries and written keys and values, in plain torch."""

from __future__ import annotations

import torch

from kernels.ref.kv_write import kv_write
from kernels.ref.rms_norm import rms_norm
from kernels.tensor_checks import require_device, require_floats, require_int64, require_rows

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_rotate_write(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    slot_of_row: torch.Tensor,
    kv_row: torch.Tensor,
    starts: torch.Tensor,
    num_heads: int,
) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape, dtype, device or layout than `rotate_write` documents.
    """
    if kv.dim() != 6 or kv.shape[1] != 2 or not 0 <= layer < kv.shape[0]:
        raise ValueError(f"layer={layer} of kv {list(kv.shape)}; expected [layers, 2, slots, L, Hk, D] with that layer")
    num_kv_heads, head_dim = kv.shape[4:]
    if not 2 <= head_dim <= 256 or head_dim % 2:
        raise ValueError(f"head_dim={head_dim} of kv; allowed: even, from 2 to 256")
    if num_heads < 0:
        raise ValueError(f"num_heads={num_heads}; allowed: from 0")
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width:
        raise ValueError(f"qkv is {list(qkv.shape)}; expected [M, ({num_heads} + 2 * {num_kv_heads}) * {head_dim}]")
    weights = {n: w for n, w in (("q_weight", q_weight), ("k_weight", k_weight)) if w is not None}
    for name, weight in weights.items():
        if weight.shape != (head_dim,):
            raise ValueError(f"{name} is {list(weight.shape)}; expected [{head_dim}]")
    for name, angle in (("cos", cos), ("sin", sin)):
        if angle.dim() != 2 or len(angle) != len(qkv) or angle.shape[1] < head_dim // 2 or angle.dtype not in FLOATS:
            expected = f"floats [{len(qkv)}, {head_dim // 2} or more]"
            raise ValueError(f"{name} is {angle.dtype} {list(angle.shape)}; expected {expected}")
    require_floats(qkv.dtype, qkv=qkv, kv=kv, **weights)
    require_rows(qkv=qkv, cos=cos, sin=sin, kv=kv, **weights)
    require_int64(len(qkv), slot_of_row=slot_of_row, kv_row=kv_row)
    require_int64(max(starts.numel(), 1), starts=starts)
    places = {"slot_of_row": slot_of_row, "kv_row": kv_row, "starts": starts}
    require_device(qkv.device, cos=cos, sin=sin, kv=kv, **places, **weights)


def rotate_write(
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
    starts: torch.Tensor,
    num_heads: int,
) -> torch.Tensor:
    """Norms and rotates the queries and keys of all rows, and stores keys and values of the live ones in the cache.

    Rotate-half form: with x1 and x2 the halves of a head, (x1 * cos - x2 * sin, x2 * cos + x1 * sin), in float32 and
    rounded once. Row i is live if i < starts[-1] and (slot_of_row[i], kv_row[i]) lies in the cache; nothing but the
    places of live rows is written, and no two of them may share one.

    Args:
        qkv: [M, (H + 2 Hk) * D] float32, float16 or bfloat16, query heads first, then key, then value heads; rows may
            lie apart.
        q_weight, k_weight: [D] of that dtype, weights of the RMS norm of every head (see `kernels.ref.rms_norm`), or
            None for heads that have no norm.
        eps: of the norms.
        cos, sin: [M, D / 2 or more] of any float type, of the position of each row; what follows the first D / 2
            columns is not read.
        kv: [layers, 2, slots, L, Hk, D] of the dtype of `qkv`, keys before values, written in place.
        layer: which of them, 0 .. layers - 1.
        slot_of_row, kv_row: [M] int64 place of each row.
        starts: [R+1] int64 first row of each request; the last entry ends the live rows.
        num_heads: H; 0 for rows that are cached without asking anything, as contexts of a drafter.

    Returns:
        [M, H, D] rotated queries, dense; those of rows that are not live too.

    Raises:
        ValueError: see `check_rotate_write`.
    """
    check_rotate_write(qkv, q_weight, k_weight, cos, sin, kv, layer, slot_of_row, kv_row, starts, num_heads)
    num_kv_heads, head_dim = kv.shape[4:]
    heads = qkv.unflatten(1, (-1, head_dim))
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, key = _normed(query, q_weight, eps), _normed(key, k_weight, eps)
    cos, sin = (angle[:, None, : head_dim // 2].float() for angle in (cos, sin))
    kv_write(_rotated(key, cos, sin), value, kv[layer, 0], kv[layer, 1], slot_of_row, kv_row, starts)
    return _rotated(query, cos, sin)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[M, heads, D]: each head by itself."""
    return x if weight is None else rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[M, heads, D] by angles [M, 1, D / 2] in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
