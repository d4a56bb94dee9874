"""From rows of token indices to what a training step needs: places, positions, and which prefixes are drafted from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from workbench.train.data import Corpus, RowOrder


@dataclass(frozen=True)
class BlockRule:
    """Where the draft blocks of a method stand, and which tokens they draft.

    A block drafts the d tokens behind its root, the newest token that is decided. It is named by its anchor, the place
    that its slot 0 stands for: whatever lies before the anchor is the block's context.

    Attributes:
        depth: d, drafted positions.
        root: places from the anchor to the root: 1 where the anchor is the newest token with known target states
            (DART), 0 where it is the root itself (DFlash).

    Raises:
        ValueError: depth below 1, or root below 0.
    """

    depth: int
    root: int = 1

    def __post_init__(self) -> None:
        for name, low in (("depth", 1), ("root", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: {low} or more")


@dataclass(frozen=True)
class PackedBatch:
    """B packed rows of T places, and A draft blocks in each.

    Attributes:
        index: [B, T] int64, place in the corpus; 0 where `filled` is False.
        filled: [B, T] bool, the place holds a token.
        tokens: [B, T] int64.
        positions: [B, T] int64, position inside the sample.
        anchors: [B, A] int64, place of every block's anchor, ascending among the used blocks.
        used: [B, A] bool, the block exists; others have anchor 0 and count nowhere.
        valid: [B, A, d] bool, position k of the block drafts a response token of the same sample.
        sampled: [B, A] bool, the block's sample was drawn at temperature 1.
        rule: what the blocks are.
    """

    index: torch.Tensor
    filled: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    anchors: torch.Tensor
    used: torch.Tensor
    valid: torch.Tensor
    sampled: torch.Tensor
    rule: BlockRule

    @property
    def starts(self) -> torch.Tensor:
        """[B, A] int64, place where the sample of each block begins."""
        return self.anchors - self.positions.gather(1, self.anchors)

    @property
    def next_tokens(self) -> torch.Tensor:
        """[B, T] int64, the token behind each place (of no meaning at the end of a sample)."""
        return self.tokens.roll(-1, dims=1)

    @property
    def teacher_places(self) -> torch.Tensor:
        """[B, A, d] int64: the place whose target logits teach each drafted position (of no meaning if not valid)."""
        return self._behind_root(0)

    @property
    def labels(self) -> torch.Tensor:
        """[B, A, d] int64: the token that each drafted position should say (of no meaning where not valid)."""
        return self.tokens.gather(1, self._behind_root(1).flatten(1)).view(self.valid.shape)

    def _behind_root(self, first: int) -> torch.Tensor:
        """[B, A, d] int64, the d places from `first` behind the root on, no further than the last place of the row."""
        steps = torch.arange(self.rule.depth, device=self.anchors.device) + self.rule.root + first
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
        self.device = torch.device(device)
        self._tokens = torch.from_numpy(corpus.tokens).to(device)
        self._positions = torch.from_numpy(positions.astype(np.int32)).to(device)
        self._left = torch.from_numpy(left.astype(np.int32)).to(device)
        self._prompt_len = torch.from_numpy(np.repeat(corpus.prompt_len, lengths)).to(device)
        self._sampled = torch.from_numpy(np.repeat(corpus.sampled, lengths)).to(device)

    def __len__(self) -> int:
        """Tokens of the corpus."""
        return len(self._tokens)

    @property
    def responses(self) -> torch.Tensor:
        """[tokens] bool, the token belongs to a response."""
        return self._positions >= self._prompt_len

    def anchors(self, rule: BlockRule, index: torch.Tensor) -> torch.Tensor:
        """Bool, of the shape of `index` (places in the corpus): the place can be the anchor of a block.

        Its root is then a response token, and at least one more follows it.
        """
        root = self._positions[index] + rule.root
        return (root >= self._prompt_len[index]) & (self._left[index] >= rule.root + 1)

    def batch(
        self,
        rows: torch.Tensor,
        num_blocks: int,
        rule: BlockRule,
        generator: torch.Generator | None = None,
        skip: int = 0,
    ) -> PackedBatch:
        """Gathers rows and draws the prefixes that are drafted from.

        Args:
            rows: [B, T] integer indices into the corpus, -1 for empty places.
            num_blocks: A.
            rule: what the blocks are.
            generator: of the draw, on the table's device; None takes the first A prefixes of every row.
            skip: prefixes of every row that are passed over before any is drawn.
        """
        filled = rows >= 0
        index = rows.clamp(min=0).long()
        allowed = self.anchors(rule, index) & filled
        if skip:
            allowed &= allowed.cumsum(1) > skip
        if generator is None:
            lottery = torch.linspace(1.0, 0.5, rows.shape[1], device=self.device).expand(rows.shape)
        else:
            lottery = torch.rand(rows.shape, generator=generator, device=self.device)
        ranked = torch.where(allowed, lottery, -1.0).topk(min(num_blocks, rows.shape[1]), dim=1)
        places = torch.where(ranked.values >= 0, ranked.indices, rows.shape[1]).sort(dim=1).values
        places = functional.pad(places, (0, num_blocks - places.shape[1]), value=rows.shape[1])
        used = places < rows.shape[1]
        anchors = torch.where(used, places, 0)
        left = self._left[index].gather(1, anchors)
        reach = torch.arange(1, rule.depth + 1, device=self.device) + rule.root
        return PackedBatch(
            index=index,
            filled=filled,
            tokens=torch.where(filled, self._tokens[index], 0).long(),
            positions=torch.where(filled, self._positions[index], 0).long(),
            anchors=anchors,
            used=used,
            valid=used[..., None] & (left[..., None] >= reach),
            sampled=self._sampled[index].gather(1, anchors) & used,
            rule=rule,
        )


class BlockBatches:
    """Batches of a run as a function of the step.

    Args:
        table: facts of the corpus.
        rows: [rows, T] int32 from `row_table`.
        order: which rows a step visits.
        num_blocks: A, blocks a row.
        rule: what the blocks are.
        seed: of the draw of prefixes.

    Raises:
        ValueError: more blocks than places.
    """

    def __init__(
        self, table: TokenTable, rows: np.ndarray, order: RowOrder, num_blocks: int, rule: BlockRule, seed: int = 0
    ) -> None:
        if not 1 <= num_blocks <= rows.shape[1]:
            raise ValueError(f"num_blocks={num_blocks} outside 1..{rows.shape[1]} (places of a row)")
        self._table, self._order = table, order
        self._rows = torch.from_numpy(rows).to(table.device)
        self._num_blocks, self._rule, self._seed = num_blocks, rule, seed

    @property
    def identity(self) -> str:
        """Text that differs when the batches do: rows, order, blocks and seed."""
        digest = hashlib.sha256(self._rows.cpu().numpy().tobytes()).hexdigest()[:16]
        return f"rows {digest} {self._order.identity} blocks {self._num_blocks} {self._rule} seed {self._seed}"

    def batch(self, step: int) -> PackedBatch:
        """The batch of a step."""
        picked = torch.from_numpy(self._order.rows(step)).to(self._table.device)
        generator = torch.Generator(self._table.device).manual_seed(self._seed * 1_000_003 + step)
        return self._table.batch(self._rows[picked], self._num_blocks, self._rule, generator)
