"""The one adapter over a stock transformers causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.batch import DeviceRows
from workbench.models.adapt import adapt, drop_stale, quicken
from workbench.models.attention import ATTENTION_NAME, PlainCall, TileCall, attention_by_name, register
from workbench.models.cache import SlotCache, head_dim_of
from workbench.models.forwards import ForwardReport
from workbench.models.fused import product
from workbench.models.packed import PackedRows
from workbench.models.taps import tapped_inputs
from workbench.models.target_checks import check_supported, checked_forward, checked_limit, default_stop_ids


@dataclass(frozen=True)
class TargetOutput:
    """Result of one target forward.

    Attributes:
        logits: [rows asked for, V] in the dtype of the model.
        taps: [M, number of taps * H] hidden states, taps in the order asked for; None without taps.
    """

    logits: torch.Tensor
    taps: torch.Tensor | None


class Target:
    """A causal LM whose distribution must be kept, run over packed rows and a slot cache.

    Works for Llama- and Qwen-style models as they are: decoder with `embed_tokens`, an output head, rotary positions,
    full attention. The model and its config object are adapted in place (the attention implementation is switched), so
    use another copy of both for `model.generate`.

    Args:
        model: stock transformers causal LM in eval mode on its device.
        tokenizer: its tokenizer; None if prompts are always token ids.
        name: how reports call it.
        context_limit: most tokens (prompt and output) of a request; default `max_position_embeddings`.
        stop_ids: ids that end an output; default: eos ids of the generation config, then of the tokenizer.
        attention: see `attention_by_name`.
        forward: "stock" runs the model's own operations; "fused" a fixed sequence of kernels with the same arithmetic,
            for layers like Llama's and Qwen3's; "compiled" the model's own, compiled layer by layer at the first
            forward of each kind. The last two need the kernels' attention. "auto" fuses, or else compiles, on a CUDA
            device. Behind a fast forward weights may be changed in place (`load_state_dict`), not moved or replaced.
            A model that another target has made fast stays so around its layers, even with "stock": fused, it keeps
            the fused last norm and the rotary table; compiled, also the compiled output head.

    Attributes:
        forward_report: what the fast forward is and what it cost; None for "stock".

    Raises:
        ValueError: a model that packed rows do not cover (checked by running six tokens both ways), or a limit outside
            1..max_position_embeddings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
        context_limit: int | None = None,
        stop_ids: Sequence[int] | None = None,
        attention: str = "auto",
        forward: str = "auto",
    ) -> None:
        check_supported(model)
        register()
        self.model = model.eval()
        self._tile = attention_by_name(attention, model.get_input_embeddings().weight.device)
        wanted = checked_forward(forward, attention, self._tile, model)
        self.tokenizer = tokenizer
        self.config = model.config
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        self.context_limit = checked_limit(context_limit, model.config.max_position_embeddings)
        self.stop_ids = tuple(stop_ids) if stop_ids is not None else default_stop_ids(model, tokenizer)
        self.forward_report: ForwardReport | None = None
        drop_stale(model)
        if model.config._attn_implementation != ATTENTION_NAME:
            adapt(self)
        if wanted != "stock":
            quicken(self, wanted)

    @property
    def tiled(self) -> bool:
        """True if rows may be on the device alone, since the kernels attend."""
        return self._tile is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.embedding.weight.dtype

    @property
    def vocab_size(self) -> int:
        """V, rows of the output head."""
        return self.lm_head.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    @property
    def embedding(self) -> nn.Embedding:
        """Input embedding, [V, H]."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        """Output head, weight [V, H] (the embedding matrix itself when tied)."""
        return self.model.get_output_embeddings()

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation through the chat template, ready for the assistant's turn.

        Raises:
            ValueError: the target has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(f"target {self.name!r} has no tokenizer; pass prompts as token ids")
        if getattr(self.tokenizer, "chat_template", None) is None:
            return self.tokenizer.encode("\n\n".join(m["content"] for m in messages))
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; without a tokenizer, the ids separated by blanks."""
        if self.tokenizer is None:
            return " ".join(str(t) for t in token_ids)
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def new_cache(self, slots: int, max_len: int) -> SlotCache:
        """An empty KV cache for `slots` requests of up to `max_len` rows (rows of a round included)."""
        config = self.config
        heads = config.num_key_value_heads, head_dim_of(config)
        return SlotCache(config.num_hidden_layers, slots, max_len, *heads, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        rows: PackedRows | DeviceRows,
        cache: SlotCache,
        taps: Sequence[int] = (),
        logit_rows: torch.Tensor | None = None,
    ) -> TargetOutput:
        """Runs the rows, writing their K/V into `cache` behind each request's committed context.

        Args:
            rows: the packed rows; those that are on the device alone need the kernels' attention, and nothing of them
                is read on the host.
            cache: from `new_cache` of this target; changed in place.
            taps: indices into `hidden_states` (0 embeddings, i the input of layer i; below the number of layers).
            logit_rows: [n] int64 rows whose logits are wanted; None for all.

        Raises:
            ValueError: a tap that is none, rows on the device alone for plain attention, or weights that were moved.
        """
        bad = [t for t in taps if not 0 <= t < self.num_layers]
        if bad:
            raise ValueError(
                f"taps={bad} outside 0..{self.num_layers - 1}: only inputs of decoder layers can be tapped"
            )
        report = getattr(self.model, "workbench_forward", None)
        if report is not None and report.places.moved:
            raise ValueError(
                f"weights of {self.name!r} were moved or replaced after the model was {report.kind}, which keeps the "
                "old ones; load the model anew and make a target of it"
            )
        call = self._call(rows, cache)
        decoder = self.model.get_decoder()
        with tapped_inputs(decoder.layers, taps, call) as states:
            out = decoder(
                input_ids=rows.tokens.unsqueeze(0),
                position_ids=rows.positions.unsqueeze(0),
                use_cache=False,
                packed=call,
            )
        hidden = out.last_hidden_state[0]
        logits = self._logits(hidden if logit_rows is None else hidden[logit_rows])
        return TargetOutput(logits, torch.cat([states[t][0] for t in taps], dim=-1) if taps else None)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self.lm_head
        if self.forward_report is None or self.forward_report.kind != "fused" or head.bias is not None:
            return head(hidden)
        return product(hidden, head.weight.detach())

    def _call(self, rows: PackedRows | DeviceRows, cache: SlotCache) -> PlainCall | TileCall:
        if self._tile is not None:
            on_device = rows.on_device() if isinstance(rows, PackedRows) else rows
            return TileCall(on_device, cache.kv, self._tile, self.forward_report is not None)
        if isinstance(rows, PackedRows):
            return PlainCall(rows, cache)
        raise ValueError("attention='plain' reads its rows on the host; take attention='tile' for rows on the device")
