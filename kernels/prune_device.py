"""Device code of `kernels.prune`: the n-gram look-ups, one level of the search, and the tree that is left of it.

`trie` is (tokens, counts, starts, overflow_nodes, overflow_counts, code_counts, num_nodes, num_inner, num_overflow,
num_roots), `work` what `work_places` returns. Array contents are not trusted: no place outside an array is read.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))
_COUNT_OVERFLOW = tl.constexpr(65535)
_LARGEST = tl.constexpr(2**31 - 1)


@triton.jit
def _unsigned(pointer, places, mask):
    """Entries of an array of unsigned integers that arrives as signed ones, as int64; 0 where masked."""
    values = tl.load(pointer + places, mask=mask, other=0).to(tl.int64)
    return values & ((1 << pointer.dtype.element_ty.primitive_bitwidth) - 1)


@triton.jit
def _last_at_most(sorted_ptr, low, size, key, WAYS: tl.constexpr):
    """For every element, the last of the `size` ascending entries from `low` on that is <= key; `low` if there is none.

    All elements step together, each step reads WAYS - 1 entries at once and leaves one part in WAYS.
    """
    longest = tl.max(size)
    while longest > 1:
        step = (size + (WAYS - 1)) // WAYS
        passed = tl.zeros_like(size)
        for way in tl.static_range(1, WAYS):
            inside = step * way < size
            passed += (inside & (_unsigned(sorted_ptr, low + step * way, inside) <= key)).to(tl.int32)
        low += passed * step
        size = tl.minimum(step, size - passed * step)
        longest = (longest + (WAYS - 1)) // WAYS
    return low


@triton.jit
def _find(trie, low, size, token, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """(node, whether it is there): the one with this token among the `size` siblings from `low` on."""
    place = _last_at_most(trie[0], low, size, ((token + 1) << SHIFT) - 1, WAYS)
    inside = size > 0
    return place, inside & ((_unsigned(trie[0], place, inside) >> SHIFT) == token)


@triton.jit
def _children(trie, nodes, wanted):
    """(first child, number of children); none for nodes that are not `wanted` or have no level below."""
    wanted = wanted & (nodes >= 0) & (nodes < trie[7])
    low, high = _unsigned(trie[2], nodes, wanted), _unsigned(trie[2], nodes + 1, wanted)
    size = tl.minimum(tl.maximum(tl.minimum(high, trie[6]) - low, 0), _LARGEST)
    return low, size.to(tl.int32)


@triton.jit
def _count(trie, nodes, wanted, SHIFT: tl.constexpr, OVERFLOW: tl.constexpr, WAYS: tl.constexpr):
    """Counts of nodes as int64, 0 where not wanted."""
    if SHIFT > 0:
        codes = _unsigned(trie[0], nodes, wanted) & 255
        counts = tl.load(trie[5] + codes, mask=wanted, other=0.0).to(tl.int64)
    else:
        counts = _unsigned(trie[1], nodes, wanted)
        if OVERFLOW:
            above = wanted & (counts == _COUNT_OVERFLOW)
            size = tl.where(above, trie[8], 0).to(tl.int32)
            place = _last_at_most(trie[3], tl.zeros_like(nodes), size, nodes, WAYS)
            above = above & (_unsigned(trie[3], place, above) == nodes)
            counts = tl.where(above, tl.load(trie[4] + place, mask=above, other=0), counts)
    return counts


@triton.jit
def _root_nodes(trie, tokens, wanted, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """Root of each token or -1. A root lies before its token by at most as many places as tokens have no root."""
    num_roots = trie[9].to(tl.int64)
    last = _unsigned(trie[0], num_roots - 1, num_roots > 0) >> SHIFT
    low = tl.minimum(tl.maximum(tokens - (last + 1 - num_roots), 0), num_roots)
    high = tl.minimum(tl.maximum(tokens + 1, 0), num_roots)
    size = tl.where(wanted, tl.minimum(tl.maximum(high - low, 0), _LARGEST), 0).to(tl.int32)
    nodes, there = _find(trie, low, size, tokens, SHIFT, WAYS)
    return tl.where(there, nodes, -1)


@triton.jit
def work_places(floats_ptr, whole_ptr, num_levels, width, NODES: tl.constexpr, CONTEXTS: tl.constexpr):
    """Scratch of one request; a level has NODES * width items, item = beam row * width + candidate.

    float64: scores of entries [2, NODES + items], logarithms [K * C], scores of the beam [NODES].
    int64: ids of entries, found children [CONTEXTS, items], first child, number of children and count of the beam's
    nodes, each [CONTEXTS, NODES], ids of all beams [K + 1, NODES], roots [K * C + CONTEXTS], rows of ids [K * items].
    An id is level * items + item. Entries are the kept ones, best first, then those that a level adds.
    """
    items = NODES * width
    logs = floats_ptr + 2 * (NODES + items)
    found = whole_ptr + 2 * (NODES + items)
    lows = found + CONTEXTS * items
    sizes = lows + CONTEXTS * NODES
    totals = sizes + CONTEXTS * NODES
    beams = totals + CONTEXTS * NODES
    roots = beams + (num_levels + 1) * NODES
    rows = roots + num_levels * width + CONTEXTS
    return (
        floats_ptr,
        whole_ptr,
        logs,
        logs + num_levels * width,
        found,
        lows,
        sizes,
        totals,
        beams,
        roots,
        rows,
        items,
    )


@triton.jit
def start(
    trie,
    work,
    ids_ptr,
    probs_ptr,
    tail_ptr,
    num_candidates,
    tail_length,
    max_context,
    epsilon,
    NODES: tl.constexpr,
    CONTEXTS: tl.constexpr,
    START: tl.constexpr,
    SHIFT: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Logarithms and roots of all candidates, and the suffixes of the context, which are the beam's first row.

    The longest suffix is left out: level 0 has no n-gram term, and longer paths take what shorter suffixes lead to.
    """
    _, _, logs, beam_scores, _, lows, sizes, _, _, roots, _, _ = work
    places = tl.arange(0, START)
    candidates = places < num_candidates
    prob = tl.load(probs_ptr + places, mask=candidates, other=0.0).to(tl.float64)
    prob = tl.minimum(tl.where(prob > 0, prob, 0.0), 1.0)
    tl.store(logs + places, tl.log(prob + epsilon), mask=candidates)
    tl.store(beam_scores, tl.zeros([], tl.float64))
    if CONTEXTS > 0:
        before = places - num_candidates + 1  # a suffix of that length
        suffix = (before > 0) & (before < max_context) & (before <= tail_length)
        token = tl.load(ids_ptr + places, mask=candidates, other=-1)
        token = tl.where(suffix, tl.load(tail_ptr + tail_length - before, mask=suffix, other=-1), token)
        nodes = _root_nodes(trie, token, candidates | suffix, SHIFT, WAYS)
        tl.store(roots + places, nodes, mask=places < num_candidates + CONTEXTS)
        tl.debug_barrier()
        lengths = tl.arange(0, CONTEXTS) + 1
        nodes = tl.load(roots + num_candidates + lengths - 1)
        low, size = _children(trie, nodes, lengths < max_context)
        for step in tl.static_range(1, CONTEXTS - 1):
            longer = (lengths > step) & (lengths < max_context) & (lengths <= tail_length)
            token = tl.load(tail_ptr + tail_length - lengths + step, mask=longer, other=-1)
            nodes, there = _find(trie, low, tl.where(longer, size, 0), token, SHIFT, WAYS)
            below, num_below = _children(trie, nodes, there)
            low, size = tl.where(longer, below, low), tl.where(longer, num_below, size)
        tl.store(lows + (lengths - 1) * NODES, low)
        tl.store(sizes + (lengths - 1) * NODES, size.to(tl.int64))
    tl.debug_barrier()


