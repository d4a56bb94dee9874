"""Compiled inner loops of n-gram counting: packing windows into keys, radix sort, run lengths.

A key is `words` unsigned 64-bit numbers, most significant first. Each holds `per` digits of `bits` bits, the first
token of the window at the top; a digit is a token id plus one, 0 lies past the end of a sequence. Nothing here checks
arguments; the callers do. All compiled code of counting is in this one file (see `workbench.jit`).
"""

from __future__ import annotations

import numpy as np

from workbench.jit import compiled

#: Bits sorted by in one pass: 512 open destinations still fit into the caches, and 51-bit keys take six passes.
RADIX_BITS = 9
RADIX = 1 << RADIX_BITS


@compiled
def pack_keys(tokens, bounds, counted, order, bits, per, keys):
    """Fills keys [n, words] with the windows that begin at the first counted[s] tokens of every sequence.

    tokens [T] int32, sequence s is tokens[bounds[s]:bounds[s + 1]]; n is the sum of `counted`.
    """
    words = keys.shape[1]
    row = 0
    top = np.uint64(bits * (per - 1))
    width = np.uint64(bits)
    for sequence in range(counted.size):
        start, stop = bounds[sequence], bounds[sequence + 1]
        if words == 1:
            window = np.uint64(0)
            for place in range(min(stop, start + counted[sequence] + order) - 1, start - 1, -1):
                window = (np.uint64(tokens[place] + np.int64(1)) << top) | (window >> width)
                if place - start < counted[sequence]:
                    keys[row + place - start, 0] = window
        else:
            for place in range(start, start + counted[sequence]):
                for word in range(words):
                    value = np.uint64(0)
                    for digit in range(word * per, (word + 1) * per):
                        value <<= width
                        if digit < order and place + digit < stop:
                            value |= np.uint64(tokens[place + digit] + np.int64(1))
                    keys[row + place - start, word] = value
        row += counted[sequence]


@compiled
def radix_histograms(keys, word, digits):
    """How often each value of each of the lowest `digits` radix digits of one word occurs, int64 [digits, RADIX]."""
    histograms = np.zeros((digits, RADIX), np.int64)
    mask = np.uint64(RADIX - 1)
    for row in range(keys.shape[0]):
        value = keys[row, word]
        for digit in range(digits):
            histograms[digit, value & mask] += 1
            value >>= np.uint64(RADIX_BITS)
    return histograms


@compiled
def radix_pass(source, target, word, shift, histogram):
    """Moves the rows of `source` to `target` in the order of one radix digit, equal ones as they were."""
    mask = np.uint64(RADIX - 1)
    shift = np.uint64(shift)
    words = source.shape[1]
    places = np.empty(RADIX, np.uint64)
    place = 0
    for bucket in range(RADIX):
        places[bucket] = place
        place += histogram[bucket]
    if words == 1:
        lone, moved = source.reshape(source.size), target.reshape(target.size)
        for row in range(lone.size):
            value = lone[row]
            bucket = (value >> shift) & mask
            to = places[bucket]
            moved[to] = value
            places[bucket] = to + np.uint64(1)
    else:
        for row in range(source.shape[0]):
            bucket = (source[row, word] >> shift) & mask
            to = places[bucket]
            for part in range(words):
                target[to, part] = source[row, part]
            places[bucket] = to + np.uint64(1)


@compiled
def count_new(keys, changed, word, shift, mask):
    """How many rows of the sorted keys begin a new n-gram that ends with the digit at `shift` of `word`.

    changed [n] uint8: whether an earlier word differs from the row above.
    """
    new = 0
    shift, mask = np.uint64(shift), np.uint64(mask)
    previous = ~keys[0, word]
    for row in range(keys.shape[0]):
        key = keys[row, word]
        differs = (((key ^ previous) >> shift) != 0) | (changed[row] != 0)
        new += np.int64(differs & (((key >> shift) & mask) != 0))
        previous = key
    return new


@compiled
def fill_level(keys, changed, word, shift, mask, node, tokens, counts, parents):
    """Writes the n-grams that `count_new` found; entry 0 of the outputs is scratch, the first n-gram is at 1.

    node [n] int32: the row's n-gram one digit shorter, counted from 0; replaced by the one found here.
    tokens int32, counts int64, parents int32 [found + 1].
    """
    shift, mask = np.uint64(shift), np.uint64(mask)
    place, run = 0, 0
    previous = ~keys[0, word]
    for row in range(keys.shape[0]):
        key = keys[row, word]
        digit = (key >> shift) & mask
        change = (key ^ previous) >> shift
        previous = key
        if digit:  # else the sequence ended before
            begins = np.int64((change != 0) | (changed[row] != 0))  # without a branch: nobody can predict it
            place += begins
            run = run * (1 - begins) + 1
            tokens[place] = np.int64(digit) - 1
            counts[place] = run
            parents[place] = node[row]
            node[row] = place - 1


@compiled
def mark_changes(keys, word, changed):
    """Adds to changed [n] uint8 where `word` of the sorted keys differs from the row above."""
    for row in range(keys.shape[0]):
        if row == 0 or keys[row, word] != keys[row - 1, word]:
            changed[row] = 1
