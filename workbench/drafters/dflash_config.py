"""Sizes of a DFlash draft network, read from the `config.json` of either published dialect.

z-lab keeps the fields of the method in an object `dflash_config` and trains slot j of a block to say token j of it;
DeepSpec keeps them at the top level and trains slot j to say token j + 1 (`shifted`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LIMITS = {
    "vocab_size": 1 << 21,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 1 << 7,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 12,
    "num_target_layers": 1 << 10,
    "block_size": 1 << 8,
    "max_position_embeddings": 1 << 24,
}
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_target_layers",
)
_OPTIONAL = ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")
#: Fields whose other values change the arithmetic, with the values that are covered.
_FIXED: dict[str, tuple[object, ...]] = {
    "attention_bias": (None, False),
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
}


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes of a DFlash draft network, with the field names of its `config.json`.

    Attributes:
        num_hidden_layers: layers of the draft network.
        num_target_layers: layers of the target.
        target_layer_ids: target layers (from 0, ascending) whose outputs are read; -1 is the embedding.
        mask_token_id: token whose embedding fills the slots behind the anchor.
        block_size: slots of a block, the anchor's included.
        shifted: slot j says the token after slot j, and the anchor's slot drafts too; otherwise slot j says its own.

    Raises:
        ValueError: a field outside its range.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    shifted: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            check_whole(name, getattr(self, name), 1, limit)
        check_whole("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        if not isinstance(self.shifted, bool):
            raise ValueError(f"shifted={self.shifted!r}; allowed: true, false")
        if self.num_drafts < 1:
            raise ValueError(f"block_size={self.block_size}: a block that is not shifted needs 2 slots or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary positions turn pairs")
        for name, low, high in (("rms_norm_eps", 1e-12, 1.0), ("rope_theta", 1.0, 1e12)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{name}={value!r} outside {low}..{high}")
        self._check_layer_ids()

    def _check_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if not isinstance(ids, tuple) or not ids:
            raise ValueError(f"target_layer_ids={ids!r} must be a list of one layer or more")
        # The last layer's output cannot be read: transformers returns it behind the final norm.
        for value in ids:
            check_whole("target_layer_ids", value, -1, self.num_target_layers - 2)
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"target_layer_ids={list(ids)} must ascend")

    @property
    def num_drafts(self) -> int:
        """Tokens that one block drafts."""
        return self.block_size if self.shifted else self.block_size - 1

    @property
    def taps(self) -> tuple[int, ...]:
        """The tapped states as indices into `hidden_states` of transformers (0 embeddings)."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DFlashConfig:
        """Reads the fields of a `config.json`; fields it does not know are ignored.

        Args:
            fields: the parsed file, in either dialect; `rope_theta` and `rope_parameters` are both understood.

        Raises:
            ValueError: a missing or bad field, or a network that is no DFlash network with full attention.
        """
        method = _method_fields(fields)
        missing = [name for name in _REQUIRED if fields.get(name) is None]
        missing += [name for name in ("mask_token_id", "block_size") if method.get(name) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        _check_form(fields)
        kept = {name: fields[name] for name in _REQUIRED}
        kept |= {name: fields[name] for name in _OPTIONAL if fields.get(name) is not None}
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        kept.setdefault("num_key_value_heads", heads)
        if "head_dim" not in kept:
            kept["head_dim"] = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
        kept["mask_token_id"], kept["block_size"] = method["mask_token_id"], method["block_size"]
        ids = method.get("target_layer_ids")
        if ids is None:
            ids = default_layer_ids(fields["num_target_layers"], fields["num_hidden_layers"])
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise ValueError(f"target_layer_ids={ids!r} must be a list of one layer or more")
        return cls(**kept, target_layer_ids=tuple(ids), shifted=_is_shifted(fields, method), rope_theta=_theta(fields))

    def to_dict(self) -> dict[str, Any]:
        """The content of a `config.json` in z-lab's dialect; `shift_label` stands in it only for a shifted block."""
        method = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        if self.shifted:
            method["shift_label"] = True
        return {name: getattr(self, name) for name in (*_REQUIRED, *_OPTIONAL)} | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "dflash_config": method,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "attention_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Target layers that a draft network of `num_layers` layers reads when its file names none.

    Evenly spaced from layer 1 to the third last one; the middle layer for a network of one layer.

    Raises:
        ValueError: the target has too few layers for that many different ones.
    """
    check_whole("num_hidden_layers", num_layers, 1, _LIMITS["num_hidden_layers"])
    check_whole("num_target_layers", num_target_layers, 3, _LIMITS["num_target_layers"])
    if num_layers == 1:
        return (num_target_layers // 2,)
    ids = tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))
    if len(set(ids)) < num_layers or ids[-1] < ids[0]:
        raise ValueError(
            f"num_target_layers={num_target_layers} is too few for {num_layers} different layers to read; allowed: "
            f"{num_layers + 3} or more, or name target_layer_ids"
        )
    return ids


def _method_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the method, which lie at the top level, inside `dflash_config`, or in both places."""
    nested = fields.get("dflash_config")
    if nested is None:
        nested = {}
        if not _is_deepspec(fields):
            raise ValueError("config.json has neither dflash_config nor markov_rank, so it is no DFlash network")
    if not isinstance(nested, Mapping):
        raise ValueError(f"dflash_config={nested!r} must be an object")
    return {**fields, **{name: value for name, value in nested.items() if value is not None}}


def _is_deepspec(fields: Mapping[str, Any]) -> bool:
    return fields.get("markov_rank") is not None or "DSpark" in str(fields.get("architectures"))


def _is_shifted(fields: Mapping[str, Any], method: Mapping[str, Any]) -> bool:
    """Which token a slot says; refuses networks with more to them than DFlash."""
    kind = method.get("projector_type")
    if kind not in (None, "dflash"):
        raise ValueError(f"projector_type={kind!r}; allowed: dflash (this is a network of another method)")
    if method.get("markov_rank") or method.get("enable_confidence_head"):
        raise ValueError(
            f"markov_rank={method.get('markov_rank')!r}, enable_confidence_head="
            f"{method.get('enable_confidence_head')!r}; allowed: 0 and false (with either this is a DSpark network)"
        )
    return _is_deepspec(fields) or method.get("shift_label", False)


def _check_form(fields: Mapping[str, Any]) -> None:
    for name, allowed in _FIXED.items():
        if fields.get(name) not in allowed:
            raise ValueError(f"{name}={fields[name]!r}; allowed: {allowed[-1]!r}")
    kinds = fields.get("layer_types")
    if not (kinds is None or isinstance(kinds, list | tuple)):
        raise ValueError(f"layer_types={kinds!r} must be a list")
    other = sorted(set(map(str, kinds or ())) - {"full_attention"})
    if other:
        raise ValueError(f"layer_types={other}; allowed: full_attention")


def _theta(fields: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies from wherever it stands; scaled positions and contradictions are refused."""
    thetas = {"rope_theta": fields.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r} must be an object")
        for kind in (value.get("rope_type"), value.get("type")):
            if kind not in (None, "default"):
                raise ValueError(f"{name}: rope type {kind!r}; allowed: default")
        thetas[f"{name}.rope_theta"] = value.get("rope_theta")
    named = {name: theta for name, theta in thetas.items() if theta is not None}
    found = list(named.values())
    if any(theta != found[0] for theta in found[1:]):
        raise ValueError(f"different bases of the rotary frequencies: {named}; allowed: one")
    return found[0] if found else 1e6


def check_whole(name: str, value: object, low: int, high: int) -> None:
    """Raises ValueError unless `value` is a whole number in low..high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}={value!r} outside {low}..{high} (whole numbers)")
