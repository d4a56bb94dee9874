"""Compiled inner loops of the search stage: trie look-ups, back-off and the pruning of draft trees.

All compiled look-up and pruning code is in this one file (see `workbench.jit`). Nothing here checks arguments; the
callers (`trie.py`, `prune.py`) do. Array contents of a trie are not trusted: child ranges are clamped, so a damaged
file can give wrong probabilities but no read outside the arrays.

`trie` is always the tuple of `NgramTrie.arrays()`:
(tokens, counts, starts, overflow_nodes, overflow_counts, num_roots, max_context, code_counts). A quantised trie has no
counts: its tokens are token << CODE_BITS | code, and code_counts [256] says what a code stands for; else it is empty.
"""

from __future__ import annotations

import numpy as np

from workbench.jit import compiled

#: Stored count that means "look into the overflow table".
COUNT_OVERFLOW = 65535

#: Low bits of a token entry that hold the code of its count, in a quantised trie.
CODE_BITS = 8

#: Up to so many siblings, comparing all of them is faster than searching; see tests/bench/layouts.py.
FEW_SIBLINGS = 16

#: Queries whose walks go on side by side.
BLOCK = 32

#: Stands for a term that was not computed yet; real ones are at most 0.
PENDING = 1.0


@compiled
def shift_of(trie):
    """Bits below the token in an entry of trie[0]."""
    return CODE_BITS if trie[7].size else 0


@compiled
def token_at(trie, node):
    """Token of a node, int64."""
    return np.int64(trie[0][node]) >> shift_of(trie)


@compiled
def last_at_most(tokens, low, high, token):
    """Index of the last entry <= token in the ascending tokens[low:high], `low` if there is none. Needs low < high."""
    size = high - low
    while size > 1:
        half = size >> 1
        if np.int64(tokens[low + half]) <= token:
            low += half
        size -= half
    return low


@compiled
def children_of(trie, node):
    """Range (low, high) of the children of a node; empty for -1 and for nodes of the last level."""
    starts = trie[2]
    if node < 0 or node >= starts.size - 1:
        return 0, 0
    low = np.int64(starts[node])
    return low, max(low, min(np.int64(starts[node + 1]), trie[0].size))


@compiled
def find_in_range(trie, low, high, token):
    """Node with this token among the siblings low..high-1, or -1."""
    if low >= high:
        return -1
    shift = shift_of(trie)
    place = last_at_most(trie[0], low, high, (token + 1 << shift) - 1)
    return place if np.int64(trie[0][place]) >> shift == token else -1


@compiled
def count_of(trie, node):
    """Count of a node as int64; exact unless the trie is quantised."""
    if trie[7].size:
        return np.int64(trie[7][trie[0][node] & 255])
    count = np.int64(trie[1][node])
    if count == COUNT_OVERFLOW and trie[3].size > 0:
        place = last_at_most(trie[3], 0, trie[3].size, node)
        if np.int64(trie[3][place]) == node:
            return np.int64(trie[4][place])
    return count


@compiled
def find_root(trie, token):
    """Node of the n-gram of one token, or -1.

    Tokens of the roots ascend and end in `last`, so there are at most `token` of them before it, and at most
    last - token behind it: where most of a vocabulary occurs, hardly anything is left to search.
    """
    last = token_at(trie, trie[5] - 1) if trie[5] > 0 else -1
    if not 0 <= token <= last:
        return -1
    return find_in_range(trie, max(0, trie[5] - 1 - (last - token)), min(trie[5], token + 1), token)


@compiled
def walk(trie, path):
    """Node reached from the root by the tokens of `path` ([n] int64, n >= 1), or -1."""
    node = find_root(trie, path[0])
    for i in range(1, path.size):
        low, high = children_of(trie, node)
        node = find_in_range(trie, low, high, path[i])
    return node


@compiled
def frequency(trie, path):
    """Count of the n-gram `path`, 0 when it is not stored."""
    node = walk(trie, path)
    return count_of(trie, node) if node >= 0 else np.int64(0)


@compiled
def suffix_nodes(trie, context, nodes):
    """Sets nodes[m-1] to the node of the last m tokens of `context`, or -1, for m = 1..nodes.size."""
    for m in range(1, nodes.size + 1):
        nodes[m - 1] = walk(trie, context[context.size - m :]) if m <= context.size else -1


@compiled
def found_of(places):
    """How many of them are not -1."""
    found = 0
    for c in range(places.size):
        found += places[c] >= 0
    return found


