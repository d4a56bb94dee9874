"""DART's draft trees in one launch: one program searches the tree of one request, level by level.

All paths of the beam times all candidates of a level are looked up together, every path in all its suffix contexts,
by searches that step in lockstep through the children. What a search finds is where the extended path stands, so that
going down a level costs no search of its own. The best nodes so far are a sorted list, into which each level is merged
by counting how many are ahead of each; the list's worst score says which items need not be looked up at all.

The time is that of dependent reads: about log4(children) + 3 for a level, wherever in the trie they lie.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from kernels.prune_device import extend, keep_best, next_beam, start, work_places, write_tree
from kernels.ref.ngrams import CODE_BITS, DeviceTrie
from kernels.ref.prune import DraftTrees, PruneSettings, check_prune

# Only speed depends on these; all but the number of warps are powers of two.
BLOCK = 512  # items looked up together: 20 paths of 25 candidates
RANKED = 128  # entries that are ranked together
CHUNK = 64  # entries they are compared with in one step
WAYS = 4  # parts into which a step of a search cuts its range
NUM_WARPS = 16

_INFINITY = tl.constexpr(float("inf"))
_SCALARS = (
    *("num_nodes", "num_inner", "num_overflow", "num_roots", "max_context", "num_levels", "width", "tail_length"),
    *("beam_width", "most_nodes", "eos_id", "gram_bits", "exponent_bits", "decay_bits", "epsilon_bits"),
    *("floats_stride", "whole_stride"),
)


@triton.jit
def _double(bits):
    """The float64 of these bits: as an argument of its own it would arrive as a float32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=_SCALARS)
def _prune(
    ids_ptr,  # [R, K, C]
    probs_ptr,
    tails_ptr,  # [R, G]
    levels_ptr,  # [R]
    limits_ptr,
    grams_ptr,  # arrays of the trie
    counts_ptr,
    starts_ptr,
    overflow_nodes_ptr,
    overflow_counts_ptr,
    codes_ptr,
    tokens_ptr,  # [R, most_nodes + 1], as are parents, depths, scores and ancestors
    parents_ptr,
    depths_ptr,
    scores_ptr,
    ancestors_ptr,
    sizes_ptr,  # [R]
    floats_ptr,  # scratch
    whole_ptr,
    num_nodes,  # of the trie, as are the next four
    num_inner,
    num_overflow,
    num_roots,
    max_context,
    num_levels,
    width,
    tail_length,
    beam_width,
    most_nodes,
    eos_id,
    gram_bits,
    exponent_bits,
    decay_bits,
    epsilon_bits,
    floats_stride,
    whole_stride,
    NODES: tl.constexpr,
    CONTEXTS: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKED: tl.constexpr,
    CHUNK: tl.constexpr,
    SHIFT: tl.constexpr,
    OVERFLOW: tl.constexpr,
    WAYS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits_ptr + request)
    if limit <= 0:
        tl.store(sizes_ptr + request, tl.zeros([], tl.int64))
        return
    most = tl.minimum(limit - 1, most_nodes).to(tl.int32)
    deepest = tl.minimum(tl.load(levels_ptr + request), tl.where(most > 0, num_levels, 0)).to(tl.int32)
    epsilon, exponent, decay = _double(epsilon_bits), _double(exponent_bits), _double(decay_bits)

    ids_ptr += request * num_levels * width
    probs_ptr += request * num_levels * width
    tails_ptr += request * tail_length
    trie = (
        grams_ptr, counts_ptr, starts_ptr, overflow_nodes_ptr, overflow_counts_ptr, codes_ptr,
        num_nodes, num_inner, num_overflow, num_roots,
    )  # fmt: skip
    floats_ptr += request * floats_stride
    whole_ptr += request * whole_stride
    work = work_places(floats_ptr, whole_ptr, num_levels, width, NODES, CONTEXTS)
    num_candidates = num_levels * width
    start(
        trie, work, ids_ptr, probs_ptr, tails_ptr, num_candidates, tail_length, max_context, epsilon,
        NODES, CONTEXTS, START, SHIFT, WAYS,
    )  # fmt: skip

    capacity = NODES + NODES * width  # entries of one of the two lists
    level, num_kept = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    rows, full = tl.full([], 1, tl.int32), tl.full([], 1, tl.int32)
    floor, decayed = tl.full([], -_INFINITY, tl.float64), tl.full([], 1.0, tl.float64)
    while (level < deepest) & (rows > 0):
        level_weight = tl.exp(-exponent * tl.log((level + 1).to(tl.float64)))
        this, other = (level % 2) * capacity, (1 - level % 2) * capacity
        gram_weight = tl.where(level > 0, level_weight * _double(gram_bits), 0.0)
        entries, kept = (floats_ptr + this, whole_ptr + this), (floats_ptr + other, whole_ptr + other)
        filled, first = num_kept, tl.zeros([], tl.int32)
        while first < rows * width:
            filled = extend(
                trie, work, ids_ptr, entries, filled, first, level, rows, width,
                level_weight * decayed, gram_weight, floor, epsilon, max_context,
                NODES, CONTEXTS, BLOCK, SHIFT, OVERFLOW, WAYS,
            )  # fmt: skip
            first += BLOCK
        tl.debug_barrier()
        keep_best(entries, kept, filled, most, RANKED, CHUNK)
        tl.debug_barrier()
        num_kept = tl.minimum(filled, most)
        floor = tl.load(kept[0] + most - 1, mask=num_kept == most, other=-_INFINITY)
        rows, full = next_beam(
            trie, work, ids_ptr, kept, num_kept, level, width, full, beam_width, eos_id, deepest,
            max_context, NODES, CONTEXTS, WIDTH, SHIFT, OVERFLOW, WAYS,
        )  # fmt: skip
        tl.debug_barrier()
        decayed *= decay
        level += 1

    last = (level % 2) * capacity
    row = request * (most_nodes + 1)
    out = (tokens_ptr + row, parents_ptr + row, depths_ptr + row, scores_ptr + row, ancestors_ptr + row)
    root = tl.load(tails_ptr + tail_length - 1)
    write_tree(work, ids_ptr, (floats_ptr + last, whole_ptr + last), num_kept, deepest, width, root, out, NODES)
    tl.store(sizes_ptr + request, num_kept.to(tl.int64) + 1)


