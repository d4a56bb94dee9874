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
def walk(trie, path):
    """Node reached from the root by the tokens of `path` ([n] int64, n >= 1), or -1."""
    node = find_in_range(trie, 0, trie[5], path[0])
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
def match(trie, nodes, tokens, pending, num_pending, probs, lengths):
    """Per-token back-off over the suffix contexts `nodes`, longest first.

    Args:
        nodes: [max_context] node of the suffix of length m at m-1, or -1.
        tokens: [C] int64 candidates.
        pending: candidate indices to look up, in ascending order of their tokens; overwritten.
        num_pending: how many of them.
        probs, lengths: [C] float32 / int32; written for matched candidates, 0 is expected to be there before.
    """
    keys, shift = trie[0], shift_of(trie)
    for m in range(nodes.size - 1, -1, -1):
        low, high = children_of(trie, nodes[m])
        if low == high:
            continue
        total = count_of(trie, nodes[m])
        unmatched = 0
        for i in range(num_pending):
            slot = pending[i]
            token = tokens[slot]
            low = last_at_most(keys, low, high, (token + 1 << shift) - 1)
            if np.int64(keys[low]) >> shift == token:
                lengths[slot] = m + 1
                if total > 0:
                    probs[slot] = np.float32(min(1.0, max(0.0, count_of(trie, low) / total)))
            else:
                pending[unmatched] = slot
                unmatched += 1
        num_pending = unmatched
        if num_pending == 0:
            break


@compiled
def query(trie, context, tokens, pending, probs, lengths):
    """Back-off probabilities of all `tokens` after `context`; arguments as in `match`."""
    nodes = np.empty(trie[6], np.int64)
    suffix_nodes(trie, context, nodes)
    match(trie, nodes, tokens, pending, tokens.size, probs, lengths)


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
def sort_slots(tokens, order):
    """Fills `order` with the indices of `tokens` in ascending, stable order (insertion sort: rows are short)."""
    for i in range(tokens.size):
        token = tokens[i]
        place = i
        while place > 0 and tokens[order[place - 1]] > token:
            order[place] = order[place - 1]
            place -= 1
        order[place] = i


@compiled
def extend_nodes(trie, old_nodes, token, new_nodes):
    """Suffix nodes of a path extended by `token`, from those of the path: one step down each instead of a new walk."""
    for m in range(new_nodes.size - 1, 0, -1):
        low, high = children_of(trie, old_nodes[m - 1])
        new_nodes[m] = find_in_range(trie, low, high, token)
    if new_nodes.size > 0:
        new_nodes[0] = find_in_range(trie, 0, trie[5], token)


@compiled
def log_terms(probs, weight, epsilon, terms):
    """terms = weight * ln(p + epsilon), at most 0 so that no child outscores its parent; NaN and p < 0 count as 0."""
    for c in range(probs.size):
        prob = np.float64(probs[c])
        if not prob > 0.0:
            prob = 0.0
        terms[c] = min(0.0, weight * np.log(min(prob, 1.0) + epsilon))


@compiled
def write_tree(root, ranked, kept, pool, used, tokens, parents, depths, scores):
    """Writes the kept expansions, best first, as a draft tree; returns its number of rows (root included)."""
    place = np.zeros(used, np.int64)  # expansion -> row
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
def gram_terms(trie, nodes, ids, order, hopeful, weight, epsilon, scratch, terms):
    """terms[c] = weight * ln(P(c | context) + epsilon), at most 0, for the candidates marked in `hopeful`.

    `scratch` is (pending int64, probs float32, lengths int32), [C] each; `order` sorts `ids` ascending.
    """
    pending, probs, lengths = scratch
    num_pending = 0
    for i in range(ids.size):
        probs[i] = 0.0
        if hopeful[order[i]]:
            pending[num_pending] = order[i]
            num_pending += 1
    match(trie, nodes, ids, pending, num_pending, probs, lengths)
    missing = weight * np.log(epsilon)
    for c in range(ids.size):
        terms[c] = missing if probs[c] == 0.0 else min(0.0, weight * np.log(np.float64(probs[c]) + epsilon))


@compiled
def next_beam(trie, plain, num_plain, eos, num_eos, pool, old_nodes, beam, nodes):
    """The next beam (eos paths last) with its suffix nodes; returns its size."""
    size = num_plain + num_eos
    for row in range(size):
        item = plain[row] if row < num_plain else eos[row - num_plain]
        beam[row] = item
        extend_nodes(trie, old_nodes[pool[3][item]], np.int64(pool[0][item]), nodes[row])
    return size


