"""Makes a stock model run over packed rows, and fast; whatever is done to it is tried on six tokens.

A configuration does not say all that a model does (another head, scaled logits, attention sinks, ...), so logits, and
for fused layers caches, must be those from before. A model that fails gets back what it had.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from workbench.models.attention import ATTENTION_NAME
from workbench.models.compiled import compile_model
from workbench.models.forwards import ForwardReport
from workbench.models.fused import fuse_model, unfuse_model
from workbench.models.packed import causal_rows

if TYPE_CHECKING:
    from workbench.models.target import Target

logger = logging.getLogger(__name__)

#: Difference of logits and caches, relative by Frobenius norms, that rounding can explain: in float32 (True) and in
#: shorter dtypes (False).
_TOLERANCE = {True: 1e-3, False: 0.1}


def adapt(target: Target) -> None:
    """Switches the attention; a model that does not work with it gets its own back, so it is refused each time.

    Raises:
        ValueError: it does not.
    """
    model = target.model
    own, ids = model.config._attn_implementation, _probe_ids(target)[None]
    try:
        with torch.inference_mode():
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
        model.set_attn_implementation(ATTENTION_NAME)
        for number, layer in enumerate(model.get_decoder().layers):
            layer.self_attn.layer_number = torch.tensor(number)  # see `kernels.cached_attention`
        check_logits(target, expected, _probe(target)[0], "over packed rows")
    except (AttributeError, RuntimeError, TypeError) as error:
        model.set_attn_implementation(own)
        raise ValueError(f"{type(model).__name__} cannot run over packed rows: {error}") from error
    except ValueError:
        model.set_attn_implementation(own)
        raise


def drop_stale(model: nn.Module) -> None:
    """Takes back the fused forward of a model that was copied or moved since.

    Raises:
        ValueError: the model is compiled, which cannot be taken back.
    """
    report = getattr(model, "workbench_forward", None)
    if report is None or not report.places.moved:
        return
    if report.kind == "compiled":
        raise ValueError("the model was copied or its weights were moved after it was compiled; load another copy")
    unfuse_model(model)
    del model.workbench_forward


def quicken(target: Target, wanted: str) -> None:
    """Gives the layers their fast forward and the target the report of it; a model that has one keeps it.

    Args:
        target: adapted, with the kernels' attention.
        wanted: "fused", "compiled", or "auto" for the first of them that works.

    Raises:
        ValueError: the model has another one already, or cannot be fused.
    """
    model = target.model
    report = getattr(model, "workbench_forward", None)
    if report is not None:
        if wanted not in ("auto", report.kind):
            raise ValueError(f"forward={wanted!r}: the model is {report.kind} already; load another copy of it")
        target.forward_report = report
        return
    reason = ""
    if wanted != "compiled":
        try:
            _fuse(target)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            if wanted == "fused":
                raise ValueError(f"forward='fused': {error}") from error
            reason = str(error)
            logger.warning("compiling the target, since it cannot be fused: %s", reason)
    if target.forward_report is None:
        report = ForwardReport("compiled", reason=reason)
        compile_model(model, report)
        target.forward_report = report
    model.workbench_forward = target.forward_report


def _fuse(target: Target) -> None:
    """Fuses the model; whatever is raised, it is as it was then.

    Raises:
        ValueError: its layers are others, or do something else under the same names.
    """
    (logits, kv), report = _probe(target), ForwardReport("fused")
    try:
        if not fuse_model(target.model, report):
            raise ValueError(f"{type(target.model).__name__} has other layers than Llama and Qwen3")
        target.forward_report = report
        found_logits, found_kv = _probe(target)
        check_logits(target, logits, found_logits, "fused")
        check_cache(target, kv, found_kv)
    except Exception:
        unfuse_model(target.model)
        target.forward_report = None
        raise


def check_logits(target: Target, expected: torch.Tensor, found: torch.Tensor, how: str) -> None:
    """Makes sure that the model still says the same as it did before.

    Args:
        target: whose they are.
        expected, found: [6, V] logits.
        how: what is tried, for the error.

    Raises:
        ValueError: it does not, so it has something that is not known of.
    """
    scale = expected.norm()
    off = (found - expected).norm() / scale
    comparable = scale > 0 and torch.isfinite(scale)
    if comparable and not off <= _tolerance(target):
        raise ValueError(
            f"{type(target.model).__name__} gives other logits {how} (relative difference {off:.2g}): unsupported"
        )


def check_cache(target: Target, expected: torch.Tensor, found: torch.Tensor) -> None:
    """Makes sure that every layer caches the same: one that works otherwise can be drowned out in the logits.

    Args:
        target: whose they are.
        expected, found: [layers, 2, ...] caches of the probe.

    Raises:
        ValueError: one does not.
    """
    size, off = (x.flatten(2).norm(dim=2) for x in (expected, found - expected))
    wrong = ((off <= _tolerance(target) * size) | ~torch.isfinite(size)).logical_not().nonzero()
    if len(wrong):
        layer, part = wrong[0].tolist()
        raise ValueError(
            f"{type(target.model).__name__} caches other {('keys', 'values')[part]} fused (layer {layer}, relative "
            f"difference {off[layer, part] / size[layer, part]:.2g}): unsupported"
        )


def _tolerance(target: Target) -> float:
    return _TOLERANCE[target.dtype == torch.float32]


def _probe_ids(target: Target) -> torch.Tensor:
    return torch.arange(6, device=target.device) % target.vocab_size


def _probe(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [6, V] of six tokens over packed rows, and the cache [layers, 2, 1, rows, Hk, D] they leave."""
    rows = causal_rows(_probe_ids(target).tolist(), 0, 0, target.device)
    cache = target.new_cache(1, 6)
    logits = target.forward(rows, cache).logits.float()
    return logits, cache.kv[:, :, :, :6].float()
