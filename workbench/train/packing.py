"""From rows of token indices to what a training step needs: places, positions, and which prefixes are drafted from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from workbench.train.data import Corpus, RowOrder


@dataclass(frozen=True)
class PackedBatch:
    """B packed rows of T places, and A draft blocks in each.

    Attributes:
        index: [B, T] int64, place in the corpus; 0 where `filled` is False.
        filled: [B, T] bool, the place holds a token.
        tokens: [B, T] int64.
        positions: [B, T] int64, position inside the sample.
        anchors: [B, A] int64, place of the newest real row of every block, ascending among the used blocks.
        used: [B, A] bool, the block exists; others have anchor 0 and count nowhere.
        valid: [B, A, d] bool, slot s of the block drafts a response token of the same sample.
        sampled: [B, A] bool, the block's sample was drawn at temperature 1.
    """

    index: torch.Tensor
    filled: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    used: torch.Tensor
    valid: torch.Tensor
    sampled: torch.Tensor

    @property
    def starts(self) -> torch.Tensor:
        """[B, A] int64, place where the sample of each block begins."""
        return self.anchors - self.positions.gather(1, self.anchors)

    @property
    def next_tokens(self) -> torch.Tensor:
        """[B, T] int64, the token behind each place (of no meaning at the end of a sample)."""
        return self.tokens.roll(-1, dims=1)

    def slot_places(self, depth: int) -> torch.Tensor:
        """[B, A, d] int64: the place whose target logits teach each slot (the last place where not valid)."""
        steps = torch.arange(1, depth + 1, device=self.anchors.device)
        return (self.anchors[..., None] + steps).clamp(max=self.tokens.shape[1] - 1)


class TokenTable:
    """Per-token facts of a corpus on a device, from which batches are gathered.

    Args:
        corpus: samples.
        device: where batches are made.
    """

    def __init__(self, corpus: Corpus, device: torch.device | str = "cpu") -> None:
        lengths = corpus.lengths
        positions = np.arange(len(corpus.tokens)) - np.repeat(corpus.offsets[:-1], lengths)
        left = np.repeat(lengths, lengths) - 1 - positions
        prompt_len = np.repeat(corpus.prompt_len, lengths)
        # A draft follows a root from the response, so the newest real row is at least the last prompt token.
        drafts = (positions >= prompt_len - 1) & (left >= 2)
        self.device = torch.device(device)
        self._tokens = torch.from_numpy(corpus.tokens).to(device)
        self._positions = torch.from_numpy(positions.astype(np.int32)).to(device)
        self._left = torch.from_numpy(left.astype(np.int32)).to(device)
        self._drafts = torch.from_numpy(drafts).to(device)
        self._sampled = torch.from_numpy(np.repeat(corpus.sampled, lengths)).to(device)

    @property
    def response_mask(self) -> torch.Tensor:
        """[T] bool, places that a draft may follow."""
        return self._drafts

    def batch(
        self, rows: torch.Tensor, num_blocks: int, depth: int, generator: torch.Generator | None = None
    ) -> PackedBatch:
        """Gathers rows and draws the prefixes that are drafted from.

        Args:
            rows: [B, T] integer indices into the corpus, -1 for empty places.
            num_blocks: A.
            depth: d.
            generator: of the draw, on the table's device; None takes the first A prefixes of every row.
        """
        filled = rows >= 0
        index = rows.clamp(min=0).long()
        drafts = self._drafts[index] & filled
        lottery = torch.rand(rows.shape, generator=generator, device=self.device) if generator else None
        if lottery is None:
            lottery = torch.linspace(1.0, 0.5, rows.shape[1], device=self.device).expand(rows.shape)
        ranked = torch.where(drafts, lottery, -1.0).topk(num_blocks, dim=1)
        used = ranked.values >= 0
        places = torch.where(used, ranked.indices, rows.shape[1]).sort(dim=1).values
        used = places < rows.shape[1]
        anchors = torch.where(used, places, 0)
        left = self._left[index].gather(1, anchors)
        reach = torch.arange(2, depth + 2, device=self.device)
        return PackedBatch(
            index=index,
            filled=filled,
            tokens=torch.where(filled, self._tokens[index], 0).long(),
            positions=torch.where(filled, self._positions[index], 0).long(),
            anchors=anchors,
            used=used,
            valid=used[..., None] & (left[..., None] >= reach),
            sampled=self._sampled[index].gather(1, anchors) & used,
        )


class BlockBatches:
    """Batches of a run as a function of the step.

    Args:
        table: facts of the corpus.
        rows: [rows, T] int32 from `row_table`.
        order: which rows a step visits.
        num_blocks: A, blocks a row.
        depth: d.
        seed: of the draw of prefixes.

    Raises:
        ValueError: more blocks than places.
    """

    def __init__(
        self, table: TokenTable, rows: np.ndarray, order: RowOrder, num_blocks: int, depth: int, seed: int = 0
    ) -> None:
        if not 1 <= num_blocks <= rows.shape[1]:
            raise ValueError(f"num_blocks={num_blocks} outside 1..{rows.shape[1]} (places of a row)")
        self._table, self._order = table, order
        self._rows = torch.from_numpy(rows).to(table.device)
        self._num_blocks, self._depth, self._seed = num_blocks, depth, seed

    @property
    def identity(self) -> str:
        """Text that differs when the batches do: rows, order, blocks and seed."""
        digest = hashlib.sha256(self._rows.cpu().numpy().tobytes()).hexdigest()[:16]
        return f"rows {digest} {self._order.identity} blocks {self._num_blocks}x{self._depth} seed {self._seed}"

    def batch(self, step: int) -> PackedBatch:
        """The batch of a step."""
        picked = torch.from_numpy(self._order.rows(step)).to(self._table.device)
        generator = torch.Generator(self._table.device).manual_seed(self._seed * 1_000_003 + step)
        return self._table.batch(self._rows[picked], self._num_blocks, self._depth, generator)