@compiled
def find_all(trie, low, high, tokens, places):
    """Places of several tokens among the siblings low..high-1.

    Few siblings are compared with all tokens, which takes vector instructions; among many, all tokens take the steps of
    their binary searches together, so that the loads of a step overlap, in the pipeline and in memory.

    Args:
        low, high: range of siblings.
        tokens: [C] int32; -1 is never found.
        places: [C] int32, written: token c is at node low + places[c], or nowhere if that is -1.

    Returns:
        How many were found.
    """
    keys = trie[0][low:high]
    shift = shift_of(trie) & 31  # a bound that the compiler can see keeps the arithmetic at 32 bits
    if keys.size <= FEW_SIBLINGS:
        places[:] = -1
        for i in range(keys.size):
            key = np.int32(np.uint32(keys[i]) >> shift)
            for c in range(tokens.size):
                places[c] = i if tokens[c] == key else places[c]
        return found_of(places)
    places[:] = 0
    size = keys.size
    while size > 1:
        half = size >> 1
        for c in range(tokens.size):
            middle = places[c] + half
            places[c] = middle if np.int32(np.uint32(keys[middle]) >> shift) <= tokens[c] else places[c]
        size -= half
    for c in range(tokens.size):
        places[c] = places[c] if np.int32(np.uint32(keys[places[c]]) >> shift) == tokens[c] else -1
    return found_of(places)


@compiled
def share_of(trie, node, total):
    """Probability of a node, float32, given the count of its parent."""
    return np.float32(min(1.0, max(0.0, count_of(trie, node) / total))) if total > 0 else np.float32(0.0)


@compiled
def settle(trie, node, low, places, length, open_tokens, slots, num_open, probs, lengths):
    """Sets probs and lengths of the tokens found among the children of `node`; the others stay open.

    Without branches on what was found, since that is as good as random; one on a large count is hardly ever taken.

    Args:
        low, places: see `find_all`, of open_tokens[:num_open].
        length: of the suffix that `node` is.
        open_tokens, slots: tokens not found yet, and their places in probs and lengths; closed up.

    Returns:
        How many are open now.
    """
    total, still = np.float64(count_of(trie, node)), 0
    if total <= 0.0:
        total = np.inf  # only in a damaged file
    for i in range(num_open):
        slot, token, found = slots[i], open_tokens[i], places[i] >= 0
        child = low + max(places[i], 0)
        count = trie[7][trie[0][child] & 255] if trie[7].size else np.float64(trie[1][child])
        if count == COUNT_OVERFLOW:
            count = np.float64(max(count_of(trie, child), 0))
        share = np.float32(count / total if count < total else 1.0)
        probs[slot] = share if found else np.float32(0.0)
        lengths[slot] = length if found else 0
        slots[still], open_tokens[still] = slot, token
        still += not found
    return still


@compiled
def block_nodes(trie, contexts, nodes):
    """`suffix_nodes` of the B contexts [B, G] of a block, into nodes [B, max_context], one step of all at a time.

    In a trie beyond the caches every step of a walk waits for memory; side by side, those of other contexts go on.
    """
    num_tokens = contexts.shape[1]
    for q in range(contexts.shape[0]):
        for m in range(nodes.shape[1]):
            nodes[q, m] = find_root(trie, contexts[q, num_tokens - 1 - m]) if m < num_tokens else -1
    for step in range(1, nodes.shape[1]):
        for q in range(contexts.shape[0]):
            for m in range(step, min(nodes.shape[1], num_tokens)):
                low, high = children_of(trie, nodes[q, m])
                nodes[q, m] = find_in_range(trie, low, high, contexts[q, num_tokens - 1 - m + step])


@compiled
def touch_children(trie, nodes, firsts):
    """Loads where tokens and counts of the children of nodes [B, max_context] begin, before any of them is searched.

    In a trie beyond the caches nearly every one of these loads misses. Here they wait for memory at the same time.
    `firsts`, of the same shape, is scratch: what is stored in it keeps the loads.
    """
    for row in range(nodes.shape[0]):
        for m in range(nodes.shape[1]):
            node = nodes[row, m]
            low, high = children_of(trie, node)
            if low < high:
                tokens = np.int64(trie[0][low]) + trie[0][low + (high - low >> 1)]
                firsts[row, m] = tokens if trie[7].size else tokens + trie[1][low] + trie[1][node]


