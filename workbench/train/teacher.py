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

from workbench.train.packing import PackedBatch, TokenTable


@dataclass(frozen=True)
class Features:
    """What the target says about B rows of T places.

    Attributes:
        taps: [B, T, taps * H] tapped states, in the model's dtype.
        hidden: [B, T, H] input of the output head.
        log_total: [B, T] fp32, logsumexp of the target's logits over the whole vocabulary.
    """

    taps: torch.Tensor
    hidden: torch.Tensor
    log_total: torch.Tensor


#: Features of a batch.
FeatureSource = Callable[[PackedBatch], Features]


class Teacher:
    """Runs the target over packed rows.

    Args:
        model: stock transformers causal LM (its attention implementation is switched while it runs here).
        taps: indices into its hidden states, ascending.
        chunk_rows: places whose full-vocabulary logits exist at once.
        compiled: compile what follows those logits (CUDA), so that no fp32 copy of them is made.
    """

    def __init__(
        self, model: PreTrainedModel, taps: Sequence[int], chunk_rows: int = 8192, compiled: bool = False
    ) -> None:
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
        with _plain_attention(self._model):
            out = self._model.get_decoder()(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=sample_mask(positions),
                use_cache=False,
                output_hidden_states=True,
            )
        taps = torch.cat([out.hidden_states[t] for t in self._taps], dim=-1)
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
    """Features of every token of a corpus, kept on the teacher's device (8 H + 4 bytes a token in half precision).

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
        num_tokens = len(table.response_mask)
        width, hidden_size = teacher.num_features
        self._taps = torch.empty(num_tokens, width, dtype=teacher.dtype, device=teacher.device)
        self._hidden = torch.empty(num_tokens, hidden_size, dtype=teacher.dtype, device=teacher.device)
        self._log_total = torch.empty(num_tokens, device=teacher.device)
        short = -len(rows) % batch_rows if len(rows) > batch_rows else 0
        rows = functional.pad(rows, (0, 0, 0, short), value=-1)  # one shape, so compiled parts are compiled once
        for part in tqdm(rows.split(batch_rows), desc="target states", disable=not progress):
            batch = table.batch(part, 1, 1)
            found = teacher(batch)
            place = batch.index[batch.filled]
            self._taps[place] = found.taps[batch.filled]
            self._hidden[place] = found.hidden[batch.filled]
            self._log_total[place] = found.log_total[batch.filled]

    def __call__(self, batch: PackedBatch) -> Features:
        """Features of a batch."""
        return Features(self._taps[batch.index], self._hidden[batch.index], self._log_total[batch.index])

    def tap_rms(self, places: torch.Tensor, chunk_rows: int = 65536) -> torch.Tensor:
        """[taps * H] fp32, root mean square of every tapped dimension over the places [T] bool."""
        index = places.nonzero().squeeze(1)
        total = torch.zeros(self._taps.shape[1], device=self._taps.device, dtype=torch.float64)
        for part in index.split(chunk_rows):
            total += self._taps[part].float().square().sum(0, dtype=torch.float64)
        return (total / max(1, len(index))).sqrt().float()
