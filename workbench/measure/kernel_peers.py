"""What else computes the attention of packed rows: library functions, timed beside the kernels on the same inputs.

Their inputs are brought into the layout that they need outside the timing, which is in their favour: a server would
have to gather keys and values, or hold them that way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from workbench.measure.kernel_cases import AttentionCase


class Absent(Exception):
    """A peer that cannot compute a cell, or not here; the text says why."""


@dataclass(frozen=True)
class Peer:
    """A library function on a case.

    Attributes:
        calls: one a set of inputs.
        rows: brings the result of a call into [M, H, D].
    """

    calls: list[Callable[[], torch.Tensor]]
    rows: Callable[[torch.Tensor], torch.Tensor]


class _Rectangle:
    """A case as one rectangle of N requests: W rows each, T = context + W keys; shorter requests repeat their last row.

    Attributes:
        rows: [N, W] packed row of each place.
        sets: per set q [N, H, W, D], k and v [N, Hk, T, D], contiguous.
    """

    def __init__(self, case: AttentionCase) -> None:
        self.case, width = case, max(case.lengths)
        lengths = torch.tensor(case.lengths, device=case.device)
        step = torch.arange(width, device=case.device)
        self.rows = case.starts[:-1, None] + torch.minimum(step, lengths[:, None] - 1)
        self._live = step < lengths[:, None]
        keys = case.cell.context + width
        self.sets = []
        for query, cache in zip(case.queries, case.caches, strict=True):
            found = cache[:, case.slots, :keys].transpose(2, 3).contiguous()
            self.sets.append((query[self.rows].transpose(1, 2).contiguous(), found[0], found[1]))

    def mask(self) -> torch.Tensor:
        """[N, 1, W, T] bool: which keys each row sees."""
        case = self.case
        own = torch.arange(self.rows.shape[1], device=case.device)
        if case.ancestors is None:
            seen = (own <= own[:, None]).expand(len(self.rows), -1, -1)
        else:
            seen = (case.ancestors[self.rows][..., None] >> own) & 1 != 0
        context = seen.new_ones(*self.rows.shape, case.cell.context)
        return torch.cat((context, seen), dim=2)[:, None]

    def packed(self, out: torch.Tensor) -> torch.Tensor:
        """[N, H, W, D] -> [M, H, D]."""
        return out.transpose(1, 2)[self._live]


def sdpa(case: AttentionCase) -> Peer:
    """`scaled_dot_product_attention` with a mask, or causal; torch chooses the backend."""
    whole = _Rectangle(case)
    causal = case.ancestors is None and case.cell.context == 0
    how = {"is_causal": True} if causal else {"attn_mask": whole.mask()}
    attention = partial(F.scaled_dot_product_attention, scale=case.scale, enable_gqa=True, **how)
    return Peer([partial(attention, *one) for one in whole.sets], whole.packed)


def flex(case: AttentionCase) -> Peer:
    """FlexAttention, compiled for the sizes and the mask of the case; forgets what torch compiled before.

    Raises:
        Absent: not on a CUDA device.
    """
    if case.device.type != "cuda":
        raise Absent("needs a CUDA device")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    whole = _Rectangle(case)
    (requests, width), context = whole.rows.shape, case.cell.context
    bits = None if case.ancestors is None else case.ancestors[whole.rows].flatten()

    def visible(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = key - context
        if bits is None:
            return own <= row
        return (own < 0) | (((bits[batch * width + row] >> own.clamp(0, 63)) & 1) != 0)

    block_mask = create_block_mask(visible, requests, None, width, context + width, device=case.device)
    torch.compiler.reset()  # torch counts the compilations of a function and stops compiling after a few
    attention = partial(
        torch.compile(flex_attention, dynamic=False), block_mask=block_mask, scale=case.scale, enable_gqa=True
    )
    return Peer([partial(attention, *one) for one in whole.sets], whole.packed)


def varlen(case: AttentionCase) -> Peer:
    """torch's attention over requests of different lengths: causal, without padding.

    Raises:
        Absent: trees, not on a CUDA device, float32, or a torch without it.
    """
    if case.cell.kind == "tree":
        raise Absent("knows no trees")
    if case.device.type != "cuda":
        raise Absent("needs a CUDA device")
    if case.queries[0].dtype == torch.float32:
        raise Absent("takes float16 and bfloat16")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise Absent(f"torch {torch.__version__} has none") from None

    lengths = [case.cell.context + length for length in case.lengths]
    ends = torch.tensor([0, *lengths], device=case.device).cumsum(0).to(torch.int32)
    # Newer ones must be told that heads share keys; older ones take it as it comes.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    shared = {"cu_seq_q": case.starts.to(torch.int32), "cu_seq_k": ends, "max_q": max(case.lengths)}
    shared |= {"max_k": max(lengths), "scale": case.scale, "window_size": (-1, 0), **grouped}
    calls = []
    for query, cache in zip(case.queries, case.caches, strict=True):
        kept = [cache[:, slot, :length] for slot, length in zip(case.slots.tolist(), lengths, strict=True)]
        key, value = torch.cat(kept, dim=1)
        calls.append(partial(varlen_attn, query, key, value, **shared))
    return Peer(calls, torch.Tensor.contiguous)


PEERS: dict[str, Callable[[AttentionCase], Peer]] = {"sdpa": sdpa, "varlen": varlen, "flex": flex}
