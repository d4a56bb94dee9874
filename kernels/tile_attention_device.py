"""Device code of `kernels.tile_attention`: the tile kernel that all paths share and the kernel that joins splits."""

import triton
import triton.language as tl

from kernels.overlap import wait_for_previous
from kernels.rotate_device import joined, load_halves, rotated, store_halves

MIN_BLOCKS = tl.constexpr(2)  # key blocks that a split takes at least, lest parts cost more than they spare


@triton.jit
def _load(pointers, inside, dims, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Rows [N, DIM] with zeros past HEAD_DIM and where not `inside` [N]."""
    mask = inside[:, None]
    if DIM != HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _attend_blocks(
    query,
    sight,
    k_ptr,
    v_ptr,
    k_stride_row,
    v_stride_row,
    first_block,
    first_masked,
    last_block,
    context,
    end,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """(values, maximum, sum) of the running softmax over key blocks first_block..last_block-1.

    Blocks below `first_masked` are seen whole by every row. All blocks go through one loop, so that their loads form
    one pipeline: a second one for the few masked blocks would have to fill anew.
    """
    rows: tl.constexpr = query.shape[0]
    acc = tl.zeros([rows, DIM], tl.float32)
    row_max = tl.full([rows], float("-inf"), tl.float32)
    row_sum = tl.zeros([rows], tl.float32)
    within = tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, DIM)
    k_offsets = within[:, None] * k_stride_row + dims[None, :]
    v_offsets = within[:, None] * v_stride_row + dims[None, :]
    for block in tl.range(first_block, last_block):
        start = block * BLOCK_KEYS
        inside = start + within < end
        key = _load(k_ptr + start.to(tl.int64) * k_stride_row + k_offsets, inside, dims, HEAD_DIM, DIM)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if block >= first_masked:
            own = start + within - context  # row of the request; below 0: committed context
            if CAUSAL:
                visible = own[None, :] <= sight[:, None]
            else:
                shift = tl.minimum(tl.maximum(own, 0), 63).to(tl.int64)
                visible = (own < 0)[None, :] | (((sight[:, None] >> shift[None, :]) & 1) != 0)
            scores = tl.where(visible & inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        anchor = tl.where(new_max == float("-inf"), 0.0, new_max)  # nothing seen yet: -inf - -inf would be NaN
        weights = tl.exp2(scores - anchor[:, None])
        decay = tl.exp2(row_max - anchor)
        value = _load(v_ptr + start.to(tl.int64) * v_stride_row + v_offsets, inside, dims, HEAD_DIM, DIM)
        acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
        row_sum = row_sum * decay + tl.sum(weights, 1)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    ancestors_ptr,
    out_ptr,
    lse_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    eps,
    num_rows,
    num_splits,
    num_slots,
    num_cache_rows,
    q_stride_row,
    q_stride_head,
    cos_stride,
    sin_stride,
    k_stride_slot,
    k_stride_row,
    k_stride_head,
    v_stride_slot,
    v_stride_row,
    v_stride_head,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    NEW_ROWS: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    ZERO_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of one request over all its keys, or over one part of them; `scale` includes log2(e).

    Grid: (heads / HEADS, requests, tiles * splits). Without splits `out` is the answer; with them it is [splits, M, H,
    D] float32 parts beside their base-2 log-sum-exp [splits, M, H], -inf where a part saw nothing and wrote no values.
    With NEW_ROWS > 0 a request has one tile of up to so many rows for each KV head, and queries are raw, their keys and
    values behind them in `q`: a program rotates them, and writes the rows among its own keys, which no other reads.
    """
    wait_for_previous(OVERLAP)
    head0 = tl.program_id(0) * HEADS
    request = tl.program_id(1)
    tile = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    if CAUSAL:  # the longest rows of keys first: what starts last should be short
        tile = tl.num_programs(2) // num_splits - 1 - tile
    first = tl.load(starts_ptr + request)
    rows = (tl.load(starts_ptr + request + 1) - first).to(tl.int32)
    slot = tl.load(slots_ptr + request)
    context = tl.load(context_ptr + request).to(tl.int32)
    if not SPLIT:  # sentinel rows: shared out over the requests, of which there may be no live one
        sentinel = tl.load(starts_ptr + tl.num_programs(1)) + request
        columns = tl.arange(0, ZERO_BLOCK)
        while (tile == 0) & (sentinel < num_rows):
            pointers = out_ptr + (sentinel * NUM_HEADS + head0) * HEAD_DIM + columns
            tl.store(pointers, tl.zeros([ZERO_BLOCK], out_ptr.dtype.element_ty), mask=columns < HEADS * HEAD_DIM)
            sentinel += tl.num_programs(1)
    row0 = tile * BLOCK_ROWS // HEADS  # first row of the tile
    if row0 >= rows:
        return

    packed = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = packed // HEADS
    head = head0 + packed % HEADS
    dims = tl.arange(0, DIM)
    live = row < rows
    row_base = first + row0  # 64 bits; offsets from here on are small
    q_ptr += row_base * q_stride_row
    q_pointers = q_ptr + ((row - row0) * q_stride_row + head * q_stride_head)[:, None]
    if CAUSAL:
        sight = row
        end = context + tl.minimum(rows, (tile * BLOCK_ROWS + BLOCK_ROWS - 1) // HEADS + 1)
        seen_by_all = context + row0 + 1
    else:
        sight = tl.load(ancestors_ptr + first + row, mask=live, other=0)
        end = context + rows
        seen_by_all = context

    blocks = tl.cdiv(end, BLOCK_KEYS)
    span = tl.maximum(tl.cdiv(blocks, num_splits), MIN_BLOCKS)
    low = split * span
    high = tl.minimum(low + span, blocks)
    middle = tl.maximum(tl.minimum(seen_by_all // BLOCK_KEYS, high), low)
    k_ptr += slot * k_stride_slot + (head0 // GROUP) * k_stride_head
    v_ptr += slot * v_stride_slot + (head0 // GROUP) * v_stride_head
    if NEW_ROWS:
        half = tl.arange(0, DIM // 2)[None, :]
        cos_ptr += row_base * cos_stride
        sin_ptr += row_base * sin_stride
        new = tl.arange(0, NEW_ROWS)
        place = context + new
        # Nothing outside the cache is written, whatever the metadata say.
        stop = tl.where((slot >= 0) & (slot < num_slots), tl.minimum(high * BLOCK_KEYS, num_cache_rows), 0)
        wanted = (new < rows) & (place >= tl.maximum(low * BLOCK_KEYS, 0)) & (place < stop)
        # All loads come first: none has to wait for another.
        queried = live[:, None] & (half < HEAD_DIM)  # compared for the shape alone
        query_1, query_2 = load_halves(q_pointers + half, queried, HEAD_DIM)
        writable = wanted[:, None] & (half < HEAD_DIM)
        key_ptr = q_ptr + (new * q_stride_row + (NUM_HEADS + head0 // GROUP) * q_stride_head)[:, None] + half
        key_1, key_2 = load_halves(key_ptr, writable, HEAD_DIM)
        value_1, value_2 = load_halves(key_ptr + NUM_HEADS // GROUP * q_stride_head, writable, HEAD_DIM)
        new_cos, new_sin = cos_ptr + (new * cos_stride)[:, None], sin_ptr + (new * sin_stride)[:, None]
        key_1, key_2 = rotated(key_1, key_2, k_weight_ptr, new_cos, new_sin, half, writable, eps, HEAD_DIM, K_NORM)
        row_cos, row_sin = cos_ptr + (row * cos_stride)[:, None], sin_ptr + (row * sin_stride)[:, None]
        query_1, query_2 = rotated(
            query_1, query_2, q_weight_ptr, row_cos, row_sin, half, queried, eps, HEAD_DIM, Q_NORM
        )
        to_row = place.to(tl.int64)[:, None]
        store_halves(k_ptr + to_row * k_stride_row + half, key_1, key_2, writable, HEAD_DIM)
        store_halves(v_ptr + to_row * v_stride_row + half, value_1, value_2, writable, HEAD_DIM)
        query = joined(query_1, query_2)
        tl.debug_barrier()  # other threads of this program load what was written
    else:
        query = _load(q_pointers + dims[None, :], live, dims, HEAD_DIM, DIM)
    acc, row_max, row_sum = _attend_blocks(
        query,
        sight,
        k_ptr,
        v_ptr,
        k_stride_row,
        v_stride_row,
        low,
        middle,
        high,
        context,
        end,
        scale,
        HEAD_DIM,
        DIM,
        BLOCK_KEYS,
        CAUSAL,
    )

    seen = row_sum != 0  # NaN counts as seen: it must show
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    place = (row - row0) * NUM_HEADS + head
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    if SPLIT:
        row_base += split * num_rows
        tl.store(lse_ptr + row_base * NUM_HEADS + place, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), mask=live)
        mask = mask & seen[:, None]
    pointers = out_ptr + row_base * NUM_HEADS * HEAD_DIM + (place * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_requests"])
def combine(
    parts_ptr,
    lse_ptr,
    starts_ptr,
    out_ptr,
    num_rows,
    num_requests,
    SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Puts the parts of a row together, weighted by their share of the softmax sum; rows of no request become zero.

    Grid: (rows, heads / BLOCK_HEADS). Reads only the parts that saw a key.
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, DIM)
    inside = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    wanted = heads < tl.where(row < tl.load(starts_ptr + num_requests), NUM_HEADS, 0)
    best = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * num_rows + row) * NUM_HEADS + heads
        best = tl.maximum(best, tl.load(lse_ptr + place, mask=wanted, other=float("-inf")))
    anchor = tl.where(best == float("-inf"), 0.0, best)
    acc = tl.zeros([BLOCK_HEADS, DIM], tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    for split in tl.static_range(SPLITS):
        place = (split * num_rows + row) * NUM_HEADS + heads
        lse = tl.load(lse_ptr + place, mask=wanted, other=float("-inf"))
        weight = tl.exp2(lse - anchor)
        pointers = parts_ptr + (place * HEAD_DIM)[:, None] + dims[None, :]
        part = tl.load(pointers, mask=inside & (lse > float("-inf"))[:, None], other=0.0)
        acc += weight[:, None] * part
        total += weight
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    pointers = out_ptr + ((row * NUM_HEADS + heads) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=inside)
