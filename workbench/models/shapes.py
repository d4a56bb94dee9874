"""Published sizes of real targets as plain data, and targets of random weights that have those sizes.

A forward takes as long with random weights as with trained ones, so latency can be measured where no checkpoint is at
hand. What such a target says means nothing, and greedily it soon loops: acceptance measured on it is no result.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workbench.models.target import Target

_FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
#: Standard deviation of random logits; their spread scales with it, near-ties relative to it do not change.
_LOGIT_DEVIATION = 3.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a causal LM, with the field names of its `config.json` where it has them.

    Attributes:
        name: how reports call it.
        family: "qwen3" (norms on query and key heads) or "llama".
        hidden_size: H.
        intermediate_size: width of the gated feed-forward block.
        vocab_size: V, rows of embedding and head.
        tied: the head is the embedding matrix itself.
    """

    name: str
    family: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    rope_theta: float
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 40960

    def __post_init__(self) -> None:
        if self.family not in _FAMILIES:
            raise ValueError(f"family={self.family!r}; allowed: {', '.join(_FAMILIES)}")
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1 and name != "tied":
                raise ValueError(f"{name}={value}; allowed: 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )

    def config(self) -> PreTrainedConfig:
        """The config of the stock transformers model."""
        sizes = asdict(self)
        name, family, tied, theta = (sizes.pop(k) for k in ("name", "family", "tied", "rope_theta"))
        config = _FAMILIES[family][0](
            **sizes,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            bos_token_id=None,
            eos_token_id=None,
        )
        config._name_or_path = name
        return config


def _qwen3(name: str, hidden: int, layers: int, heads: int, feed_forward: int, tied: bool) -> Shape:
    return Shape(f"Qwen3-{name}", "qwen3", hidden, layers, heads, 8, 128, feed_forward, 151_936, tied, 1e6)


_PUBLISHED = (
    Shape("SmolLM2-135M", "llama", 576, 30, 9, 3, 64, 1536, 49_152, True, 1e5, 1e-5, 8192),
    _qwen3("1.7B", 2048, 28, 16, 6144, True),
    _qwen3("4B", 2560, 36, 32, 9728, True),
    _qwen3("8B", 4096, 36, 32, 12_288, False),
    _qwen3("14B", 5120, 40, 40, 17_408, False),
)
#: Name -> sizes.
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _PUBLISHED}


def shape_by_name(name: str) -> Shape:
    """A published shape.

    Raises:
        ValueError: an unknown name.
    """
    try:
        return SHAPES[name]
    except KeyError:
        raise ValueError(f"shape={name!r} is unknown; allowed: {', '.join(SHAPES)}") from None


def random_target(
    shape: Shape | str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    num_layers: int | None = None,
    attention: str = "auto",
    forward: str = "auto",
) -> Target:
    """A stock transformers model of random weights, which are drawn on the device itself.

    Weights depend on seed, dtype and kind of device. Activations keep the size of order one that norms give them, at
    any depth; logits depend on the context and have a standard deviation of about 3. No token ends an output.

    Args:
        shape: sizes, or the name of published ones.
        dtype: of the weights.
        device: where they are made.
        seed: of the weights; the global random state stays as it is.
        num_layers: other than the shape's, to try things out.
        attention, forward: see `Target`.

    Raises:
        ValueError: an unknown shape, or sizes out of range.
    """
    shape = shape_by_name(shape) if isinstance(shape, str) else shape
    if num_layers is not None and num_layers != shape.num_hidden_layers:
        shape = replace(shape, num_hidden_layers=num_layers, name=f"{shape.name} (num_layers={num_layers})")
    model = _built(shape, dtype, torch.device(device))
    fill_random(model, seed)
    return Target(model, name=shape.name, stop_ids=(), attention=attention, forward=forward)


def _built(shape: Shape, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model on its device, in its dtype; buffers are right, what the weights are is up to transformers."""
    model_class = _FAMILIES[shape.family][1]
    kept = torch.get_default_dtype()
    # Transformers draws weights of its own from the global generator.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.set_default_dtype(dtype)
        try:
            model = model_class(shape.config())
        finally:
            torch.set_default_dtype(kept)
    return model.requires_grad_(False).eval()


@torch.no_grad()
def fill_random(module: nn.Module, seed: int) -> None:
    """Sets all parameters in place: matrices of variance 1 / inputs, norms one, biases zero, other vectors normal.

    Rows of embeddings and heads have a norm of 3, so that logits of normed states have a standard deviation of 3.

    Args:
        module: all of it on one device.
        seed: of the generator, on that device, which draws the parameters in the order of the module.
    """
    generator = torch.Generator(next(module.parameters()).device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            _fill_vector(name, parameter, generator)
            continue
        gain = _LOGIT_DEVIATION if name.endswith(("embed_tokens.weight", "lm_head.weight")) else 1.0
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5, generator=generator)


def _fill_vector(name: str, parameter: nn.Parameter, generator: torch.Generator) -> None:
    if "norm" in name:
        parameter.fill_(1.0)
    elif name.endswith("bias"):
        parameter.zero_()
    else:
        parameter.normal_(0.0, 1.0, generator=generator)