def prune(
    ids: torch.Tensor,
    probs: torch.Tensor,
    tails: torch.Tensor,
    levels: torch.Tensor,
    limits: torch.Tensor,
    trie: DeviceTrie | None,
    settings: PruneSettings,
    out: DraftTrees,
) -> None:
    """See `kernels.ref.prune`; one launch, nothing is read on the host.

    Raises:
        ValueError: see `kernels.ref.prune.check_prune`.
    """
    check_prune(ids, probs, tails, levels, limits, trie, settings, out)
    num_requests, num_levels, width = ids.shape
    if num_requests == 0:
        return
    used = trie if trie is not None and settings.ngram_weight > 0 else None
    arrays, numbers, contexts = _trie_arguments(used, ids)
    nodes = triton.next_power_of_2(settings.num_nodes)
    # Sizes of the parts that `work_places` lists.
    items, candidates = nodes * width, num_levels * width
    num_floats = 2 * (nodes + items) + candidates + nodes
    num_whole = 2 * (nodes + items) + contexts * (items + 3 * nodes) + (num_levels + 1) * nodes
    num_whole += candidates + contexts + num_levels * items
    floats = torch.empty(num_requests, num_floats, dtype=torch.float64, device=ids.device)
    whole = torch.empty(num_requests, num_whole, dtype=torch.int64, device=ids.device)
    weights = (settings.ngram_weight, settings.level_exponent, settings.logit_decay, settings.epsilon)
    _prune[(num_requests,)](
        *(ids, probs, tails, levels, limits, *arrays, *out, floats, whole, *numbers),
        *(num_levels, width, tails.shape[1], settings.beam_width, settings.num_nodes, settings.eos_id),
        *(struct.unpack("4q", struct.pack("4d", *map(float, weights)))),
        *(num_floats, num_whole, nodes, contexts),
        triton.next_power_of_2(candidates + contexts),
        triton.next_power_of_2(width),
        *(BLOCK, RANKED, CHUNK),
        CODE_BITS if used is not None and used.code_counts.numel() else 0,
        used is not None and used.overflow_nodes.numel() > 0,
        WAYS,
        num_warps=NUM_WARPS,
    )


def _trie_arguments(trie: DeviceTrie | None, unread: torch.Tensor) -> tuple[tuple, tuple[int, ...], int]:
    """Arrays and numbers of the trie as the kernel takes them; its contexts padded to a power of two, 0 for none."""
    if trie is None:
        return (unread,) * 6, (0,) * 5, 0
    num_inner = max(trie.starts.numel() - 1, 0)
    numbers = (trie.tokens.numel(), num_inner, trie.overflow_nodes.numel(), trie.num_roots, trie.max_context)
    return trie[:6], numbers, triton.next_power_of_2(trie.max_context)
