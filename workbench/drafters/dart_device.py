"""DART's part of a round on the device: the forward of `dart.py` and its commit with fixed shapes, to be captured.

The least that a draft can read: its rows lie ready in the state (a commit has projected the newest real row already,
and masks are constants), keys and values of real rows lie in the cache, and what follows from positions is looked up.
So before attention nothing is multiplied. Every weight matrix is read once at most: gate and up projections are one
product, and so are query, key and value projections of a commit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from workbench.batch import AcceptedRows, Batch, Candidates, DeviceRows, Drafted, DraftTrees
from workbench.drafters.dart_model import DartModel
from workbench.drafters.dart_state import DartState, num_candidates
from workbench.drafters.device_search import DeviceSearch, trees_on_host
from workbench.drafters.layers import RmsNorm
from workbench.kernel_path import kernel
from workbench.models.fused import add_product, gated, product
from workbench.models.merge import merge_linears
from workbench.types import MAX_TREE_ROWS, DraftRequest, DraftTree, Stopwatch

#: Given which of the requests draft: their candidates' ids [r, d, C] int64 and probabilities [r, d, C] float32.
CandidatesOf = Callable[[list[int]], tuple[np.ndarray, np.ndarray]]
#: (requests, their candidates, timer) -> one tree a request
Search = Callable[[Sequence[DraftRequest], CandidatesOf, Stopwatch], list[DraftTree]]


class _Tables(NamedTuple):
    """What follows from the sizes alone.

    Attributes:
        starts: [slots + 1, slots + 1] int64, by the number of live requests: first query of each request and their
            end; requests that pad have none.
        ancestors: [slots * d] int64 bits. The newest real row is already committed, so only masks are rows of their
            requests: bit j stands for mask j, and that row itself sees none.
        steps: [d] int64, from the committed tokens to the cache row of each query; outside the cache for the newest
            real row, which must not be written again.
        turns: [max_len + 1, d, 2, head_dim / 2], by committed tokens: `DartState.turn` of each query.
    """

    starts: torch.Tensor
    ancestors: torch.Tensor
    steps: torch.Tensor
    turns: torch.Tensor


def _tables(state: DartState, depth: int) -> _Tables:
    most, device = len(state.drafts) - 1, state.drafts.device
    requests, queries = torch.arange(most + 1, device=device), torch.arange(depth, device=device)
    steps = queries - 1
    steps[0] = -state.cache.kv.shape[3]
    return _Tables(
        starts=torch.minimum(requests, requests[:, None]) * depth,
        ancestors=((1 << queries) - 1).repeat(most),
        steps=steps,
        turns=state.turn.unfold(0, depth, 1).movedim(-1, 1),
    )


class DartDeviceSession:
    """See `workbench.batch.DeviceSession`; the state is that of a session on the host, so rounds may alternate.

    It merges weights of the network, whose `Parameter` objects are replaced: an optimiser made before would update ones
    that nothing reads any more. So a network that is to be trained must not have been on the device.

    Args:
        model: the draft network; its merged weights become views of one matrix.
        embedding: the target's input embedding.
        state: what is committed so far.
        search: makes trees of candidates on the host.
        device_search: makes them on the device, as part of the draft; None leaves that to `search`.

    Attributes:
        searches: see `workbench.batch.DeviceSession`.

    Raises:
        ValueError: more drafted positions than a row has ancestor bits, or drafts that the target cannot embed.
    """

    on_host = False

    def __init__(
        self,
        model: DartModel,
        embedding: nn.Embedding,
        state: DartState,
        search: Search,
        device_search: DeviceSearch | None = None,
    ) -> None:
        depth, layer, device = model.config.depth, model.midlayer, model.fc.weight.device
        if depth > MAX_TREE_ROWS:
            raise ValueError(f"draft_length={depth - 1}; allowed on the device: 1..{MAX_TREE_ROWS - 1}")
        if embedding.num_embeddings < model.config.vocab_size:
            raise ValueError(
                f"vocab_size={model.config.vocab_size} of the draft network; allowed: up to "
                f"{embedding.num_embeddings}, the rows of the target's embedding, which reads drafts unseen"
            )
        self._attend = kernel("attend_rows", device)
        self._norm, self._rotate_write = kernel("rms_norm", device), kernel("rotate_write", device)
        self._model, self._embedding, self._state, self._search = model, embedding, state, search
        self._device_search, self.searches = device_search, device_search is not None
        attention = layer.self_attn
        with torch.inference_mode(False):  # they become the network's own, which somebody may still want to train
            self._gate_up = merge_linears([layer.mlp.gate_proj, layer.mlp.up_proj])
            self._qkv = merge_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        self._draft_ids = model.draft_ids
        self._tables = _tables(state, depth)

    @torch.inference_mode()
    def draft(self, batch: Batch) -> Candidates | DraftTrees:
        """Trees of the best tokens at d positions behind the newest committed token of every request, or those tokens.

        Raises:
            ValueError: a bucket of more requests than the state has slots, or one without what the search needs.
        """
        candidates = self._candidates(batch)
        return candidates if self._device_search is None else self._device_search(candidates, batch)

    def _candidates(self, batch: Batch) -> Candidates:
        """The best tokens, in one forward."""
        config, state, tables = self._model.config, self._state, self._tables
        num_requests, most = len(batch.slots), len(state.drafts) - 1
        if num_requests > most:
            raise ValueError(f"the bucket has room for {num_requests} requests; allowed: up to {most}, as slots")
        starts = tables.starts.index_select(0, batch.num_live)[0, : num_requests + 1]
        own = state.drafts.index_select(0, batch.slots).flatten(0, 1)  # [R * d, ...], residuals and heads
        residual, heads = own[:, : config.hidden_size], own[:, config.hidden_size :]
        query = self._place(heads, batch, starts)
        attended = self._attend(
            query,
            *state.cache.layer(0),
            batch.slots,
            starts,
            batch.context_len,
            tables.ancestors[: len(own)],
            config.head_dim**-0.5,
            config.depth,
            batch.max_context,
        )
        return self._best(self._finish(residual, attended.flatten(1)))

    def _place(self, heads: torch.Tensor, batch: Batch, starts: torch.Tensor) -> torch.Tensor:
        """Rotates the heads [R * d, (n_h + 2 * n_kv) * head_dim] and caches those of masks: queries [R * d, n_h, D]."""
        tables, depth = self._tables, self._model.config.depth
        turn = tables.turns.index_select(0, batch.context_len).flatten(0, 1)  # [R * d, 2, head_dim / 2]
        slot_of_row = batch.slots.repeat_interleave(depth)
        kv_row = (batch.context_len[:, None] + tables.steps).flatten()
        return self._rotated(heads, turn, slot_of_row, kv_row, starts, self._model.config.num_attention_heads)

    def _rotated(
        self,
        heads: torch.Tensor,
        turn: torch.Tensor,
        slot_of_row: torch.Tensor,
        kv_row: torch.Tensor,
        starts: torch.Tensor,
        num_heads: int,
    ) -> torch.Tensor:
        """The kernel over heads [M, (num_heads + 2 * n_kv) * head_dim] and angles [M, 2, head_dim / 2]."""
        cos, sin = turn[:, 0], turn[:, 1]
        kv, eps = self._state.cache.kv, self._model.config.rms_norm_eps  # heads have no norm
        return self._rotate_write(heads, None, None, eps, cos, sin, kv, 0, slot_of_row, kv_row, starts, num_heads)

    def _finish(self, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """`DartModel.finish` over rows, states [R * d, H] in place: input of the head."""
        model, layer = self._model, self._model.midlayer
        add_product(states, attended, layer.self_attn.o_proj.weight)
        normed = self._normed(states, layer.post_attention_layernorm)
        add_product(states, self._gated(normed), layer.mlp.down_proj.weight)
        states = self._normed(states, model.norm)
        return self._normed(states, model.norm) if model.double_norm else states

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """Gate and up projections of x [R * d, H] and what joins them: [R * d, I]."""
        activation = self._model.config.hidden_act
        if activation == "silu":
            return gated(x, self._gate_up)
        gate, up = product(x, self._gate_up).chunk(2, dim=-1)
        return getattr(functional, activation)(gate) * up

    def _best(self, states: torch.Tensor) -> Candidates:
        """The best tokens by the head's input [R * d, H], with their probabilities among each other."""
        model, config = self._model, self._model.config
        logits = product(states, model.lm_head.weight).unflatten(0, (-1, config.depth))
        best, index = logits.topk(num_candidates(config), dim=-1)
        return Candidates(self._draft_ids[index], torch.softmax(best, dim=-1, dtype=torch.float32))

    @torch.inference_mode()
    def commit(self, rows: DeviceRows, accepted: AcceptedRows, taps: torch.Tensor | None) -> None:
        """Adds the accepted rows as real rows.

        Raises:
            ValueError: no taps, or not [M, 3H].
        """
        state, needed = self._state, (len(rows.tokens), self._model.fc.in_features)
        if taps is None or taps.shape != needed:
            raise ValueError(f"taps {None if taps is None else list(taps.shape)}; needed: {list(needed)}, one row each")
        real = self._real_rows(taps, accepted.next_tokens)
        # Tokens and positions of rows that were not accepted need not be valid ones.
        kv_row = torch.where(accepted.place < 0, accepted.place, rows.positions)  # a row at -1 is not written
        kept = state.newest.shape[1]
        self._rotated(real[:, kept:], state.turn[1:][kv_row], rows.slot_of_row, kv_row, rows.starts, 0)
        slots = torch.where(rows.starts[1:] > rows.starts[:-1], rows.slots, state.nowhere)
        state.newest.index_copy_(0, slots, real[:, :kept].index_select(0, accepted.last))

    def _real_rows(self, taps: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        """`DartModel.real_rows` and the projections of M rows, side by side as in `DartState.drafts`.

        Args:
            taps: [M, 3H].
            next_tokens: [M] int64; any number.
        """
        model, layer, hidden = self._model, self._model.midlayer, self._model.config.hidden_size
        dtype = model.fc.weight.dtype
        rows = torch.empty(len(taps), self._state.drafts.shape[2], dtype=dtype, device=taps.device)
        features = torch.mm(taps.to(dtype), model.fc.weight.t(), out=rows[:, :hidden])
        embeddings = self._embedding(next_tokens.clamp(0, self._embedding.num_embeddings - 1)).to(dtype)
        inputs = [self._normed(embeddings, layer.input_layernorm), self._normed(features, layer.hidden_norm)]
        torch.mm(torch.cat(inputs, dim=1), self._qkv.t(), out=rows[:, hidden:])
        return rows

    def _normed(self, x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
        return self._norm(x, norm.weight, norm.eps)

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Adds what `commit` put on the device to the lengths on the host.

        Raises:
            ValueError: more tokens than a slot has room for.
        """
        for slot, count in zip(slots, counts, strict=True):
            length = int(self._state.lengths[slot]) + count
            if count < 0 or length > self._state.max_len:
                room = self._state.max_len - int(self._state.lengths[slot])
                raise ValueError(f"slot {slot}: {count} tokens were committed; allowed: 0..{room}")
            self._state.lengths[slot] = length

    def trees(self, requests: Sequence[DraftRequest], drafted: Drafted, timer: Stopwatch) -> list[DraftTree]:
        """One pruned tree a request, from its candidates or as the device made it; row i of `drafted` is request i.

        Raises:
            ValueError: `drafted` is not what `draft` returns.
        """
        if isinstance(drafted, DraftTrees):
            with timer.stage("draft"):
                return trees_on_host(drafted, len(requests))
        if not isinstance(drafted, Candidates):
            raise ValueError(f"drafted is {type(drafted).__name__}; allowed: Candidates, DraftTrees")

        def candidates_of(drafting: list[int]) -> tuple[np.ndarray, np.ndarray]:
            ids, probs = _on_host(drafted.ids[: len(requests)], drafted.probs[: len(requests)])
            return ids[drafting], probs[drafting]

        return self._search(requests, candidates_of, timer)


def _on_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    """Copies to the host, waited for once."""
    copies = [t.to("cpu", non_blocking=True) for t in tensors]
    if tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()
    return [c.numpy() for c in copies]
