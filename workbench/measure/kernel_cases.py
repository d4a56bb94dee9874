"""Inputs of one attention call, in several sets that take turns, and its result in float64.

Contexts are equal for all requests of a call, so that library functions that need a rectangle waste nothing on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

import torch

from workbench.kernel_path import add_own_kernels
from workbench.measure.kernel_plan import Cell, HeadShape
from workbench.measure.kernel_times import sets_of

if TYPE_CHECKING:
    from kernels.tile_choice import Tile

#: Rows of a request that are compared with float64; of longer ones so many, evenly spread, and the last.
_EXACT_ROWS = 64


class AttentionCase:
    """One cell at one head shape. Requests have the slots in reverse order, and random queries, keys and values.

    Attributes:
        shape, cell: what it is made for.
        lengths: rows of each request.
        queries: per set [M, H, D].
        caches: per set [2, N, context + max_rows, Hk, D], keys and values.
        slots, starts, context_len: [N], [N+1], [N] int64.
        ancestors: [M] int64, 64 bits each; None for prefill.
        scale: D ** -0.5.
    """

    def __init__(
        self, shape: HeadShape, cell: Cell, dtype: torch.dtype, device: torch.device, seed: int = 0, sets: int = 0
    ) -> None:
        """Makes everything on `device`; `sets` 0 is as many as outgrow its caches."""
        self.shape, self.cell = shape, cell
        rng = Random(seed)
        self.lengths = row_counts(cell, rng)
        starts = [0, *accumulate(self.lengths)]
        self.slots = torch.arange(cell.requests - 1, -1, -1, device=device)
        self.starts = torch.tensor(starts, device=device)
        self.context_len = torch.full((cell.requests,), cell.context, device=device)
        bits = [row for length in self.lengths for row in tree_bits(cell.kind, length, rng)]
        self.ancestors = None if cell.kind == "prefill" else torch.tensor(bits, device=device)
        self.scale = shape.head_dim**-0.5
        generator = torch.Generator(device).manual_seed(seed)
        new = partial(torch.randn, generator=generator, dtype=dtype, device=device)
        number = range(sets or sets_of(self.kv_elements * dtype.itemsize, device))
        cache = (2, cell.requests, cell.context + cell.max_rows, shape.kv_heads, shape.head_dim)
        self.queries = [new(starts[-1], shape.heads, shape.head_dim) for _ in number]
        self.caches = [new(cache) for _ in number]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.starts.device

    @property
    def kv_elements(self) -> int:
        """Elements of the keys and values that are seen, each counted once a KV head."""
        rows = self.cell.requests * self.cell.context + sum(self.lengths)
        return rows * 2 * self.shape.kv_heads * self.shape.head_dim

    @property
    def flops(self) -> int:
        """Additions and multiplications of both products over the visible pairs of row and key."""
        own = sum(length * (length + 1) // 2 for length in self.lengths)
        if self.cell.kind == "tree":
            own = sum(bits.bit_count() for bits in (row % 2**64 for row in self.ancestors.tolist()))
        return 4 * self.shape.heads * self.shape.head_dim * (sum(self.lengths) * self.cell.context + own)

    def kernel_calls(self, tile: Tile) -> list[Callable[[], torch.Tensor]]:
        """One launch of the tile kernel a set."""
        add_own_kernels()
        from kernels.tile_attention import launch

        return self._calls(partial(launch, max_rows=self.cell.max_rows, tile=tile))

    def reference_calls(self) -> list[Callable[[], torch.Tensor]]:
        """One call of the plain reference a set: what a CPU runs in place of the kernel."""
        add_own_kernels()
        from kernels.ref.tile_attention import tile_attention_tensors

        return self._calls(tile_attention_tensors)

    def _calls(self, attention: Callable[..., torch.Tensor]) -> list[Callable[[], torch.Tensor]]:
        fields = ("slots", "starts", "context_len", "ancestors", "scale")
        shared = {name: getattr(self, name) for name in fields}
        return [
            partial(attention, query=query, k_cache=cache[0], v_cache=cache[1], **shared)
            for query, cache in zip(self.queries, self.caches, strict=True)
        ]

    def seen(self, request: int, rows: torch.Tensor) -> torch.Tensor:
        """[m, length] bool: which rows of its request each of `rows` [m] sees."""
        own = torch.arange(self.lengths[request], device=self.device)
        if self.ancestors is None:
            return own <= rows[:, None]
        bits = self.ancestors[self.starts[request] + rows]
        return (bits[:, None] >> own) & 1 != 0

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers of some rows [m] and the attention of the first set there, [m, H, D] float64."""
        add_own_kernels()
        from kernels.ref.tile_attention import tile_attention

        picked, masks, starts = [], [], self.starts.tolist()
        for request, length in enumerate(self.lengths):
            rows = torch.arange(0, length, max(length // _EXACT_ROWS, 1), device=self.device)
            rows = torch.unique(torch.cat((rows, rows.new_tensor([length - 1]))))
            hidden = ~self.seen(request, rows)
            mask = torch.zeros(len(rows), self.cell.context + length, dtype=torch.float64, device=self.device)
            mask[:, self.cell.context :].masked_fill_(hidden, -torch.inf)
            picked.append(starts[request] + rows)
            masks.append(mask)
        numbers = torch.cat(picked)
        keys, values = self.caches[0].double()
        first = [0, *accumulate(map(len, picked))]
        kv_len = [self.cell.context + length for length in self.lengths]
        query = self.queries[0][numbers].double()
        return numbers, tile_attention(query, keys, values, self.slots.tolist(), first, kv_len, masks, self.scale)


def row_counts(cell: Cell, rng: Random) -> list[int]:
    """[N] rows of each request; ragged ones lie between 1 and twice the mean and sum to N times the mean."""
    counts = [cell.rows] * cell.requests
    if cell.kind == "ragged":
        for _ in range(cell.rows * cell.requests):
            giver, taker = rng.randrange(cell.requests), rng.randrange(cell.requests)
            if counts[giver] > 1 and counts[taker] < cell.max_rows:
                counts[giver] -= 1
                counts[taker] += 1
    return counts


def tree_bits(kind: str, length: int, rng: Random) -> Sequence[int]:
    """Ancestor bits of each row of a request as int64: of a chain, or of a tree whose parents are recent rows."""
    if kind == "prefill":
        return ()
    rows: list[int] = []
    for row in range(length):
        parent = row - 1 if kind != "tree" else rng.randrange(max(0, row - 6), max(row, 1))
        rows.append((rows[parent] if row else 0) | 1 << row)
    return [bits - (1 << 64) if bits >> 63 else bits for bits in rows]
