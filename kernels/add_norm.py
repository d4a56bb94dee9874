"""Between two matrix products of a layer: parts of the first join the residual stream, whose norm the second reads.

A product of few rows has too few tiles for the device unless its inner dimension is cut, and the parts must then be
added up anyway; so the residual and the norm behind it come along in the same pass. A program holds a whole row.

Least traffic: 4 * S * M * H bytes of parts, `total` read and written, the norm written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import overlap_options, wait_for_previous
from kernels.ref.add_norm import check_add_norm
from kernels.rms_norm import normed_row, row_cut


@triton.jit
def _add_norm(
    total_ptr,
    parts_ptr,
    weight_ptr,
    out_ptr,
    row_stride,
    part_stride,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (M,). total [M, WIDTH] with `row_stride`, parts [PARTS, M, WIDTH] and out [M, WIDTH] dense."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    total_ptr += row * row_stride + columns
    parts_ptr += row * WIDTH + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    total = tl.load(total_ptr, mask=inside, other=0.0)
    added = tl.zeros([BLOCK], tl.float32)
    for _ in tl.static_range(PARTS):
        added += tl.load(parts_ptr, mask=inside, other=0.0)
        parts_ptr += part_stride  # step by step: the product of both need not fit 32 bits
    total = (total.to(tl.float32) + added).to(total.dtype)
    tl.store(total_ptr, total, mask=inside)
    tl.store(out_ptr + row * WIDTH + columns, normed_row(total, weight, eps, WIDTH), mask=inside)


def add_norm(total: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.ref.add_norm`; one launch.

    Raises:
        ValueError: see `kernels.ref.add_norm.check_add_norm`.
    """
    check_add_norm(total, parts, weight)
    out = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    num_rows, width = total.shape
    if num_rows:
        block, warps = row_cut(num_rows, width, total.element_size())
        _add_norm[(num_rows,)](
            total,
            parts,
            weight,
            out,
            total.stride(0),
            num_rows * width,
            eps,
            len(parts),
            width,
            block,
            num_warps=warps,
            **overlap_options(total.device),
        )
    return out
