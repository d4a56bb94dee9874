"""Sizes of a DART draft network, read from and written to the `config.json` of its published layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = ("silu", "gelu", "relu")
_LIMITS = {
    "vocab_size": 1 << 21,
    "draft_vocab_size": 1 << 21,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 12,
    "draft_length": 1 << 8,
    "max_position_embeddings": 1 << 24,
}


@dataclass(frozen=True)
class DartConfig:
    """Sizes of a DART draft network, with the field names of its `config.json`.

    Attributes:
        draft_length: m, mask slots behind the newest real row; `depth` = m + 1 positions are drafted.
        draft_vocab_size: V_d, rows of the draft head.
        rope_factor: linear position scaling; 1 for none.

    Raises:
        ValueError: a field outside its range.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    draft_length: int = 7
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_factor: float = 1.0

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise ValueError(f"{name}={value!r} outside 1..{limit} (whole numbers)")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} above vocab_size={self.vocab_size}")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r}; allowed: {', '.join(ACTIVATIONS)}")
        for name, low, high in (("rms_norm_eps", 1e-12, 1.0), ("rope_theta", 1.0, 1e12), ("rope_factor", 1e-3, 1e3)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{name}={value!r} outside {low}..{high}")

    @property
    def depth(self) -> int:
        """d, drafted positions."""
        return self.draft_length + 1

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], draft_vocab_size: int | None = None) -> DartConfig:
        """Reads the fields of a `config.json`; fields it does not know are ignored.

        Args:
            fields: the parsed file; `rope_theta` and `rope_parameters` are both understood.
            draft_vocab_size: used when the file has none (the rows of the head).

        Raises:
            ValueError: a missing or bad field, or a form that the layout does not cover.
        """
        required = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "draft_length")
        missing = [name for name in required if fields.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        if fields.get("pretraining_tp", 1) != 1:
            raise ValueError(f"pretraining_tp={fields['pretraining_tp']!r}; allowed: 1")
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        if fields.get("target_hidden_size", hidden) not in (None, hidden):
            raise ValueError(
                f"target_hidden_size={fields['target_hidden_size']!r} differs from hidden_size={hidden!r}: "
                "a draft network with an embedding of its own is not covered"
            )
        kept = {name: fields[name] for name in required}
        for name in ("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"):
            if fields.get(name) is not None:
                kept[name] = fields[name]
        kept.setdefault("num_key_value_heads", heads)
        if "head_dim" not in kept:
            kept["head_dim"] = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
        candidates = (fields.get("draft_vocab_size"), draft_vocab_size, fields["vocab_size"])
        kept["draft_vocab_size"] = next(size for size in candidates if size is not None)
        kept["rope_theta"], kept["rope_factor"] = _rope(fields)
        return cls(**kept)

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json`."""
        names = ("rope_theta", "rope_factor")
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in names}
        scaling = None if self.rope_factor == 1.0 else {"type": "linear", "factor": self.rope_factor}
        return fields | {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "pretraining_tp": 1,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "tie_word_embeddings": False,
        }


def _rope(fields: Mapping[str, Any]) -> tuple[float, float]:
    """(theta, linear factor) from either dialect."""
    parameters = fields.get("rope_parameters") or {}
    scaling = fields.get("rope_scaling") or parameters
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r} must be an object")
    theta = fields.get("rope_theta") or parameters.get("rope_theta") or 10000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear"):
        raise ValueError(f"rope type {kind!r}; allowed: default, linear")
    return theta, scaling.get("factor", 1.0) if kind == "linear" else 1.0
