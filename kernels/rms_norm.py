"""Root-mean-square normalisation of rows in one pass: a program holds a whole row in registers.

It runs between matrix products, so its input is mostly still in the L2 cache, and what counts is how soon the loads of
all rows are under way: one load of 16 bytes a thread, as many threads as a row needs, up to 512, or, where there are
about as many rows as multiprocessors or more, half as many.

Least traffic: x read and the result written once, 4 * M * H bytes in half precision; the weight stays in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import overlap_options, wait_for_previous
from kernels.ref.rms_norm import check_rms_norm

MAX_WARPS, MAX_WARPS_OF_MANY = 16, 8  # of a row; beyond, threads load several times
MANY_ROWS = 129  # from here on, multiprocessors hold several


@triton.jit
def normed_row(x, weight, eps, WIDTH: tl.constexpr):
    """The norm of one row: x and weight [BLOCK], zero from WIDTH on, in the dtype of x."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    # Products of two half precision numbers are exact in float32, so this is the product in the dtype of x.
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _normalise(
    x_ptr,
    weight_ptr,
    out_ptr,
    row_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (M,). x [M, WIDTH] with `row_stride`, out [M, WIDTH] dense."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + columns, normed_row(x, weight, eps, WIDTH), mask=inside)


def row_cut(num_rows: int, width: int, element_size: int) -> tuple[int, int]:
    """(block, warps) of a program that holds a row: a load of 16 bytes a thread, as far as warps go."""
    block = triton.next_power_of_2(width)
    most = MAX_WARPS if num_rows < MANY_ROWS else MAX_WARPS_OF_MANY
    return block, min(max(block * element_size // (16 * 32), 1), most)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.ref.rms_norm`; one launch.

    Rows of more than 16384 numbers no longer fit in registers and become slow, not wrong.

    Raises:
        ValueError: see `kernels.ref.rms_norm.check_rms_norm`.
    """
    check_rms_norm(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x.shape
    if num_rows:
        block, warps = row_cut(num_rows, width, x.element_size())
        options = overlap_options(x.device)
        _normalise[(num_rows,)](x, weight, out, x.stride(0), eps, width, block, num_warps=warps, **options)
    return out
