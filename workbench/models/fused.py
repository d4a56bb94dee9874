"""A decoder layer of Llama's kind in eight launches: four products, and what lies between them fused.

    x += out(attention(rotate(norm(qkv(norm(x))))))      x += down(silu(gate) * up of norm(x))

The stock layers of transformers say the same in some thirty operations. Weights stay where the model has them, merged
into fewer matrices (`workbench.models.merge`); the residual stream is updated in place by the products themselves, or,
where few rows make it pay to cut a product, by the norm behind it. The first norm of a layer is made at the end of the
layer before. Attention takes one launch more where its keys are split, and one where it does not rotate its own rows.
Nothing here reads on the host, so it can be captured. A single row takes matrix-vector kernels, as libraries for matrix
products leave a third of the bandwidth unused there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from workbench.batch import DeviceRows
from workbench.kernel_path import kernel
from workbench.models.attention import TileCall
from workbench.models.forwards import ForwardReport, NormAhead, SwitchedForward, WeightPlaces
from workbench.models.merge import merge_linears
from workbench.types import MAX_TREE_ROWS

#: Rows up to which a product is cut in halves along K, those up to which one is whose K is at least twice its outputs,
#: and weights that it has at least. In whole forwards of Qwen3-8B's shape on an H200 it paid to cut the output
#: projection (0.7 % at 16 and 32 rows; at 256 it cost 0.4 %) and the down projection (0.3 to 1.5 %, 16 to 256 rows).
#: At 512 rows both products alone took 7 to 18 % more. Smaller matrices were not tried.
CUT_ROWS, CUT_ROWS_LONG, CUT_WEIGHTS = 128, 256, 8_000_000


@dataclass(frozen=True)
class LayerWeights:
    """What a layer is made of.

    Attributes:
        norm1, norm2: [H], before attention and before the feed-forward block.
        qkv: [(heads + 2 * KV heads) * D, H].
        q_norm, k_norm: [D] norms of every query and key head, or None.
        out: [H, heads * D].
        gate_up: [2 F, H], down: [H, F].
        num_heads, head_dim: of the queries.
        eps: of the norms.
        scale: factor on the scores.
    """

    norm1: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    norm2: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    num_heads: int
    head_dim: int
    eps: float
    scale: float


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [N, K] -> [M, N]."""
    if len(x) == 1 and x.device.type == "cuda":
        return kernel("matvec", x.device)(x, weight)
    return functional.linear(x, weight)


def add_product(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Adds x [M, K] times weight [N, K] to total [M, N], in place."""
    if len(x) == 1 and x.device.type == "cuda":
        kernel("matvec", x.device)(x, weight, total, out=total)
    else:
        total.addmm_(x, weight.t())


def add_normed(
    total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`add_product`, and the RMS norm [M, N] of what `total` is then.

    Where the product would be cut along K by the library and its parts added by a kernel of their own, that kernel is
    ours and norms in the same pass.
    """
    if _cut_pays(x, weight):
        return kernel("add_norm", x.device)(total, product_in_halves(x, weight), norm_weight, eps)
    add_product(total, x, weight)
    return kernel("rms_norm", x.device)(total, norm_weight, eps)


def product_in_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K], weight [N, K], both dense, K even -> [2, M, N] float32, whose sum is the product."""
    left, right = (matrix.unflatten(1, (2, -1)).transpose(0, 1) for matrix in (x, weight))
    if x.device.type == "cuda":
        return torch.bmm(left, right.mT, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.mT.float())


def _cut_pays(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a product has so few tiles that two halves of it keep the device busier."""
    rows, inner = x.shape
    most = CUT_ROWS_LONG if inner >= 2 * len(weight) else CUT_ROWS
    if x.device.type != "cuda" or x.dtype == torch.float32 or not 1 < rows <= most or inner % 16:
        return False
    return weight.numel() >= CUT_WEIGHTS and x.is_contiguous() and weight.is_contiguous()


