"""Packing of chains into flat rows, one request after another: the truth for `kernels.pack`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.tensor_checks import require_device, require_int64

#: Rows of a request whose mutual visibility fits into the 64 bits of `ancestors`.
MAX_CHAIN_ROWS = 64


class ChainRows(NamedTuple):
    """Where the rows go: int64 tensors that keep their addresses, contiguous.

    Attributes:
        tokens, positions, slot_of_row, kv_row, ancestors: [M], M from the sum of the lengths on.
        starts: [R+1].
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_of_row: torch.Tensor
    kv_row: torch.Tensor
    ancestors: torch.Tensor
    starts: torch.Tensor


def check_chains(
    lengths: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    out: ChainRows,
) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape or type than `pack` documents.
    """
    num_requests, num_rows = len(lengths), len(out.tokens)
    if num_requests == 0 or num_rows == 0:
        raise ValueError(f"{num_requests} requests and {num_rows} rows, allowed: at least one of each")
    inputs = {"lengths": lengths, "anchors": anchors, "slots": slots, "context_len": context_len}
    fields = out._asdict()
    require_device(lengths.device, drafts=drafts, **inputs, **fields)
    require_int64(num_requests + 1, starts=fields.pop("starts"))
    require_int64(num_requests, **inputs)
    require_int64(num_rows, **fields)
    good = drafts.ndim == 2 and len(drafts) == num_requests and 1 <= drafts.shape[1] < MAX_CHAIN_ROWS
    if not good or drafts.dtype != torch.int64:
        raise ValueError(
            f"drafts {list(drafts.shape)} {drafts.dtype}, allowed [{num_requests}, 1..{MAX_CHAIN_ROWS - 1}] int64"
        )


def pack(
    lengths: torch.Tensor,
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    dead_row: int,
    out: ChainRows,
) -> None:
    """Writes the first rows of every chain one request after another.

    Row j of a request is its anchor (j = 0) or its draft j - 1, at position and cache row context + j, and sees the
    rows up to itself. Rows behind the last one are sentinels: all zeros, with K/V bound for the dead row. Lengths that
    do not fit into M rows are cut, the last requests first.

    Args:
        lengths: [R] int64, rows of each chain, 0..C + 1; 0 for a request that is not there.
        anchors: [R] int64, newest token of each request.
        drafts: [R, C] int64 drafted tokens, any strides.
        slots, context_len: [R] int64.
        dead_row: cache row that no request reads.
        out: written in place, whole.

    Raises:
        ValueError: see `check_chains`.
    """
    check_chains(lengths, anchors, drafts, slots, context_len, out)
    first, room = 0, len(out.tokens)
    out.starts[0] = 0
    for r, length in enumerate(lengths.tolist()):
        stop = min(first + length, room)
        steps = torch.arange(stop - first, device=lengths.device)
        out.tokens[first:stop] = torch.cat((anchors[r : r + 1], drafts[r]))[: stop - first]
        out.positions[first:stop] = out.kv_row[first:stop] = context_len[r] + steps
        out.slot_of_row[first:stop] = slots[r]
        out.ancestors[first:stop] = ~(torch.full_like(steps, -2) << steps)  # bits 0..j
        out.starts[r + 1] = first = stop
    for name, field in zip(ChainRows._fields[:-1], out, strict=False):
        field[first:] = dead_row if name == "kv_row" else 0
