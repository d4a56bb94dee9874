"""What a target is refused for, and what is taken for options that are not given."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from workbench.models.forwards import FORWARDS


def check_supported(model: PreTrainedModel) -> None:
    """Refuses what its configuration says packed rows do not cover; `workbench.models.adapt` tries the rest.

    Raises:
        ValueError: local attention, frequencies that change with the batch, capped scores or logits, or no output head.
    """
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


def checked_forward(forward: str, attention: str, tile: str | None, model: PreTrainedModel) -> str:
    """The kind of forward, "auto" only where it has something to choose.

    Args:
        forward, attention: as `Target` is asked for them.
        tile: variant of the kernels' attention; None for plain attention.
        model: whose device counts.

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


def checked_limit(limit: int | None, longest: int) -> int:
    """Most tokens of a request; None stands for the `longest` that the model has positions for.

    Raises:
        ValueError: outside 1..longest.
    """
    if limit is None:
        return longest
    if not 1 <= limit <= longest:
        raise ValueError(f"context_limit={limit} outside 1..{longest} (max_position_embeddings)")
    return limit


def default_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Ids that end an output: those of the generation config, or else of the tokenizer; none if neither knows one."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
