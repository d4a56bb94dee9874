"""The target's token after each row, greedy or sampled with counter-based randomness, without reading on the host.

    greedy    the lowest id of the largest logit
    sampled   min {id : sum of exp(x_j / T) over j <= id  >  u * sum of all},  u = Philox(seed, position)

The first kernel reads every logit once: a program reduces one tile of a row to its largest logit m, where that is, and
the sum of exp((x - m) / T). The second picks, for each row, the tile in which the cumulative sum passes the draw, and
reads that tile again to find the token. Sums are float64, so the order of additions does not matter in practice;
exponentials are float64 for float32 logits, where outputs are compared token by token, and float32 for half precision.

Least traffic: M * V logits read once; the second look and the partial results add 2048 logits and 16 bytes a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.choose import BROKEN, GREEDY_TEMPERATURE, check_rows

TILE = 2048  # logits of a program
_INFINITY = tl.constexpr(float("inf"))
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_BROKEN = tl.constexpr(BROKEN)
_NOWHERE = tl.constexpr(2**31 - 1)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_WEYL_0, _WEYL_1 = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _uniform(seed, position):
    """Float64 in [0, 1), see `kernels.ref.choose.uniform`; both arguments are one int64."""
    zero = tl.zeros([], tl.uint64)
    word_0, word_1, word_2, word_3 = (position + 1).to(tl.uint64, bitcast=True), zero, zero, zero
    key_0, key_1 = seed.to(tl.uint64, bitcast=True), zero
    multiplier_0, multiplier_1 = zero + _MULTIPLIER_0, zero + _MULTIPLIER_1
    for _ in tl.static_range(10):
        upper_0, lower_0 = tl.umulhi(word_0, multiplier_0), word_0 * multiplier_0
        upper_1, lower_1 = tl.umulhi(word_2, multiplier_1), word_2 * multiplier_1
        word_0, word_1, word_2, word_3 = upper_1 ^ word_1 ^ key_0, lower_1, upper_0 ^ word_3 ^ key_1, lower_0
        key_0, key_1 = key_0 + _WEYL_0, key_1 + _WEYL_1
    return (word_0 >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _weights(logits, largest, temperature, EXACT: tl.constexpr):
    """exp((logits - largest) / temperature) in float64 or float32; 0 where all logits are minus infinity."""
    kind: tl.constexpr = tl.float64 if EXACT else tl.float32
    reference = tl.where(largest == -_INFINITY, 0.0, largest).to(kind)
    return tl.exp((logits.to(kind) - reference) * (1.0 / temperature).to(kind))


@triton.jit
def _reduce_tiles(
    logits_ptr,  # [M, V]
    slot_of_row_ptr,  # [M] int64
    temperature_ptr,  # [slots] float64
    largest_ptr,  # [M, num_tiles] float32
    place_ptr,  # [M, num_tiles] int32, -1 if the tile holds NaN
    sums_ptr,  # [M, num_tiles] float64, of sampled rows
    row_stride,
    vocab,
    num_tiles,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    temperature = tl.load(temperature_ptr + tl.load(slot_of_row_ptr + row))
    ids = tile * WIDTH + tl.arange(0, WIDTH)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-_INFINITY).to(tl.float32)
    largest = tl.max(logits, axis=0)
    place = tl.min(tl.where(logits == largest, ids, tl.where(logits == logits, _NOWHERE, _BROKEN)), axis=0)
    part = row * num_tiles + tile
    tl.store(largest_ptr + part, largest)
    tl.store(place_ptr + part, place)
    if temperature >= _GREEDY:
        weights = _weights(logits, largest, temperature, EXACT)
        tl.store(sums_ptr + part, tl.sum(weights.to(tl.float64), axis=0))


@triton.jit
def _passing(weights, draw, places):
    """(the first place at which the cumulative weight passes the draw, the weight before it).

    Rounding may leave the draw just above the last sum; then it is the last place that has weight.
    """
    cumulative = tl.cumsum(weights, 0)
    first = tl.min(tl.where((cumulative > draw) & (weights > 0), places, _NOWHERE), axis=0)
    last = tl.max(tl.where(weights > 0, places, 0), axis=0)
    place = tl.minimum(first, last)
    return place, tl.sum(tl.where(places < place, weights, 0.0), axis=0)


@triton.jit
def _pick(
    logits_ptr,
    positions_ptr,  # [M] int64
    slot_of_row_ptr,
    temperature_ptr,
    seed_ptr,  # [slots] int64
    largest_ptr,
    place_ptr,
    sums_ptr,
    chosen_ptr,  # [M] int64
    row_stride,
    vocab,
    num_tiles,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of_row_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    parts = row * num_tiles + tiles
    largest = tl.load(largest_ptr + parts, mask=inside, other=-_INFINITY)
    place = tl.load(place_ptr + parts, mask=inside, other=_NOWHERE)
    top = tl.max(largest, axis=0)
    finite = (tl.min(place, axis=0) >= 0) & (tl.abs(top) < _INFINITY)
    chosen = tl.min(tl.where(largest == top, place, _NOWHERE), axis=0)
    if temperature >= _GREEDY:
        sums = tl.load(sums_ptr + parts, mask=inside, other=0.0)
        mass = sums * _weights(largest, top, temperature, EXACT).to(tl.float64)
        draw = _uniform(tl.load(seed_ptr + slot), tl.load(positions_ptr + row) + 1) * tl.sum(mass, axis=0)
        tile, before = _passing(mass, draw, tiles)
        ids = tile * WIDTH + tl.arange(0, WIDTH)
        logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-_INFINITY).to(tl.float32)
        chosen, _ = _passing(_weights(logits, top, temperature, EXACT).to(tl.float64), draw - before, ids)
    tl.store(chosen_ptr + row, tl.where(finite, chosen, _BROKEN).to(tl.int64))


def choose(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slot_of_row: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.ref.choose`; two launches whose sizes follow from the shape alone.

    Rows of requests and sentinel rows are treated alike; what the latter get means nothing.

    Raises:
        ValueError: see `kernels.ref.choose.check_rows`.
    """
    check_rows(logits, positions, slot_of_row, temperature, seed)
    num_rows, vocab = logits.shape
    chosen = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return chosen
    num_tiles = triton.cdiv(vocab, TILE)
    largest, place, sums = (
        torch.empty(num_rows, num_tiles, dtype=dtype, device=logits.device)
        for dtype in (torch.float32, torch.int32, torch.float64)
    )
    exact = logits.dtype == torch.float32
    sizes = (logits.stride(0), vocab, num_tiles)
    _reduce_tiles[(num_rows * num_tiles,)](
        logits, slot_of_row, temperature, largest, place, sums, *sizes, TILE, exact, num_warps=4
    )
    _pick[(num_rows,)](
        logits,
        positions,
        slot_of_row,
        temperature,
        seed,
        largest,
        place,
        sums,
        chosen,
        *sizes,
        triton.next_power_of_2(num_tiles),
        TILE,
        exact,
        num_warps=4,
    )
    return chosen
