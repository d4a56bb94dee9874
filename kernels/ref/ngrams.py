"""N-gram look-ups in the arrays of a trie, one at a time in Python: the truth for what kernels look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kernels.tensor_checks import require_tensors

#: Tokens of the longest context, that of a trie of order 5.
MAX_CONTEXT = 4
#: Stored count that means "look into the overflow table".
COUNT_OVERFLOW = 65535
#: Low bits of a quantised trie's entries that hold the code of the count.
CODE_BITS = 8


class DeviceTrie(NamedTuple):
    """Arrays of an n-gram trie, roots first, then level by level; siblings lie together, ascending by token.

    Unsigned arrays come as the signed type of the same width. A quantised trie has no counts and no overflow table: its
    entries are token << 8 | code, and `code_counts` says what a code stands for.

    Attributes:
        tokens: [N] int16 or int32.
        counts: [N] int16, 65535 for one that stands in the overflow table; [0] uint8 if quantised.
        starts: [I+1] int32, the children of node n < I are starts[n]..starts[n+1]-1; later nodes have none.
        overflow_nodes, overflow_counts: [V] int32 ascending and int64.
        code_counts: [256] float64, or [0] if exact.
        num_roots: nodes without a parent, the first ones.
        max_context: longest context in tokens, 1..4.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    overflow_nodes: torch.Tensor
    overflow_counts: torch.Tensor
    code_counts: torch.Tensor
    num_roots: int
    max_context: int


class Grams:
    """N-gram look-ups in the arrays of a trie, one at a time."""

    def __init__(self, trie: DeviceTrie) -> None:
        types = (np.dtype(f"u{trie.tokens.element_size()}"), np.dtype(f"u{trie.counts.element_size()}"), "u4", "u4")
        self.entries, self.counts, self.starts, self.overflow_nodes = (
            tensor.cpu().numpy().view(kind) for tensor, kind in zip(trie[:4], types, strict=True)
        )
        self.overflow_counts, self.codes = (tensor.cpu().numpy() for tensor in trie[4:6])
        self.num_roots, self.max_context = trie.num_roots, trie.max_context
        self.shift = CODE_BITS if len(self.codes) else 0

    def find(self, path: Sequence[int]) -> int:
        """Node of an n-gram, or -1."""
        low, high, node = 0, self.num_roots, -1
        for token in path:
            if token < 0:
                return -1
            place = low + int(np.searchsorted(self.entries[low:high], token << self.shift))
            if place >= high or int(self.entries[place]) >> self.shift != token:
                return -1
            node, low, high = place, 0, 0
            if node + 1 < len(self.starts):
                low, high = int(self.starts[node]), min(int(self.starts[node + 1]), len(self.entries))
        return node

    def count(self, node: int) -> int:
        if self.shift:
            return int(self.codes[int(self.entries[node]) & 255])
        count = int(self.counts[node])
        overflow = np.flatnonzero(self.overflow_nodes == node) if count == COUNT_OVERFLOW else []
        return int(self.overflow_counts[overflow[0]]) if len(overflow) else count

    def probability(self, context: Sequence[int], token: int) -> float:
        """P(token | context): the longest suffix of the context that the token was seen after decides."""
        for length in range(min(self.max_context, len(context)), 0, -1):
            suffix = list(context[len(context) - length :])
            node = self.find([*suffix, token])
            if node >= 0:
                total = self.count(self.find(suffix))
                share = self.count(node) / total if total > 0 else 0.0
                return float(np.float32(min(max(share, 0.0), 1.0)))
        return 0.0


def check_trie(trie: DeviceTrie) -> None:
    """Raises a ValueError naming what does not fit `DeviceTrie`; looks at no value of the arrays."""
    num_nodes, num_codes = trie.tokens.numel(), trie.code_counts.numel()
    if num_codes not in (0, 1 << CODE_BITS):
        raise ValueError(f"code_counts has {num_codes} entries, allowed: 0, {1 << CODE_BITS}")
    if trie.tokens.dtype not in (torch.int16, torch.int32) or (num_codes and trie.tokens.dtype != torch.int32):
        raise ValueError(f"tokens is {trie.tokens.dtype}, allowed: int32, or int16 for an exact trie")
    counts = (torch.uint8, (0,)) if num_codes else (torch.int16, (num_nodes,))
    overflow = trie.overflow_nodes.numel()
    require_tensors(
        tokens=(trie.tokens, trie.tokens.dtype, (num_nodes,)),
        counts=(trie.counts, *counts),
        starts=(trie.starts, torch.int32, (max(trie.starts.numel(), 1),)),
        overflow_nodes=(trie.overflow_nodes, torch.int32, (overflow,)),
        overflow_counts=(trie.overflow_counts, torch.int64, (overflow,)),
        code_counts=(trie.code_counts, torch.float64, (num_codes,)),
    )
    if not 0 <= trie.num_roots <= num_nodes:
        raise ValueError(f"num_roots is {trie.num_roots}, allowed 0..{num_nodes}")
    if not 1 <= trie.max_context <= MAX_CONTEXT:
        raise ValueError(f"max_context is {trie.max_context}, allowed 1..{MAX_CONTEXT}")
