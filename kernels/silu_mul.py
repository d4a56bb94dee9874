"""The gated product of an MLP over the merged product of its two projections, in one pass.

A thread has its loads of 16 bytes of both halves under way before it computes. The grid is flat over the tiles of all
rows, neighbours in memory next to each other.

Least traffic: gate and up read, the result written, 6 * M * F bytes in half precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.overlap import overlap_options, wait_for_previous
from kernels.ref.silu_mul import check_silu_mul

#: Of the result, of a program: a store of 16 bytes for each thread of four warps, or of two where the whole result is
#: small, so that more multiprocessors take part.
TILE_BYTES, NUM_WARPS = 2048, 4
SMALL_TILE_BYTES, SMALL_WARPS, SMALL_RESULT = 1024, 2, 1 << 18
#: Left to itself the assembler aims at 32 and, to get there, loads `up` only after the exponentials: twice the latency.
MAX_REGISTERS = 40


@triton.jit
def _gated(
    gate_up_ptr,
    out_ptr,
    row_stride,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid: (M * tiles of a row,). gate_up [M, 2 * WIDTH] with `row_stride`, out [M, WIDTH] dense."""
    num_tiles: tl.constexpr = (WIDTH + TILE - 1) // TILE
    wait_for_previous(OVERLAP)
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    columns = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    inside = columns < WIDTH
    gate_ptr = gate_up_ptr + row * row_stride
    gate = tl.load(gate_ptr + columns, mask=inside, other=0.0)
    up = tl.load(gate_ptr + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Products of two half precision numbers are exact in float32, so this is the product in the dtype.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.ref.silu_mul`; one launch.

    Raises:
        ValueError: see `kernels.ref.silu_mul.check_silu_mul`.
    """
    check_silu_mul(gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        small = out.nbytes <= SMALL_RESULT
        tile_bytes, warps = (SMALL_TILE_BYTES, SMALL_WARPS) if small else (TILE_BYTES, NUM_WARPS)
        tile = tile_bytes // out.element_size()
        grid = (num_rows * triton.cdiv(width, tile),)
        options = {"num_warps": warps, "maxnreg": MAX_REGISTERS, **overlap_options(gate_up.device)}
        _gated[grid](gate_up, out, gate_up.stride(0), width, tile, **options)
    return out
