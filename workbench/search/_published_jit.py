"""Compiled loops of the import of published tries. See `published_trie.py` for the format and the callers."""

from __future__ import annotations

import numpy as np

from workbench.jit import compiled

#: What `read_records` reports; the texts are in `published_trie.py`.
FINE, ROOT_TOKEN, ROOT_PARENT, PARENT, DEPTH, TOKEN, FREQUENCY, NUM_CHILDREN = range(8)
CHILD_TOKEN, CHILD_ID, LISTED_TWICE, NOT_LISTED = range(8, 12)
#: Entries of `state`.
NODE, LEFT, EDGES, VALUE, LARGEST_TOKEN, NUM_STATE = range(6)
#: Words of 4 bytes that a node and one of its children take in the file.
NODE_WORDS, CHILD_WORDS = 6, 3
#: Nodes for which `level_blocks` notes one number.
BLOCK = 64


@compiled
def read_records(words, state, sums, depth, limits, rows, window_low, window):
    """Reads and checks as many whole fields as `words` holds.

    Args:
        words: [n] uint32, the file from where the last call stopped.
        state: [NUM_STATE] int64: node that comes next, children of the node before that are still to come, children
            seen in all, the value an error is about, largest token so far. All 0 at first. Updated.
        sums: [2] uint64, sums of a hash of (node, parent, token) over the nodes, and over the children lists. Updated.
        depth: [N] uint8, depth of the nodes so far. Updated.
        limits: nodes N, order, what tokens are below, lowest frequency, 1 when it replaces lower ones else 0.
        rows: [c, 6] uint32, c > n / NODE_WORDS; gets parent, token, frequency, number of children, nothing, level of
            every node but the root.
        window_low: first node that `window` is about.
        window: [w, 2] int64, 1 + parent and token as listed by the parent, 0 before. Updated.

    Returns:
        Words used, rows filled, an error code. In case of an error it is about state[NODE] and state[VALUE].
    """
    place, filled = 0, 0
    while True:
        if state[LEFT] > 0:
            if place + CHILD_WORDS > words.size:
                return place, filled, FINE
            error = _read_child(words, place, state, sums, limits, window_low, window)
            place += CHILD_WORDS
        elif state[NODE] < limits[0]:
            if place + NODE_WORDS > words.size:
                return place, filled, FINE
            error = _read_node(words, place, state, sums, depth, limits, rows[filled], window_low, window)
            place += NODE_WORDS
            filled += state[NODE] > 1
        else:
            return place, filled, FINE
        if error != FINE:
            return place, filled, error


@compiled
def _signed(word):
    value = np.int64(word)
    return value - 4294967296 if value >= 2147483648 else value


@compiled
def _joined(low, high):
    """The integer of two words; one beyond 2^63 is negative, hence as wrong as it was."""
    return np.int64(np.uint64(low) | (np.uint64(high) << np.uint64(32)))


@compiled
def _mixed(node, parent, token):
    """Hash of a node, its parent and its token."""
    value = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(parent) * np.uint64(0xC2B2AE3D27D4EB4F)
    value += np.uint64(token) * np.uint64(0x165667B19E3779F9)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def _read_child(words, place, state, sums, limits, window_low, window):
    parent = state[NODE] - 1
    token, child = _signed(words[place]), _joined(words[place + 1], words[place + 2])
    if token < 0 or token >= limits[2]:
        state[VALUE] = token
        return CHILD_TOKEN
    state[VALUE] = child
    if child <= parent or child >= limits[0]:
        return CHILD_ID
    sums[1] += _mixed(child, parent, token)
    seat = child - window_low
    if 0 <= seat < window.shape[0]:
        if window[seat, 0] != 0:
            return LISTED_TWICE
        window[seat, 0], window[seat, 1] = parent + 1, token
    state[LEFT] -= 1
    return FINE


@compiled
def _read_node(words, place, state, sums, depth, limits, row, window_low, window):
    node = state[NODE]
    token, frequency = _signed(words[place]), _signed(words[place + 3])
    parent = _joined(words[place + 1], words[place + 2])
    children = _joined(words[place + 4], words[place + 5])
    state[VALUE] = children
    if children < 0 or children > limits[0] - 1 - state[EDGES]:
        return NUM_CHILDREN
    if node == 0:
        error = _check_root(state, token, parent)
    else:
        error = _check_node(state, depth, limits, token, parent, frequency, children)
    if error != FINE:
        return error
    if node > 0:
        seat = node - window_low
        if 0 <= seat < window.shape[0] and (window[seat, 0] != parent + 1 or window[seat, 1] != token):
            state[VALUE] = parent
            return NOT_LISTED
        sums[0] += _mixed(node, parent, token)
        state[LARGEST_TOKEN] = max(state[LARGEST_TOKEN], token)
        level = depth[parent] + 1
        depth[node] = level
        row[0], row[1], row[2] = parent, token, max(frequency, limits[3])
        row[3], row[5] = children, level
    state[NODE] += 1
    state[LEFT] = children
    state[EDGES] += children
    return FINE


@compiled
def _check_root(state, token, parent):
    state[VALUE] = token
    if token != 0:
        return ROOT_TOKEN
    state[VALUE] = parent
    return ROOT_PARENT if parent != 0 else FINE


@compiled
def _check_node(state, depth, limits, token, parent, frequency, children):
    state[VALUE] = parent
    if parent < 0 or parent >= state[NODE]:
        return PARENT
    level = np.int64(depth[parent]) + 1
    state[VALUE] = level
    if level > limits[1]:
        return DEPTH
    state[VALUE] = token
    if token < 0 or token >= limits[2]:
        return TOKEN
    state[VALUE] = frequency
    if frequency < limits[3] and limits[4] == 0:
        return FREQUENCY
    return FINE


@compiled
def level_blocks(depth, level):
    """[ceil(N / BLOCK)] uint32: how many nodes of a level lie before every block of BLOCK nodes."""
    blocks = np.empty((depth.size + BLOCK - 1) // BLOCK, np.uint32)
    total = 0
    for block in range(blocks.size):
        blocks[block] = total
        for node in range(block * BLOCK, min(depth.size, (block + 1) * BLOCK)):
            total += depth[node] == level
    return blocks


@compiled
def renumber(nodes, depth, level, blocks, new_index):
    """Puts into `nodes` ([n] uint32, numbers of nodes of `level`) their new index in the level, in place.

    `new_index` ([size of the level] uint32) is by the rank of a node among those of its level.
    """
    for i in range(nodes.size):
        node = np.int64(nodes[i])
        rank = np.int64(blocks[node // BLOCK])
        for before in range(node // BLOCK * BLOCK, node):
            rank += depth[before] == level
        nodes[i] = new_index[rank]