@compiled
def query_block(trie, contexts, tokens, scratch, probs, lengths):
    """Per-token back-off over the suffixes of each context, the longest first.

    Args:
        contexts: [B, G] int64, right-aligned behind -1.
        tokens: [B, C] int32 candidates; -1 is unseen.
        scratch: (nodes, firsts [B, max_context] int64, places, open_tokens, slots [C] int32).
        probs, lengths: [B, C] float32 / int32, written.
    """
    nodes, firsts, places, open_tokens, slots = scratch
    block_nodes(trie, contexts, nodes)
    touch_children(trie, nodes, firsts)
    for q in range(contexts.shape[0]):
        probs[q, :] = 0.0
        lengths[q, :] = 0
        num_open = tokens.shape[1]
        for c in range(num_open):
            open_tokens[c], slots[c] = tokens[q, c], c
        for m in range(nodes.shape[1] - 1, -1, -1):
            low, high = children_of(trie, nodes[q, m])
            if low < high and find_all(trie, low, high, open_tokens[:num_open], places[:num_open]):
                num_open = settle(
                    trie, nodes[q, m], low, places, m + 1, open_tokens, slots, num_open, probs[q], lengths[q]
                )


@compiled
def query_batch(trie, contexts, tokens, probs, lengths):
    """`query_block` for contexts [Q, G] and tokens [Q, C], some at a time; probs, lengths [Q, C]."""
    num_queries, width = tokens.shape
    nodes, firsts = np.empty((BLOCK, trie[6]), np.int64), np.empty((BLOCK, trie[6]), np.int64)
    places, open_tokens, slots = np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32)
    for low in range(0, num_queries, BLOCK):
        high = min(low + BLOCK, num_queries)
        scratch = (nodes[: high - low], firsts[: high - low], places, open_tokens, slots)
        query_block(trie, contexts[low:high], tokens[low:high], scratch, probs[low:high], lengths[low:high])


@compiled
def insert_ranked(ranked, size, limit, scores, item):
    """Inserts `item` into ranked[:size], kept by descending score, earlier items first on ties; returns the new size.

    At most `limit` items stay; the worst one falls out.
    """
    score = scores[item]
    if size < limit:
        place = size
        size += 1
    elif limit > 0 and score > scores[ranked[limit - 1]]:
        place = limit - 1
    else:
        return size
    while place > 0 and scores[ranked[place - 1]] < score:
        ranked[place] = ranked[place - 1]
        place -= 1
    ranked[place] = item
    return size


@compiled
def log_terms(probs, weight, epsilon, terms):
    """terms = weight * ln(p + epsilon), at most 0 so that no child outscores its parent; NaN and p < 0 count as 0."""
    for c in range(probs.size):
        prob = np.float64(probs[c])
        if not prob > 0.0:
            prob = 0.0
        terms[c] = min(0.0, weight * np.log(min(prob, 1.0) + epsilon))


@compiled
def write_tree(root, ranked, kept, pool, tokens, parents, depths, scores):
    """Writes the kept expansions, best first, as a draft tree; returns its number of rows (root included)."""
    place = pool[3]  # expansion -> row; beam rows are of no use any more
    tokens[0], parents[0], depths[0], scores[0] = root, -1, 0, 0.0
    for row in range(1, kept + 1):
        item = ranked[row - 1]
        place[item] = row
        parent = place[pool[1][item]] if pool[1][item] >= 0 else 0
        tokens[row] = pool[0][item]
        parents[row] = parent
        depths[row] = depths[parent] + 1
        scores[row] = pool[2][item]
    return kept + 1


@compiled
def log_term(prob, weight, epsilon):
    """weight * ln(p + epsilon), at most 0 so that no child outscores its parent."""
    return min(0.0, weight * np.log(np.float64(prob) + epsilon))


@compiled
def bigrams_of(trie, node, ids, memo, size):
    """Slot of `memo` with the look-up of `ids` among the children of `node`, one token's; returns it and the new size.

    Paths of a beam end in few different tokens, and this look-up is the one with most siblings, so a level does it once
    for each. `memo` is (nodes [B], lows [B], places [B, C], terms [B, C]); terms are PENDING until they are needed.
    """
    nodes, lows, places, terms = memo
    for slot in range(size):
        if nodes[slot] == node:
            return slot, size
    low, high = children_of(trie, node)
    find_all(trie, low, high, ids, places[size])
    nodes[size], lows[size] = node, low
    terms[size, :] = PENDING
    return size, size + 1