@triton.jit
def _gram_probs(
    trie,
    work,
    tokens,
    items,
    rows,
    wanted,
    level,
    max_context,
    NODES: tl.constexpr,
    CONTEXTS: tl.constexpr,
    SHIFT: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WAYS: tl.constexpr,
):
    """P(token | context of the row) as float32; remembers what is found, since it is where an extended path stands."""
    _, _, _, _, found, lows, sizes, totals, _, _, _, num_items = work
    lengths = tl.arange(0, CONTEXTS)[None, :] + 1
    asked = wanted[:, None] & (lengths <= max_context)  # [BLOCK, CONTEXTS]
    state = (lengths - 1) * NODES + rows[:, None]
    low = tl.load(lows + state, mask=asked, other=0)
    size = tl.load(sizes + state, mask=asked, other=0).to(tl.int32)
    counted = tl.where(level > 0, max_context, 0)
    total = tl.load(totals + state, mask=asked & (lengths <= counted), other=0)
    nodes, there = _find(trie, low, size, tokens[:, None], SHIFT, WAYS)
    tl.store(found + (lengths - 1) * num_items + items[:, None], tl.where(there, nodes, -1), mask=asked)
    longest = tl.max(tl.where(there, lengths, 0), axis=1)
    deciding = there & (lengths == longest[:, None])
    total = tl.sum(tl.where(deciding, total, 0), axis=1)
    node = tl.sum(tl.where(deciding, nodes, 0), axis=1)
    count = _count(trie, node, total > 0, SHIFT, OVERFLOW, WAYS)
    share = count.to(tl.float64) / tl.maximum(total, 1).to(tl.float64)
    return tl.where(total > 0, tl.minimum(tl.maximum(share, 0.0), 1.0), 0.0).to(tl.float32)


