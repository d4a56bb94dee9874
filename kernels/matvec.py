"""Linear layers of a single row, as plain decoding of one sequence has them: bound by reading the weights once.

A program owns a few rows of the weight and goes through them in tiles along K, in which its warps lie side by side. A
thread reads 16 bytes at a time and keeps one float32 sum a row; the sums of the threads are added once, at the end. So
the order of additions follows from the sizes alone: nothing is split over programs, and there are no atomics.

Least traffic: the N * K weights. The row `x` stays in the first-level cache, from which weights go first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.ref.matvec import check, check_gate_up

#: Weights of fewer bytes than this take a row a program, or there would be too few programs for the device.
_SMALL = 8_000_000


@dataclass(frozen=True)
class MatvecConfig:
    """How the work is cut.

    Attributes:
        rows: rows of the result of a program, a power of two.
        warps: warps of a program, a power of two; a tile is 512 bytes wide for each of them.
        reach: factor on the width of a tile, a power of two.
        stages: tiles in flight through shared memory; with 1 they go straight to registers.
    """

    rows: int
    warps: int
    reach: int = 1
    stages: int = 1


@triton.jit
def _sums(
    x_ptr,
    weight_ptr,
    rows,
    inside,  # of each row: whether there is one
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[len(rows)] float32: the products of these rows of the weight with x."""
    num_rows: tl.constexpr = rows.shape[0]
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([num_rows, BLOCK // LANE], tl.float32)
    for start in tl.range(0, K, BLOCK, num_stages=STAGES):
        mask = start + columns < K
        places = weight_ptr + rows[:, None] * K + (start + columns)[None, :]
        if inside is None and K % BLOCK == 0:
            weight = tl.load(places, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + columns)
        elif inside is None:
            weight = tl.load(places, mask[None, :], 0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + columns, mask, 0.0)
        else:
            weight = tl.load(places, mask[None, :] & inside[:, None], 0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + start + columns, mask, 0.0)
        products = weight.to(tl.float32) * x.to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(products, [num_rows, BLOCK // LANE, LANE]), 2)  # within a thread
    return tl.sum(sums, 1)


@triton.jit
def _matvec(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]
    residual_ptr,  # [N] or None
    out_ptr,  # [N]
    num_rows,
    WHOLE: tl.constexpr,  # whether every program has all its rows
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (ceil(N / ROWS),)."""
    first = tl.program_id(0) * ROWS
    rows = tl.arange(0, ROWS)
    inside = None if WHOLE else first + rows < num_rows
    weight_ptr += first.to(tl.int64) * K
    if residual_ptr is not None:  # asked for before the products, so that nothing waits for it after them
        residual = tl.load(residual_ptr + first + rows, inside).to(tl.float32)
    sums = _sums(x_ptr, weight_ptr, rows, inside, K, BLOCK, LANE, STAGES)
    if residual_ptr is not None:
        sums += residual
    tl.store(out_ptr + first + rows, sums, inside)


@triton.jit
def _matvec_silu(
    x_ptr,  # [K]
    weight_ptr,  # [2F, K]
    out_ptr,  # [F]
    num_rows,  # F
    WHOLE: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (ceil(F / ROWS),). A program has ROWS rows of the gate and the same ones of up, in turns."""
    first = tl.program_id(0) * ROWS
    both = tl.arange(0, 2 * ROWS)
    inside = None if WHOLE else first + both // 2 < num_rows
    rows = (both % 2).to(tl.int64) * num_rows + both // 2
    weight_ptr += first.to(tl.int64) * K
    sums = _sums(x_ptr, weight_ptr, rows, inside, K, BLOCK, LANE, STAGES)
    kind = out_ptr.dtype.element_ty
    gate, up = tl.split(tl.reshape(sums.to(kind).to(tl.float32), [ROWS, 2]))
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    place = first + tl.arange(0, ROWS)
    tl.store(out_ptr + place, active * up, None if WHOLE else place < num_rows)


def choose_config(num_rows: int, width: int, element_size: int) -> MatvecConfig:
    """The cut of a weight [num_rows, width]: few rows and many warps a program, so that each begins with long reads.

    Chosen on an H200 among some fifteen cuts a shape, for Qwen3 and SmolLM2: at most 4 % slower than the best of them
    at every shape of the former. A tile may reach beyond K for an eighth of all that is read at most, as the threads
    beyond have nothing to read.
    """
    lane = 512 // element_size
    if width % (16 * lane) == 0:
        return MatvecConfig(rows=2, warps=8, reach=2)
    warps = next((w for w in (4, 2) if triton.cdiv(width, w * lane) * w * lane * 7 <= width * 8), 1)
    return MatvecConfig(1 if num_rows * width * element_size < _SMALL else 2, warps)


def matvec(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`kernels.ref.matvec.matvec` in one launch, which can be captured."""
    check(x, weight, residual, out, weight.shape[0])
    return launch(x, weight, residual, out, choose_config(*weight.shape, x.element_size()))


def matvec_silu(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """`kernels.ref.matvec.matvec_silu` in one launch, which can be captured."""
    check_gate_up(x, gate_up)
    config = choose_config(*gate_up.shape, x.element_size())
    # Two rows of the weight make one of the result, so half the reach has as much under way.
    return launch_silu(x, gate_up, None, replace(config, reach=1))


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
    config: MatvecConfig,
) -> torch.Tensor:
    """`matvec` under a given cut; arguments are taken as checked."""
    num_rows = len(weight)
    out = x.new_empty(1, num_rows) if out is None else out
    if num_rows:
        grid = (triton.cdiv(num_rows, config.rows),)
        _matvec[grid](x, weight, residual, out, num_rows, **_options(x, num_rows, config))
    return out


def launch_silu(x: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor | None, config: MatvecConfig) -> torch.Tensor:
    """`matvec_silu` under a given cut, whose rows are those of the result; arguments are taken as checked."""
    num_rows = len(gate_up) // 2
    out = x.new_empty(1, num_rows) if out is None else out
    if num_rows:
        grid = (triton.cdiv(num_rows, config.rows),)
        _matvec_silu[grid](x, gate_up, out, num_rows, **_options(x, num_rows, config))
    return out


def _options(x: torch.Tensor, num_rows: int, config: MatvecConfig) -> dict[str, int | bool]:
    """The static arguments that both kernels take."""
    lane = 16 // x.element_size()
    return {
        "WHOLE": num_rows % config.rows == 0,
        "K": x.shape[1],
        "ROWS": config.rows,
        "BLOCK": 32 * lane * config.warps * config.reach,
        "LANE": lane,
        "STAGES": config.stages,
        "num_warps": config.warps,
    }