@compiled
def gram_terms(trie, nodes, ids, hopeful, weight, epsilon, memo, slot, places, terms):
    """terms[c] = weight * ln(P(c | context) + epsilon), at most 0, of the candidates that are `hopeful`.

    Args:
        nodes: [max_context] node of the suffix of length m at m-1, or -1.
        ids, hopeful: [C].
        memo, slot: see `bigrams_of`, for nodes[0].
        places: [C] int32 scratch.
        terms: [C] float64, written.
    """
    terms[:] = PENDING
    for m in range(nodes.size - 1, 0, -1):
        low, high = children_of(trie, nodes[m])
        if low == high:
            continue
        find_all(trie, low, high, ids, places)
        total = count_of(trie, nodes[m])
        for c in range(ids.size):
            if places[c] >= 0 and terms[c] == PENDING and hopeful[c]:
                terms[c] = log_term(share_of(trie, low + places[c], total), weight, epsilon)
    low, shorter, known = memo[1][slot], memo[2][slot], memo[3][slot]
    for c in range(ids.size):
        if terms[c] != PENDING or not hopeful[c]:
            continue
        if known[c] == PENDING:
            seen = shorter[c] >= 0
            prob = share_of(trie, low + shorter[c], count_of(trie, nodes[0])) if seen else np.float32(0.0)
            known[c] = log_term(prob, weight, epsilon)
        terms[c] = known[c]


@compiled
def next_beam(trie, picks, sizes, pool, old_nodes, memo, slots, roots, beam, nodes):
    """The next beam (eos paths last) with the suffix nodes of its paths, one step down from those they extend.

    Args:
        picks, sizes: (plain, eos) expansions and how many of each.
        old_nodes, slots: suffix nodes and slots of `memo` of the paths that were extended.
        roots: [C] int32 node of each candidate of the level, or -1.
        beam, nodes: written.

    Returns:
        Its size.
    """
    size = sizes[0] + sizes[1]
    for row in range(size):
        item = picks[0][row] if row < sizes[0] else picks[1][row - sizes[0]]
        beam[row] = item
        if nodes.shape[1] == 0:
            continue
        column, old, slot = pool[4][item], pool[3][item], slots[pool[3][item]]
        nodes[row, 0] = roots[column]
        if nodes.shape[1] > 1:
            place = memo[2][slot, column]
            nodes[row, 1] = memo[1][slot] + place if place >= 0 else -1
        for m in range(2, nodes.shape[1]):
            low, high = children_of(trie, old_nodes[old, m - 1])
            nodes[row, m] = find_in_range(trie, low, high, np.int64(pool[0][item]))
    return size


@compiled
def expand_level(trie, ids, terms, weight, config, pool, used, beam, beam_size, grams, kept_of, room, picks):
    """Expands every path of the beam by the candidates of one level.

    A path or candidate that cannot beat the worst of `num_nodes` kept nodes is skipped: scores never grow along a path,
    so neither it nor anything below it can be kept, and in the beam it could only follow paths that can.

    Args:
        ids, terms: [C] candidates, int32, and their drafter terms.
        weight: of the n-gram term.
        pool: (token, parent, score, beam row, column) of all stored expansions; `used` of them so far.
        grams: (nodes, memo, slots): [B, max_context] suffix nodes of the beam, without columns when n-grams do not
            count; look-ups of the level, see `bigrams_of`, and which one each row of the beam uses, both written.
        kept_of: (ranked, kept): the best expansions so far, best first.
        room: (plain, eos) places in the next beam.
        picks: (plain, eos) arrays that receive the next beam's expansions.

    Returns:
        used, kept, number of plain picks, number of eos picks.
    """
    width, num_nodes, epsilon, eos_id = ids.size, config[1], config[5], config[6]
    (nodes, memo, slots), (ranked, kept) = grams, kept_of
    hopeful, gram, places = np.empty(width, np.bool_), np.zeros(width), np.empty(width, np.int32)
    num_plain = num_eos = num_slots = 0
    for row in range(beam_size):
        item = beam[row]
        base = pool[2][item] if item >= 0 else 0.0
        floor = pool[2][ranked[kept - 1]] if kept == num_nodes else -np.inf
        num_hopeful = 0
        for c in range(width):
            hopeful[c] = base + terms[c] > floor
            num_hopeful += hopeful[c]
        if num_hopeful == 0:
            continue
        if nodes.shape[1]:
            slots[row], num_slots = bigrams_of(trie, nodes[row, 0], ids, memo, num_slots)
            if weight > 0.0:
                gram_terms(trie, nodes[row], ids, hopeful, weight, epsilon, memo, slots[row], places, gram)
        for c in range(width):
            score = base + (terms[c] + gram[c])
            if not hopeful[c] or score <= floor:
                continue
            pool[0][used], pool[1][used], pool[2][used] = ids[c], item, score
            pool[3][used], pool[4][used] = row, c
            kept = insert_ranked(ranked, kept, num_nodes, pool[2], used)
            if ids[c] == eos_id:
                num_eos = insert_ranked(picks[1], num_eos, room[1], pool[2], used)
            else:
                num_plain = insert_ranked(picks[0], num_plain, room[0], pool[2], used)
            used += 1
    return used, kept, num_plain, num_eos