def gated(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [M, H] and gate_up [2 F, H] -> [M, F]."""
    if len(x) == 1 and x.device.type == "cuda":
        return kernel("matvec_silu", x.device)(x, gate_up)
    return kernel("silu_mul", x.device)(functional.linear(x, gate_up))


@dataclass(frozen=True)
class FusedCall:
    """What all layers of one forward share.

    Attributes:
        rows: the packed rows.
        kv: [layers, 2, slots, L, Hk, D], keys and values; written in place.
        cos, sin: [M, D / 2 or more], of the rows' positions; the first D / 2 columns count.
        variant: tile of the attention, see `kernels.tile_attention`.
        ahead: norms that a layer makes for the next one.
    """

    rows: DeviceRows
    kv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    variant: str = "auto"
    ahead: NormAhead = field(default_factory=NormAhead)


def attention(qkv: torch.Tensor, weights: LayerWeights, layer: int, call: FusedCall) -> torch.Tensor:
    """Norms, rotates and caches the merged product [M, (heads + 2 KV heads) D], and attends: [M, heads * D]."""
    rows = call.rows
    attended = kernel("rotate_attend", qkv.device)(
        qkv,
        weights.q_norm,
        weights.k_norm,
        weights.eps,
        call.cos,
        call.sin,
        call.kv,
        layer,
        rows.slot_of_row,
        rows.kv_row,
        rows.slots,
        rows.starts,
        rows.context_len,
        rows.ancestors,
        weights.num_heads,
        weights.scale,
        rows.max_rows,
        rows.max_context,
        call.variant,
    )
    return attended.flatten(1)


def run_layer(
    x: torch.Tensor, weights: LayerWeights, layer: int, call: FusedCall, following: LayerWeights | None = None
) -> None:
    """Moves the residual stream x [M, H] through a layer, in place.

    Args:
        x: what the layer before left, the same tensor in all layers.
        weights: of the layer.
        layer: its number in the cache.
        call: shared by all layers.
        following: the layer that runs next on the same tensor; its first norm is made here.
    """
    normed = call.ahead.take(x, weights.norm1)
    if normed is None:
        normed = kernel("rms_norm", x.device)(x, weights.norm1, weights.eps)
    attended = attention(product(normed, weights.qkv), weights, layer, call)
    normed = add_normed(x, attended, weights.out, weights.norm2, weights.eps)
    values = gated(normed, weights.gate_up)
    if following is None:
        add_product(x, values, weights.down)
    else:
        normed = add_normed(x, values, weights.down, following.norm1, following.eps)
        call.ahead.put(x, following.norm1, normed)


def layer_weights(layer: nn.Module) -> LayerWeights | None:
    """Weights of a decoder layer as transformers builds it, or of one with the same names; merges its projections.

    Returns:
        None if the layer has other parts than a Llama or Qwen3 layer, so that this arithmetic is not its own. That it
        is must still be tried: a name says nothing about a norm or a scale.
    """
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    needed = {
        layer: ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp"),
        attention: ("q_proj", "k_proj", "v_proj", "o_proj"),
        mlp: ("gate_proj", "up_proj", "down_proj"),
    }
    if None in needed or not all(hasattr(module, name) for module, names in needed.items() for name in names):
        return None
    linears = [getattr(m, n) for m, names in needed.items() for n in names if n.endswith("_proj")]
    if any(type(m) is not nn.Linear or m.bias is not None for m in linears):
        return None
    extra = {name for name, _ in attention.named_children()} - set(needed[attention])
    if {n for n, _ in layer.named_children()} != set(needed[layer]) or not extra <= {"q_norm", "k_norm"}:
        return None
    eps = _eps(layer.input_layernorm)
    norms = (layer.post_attention_layernorm, *(getattr(attention, n) for n in sorted(extra)))
    if eps is None or len(extra) == 1 or any(_eps(n) != eps for n in norms):
        return None
    q_norm, k_norm = (getattr(attention, n).weight.detach() if extra else None for n in ("q_norm", "k_norm"))
    head_dim = attention.head_dim
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        merge_linears([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm,
        k_norm,
        attention.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        merge_linears([mlp.gate_proj, mlp.up_proj]),
        mlp.down_proj.weight.detach(),
        attention.q_proj.out_features // head_dim,
        head_dim,
        eps,
        getattr(attention, "scaling", head_dim**-0.5),
    )


def fuse_model(model: nn.Module, report: ForwardReport) -> bool:
    """Gives the decoder layers of an adapted model a fused forward, in place; see `compile_model`.

    Rotary positions come from a table of all positions, made once by the model's own function.

    Args:
        model: adapted for packed rows.
        report: gets the products that merging saves, and the places of the weights, which must not be moved any more.

    Returns:
        False if one of the layers is of another kind; nothing is changed then, nor if anything is raised, but for where
        weights lie.
    """
    decoder = model.get_decoder()
    weights = [layer_weights(layer) for layer in decoder.layers]
    if None in weights or _eps(decoder.norm) is None or model.config.hidden_act not in ("silu", "swish"):
        return False
    norm, rotary = _NormForward(decoder.norm), _RotaryTable(decoder.rotary_emb, model)
    following = [*weights[1:], None]
    for number, (layer, its, next_one) in enumerate(zip(decoder.layers, weights, following, strict=True)):
        layer.forward = SwitchedForward(layer.forward, _LayerForward(its, number, next_one))
        report.merged += 3
    decoder.norm.forward, decoder.rotary_emb.forward = norm, rotary
    report.places = WeightPlaces([*decoder.layers, decoder.norm])
    return True


def unfuse_model(model: nn.Module) -> None:
    """Takes `fuse_model` back; a model that is not fused stays as it is."""
    decoder = model.get_decoder()
    for layer in decoder.layers:
        if isinstance(layer.forward, SwitchedForward):
            layer.forward = layer.forward.plain
    for module in (decoder.norm, decoder.rotary_emb):
        vars(module).pop("forward", None)


class _LayerForward:
    """A layer's forward over packed rows, as the decoder calls it."""

    def __init__(self, weights: LayerWeights, number: int, following: LayerWeights | None) -> None:
        self._weights, self._number, self._following = weights, number, following

    def __call__(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        packed: TileCall,
        **_: object,
    ) -> torch.Tensor:
        cos, sin = position_embeddings
        call = FusedCall(packed.rows, packed.kv, cos[0], sin[0], packed.variant, packed.ahead)
        run_layer(hidden_states[0], self._weights, self._number, call, self._following)
        return hidden_states


class _NormForward:
    """The last norm as one kernel."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm, self._eps = norm, _eps(norm)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        return kernel("rms_norm", x.device)(rows, self._norm.weight.detach(), self._eps).view(x.shape)


class _RotaryTable:
    """Rotary positions looked up instead of computed anew in every forward."""

    def __init__(self, rotary: nn.Module, model: nn.Module) -> None:
        weight = model.get_input_embeddings().weight
        # A tree's rows stand up to 64 positions behind the last one that a prompt or an output may have.
        length = model.config.max_position_embeddings + MAX_TREE_ROWS
        positions = torch.arange(length, device=weight.device)[None]
        with torch.no_grad():
            self._cos, self._sin = (table[0] for table in rotary(weight[:1, None], positions))

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cos[position_ids], self._sin[position_ids]


def _eps(norm: nn.Module) -> float | None:
    """Epsilon of an RMS norm under the names it goes by."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None
