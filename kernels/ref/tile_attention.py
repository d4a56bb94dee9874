"""Attention of packed rows over a slot cache, in plain torch: the truth that the fast kernels are checked against.

Row j of a request sees the committed context of its slot and those rows of its own request that its mask names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

MAX_MASKED_ROWS = 64  # bits of an ancestor mask


def tile_attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: Sequence[int],
    starts: Sequence[int],
    kv_len: Sequence[int],
    masks: Sequence[torch.Tensor | None],
    scale: float,
) -> torch.Tensor:
    """Softmax attention, one request after another.

    Args:
        query: [M, H, D], rows of request r are starts[r]..starts[r+1]; those behind the last request's give zeros.
        k_cache, v_cache: [slots, max_len, Hk, D]; the rows of this call are already written.
        slots: [R] cache slot of each request.
        starts: [R+1] first row of each request.
        kv_len: [R] cache rows that a request may see: committed context plus its own rows.
        masks: per request, additive mask [m, kv_len] (0 or -inf) in the dtype of `query`; None means every row
            sees everything (one row) or, with as many rows as keys, that rows are causal.
        scale: factor on the scores, normally D ** -0.5.

    Returns:
        [M, H, D] in the dtype of `query`. GQA: query head h reads KV head h // (H / Hk).
    """
    out = torch.empty_like(query)
    out[starts[-1] :] = 0
    for r, slot in enumerate(slots):
        first, stop, length = starts[r], starts[r + 1], kv_len[r]
        if stop == first:
            continue
        mask = masks[r]
        out[first:stop] = F.scaled_dot_product_attention(
            query[first:stop].transpose(0, 1).unsqueeze(0),  # [1, H, m, D]
            k_cache[slot, :length].transpose(0, 1).unsqueeze(0),  # [1, Hk, T, D]
            v_cache[slot, :length].transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None and stop - first == length,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return out


def tile_attention_tensors(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    context_len: torch.Tensor,
    ancestors: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """`tile_attention` with the metadata in the tensors that `kernels.tile_attention` takes; see there.

    Reads them on the host, so it can be neither captured nor used where that costs.
    """
    first, context, mask_of = starts.tolist(), context_len.tolist(), []
    for r, length in enumerate(context):
        rows = slice(first[r], first[r + 1])
        index = torch.arange(rows.stop - rows.start, device=query.device)
        if ancestors is None:
            seen = index <= index[:, None]
        else:
            seen = (ancestors[rows, None] >> index.clamp(max=MAX_MASKED_ROWS - 1)) & 1 != 0  # [m, m]
        mask = query.new_zeros(len(index), length + len(index))
        mask[:, length:].masked_fill_(~seen, -torch.inf)
        mask_of.append(mask)
    kv_len = [c + b - a for c, a, b in zip(context, first, first[1:], strict=False)]
    return tile_attention(query, k_cache, v_cache, slots.tolist(), first, kv_len, mask_of, scale)