@compiled
def new_scratch(num_levels, width, beam_width, num_nodes, max_context):
    """What `prune_one` works in: the pool of expansions, the kept ones, beams, their suffix nodes, look-ups."""
    most = width + beam_width * width * (num_levels - 1)
    pool = (
        np.empty(most, np.int32), np.empty(most, np.int64), np.empty(most),
        np.empty(most, np.int32), np.empty(most, np.int32),
    )  # fmt: skip
    picks = (np.empty(beam_width, np.int64), np.empty(beam_width, np.int64))
    nodes = (np.empty((beam_width, max_context), np.int64), np.empty((beam_width, max_context), np.int64))
    memo = (
        np.empty(beam_width, np.int64), np.empty(beam_width, np.int64),
        np.empty((beam_width, width), np.int32), np.empty((beam_width, width)),
    )  # fmt: skip
    rows = (np.empty(num_nodes, np.int64), np.empty(beam_width, np.int64), np.zeros(beam_width, np.int64))
    return pool, picks, nodes, memo, rows, (np.empty(width), np.full(width, -1, np.int32))


@compiled
def prune_one(ids, probs, context, trie, config, scratch, tokens, parents, depths, scores):
    """One draft tree; see `workbench.search.prune.prune_trees` for the rule.

    Args:
        ids, probs: [K, C] int32 / float32 candidates of every level.
        context: [n >= 1] int64, the root last.
        config: (beam_width, num_nodes, ngram_weight, level_exponent, logit_decay, epsilon, eos_id or -1).
        scratch: see `new_scratch`.
        tokens, parents, depths, scores: [num_nodes + 1], written.

    Returns:
        Rows written, root included.
    """
    beam_width, _, ngram_weight, exponent, decay, epsilon, eos_id = config
    num_levels, width = ids.shape
    pool, picks, (nodes, next_nodes), memo, (ranked, beam, slots), (terms, roots) = scratch
    beam[0] = -1
    if nodes.shape[1]:
        suffix_nodes(trie, context, nodes[0])
    used = kept = 0
    # `full_size` is the beam without skipping: eos paths get only the places that other paths cannot fill.
    beam_size = full_size = 1
    for level in range(num_levels):
        weight = (level + 1.0) ** -exponent
        log_terms(probs[level], weight * decay**level, epsilon, terms)
        num_other = 0
        for c in range(width):
            num_other += ids[level, c] != eos_id
        plain_room = min(beam_width, full_size * num_other)
        room = (plain_room, min(beam_width, full_size * width) - plain_room)
        used, kept, num_plain, num_eos = expand_level(
            trie, ids[level], terms, weight * ngram_weight if level > 0 else 0.0, config,
            pool, used, beam, beam_size, (nodes, memo, slots), (ranked, kept), room, picks,
        )  # fmt: skip
        if level == num_levels - 1:
            break
        if nodes.shape[1]:
            find_all(trie, 0, trie[5], ids[level], roots)
        sizes = (num_plain, num_eos)
        beam_size = next_beam(trie, picks, sizes, pool, nodes, memo, slots, roots, beam, next_nodes)
        touch_children(trie, next_nodes[:beam_size], nodes)  # those of the level before are of no use any more
        nodes, next_nodes = next_nodes, nodes
        full_size = plain_room + room[1]
    root = context[context.size - 1]
    return write_tree(root, ranked, kept, pool, tokens, parents, depths, scores)


@compiled
def prune_batch(ids, probs, contexts, context_lens, levels, limits, trie, config, out):
    """`prune_one` for R requests.

    Args:
        ids, probs: [R, K, C].
        contexts, context_lens: [R, G] and [R]: the last context_lens[r] >= 1 entries of a row are valid.
        levels, limits: [R] levels that a request uses, and most rows of its tree.
        out: (tokens, parents, depths, scores, sizes): [R, num_nodes + 1] and [R], written.
    """
    tokens, parents, depths, scores, sizes = out
    num_levels, width = ids.shape[1:]
    max_context = trie[6] if config[2] > 0.0 else 0
    scratch = new_scratch(num_levels, width, config[0], config[1], max_context)
    for r in range(ids.shape[0]):
        context, depth = contexts[r, contexts.shape[1] - context_lens[r] :], levels[r]
        tree = (tokens[r], parents[r], depths[r], scores[r])
        found = prune_one(ids[r, :depth], probs[r, :depth], context, trie, config, scratch, *tree)
        sizes[r] = min(found, limits[r])