@compiled
def expand_level(trie, ids, terms, gram_weight, config, pool, used, beam, beam_size, nodes, ranked, kept, room, picks):
    """Expands every path of the beam by the candidates of one level.

    A path or candidate that cannot beat the worst of `num_nodes` kept nodes is skipped: scores never grow along a path,
    so neither it nor anything below it can be kept, and in the beam it could only follow paths that can.

    Args:
        ids, terms: [C] candidates and their drafter terms.
        pool: (token, parent, score, beam row) of all stored expansions; `used` of them so far.
        ranked, kept: the best expansions so far, best first.
        room: (plain, eos) places in the next beam.
        picks: (plain, eos) arrays that receive the next beam's expansions.

    Returns:
        used, kept, number of plain picks, number of eos picks.
    """
    width, num_nodes, epsilon, eos_id = ids.size, config[1], config[5], config[6]
    order, hopeful = np.empty(width, np.int64), np.empty(width, np.bool_)
    gram = np.zeros(width)
    scratch = (np.empty(width, np.int64), np.empty(width, np.float32), np.empty(width, np.int32))
    sort_slots(ids, order)
    num_plain = num_eos = 0
    for row in range(beam_size):
        item = beam[row]
        base = pool[2][item] if item >= 0 else 0.0
        floor = pool[2][ranked[kept - 1]] if kept == num_nodes else -np.inf
        if base <= floor:
            continue
        for c in range(width):
            hopeful[c] = base + terms[c] > floor
        if gram_weight > 0.0:
            gram_terms(trie, nodes[row], ids, order, hopeful, gram_weight, epsilon, scratch, gram)
        for c in range(width):
            score = base + (terms[c] + gram[c])
            if not hopeful[c] or score <= floor:
                continue
            pool[0][used], pool[1][used], pool[2][used], pool[3][used] = ids[c], item, score, row
            kept = insert_ranked(ranked, kept, num_nodes, pool[2], used)
            if ids[c] == eos_id:
                num_eos = insert_ranked(picks[1], num_eos, room[1], pool[2], used)
            else:
                num_plain = insert_ranked(picks[0], num_plain, room[0], pool[2], used)
            used += 1
    return used, kept, num_plain, num_eos


@compiled
def prune_one(ids, probs, context, trie, config, tokens, parents, depths, scores):
    """One draft tree; see `workbench.search.prune.prune_trees` for the rule.

    Args:
        ids, probs: [K, C] int64 / float32 candidates of every level.
        context: [n >= 1] int64, the root last.
        config: (beam_width, num_nodes, ngram_weight, level_exponent, logit_decay, epsilon, eos_id or -1).
        tokens, parents, depths, scores: [num_nodes + 1], written.

    Returns:
        Rows written, root included.
    """
    beam_width, num_nodes, ngram_weight, exponent, decay, epsilon, eos_id = config
    num_levels, width = ids.shape
    most = width + beam_width * width * (num_levels - 1)
    pool = (np.empty(most, np.int32), np.empty(most, np.int64), np.empty(most), np.empty(most, np.int32))
    ranked, terms = np.empty(num_nodes, np.int64), np.empty(width)
    picks = (np.empty(beam_width, np.int64), np.empty(beam_width, np.int64))
    beam = np.full(beam_width, -1, np.int64)
    nodes, next_nodes = np.empty((beam_width, trie[6]), np.int64), np.empty((beam_width, trie[6]), np.int64)
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
            pool, used, beam, beam_size, nodes, ranked, kept, room, picks,
        )  # fmt: skip
        beam_size = next_beam(trie, picks[0], num_plain, picks[1], num_eos, pool, nodes, beam, next_nodes)
        nodes, next_nodes = next_nodes, nodes
        full_size = plain_room + room[1]
    root = context[context.size - 1]
    return write_tree(root, ranked, kept, pool, used, tokens, parents, depths, scores)


@compiled
def prune_batch(ids, probs, contexts, context_lens, trie, config, tokens, parents, depths, scores, sizes):
    """`prune_one` for R requests: ids, probs [R, K, C]; contexts [R, G], the last context_lens[r] entries are valid."""
    for r in range(ids.shape[0]):
        context = contexts[r, contexts.shape[1] - context_lens[r] :]
        sizes[r] = prune_one(ids[r], probs[r], context, trie, config, tokens[r], parents[r], depths[r], scores[r])
