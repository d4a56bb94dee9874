"""The one adapter over a stock transformers causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.models.attention import ATTENTION_NAME, PackedCall, attention_by_name, register
from workbench.models.cache import SlotCache
from workbench.models.packed import PackedRows, causal_rows

#: Relative difference of logits that rounding can explain: in float32 (True) and in shorter dtypes (False).
_PROBE_TOLERANCE = {True: 1e-3, False: 0.1}


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
    ) -> None:
        _check_supported(model)
        register()
        self.model = model.eval()
        self._attend = attention_by_name(attention, model.get_input_embeddings().weight.device)
        self.tokenizer = tokenizer
        self.config = model.config
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        self.context_limit = _checked_limit(context_limit, model.config.max_position_embeddings)
        self.stop_ids = tuple(stop_ids) if stop_ids is not None else _default_stop_ids(model, tokenizer)
        if model.config._attn_implementation != ATTENTION_NAME:
            self._adapt()

    def _adapt(self) -> None:
        """Switches the attention; a model that does not work with it gets its own back, so it is refused each time."""
        own = self.model.config._attn_implementation
        try:
            self._switch_checked()
        except ValueError:
            self.model.set_attn_implementation(own)
            raise

    @torch.inference_mode()
    def _switch_checked(self) -> None:
        """Switches the attention, and makes sure on six tokens that the model still says the same.

        Raises:
            ValueError: it does not, so it has something that packed rows do not know of (another head, scaled logits,
                attention sinks, ...).
        """
        name = type(self.model).__name__
        ids = torch.arange(6, device=self.device) % self.vocab_size
        try:
            expected = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
            self.model.set_attn_implementation(ATTENTION_NAME)
            rows = causal_rows(ids.tolist(), 0, 0, self.device)
            found = self.forward(rows, self.new_cache(1, 6)).logits.float()
        except (AttributeError, RuntimeError, TypeError) as error:
            raise ValueError(f"{name} cannot run over packed rows: {error}") from error
        scale = expected.abs().max()
        worst = (found - expected).abs().max() / scale
        comparable = scale > 0 and torch.isfinite(scale)
        if comparable and not worst <= _PROBE_TOLERANCE[self.dtype == torch.float32]:
            raise ValueError(
                f"{name} gives other logits over packed rows (relative difference {worst:.2g}): unsupported"
            )

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
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return SlotCache(
            config.num_hidden_layers, slots, max_len, config.num_key_value_heads, head_dim, self.dtype, self.device
        )

    @torch.inference_mode()
    def forward(
        self, rows: PackedRows, cache: SlotCache, taps: Sequence[int] = (), logit_rows: torch.Tensor | None = None
    ) -> TargetOutput:
        """Runs the rows, writing their K/V into `cache` behind each request's committed context.

        Args:
            rows: the packed rows.
            cache: from `new_cache` of this target; changed in place.
            taps: indices into `hidden_states` (0 embeddings, i the input of layer i; below the number of layers).
            logit_rows: [n] int64 rows whose logits are wanted; None for all.
        """
        bad = [t for t in taps if not 0 <= t < self.num_layers]
        if bad:
            raise ValueError(
                f"taps={bad} outside 0..{self.num_layers - 1}: only inputs of decoder layers can be tapped"
            )
        out = self.model.get_decoder()(
            input_ids=rows.tokens.unsqueeze(0),
            position_ids=rows.positions.unsqueeze(0),
            use_cache=False,
            output_hidden_states=bool(taps),
            packed=PackedCall(rows, cache, self._attend),
        )
        hidden = out.last_hidden_state[0]
        logits = self.lm_head(hidden if logit_rows is None else hidden[logit_rows])
        states = torch.cat([out.hidden_states[t][0] for t in taps], dim=-1) if taps else None
        return TargetOutput(logits, states)


def _check_supported(model: PreTrainedModel) -> None:
    config = model.config
    layer_types = getattr(config, "layer_types", None) or []
    other = sorted(set(layer_types) - {"full_attention"})
    if other:
        raise ValueError(f"layer_types={other}: packed rows cover full attention only")
    window = getattr(config, "sliding_window", None)
    if window and not layer_types and getattr(config, "use_sliding_window", True):
        raise ValueError(f"sliding_window={window}: packed rows cover full attention only")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        raise ValueError(
            f"rope_type={rope['rope_type']!r}: its frequencies depend on the longest request of a forward, so outputs "
            "would depend on the batch; allowed are types whose frequencies are fixed"
        )
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, field, None):
            raise ValueError(f"{field}={getattr(config, field)}: not covered by packed rows, must be unset")
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no output head; a causal LM is needed")


def _checked_limit(limit: int | None, longest: int) -> int:
    if limit is None:
        return longest
    if not 1 <= limit <= longest:
        raise ValueError(f"context_limit={limit} outside 1..{longest} (max_position_embeddings)")
    return limit


def _default_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
