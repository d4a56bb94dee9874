"""Best 16 logits, normaliser and entropy of rows of logits in one pass over the vocabulary (DScale's confidence).

    normaliser = ln sum exp(x)        entropy = normaliser - sum x exp(x - normaliser)

One kernel reads every logit once. A program reduces one tile of a row to its largest logit m, sum exp(x - m) and
sum (x - m) exp(x - m), and every group of 128 logits to its largest. The second kernel joins the tiles of a row, and
finds its best logits: they lie in the 16 groups with the largest maxima, of equal groups the first, so these are all
that is read again.

Least traffic: n * V logits read once. Partial results and the second look add 4 bytes a group, read and written, and
2048 logits a row: under 5 % of it for float16 and V from 49,152.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ref.features import NUM_TOP, LogitFeatures, check_logits

GROUP = 128  # logits that share a maximum
TILE = 4096  # logits of a program: 8 independent 16-byte loads a thread in float32, 4 in half precision
_INFINITY = tl.constexpr(float("inf"))
_TAKEN = tl.constexpr(-(2**63))
# Where exp is still a normal float32: such a logit has no weight, and minus infinity times zero does not occur.
_FAR_BELOW = tl.constexpr(-87.0)


@triton.jit
def _not_far(below):
    """Differences to a largest value, cut off far below it; NaN stays, so that broken logits remain visible."""
    return tl.where(below < _FAR_BELOW, _FAR_BELOW, below)


@triton.jit
def _reduce_tiles(
    logits_ptr,  # [n, V]
    maxima_ptr,  # [n, num_groups] float32
    parts_ptr,  # [n, 3, num_tiles] float32: largest, sum, weighted sum
    row_stride,
    vocab,
    num_groups,
    num_tiles,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    groups = tile * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [GROUPS, WIDTH]
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-_INFINITY).to(tl.float32)
    maxima = tl.max(logits, axis=1)
    tl.store(maxima_ptr + row * num_groups + groups, maxima, mask=groups < num_groups)
    largest = tl.max(maxima, axis=0)
    below = _not_far(logits - tl.where(largest == -_INFINITY, 0.0, largest))
    weights = tl.exp(below)
    parts = parts_ptr + row * 3 * num_tiles + tile
    tl.store(parts, largest)
    tl.store(parts + num_tiles, tl.sum(weights))
    tl.store(parts + 2 * num_tiles, tl.sum(weights * below))


@triton.jit
def _sort_keys(values, places):
    """Integers in the order (value, lower place first), every one different; NaN before everything."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)  # the two zeros are equal
    order = tl.where(values == values, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - places).to(tl.int64)


@triton.jit
def _place(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _value(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_keys(keys, TOP: tl.constexpr):
    """[TOP] the largest of `keys`, largest first."""
    ranks = tl.arange(0, TOP)
    best = tl.full([TOP], _TAKEN, tl.int64)
    for rank in range(TOP):
        largest = tl.max(keys)
        best = tl.where(ranks == rank, largest, best)
        keys = tl.where(keys == largest, _TAKEN, keys)
    return best


@triton.jit
def _join_tiles(
    logits_ptr,
    maxima_ptr,
    parts_ptr,
    values_ptr,  # [n, TOP] float32
    ids_ptr,  # [n, TOP] int64
    normaliser_ptr,  # [n] float32
    entropy_ptr,  # [n] float32
    row_stride,
    vocab,
    num_groups,
    num_tiles,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    parts = parts_ptr + row * 3 * num_tiles + tiles
    largest = tl.load(parts, mask=tiles < num_tiles, other=-_INFINITY)
    sums = tl.load(parts + num_tiles, mask=tiles < num_tiles, other=0.0)
    weighted = tl.load(parts + 2 * num_tiles, mask=tiles < num_tiles, other=0.0)
    top = tl.max(largest, axis=0)
    below = _not_far(largest - top)
    scale = tl.exp(below)
    total = tl.sum(sums * scale, axis=0)
    mean = tl.sum(scale * (weighted + below * sums), axis=0) / total
    log_total = tl.log(total)
    tl.store(normaliser_ptr + row, top + log_total)
    tl.store(entropy_ptr + row, log_total - mean)

    groups = tl.arange(0, GROUPS)
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=-_INFINITY)
    chosen = _place(_best_keys(_sort_keys(maxima, groups), TOP))
    ids = chosen[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]  # [TOP, WIDTH]
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab, other=-_INFINITY).to(tl.float32)
    best = _best_keys(_sort_keys(logits, ids), TOP)
    ranks = tl.arange(0, TOP)
    tl.store(values_ptr + row * TOP + ranks, _value(best))
    tl.store(ids_ptr + row * TOP + ranks, _place(best).to(tl.int64))


def features(logits: torch.Tensor) -> LogitFeatures:
    """See `kernels.ref.features`; two launches whose sizes follow from the shape alone.

    Raises:
        ValueError: see `kernels.ref.features.check_logits`.
    """
    check_logits(logits)
    num_rows, vocab = logits.shape
    num_groups, num_tiles = triton.cdiv(vocab, GROUP), triton.cdiv(vocab, TILE)
    new = {"dtype": torch.float32, "device": logits.device}
    out = LogitFeatures(
        torch.empty(num_rows, NUM_TOP, **new),
        torch.empty(num_rows, NUM_TOP, dtype=torch.int64, device=logits.device),
        torch.empty(num_rows, **new),
        torch.empty(num_rows, **new),
    )
    if num_rows == 0:
        return out
    maxima, parts = torch.empty(num_rows, num_groups, **new), torch.empty(num_rows, 3, num_tiles, **new)
    sizes = (logits.stride(0), vocab, num_groups, num_tiles)
    _reduce_tiles[(num_rows * num_tiles,)](logits, maxima, parts, *sizes, TILE // GROUP, GROUP, num_warps=4)
    _join_tiles[(num_rows,)](
        logits,
        maxima,
        parts,
        *out,
        *sizes,
        max(triton.next_power_of_2(num_groups), NUM_TOP),
        triton.next_power_of_2(num_tiles),
        GROUP,
        NUM_TOP,
        num_warps=4,
    )
    return out
