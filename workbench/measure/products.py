"""Only the matrix products of a target forward, on random rows: what the rest of a forward is measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from workbench.models.merge import merged_view
from workbench.models.target import Target

#: Projections of a decoder layer whose inputs are the same, in order: where they are, and what they are called.
_PRODUCTS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)


class MatrixProducts:
    """The products of all layers and of the output head, one after another; biases are left out.

    Calling it runs them on fixed inputs and hands back the last result, [rows, V]. Nothing waits, so it can be captured
    in a CUDA graph. It reads the target's own weights, so it costs no memory of its own but for merged copies.

    Args:
        weights: matrices [outputs, inputs] in their order.
        rows: of every product.
        seed: of the inputs, standard normal.

    Attributes:
        rows: of every product.
        weights: the matrices.
    """

    def __init__(self, weights: Sequence[torch.Tensor], rows: int, seed: int = 0) -> None:
        if rows < 1:
            raise ValueError(f"rows={rows}; allowed: 1 or more")
        self.rows, self.weights = rows, tuple(weights)
        first = self.weights[0]
        generator = torch.Generator(first.device).manual_seed(seed)
        self._inputs = {
            size: torch.randn(rows, size, device=first.device, generator=generator).to(first.dtype)
            for size in sorted({w.shape[1] for w in self.weights})
        }

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        """Runs all products."""
        for weight in self.weights:
            out = functional.linear(self._inputs[weight.shape[1]], weight)
        return out


def matrix_products(target: Target, rows: int, merged: bool = True, seed: int = 0) -> MatrixProducts:
    """The matrix products of one target forward over `rows` rows, logits of all of them included.

    Args:
        target: a Llama- or Qwen3-style target.
        rows: of the forward.
        merged: query, key and value projections as one product, gate and up as another. Weights that lie side by side
            are used where they are (see `workbench.models.merge`); others are copied together.
        seed: of the inputs.

    Raises:
        ValueError: no rows, or layers with other projections.
    """
    weights: list[torch.Tensor] = []
    for layer in target.model.get_decoder().layers:
        for parent, names in _PRODUCTS:
            parts = [_weight(getattr(layer, parent, None), name) for name in names]
            weights += [_merged(parts)] if merged else parts
    return MatrixProducts([*weights, target.lm_head.weight.detach()], rows, seed)


def _merged(weights: list[torch.Tensor]) -> torch.Tensor:
    view = merged_view(weights)
    return torch.cat(weights) if view is None else view


def _weight(parent: nn.Module | None, name: str) -> torch.Tensor:
    module = getattr(parent, name, None)
    if not isinstance(module, nn.Linear):
        raise ValueError(f"a decoder layer has no linear {name}; allowed: layers as in Llama and Qwen3")
    return module.weight.detach()
