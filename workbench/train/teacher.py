"""The target as a teacher: tapped states and its own distribution at every place of packed rows.

States are computed from the stock model under a mask that keeps samples apart. They can be computed for each batch
(`Teacher`), or once for a whole corpus that fits into the device's memory (`FeatureStore`); both are asked the same
way, with a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn import functional
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from workbench.models.taps import tapped_inputs
from workbench.train.packing import BlockRule, PackedBatch, TokenTable


@dataclass(frozen=True)
class Features:
    """What the target says about B rows of T places.

    Attributes:
        taps: [B, T, taps * H] tapped states, in the model's dtype.
        hidden: [B, T, H] input of the output head; None from a teacher of taps only.
        log_total: [B, T] fp32, logsumexp of the target's logits over the whole vocabulary; None likewise.
    """

    taps: torch.Tensor
    hidden: torch.Tensor | None = None
    log_total: torch.Tensor | None = None


#: Features of a batch.
FeatureSource = Callable[[PackedBatch], Features]


class Teacher:
    """Runs the target over packed rows.

    Args:
        model: stock transformers causal LM (its attention implementation is switched while it runs here).
        taps: indices into its hidden states, ascending.
        chunk_rows: places whose full-vocabulary logits exist at once.
        compiled: compile what follows those logits (CUDA), so that no fp32 copy of them is made.
        taps_only: for objectives that never ask what the target itself says; saves its output head, and a third of
            what a `FeatureStore` keeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        taps: Sequence[int],
        chunk_rows: int = 8192,
        compiled: bool = False,
        taps_only: bool = False,
    ) -> None:
        self.taps_only = taps_only
        self._model, self._taps, self._chunk_rows = model, tuple(taps), chunk_rows
        self._head = model.get_output_embeddings().weight.detach()
        self._logsumexp = torch.compile(_logsumexp) if compiled else _logsumexp

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self._head.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the target."""
        return self._head.dtype

    @property
    def num_features(self) -> tuple[int, int]:
        """Widths of `taps` and `hidden`."""
        return len(self._taps) * self._head.shape[1], self._head.shape[1]

    def __call__(self, batch: PackedBatch) -> Features:
        """Features of a batch, without gradient."""
        return self.features(batch.tokens, batch.positions)

    @torch.no_grad()
    def features(self, tokens: torch.Tensor, positions: torch.Tensor) -> Features:
        """Features of packed rows.

        Args:
            tokens: [B, T] int64.
            positions: [B, T] int64, restarting at 0 with every sample; empty places are samples of one token.
        """
        decoder = self._model.get_decoder()
        with _plain_attention(self._model), tapped_inputs(decoder.layers, self._taps) as states:
            out = decoder(
                input_ids=tokens, position_ids=positions, attention_mask=sample_mask(positions), use_cache=False
            )
        taps = torch.cat([states[t] for t in self._taps], dim=-1)
        if self.taps_only:
            return Features(taps)
        hidden = out.last_hidden_state
        return Features(taps, hidden, self._log_total(hidden.flatten(0, 1)).view(tokens.shape))

    def _log_total(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = hidden.split(self._chunk_rows)
        return torch.cat([self._logsumexp(functional.linear(part, self._head)) for part in parts])


def _logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """logits [n, V] -> [n] fp32."""
    return logits.float().logsumexp(-1)


def sample_mask(positions: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, T] bool: causal, and only inside the sample; positions [B, T] restart at 0 with every sample."""
    place = torch.arange(positions.shape[1], device=positions.device)
    start = place - positions
    return ((place <= place[:, None]) & (place >= start[..., None])).unsqueeze(1)


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Stock attention inside the block, whatever the model is set to outside."""
    before = model.config._attn_implementation
    if before == "sdpa":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class FeatureStore:
    """Features of every token of a corpus, kept on the teacher's device.

    In half precision a token takes 2 H bytes for each tap, and 2 H + 4 more unless the teacher gives taps only.

    Args:
        teacher: computes them.
        table: facts of the corpus.
        rows: [rows, T] int32 from `row_table`; every sample once.
        batch_rows: rows of one forward.
        progress: show a bar.
    """

    def __init__(
        self, teacher: Teacher, table: TokenTable, rows: torch.Tensor, batch_rows: int = 32, progress: bool = False
    ) -> None:
        width, hidden_size = teacher.num_features
        self._taps = torch.empty(len(table), width, dtype=teacher.dtype, device=teacher.device)
        hidden = log_total = None
        if not teacher.taps_only:
            hidden = torch.empty(len(table), hidden_size, dtype=teacher.dtype, device=teacher.device)
            log_total = torch.empty(len(table), device=teacher.device)
        self._kept = (self._taps, hidden, log_total)
        short = -len(rows) % batch_rows if len(rows) > batch_rows else 0
        rows = functional.pad(rows, (0, 0, 0, short), value=-1)  # one shape, so compiled parts are compiled once
        for part in tqdm(rows.split(batch_rows), desc="target states", disable=not progress):
            batch = table.batch(part, 1, BlockRule(1))
            found = teacher(batch)
            place = batch.index[batch.filled]
            new = (found.taps, found.hidden, found.log_total)
            for kept, values in zip(self._kept, new, strict=True):
                if kept is not None and values is not None:
                    kept[place] = values[batch.filled]

    def __call__(self, batch: PackedBatch) -> Features:
        """Features of a batch."""
        return Features(*(None if kept is None else kept[batch.index] for kept in self._kept))

    def tap_rms(self, places: torch.Tensor, chunk_rows: int = 65536) -> torch.Tensor:
        """[taps * H] fp32, root mean square of every tapped dimension over the places [T] bool."""
        index = places.nonzero().squeeze(1)
        total = torch.zeros(self._taps.shape[1], device=self._taps.device, dtype=torch.float64)
        for part in index.split(chunk_rows):
            total += self._taps[part].float().square().sum(0, dtype=torch.float64)
        return (total / max(1, len(index))).sqrt().float()
