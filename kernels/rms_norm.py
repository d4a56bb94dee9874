"""Root-mean-square normalisation of rows in one pass: a program holds a whole row in registers.

It runs between matrix products, so its input is mostly still in the L2 cache, and what counts is how soon the loads of
all rows are under way: one load of 16 bytes a thread, as many threads as a row needs, up to 512.

Least traffic: x read and the result written once, 4 * M * H bytes in half precision; the weight stays in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.rms_norm import check_rms_norm

MAX_WARPS = 16  # of a row; beyond, threads load several times


@triton.jit
def _normalise(x_ptr, weight_ptr, out_ptr, row_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (M,). x [M, WIDTH] with `row_stride`, out [M, WIDTH] dense."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * row_stride + columns, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    # Products of two half precision numbers are exact in float32, so this is the product in the dtype of x.
    normed = (wide * scale).to(x.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (normed * weight).to(x.dtype), mask=inside)


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
        block = triton.next_power_of_2(width)
        warps = min(max(block * x.element_size() // (16 * 32), 1), MAX_WARPS)
        _normalise[(num_rows,)](x, weight, out, x.stride(0), eps, width, block, num_warps=warps)
    return out
