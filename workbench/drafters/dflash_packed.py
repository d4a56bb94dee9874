"""DFlash's network over packed rows, as a captured round runs it.

The arithmetic is that of `dflash_model` and `dflash`. A block is a request's rows, which see each other in both
directions, and its layers are those of a target (`workbench.models.fused`). Context features become keys and values of
all layers in one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch.nn import functional

from workbench.batch import Batch, DeviceRows
from workbench.drafters.dflash_model import DFlashModel
from workbench.kernel_path import kernel
from workbench.models.fused import FusedCall, LayerWeights, layer_weights, product, run_layer
from workbench.types import MAX_TREE_ROWS


@dataclass(frozen=True)
class DFlashWeights:
    """A network's weights with its products merged; the network itself keeps views of most of them.

    Attributes:
        layers: the block's.
        fc: [H, m * H], hidden_norm: [H]: from taps to context features.
        context_kv: [layers * 2 * G * D, H], keys and values of every layer. A copy: between the layers' own lie
            queries, which context features do not have. `current_weights` makes it anew.
        norm: [H], behind the last layer.
        eps: of all norms.
        places: addresses of the network's parameters. All of them are held here, so no address can be given away.
    """

    layers: tuple[LayerWeights, ...]
    fc: torch.Tensor
    hidden_norm: torch.Tensor
    context_kv: torch.Tensor
    norm: torch.Tensor
    eps: float
    places: tuple[int, ...]

    @classmethod
    def of(cls, model: DFlashModel) -> DFlashWeights:
        """Merges the projections of equal input of a network, whose `Parameter` objects become others."""
        return cls(
            tuple(layer_weights(layer) for layer in model.layers),
            model.fc.weight.detach(),
            model.hidden_norm.weight.detach(),
            torch.cat(_keys_and_values(model)),
            model.norm.weight.detach(),
            model.config.rms_norm_eps,
            _places(model),
        )


def _keys_and_values(model: DFlashModel) -> list[torch.Tensor]:
    attentions = [layer.self_attn for layer in model.layers]
    return [m.weight.detach() for a in attentions for m in (a.k_proj, a.v_proj)]


def _places(model: DFlashModel) -> tuple[int, ...]:
    return tuple(weight.data_ptr() for weight in model.parameters())


def current_weights(model: DFlashModel, known: DFlashWeights | None) -> DFlashWeights:
    """The weights as they are now.

    Args:
        model: the network.
        known: what was made of it before, if anything.

    Returns:
        `known`, its copies brought up to date in place, as long as no weight was moved or replaced; graphs that read
        them go on with the new values then. Otherwise new ones.
    """
    with torch.inference_mode(False):  # merged ones become the network's own, which somebody may still want to train
        if known is None or known.places != _places(model):
            return DFlashWeights.of(model)
        torch.cat(_keys_and_values(model), out=known.context_kv)
        return known


def block_rows(batch: Batch, block: int) -> DeviceRows:
    """Rows of the blocks behind the contexts, of positions alone: the network embeds its tokens itself.

    Args:
        batch: the requests; those that pad have no rows.
        block: slots of a block.
    """
    positions = (batch.context_len[:, None] + torch.arange(block, device=batch.slots.device)).flatten()
    seen = (1 << block) - 1 if block < MAX_TREE_ROWS else -1
    starts = functional.pad((batch.limits > 0).cumsum(0) * block, (1, 0))
    slot_of_row = batch.slots.repeat_interleave(block, output_size=len(positions))
    ancestors = torch.full_like(positions, seen)
    requests = (batch.slots, starts, batch.context_len)
    return DeviceRows(
        positions,
        positions,
        slot_of_row,
        positions,
        ancestors,
        *requests,
        max_rows=block,
        max_context=batch.max_context,
    )


def block_states(
    weights: DFlashWeights,
    x: torch.Tensor,
    first_slot: int,
    kv: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    rows: DeviceRows,
    variant: str,
) -> torch.Tensor:
    """The blocks behind their contexts, in one forward.

    Args:
        weights: of the network.
        x: [R * block, H], embedded tokens; changed in place.
        first_slot: slot of a block that says the first draft.
        kv: [layers, 2, slots, L, G, D], written in place behind each context.
        turn: cos and sin [L, D / 2] fp32 of all positions.
        rows: those of the blocks.
        variant: tile of the attention.

    Returns:
        [R * n, H], inputs of the output head; those of padding requests mean nothing.
    """
    cos, sin = turn[0][rows.positions], turn[1][rows.positions]
    call = FusedCall(rows, kv, cos, sin, variant)
    for index, (layer, following) in enumerate(zip_longest(weights.layers, weights.layers[1:])):
        run_layer(x, layer, index, call, following)
    said = x.unflatten(0, (-1, rows.max_rows))[:, first_slot:].flatten(0, 1)
    return kernel("rms_norm", x.device)(said, weights.norm, weights.eps)


def write_context(
    weights: DFlashWeights,
    kv: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor],
    taps: torch.Tensor,
    rows: DeviceRows,
    place: torch.Tensor,
) -> None:
    """Keys and values of the accepted rows, of all layers.

    Args:
        weights: of the network.
        kv: [layers, 2, slots, L, G, D], written in place.
        turn: cos and sin [L, D / 2] fp32 of all positions.
        taps: [M, m * H].
        rows: the verified rows.
        place: [M] int64, negative: not accepted.
    """
    device = taps.device
    features = kernel("rms_norm", device)(product(taps, weights.fc), weights.hidden_norm, weights.eps)
    merged = product(features, weights.context_kv).unflatten(1, (len(weights.layers), -1))
    at = rows.positions.where(place >= 0, 0)  # other rows may claim any position
    kv_row = rows.positions.where(place >= 0, -1)
    cos, sin = turn[0][at], turn[1][at]
    write = kernel("rotate_write", device)
    for index, layer in enumerate(weights.layers):
        write(
            merged[:, index],
            None,
            layer.k_norm,
            layer.eps,
            cos,
            sin,
            kv,
            index,
            rows.slot_of_row,
            kv_row,
            rows.starts,
            num_heads=0,
        )
