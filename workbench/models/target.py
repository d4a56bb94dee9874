"""The one adapter over a stock transformers causal LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.batch import DeviceRows
from workbench.models.attention import ATTENTION_NAME, PlainCall, TileCall, attention_by_name, register
from workbench.models.cache import SlotCache
from workbench.models.compiled import compile_model
from workbench.models.forwards import FORWARDS, ForwardReport
from workbench.models.fused import fuse_model, product, unfuse_model
from workbench.models.packed import PackedRows, causal_rows
from workbench.models.taps import tapped_inputs

#: Relative difference of logits and caches that rounding can explain: in float32 (True) and in shorter dtypes (False).
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
        forward: "stock" runs the model's own operations; "fused" a fixed sequence of kernels with the same arithmetic,
            for layers like Llama's and Qwen3's; "compiled" the model's own, compiled layer by layer at the first
            forward of each kind. The last two need the kernels' attention. "auto" fuses, or else compiles, on a CUDA
            device. Behind a fast forward weights may be changed in place (`load_state_dict`), not moved or replaced.

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
        _check_supported(model)
        register()
        self.model = model.eval()
        self._tile = attention_by_name(attention, model.get_input_embeddings().weight.device)
        self._forward = _checked_forward(forward, attention, self._tile, model)
        self.tokenizer = tokenizer
        self.config = model.config
        self.name = name or getattr(model.config, "_name_or_path", "") or model.config.model_type
        self.context_limit = _checked_limit(context_limit, model.config.max_position_embeddings)
        self.stop_ids = tuple(stop_ids) if stop_ids is not None else _default_stop_ids(model, tokenizer)
        self.forward_report: ForwardReport | None = None
        self._drop_stale()
        if model.config._attn_implementation != ATTENTION_NAME:
            self._adapt()
        if self._forward != "stock":
            self.forward_report = self._quicken()

    def _adapt(self) -> None:
        """Switches the attention; a model that does not work with it gets its own back, so it is refused each time."""
        own = self.model.config._attn_implementation
        ids = torch.arange(6, device=self.device) % self.vocab_size
        try:
            with torch.inference_mode():
                expected = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
            self.model.set_attn_implementation(ATTENTION_NAME)
            for number, layer in enumerate(self.model.get_decoder().layers):
                layer.self_attn.layer_number = torch.tensor(number)  # see `kernels.cached_attention`
            self._check(expected, self._probe()[0], "over packed rows")
        except (AttributeError, RuntimeError, TypeError) as error:
            self.model.set_attn_implementation(own)
            raise ValueError(f"{type(self.model).__name__} cannot run over packed rows: {error}") from error
        except ValueError:
            self.model.set_attn_implementation(own)
            raise

    def _check(self, expected: torch.Tensor, found: torch.Tensor, how: str) -> None:
        """Makes sure that the model still says the same as it did before.

        Args:
            expected, found: [6, V] logits.
            how: what is tried, for the error.

        Raises:
            ValueError: it does not, so it has something that is not known of (another head, scaled logits, attention
                sinks, ...).
        """
        scale = expected.abs().max()
        worst = (found - expected).abs().max() / scale
        comparable = scale > 0 and torch.isfinite(scale)
        if comparable and not worst <= self._tolerance:
            raise ValueError(
                f"{type(self.model).__name__} gives other logits {how} (relative difference {worst:.2g}): unsupported"
            )

    def _check_cache(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Makes sure that every layer caches the same: one that works otherwise can be drowned out in the logits.

        Args:
            expected, found: [layers, 2, ...] caches of the probe.

        Raises:
            ValueError: one does not.
        """
        size, off = (x.flatten(2).norm(dim=2) for x in (expected, found - expected))
        wrong = ((off <= self._tolerance * size) | ~torch.isfinite(size)).logical_not().nonzero()
        if len(wrong):
            layer, part = wrong[0].tolist()
            raise ValueError(
                f"{type(self.model).__name__} caches other {('keys', 'values')[part]} fused (layer {layer}, relative "
                f"difference {off[layer, part] / size[layer, part]:.2g}): unsupported"
            )

    @property
    def _tolerance(self) -> float:
        return _PROBE_TOLERANCE[self.dtype == torch.float32]

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [6, V] of six tokens over packed rows, and the cache [layers, 2, 1, rows, Hk, D] they leave."""
        ids = torch.arange(6, device=self.device) % self.vocab_size
        rows, cache = causal_rows(ids.tolist(), 0, 0, self.device), self.new_cache(1, 6)
        logits = self.forward(rows, cache).logits.float()
        return logits, cache.kv[:, :, :, :6].float()

    def _drop_stale(self) -> None:
        """Takes back the fused forward of a model that was copied or moved since.

        Raises:
            ValueError: the model is compiled, which cannot be taken back.
        """
        report = getattr(self.model, "workbench_forward", None)
        if report is None or not report.places.moved:
            return
        if report.kind == "compiled":
            raise ValueError("the model was copied or its weights were moved after it was compiled; load another copy")
        unfuse_model(self.model)
        del self.model.workbench_forward

    def _quicken(self) -> ForwardReport:
        """Gives the layers their fast forward; a model that has one keeps it.

        Raises:
            ValueError: the model has another one already, or cannot be fused.
        """
        model, wanted, report = self.model, self._forward, getattr(self.model, "workbench_forward", None)
        if report is not None:
            if wanted not in ("auto", report.kind):
                raise ValueError(f"forward={wanted!r}: the model is {report.kind} already; load another copy of it")
            return report
        if wanted != "compiled":
            try:
                report = self._fused()
            except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                if wanted == "fused":
                    raise ValueError(f"forward='fused': {error}") from error
        if report is None:
            report = ForwardReport("compiled")
            compile_model(model, report)
        model.workbench_forward = report
        return report

    def _fused(self) -> ForwardReport:
        """Fuses the model; whatever is raised, it is as it was then.

        Raises:
            ValueError: its layers are others, or do something else under the same names.
        """
        (logits, kv), report = self._probe(), ForwardReport("fused")
        try:
            if not fuse_model(self.model, report):
                raise ValueError(f"{type(self.model).__name__} has other layers than Llama and Qwen3")
            self.forward_report = report
            found_logits, found_kv = self._probe()
            self._check(logits, found_logits, "fused")
            self._check_cache(kv, found_kv)
        except Exception:
            unfuse_model(self.model)
            self.forward_report = None
            raise
        return report

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
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return SlotCache(
            config.num_hidden_layers, slots, max_len, config.num_key_value_heads, head_dim, self.dtype, self.device
        )

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


def _checked_forward(forward: str, attention: str, tile: str | None, model: PreTrainedModel) -> str:
    """The kind of forward, "auto" only where it has something to choose.

    Raises:
        ValueError: an unknown kind, or a fast one without the kernels' attention.
    """
    if forward not in FORWARDS:
        raise ValueError(f"forward={forward!r} is not one of {', '.join(FORWARDS)}")
    if forward == "auto":
        fast = tile is not None and model.get_input_embeddings().weight.device.type == "cuda"
        return "auto" if fast else "stock"
    if forward != "stock" and tile is None:
        raise ValueError(f"forward={forward!r} needs the kernels' attention, not attention={attention!r}")
    return forward


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
