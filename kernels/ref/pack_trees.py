"""Packing of draft trees into flat rows, one request after another: the truth for `kernels.pack_trees`."""

from __future__ import annotations

import torch

from kernels.ref.pack import MAX_CHAIN_ROWS, ChainRows
from kernels.ref.prune import DraftTrees
from kernels.tensor_checks import require_device, require_int64


def check_trees(trees: DraftTrees, slots: torch.Tensor, context_len: torch.Tensor, out: ChainRows) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape or type than `pack_trees` documents.
    """
    num_requests, num_rows = len(slots), len(out.tokens)
    if num_requests == 0 or num_rows == 0:
        raise ValueError(f"{num_requests} requests and {num_rows} rows, allowed: at least one of each")
    tables = {"tokens": trees.tokens, "depths": trees.depths, "ancestors": trees.ancestors}
    inputs = {"slots": slots, "context_len": context_len, "sizes": trees.sizes}
    fields = out._asdict()
    require_device(slots.device, **{f"trees.{name}": t for name, t in tables.items()}, **inputs, **fields)
    require_int64(num_requests + 1, starts=fields.pop("starts"))
    require_int64(num_requests, **inputs)
    require_int64(num_rows, **fields)
    most = trees.tokens.shape[-1]
    for name, table in tables.items():
        good = table.shape == (num_requests, most) and 1 <= most <= MAX_CHAIN_ROWS and table.is_contiguous()
        if not good or table.dtype != torch.int64:
            raise ValueError(
                f"trees.{name} {list(table.shape)} {table.dtype}, allowed: all alike, contiguous "
                f"[{num_requests}, 1..{MAX_CHAIN_ROWS}] int64"
            )


def pack_trees(
    trees: DraftTrees, slots: torch.Tensor, context_len: torch.Tensor, dead_row: int, out: ChainRows
) -> None:
    """Writes the first rows of every tree one request after another.

    Row j of a request stands at position context + its depth and in cache row context + j, and sees what its bits say.
    Rows behind the last one are sentinels: all zeros, with K/V bound for the dead row. Trees that do not fit into M
    rows are cut to their first rows, the last requests first.

    Args:
        trees: of R requests; tokens, depths and ancestors [R, N+1] and sizes [R], 0..N+1, are read, all int64. A
            request of size 0 is not there.
        slots, context_len: [R] int64.
        dead_row: cache row that no request reads.
        out: written in place, whole.

    Raises:
        ValueError: see `check_trees`.
    """
    check_trees(trees, slots, context_len, out)
    first, room = 0, len(out.tokens)
    out.starts[0] = 0
    for r, size in enumerate(trees.sizes.tolist()):
        stop = min(first + size, room)
        kept = slice(0, stop - first)
        out.tokens[first:stop] = trees.tokens[r, kept]
        out.positions[first:stop] = context_len[r] + trees.depths[r, kept]
        out.slot_of_row[first:stop] = slots[r]
        out.kv_row[first:stop] = context_len[r] + torch.arange(stop - first, device=slots.device)
        out.ancestors[first:stop] = trees.ancestors[r, kept]
        out.starts[r + 1] = first = stop
    for name, field in zip(ChainRows._fields[:-1], out, strict=False):
        field[first:] = dead_row if name == "kv_row" else 0