@triton.jit
def extend(
    trie,
    work,
    ids_ptr,
    entries,
    filled,
    first,
    level,
    rows,
    width,
    weight,
    gram_weight,
    floor,
    epsilon,
    max_context,
    NODES: tl.constexpr,
    CONTEXTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Adds the items from `first` on to the entries, in their order; returns how many entries there are then.

    Items that the drafter's term alone takes to the floor are not looked up: that many better ones are known, so
    neither they nor what extends them can be kept, and in the beam they could only follow those that can.
    """
    scores, ids = entries
    items = first + tl.arange(0, BLOCK)
    inside = items < rows * width
    row, candidate = items // width, level * width + items % width
    base = tl.load(work[3] + row, mask=inside, other=0.0)
    term = tl.minimum(weight * tl.load(work[2] + candidate, mask=inside, other=0.0), 0.0)
    hopeful = inside & (base + term > floor)
    gram = tl.zeros_like(base)
    if CONTEXTS > 0:
        tokens = tl.load(ids_ptr + candidate, mask=inside, other=-1)
        prob = _gram_probs(
            trie, work, tokens, items, row, hopeful, level, max_context, NODES, CONTEXTS, SHIFT, OVERFLOW, WAYS
        )
        gram = tl.minimum(gram_weight * tl.log(prob.to(tl.float64) + epsilon), 0.0)
    score = base + (term + gram)
    added = hopeful & (score > floor)
    place = filled + tl.cumsum(added.to(tl.int32), 0) - 1
    tl.store(scores + place, score, mask=added)
    tl.store(ids + place, level.to(tl.int64) * work[11] + items, mask=added)
    return filled + tl.sum(added.to(tl.int32), axis=0)


@triton.jit
def _rank(scores_ptr, num_entries, first, RANKED: tl.constexpr, CHUNK: tl.constexpr):
    """(score, rank among all entries) of the entries from `first` on; of equal scores the earlier entry is ahead."""
    entries = first + tl.arange(0, RANKED)
    score = tl.load(scores_ptr + entries, mask=entries < num_entries, other=-_INFINITY)
    rank = tl.zeros([RANKED], tl.int32)
    start = tl.zeros([], tl.int32)
    while start < num_entries:
        others = start + tl.arange(0, CHUNK)[:, None]  # [CHUNK, 1]
        other = tl.load(scores_ptr + others, mask=others < num_entries, other=-_INFINITY)
        ahead = (other > score[None, :]) | ((other == score[None, :]) & (others < entries[None, :]))
        rank += tl.sum(ahead.to(tl.int32), axis=0)
        start += CHUNK
    return score, rank


@triton.jit
def keep_best(entries, kept, num_entries, most, RANKED: tl.constexpr, CHUNK: tl.constexpr):
    """Writes the `most` best entries to `kept`, best first."""
    first = tl.zeros([], tl.int32)
    while first < num_entries:
        score, rank = _rank(entries[0], num_entries, first, RANKED, CHUNK)
        places = first + tl.arange(0, RANKED)
        stays = (places < num_entries) & (rank < most)
        tl.store(kept[0] + rank, score, mask=stays)
        tl.store(kept[1] + rank, tl.load(entries[1] + places, mask=stays, other=0), mask=stays)
        first += RANKED


@triton.jit
def next_beam(
    trie,
    work,
    ids_ptr,
    kept,
    num_kept,
    level,
    width,
    full,
    beam_width,
    eos_id,
    deepest,
    max_context,
    NODES: tl.constexpr,
    CONTEXTS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The beam of the next level; returns its rows and how many there would be if every item had been computed.

    Only kept items can have descendants that are kept. Paths that end in eos get the places that others could not fill.
    """
    _, _, _, beam_scores, found, lows, sizes, totals, beams, roots, _, num_items = work
    candidates = tl.arange(0, WIDTH)
    others = tl.load(ids_ptr + level * width + candidates, mask=candidates < width, other=eos_id) != eos_id
    plain_room = tl.minimum(beam_width, full * tl.sum(others.to(tl.int32), axis=0))
    eos_room = tl.minimum(beam_width, full * width) - plain_room

    places = tl.arange(0, NODES)
    node_id = tl.load(kept[1] + places, mask=places < num_kept, other=-1)
    item = (node_id - level.to(tl.int64) * num_items).to(tl.int32)
    new = item >= 0
    candidate = level * width + tl.where(new, item, 0) % width
    ends = new & (tl.load(ids_ptr + candidate, mask=new, other=0) == eos_id)
    plain = new & (ends == 0)
    plain_row = tl.cumsum(plain.to(tl.int32), 0) - 1
    eos_row = tl.cumsum(ends.to(tl.int32), 0) - 1
    num_plain = tl.minimum(tl.sum(plain.to(tl.int32), axis=0), plain_room)
    num_eos = tl.minimum(tl.sum(ends.to(tl.int32), axis=0), eos_room)
    row = tl.where(ends, num_plain + eos_row, plain_row)
    picked = (plain & (plain_row < num_plain)) | (ends & (eos_row < num_eos))
    score = tl.load(kept[0] + places, mask=picked, other=0.0)
    tl.store(beam_scores + row, score, mask=picked)
    tl.store(beams + (level + 1) * NODES + row, node_id, mask=picked)
    if CONTEXTS > 0:
        lengths = tl.arange(0, CONTEXTS)[None, :] + 1  # [1, CONTEXTS]
        asked = picked[:, None] & (lengths <= tl.where(level + 1 < deepest, max_context, 0))
        before = (lengths - 2) * num_items + item[:, None]
        node = tl.load(found + before, mask=asked & (lengths > 1), other=-1)
        root = tl.load(roots + candidate, mask=picked, other=-1)[:, None]
        node = tl.where(lengths == 1, root, node)
        low, size = _children(trie, node, asked)
        total = _count(trie, node, asked & (node >= 0), SHIFT, OVERFLOW, WAYS)
        state = (lengths - 1) * NODES + row[:, None]
        tl.store(lows + state, low, mask=asked)
        tl.store(sizes + state, size.to(tl.int64), mask=asked)
        tl.store(totals + state, total, mask=asked)
    return num_plain + num_eos, plain_room + eos_room


@triton.jit
def write_tree(work, ids_ptr, kept, num_kept, num_levels, width, root, out, NODES: tl.constexpr):
    """Rows of the tree: the root, then the kept items, best first; `out` is one pointer for each field."""
    tokens_ptr, parents_ptr, depths_ptr, scores_ptr, ancestors_ptr = out
    _, _, _, _, _, _, _, _, beams, _, rows, num_items = work
    places = tl.arange(0, NODES)
    inside = places < num_kept
    node_id = tl.load(kept[1] + places, mask=inside, other=0)
    level, item = node_id // num_items, node_id % num_items
    tl.store(rows + node_id, places.to(tl.int64) + 1, mask=inside)
    parent_id = tl.load(beams + level * NODES + item // width, mask=inside & (level > 0), other=0)
    tl.debug_barrier()
    parent = tl.load(rows + parent_id, mask=inside & (level > 0), other=0)
    tl.store(parents_ptr + 1 + places, parent, mask=inside)
    tl.store(tokens_ptr + 1 + places, tl.load(ids_ptr + level * width + item % width, mask=inside, other=0), inside)
    tl.store(depths_ptr + 1 + places, level + 1, mask=inside)
    tl.store(scores_ptr + 1 + places, tl.load(kept[0] + places, mask=inside, other=0.0).to(tl.float32), mask=inside)
    tl.debug_barrier()
    one = tl.full([NODES], 1, tl.int64)
    bits = (one << (places + 1)) | 1
    step = tl.zeros([], tl.int32)
    while step < num_levels:
        bits = bits | (one << parent)
        parent = tl.load(parents_ptr + parent, mask=inside & (parent > 0), other=0)
        step += 1
    tl.store(ancestors_ptr + 1 + places, bits, mask=inside)
    tl.store(tokens_ptr, root)
    tl.store(parents_ptr, tl.full([], -1, tl.int64))
    tl.store(depths_ptr, tl.zeros([], tl.int64))
    tl.store(scores_ptr, tl.zeros([], tl.float32))
    tl.store(ancestors_ptr, tl.full([], 1, tl.int64))
