"""A Llama model in a GGUF file, rewritten as an ordinary model folder (safetensors, config, tokenizer).

Knows the GGUF container and its naming of Llama tensors; knows nothing of where a file comes from or where the folder
is kept. Reads the file directly instead of through transformers' own loader, which is slower, needs one more package
and reports the wrong end-of-turn id for chat models of this kind.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gguf import GGUFReader

logger = logging.getLogger(__name__)

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: GGUF's token type of control tokens such as `<|im_end|>`.
_CONTROL_TOKEN = 3


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes the model of the GGUF file `path` into `folder` as bfloat16.

    Args:
        path: GGUF file of architecture `llama` with a byte-level BPE vocabulary.
        folder: existing, empty folder.

    Raises:
        ValueError: the file is no GGUF file, another architecture, or its tensors do not fit its metadata.
    """
    # Heavy imports inside: a caller that finds a converted folder never pays for them.
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path}: not a readable GGUF file ({error})") from error
    architecture = _field(reader, path, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: general.architecture={architecture!r}, only 'llama' is converted")
    _write_model(reader, path, folder)
    _write_tokenizer(reader, path, folder)


def _field(reader: GGUFReader, path: Path, key: str, default: object = None):
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise ValueError(f"{path}: metadata field {key} is missing")
    return default


def _write_model(reader: GGUFReader, path: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    names = {tensor.name for tensor in reader.tensors}
    eos = int(_field(reader, path, "tokenizer.ggml.eos_token_id"))
    heads = int(_field(reader, path, "llama.attention.head_count"))
    hidden = int(_field(reader, path, "llama.embedding_length"))
    config = LlamaConfig(
        vocab_size=len(reader.get_field("tokenizer.ggml.tokens").data),
        hidden_size=hidden,
        intermediate_size=int(_field(reader, path, "llama.feed_forward_length")),
        num_hidden_layers=int(_field(reader, path, "llama.block_count")),
        num_attention_heads=heads,
        num_key_value_heads=int(_field(reader, path, "llama.attention.head_count_kv", heads)),
        head_dim=int(_field(reader, path, "llama.rope.dimension_count", hidden // heads)),
        max_position_embeddings=int(_field(reader, path, "llama.context_length")),
        rms_norm_eps=float(_field(reader, path, "llama.attention.layer_norm_rms_epsilon")),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(_field(reader, path, "llama.rope.freq_base", 10000.0)),
        },
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=int(_field(reader, path, "tokenizer.ggml.bos_token_id")),
        eos_token_id=eos,
        pad_token_id=int(_field(reader, path, "tokenizer.ggml.padding_token_id", eos)),
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    weights = _read_weights(reader, path, config, expected)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def _read_weights(reader: GGUFReader, path: Path, config, expected: dict[str, tuple[int, ...]]) -> dict:
    """Every tensor under its transformers name in bfloat16; strict about names and shapes."""
    import torch
    from gguf.quants import dequantize
    from tqdm.auto import tqdm

    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="converting", unit="tensor", leave=False, disable=None):
        name = _transformers_name(tensor.name)
        if name not in expected:
            raise ValueError(f"{path}: tensor {tensor.name!r} has no place in a Llama model of this size")
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.shape != expected[name]:
            raise ValueError(f"{path}: tensor {tensor.name!r} has shape {values.shape}, expected {expected[name]}")
        projection = name.split(".")[-2]
        if projection in heads:
            values = _half_split(values, heads[projection])
        weights[name] = torch.tensor(values).to(torch.bfloat16)  # copies: the file's memory map is read-only
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise ValueError(f"{path}: {len(missing)} tensors are missing, the first is that of {missing[0]}")
    return weights


def _transformers_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name that Llama lacks."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _BLOCK_NAMES:
        return None
    return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a query or key projection for rotary embeddings of the half-split kind.

    GGUF keeps the two rows of a rotation pair next to each other; transformers keeps all first members of a head
    before all second ones.

    Args:
        weight: [heads * D, H].
        heads: heads of this projection.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(reader: GGUFReader, path: Path, folder: Path) -> None:
    """Byte-level BPE from the vocabulary and merges in the metadata, with the chat template.

    Built here so that every supported transformers gives the same ids.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = _field(reader, path, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(f"{path}: tokenizer.ggml.model={kind!r}, only byte-level BPE ('gpt2') is converted")
    tokens = _field(reader, path, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, path, "tokenizer.ggml.merges")]
    types = _field(reader, path, "tokenizer.ggml.token_type", [0] * len(tokens))
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])

    def token_at(key: str, default: int | None = None) -> str:
        return tokens[int(_field(reader, path, f"tokenizer.ggml.{key}_token_id", default))]

    eos = int(_field(reader, path, "tokenizer.ggml.eos_token_id"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=token_at("bos"),
        eos_token=token_at("eos"),
        pad_token=token_at("padding", eos),
        unk_token=token_at("unknown", eos),
        clean_up_tokenization_spaces=False,
    )
    template = reader.get_field("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template.contents()
    tokenizer.save_pretrained(folder)
