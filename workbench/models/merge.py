"""Products that read the same input become one, by moving weights next to each other; nothing is copied twice.

Query, key and value projections, and gate and up projections, are three and two products over the same rows. Their
weights are put below each other in one matrix of which each module keeps a view, so state dicts, names and eager
arithmetic stay what they were. Under compilation every module asks for the whole product and takes its columns; the
compiler sees the same product several times and makes it once (`merge_equal_products`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


def merge_linears(modules: Sequence[nn.Linear]) -> torch.Tensor:
    """Makes the weights of linear layers without bias adjacent views of one matrix.

    Args:
        modules: of one input size, dtype and device.

    Returns:
        [sum of outputs, inputs], the rows of the modules one below the other. Merging merged ones again returns the
        matrix they share.

    Raises:
        ValueError: none given, or biases, sizes, dtypes or devices that differ.
    """
    if not modules:
        raise ValueError("modules is empty; at least one is needed")
    kinds = {(m.in_features, m.weight.dtype, m.weight.device) for m in modules}
    if len(kinds) != 1 or any(m.bias is not None for m in modules):
        raise ValueError(f"modules differ or have a bias: {modules}; allowed: equal inputs, dtype and device, no bias")
    weights = [m.weight.detach() for m in modules]
    sizes = [len(w) for w in weights]
    found = merged_view(weights)
    if found is not None:
        return found
    shared = torch.cat(weights)
    for module, part in zip(modules, shared.split(sizes), strict=True):
        module.weight = nn.Parameter(part, requires_grad=module.weight.requires_grad)
    return shared


def merged_view(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Matrices [outputs, inputs] of one dtype, below each other, without a copy.

    Returns:
        [sum of outputs, inputs], a view; None where they do not lie one behind the other in one storage.
    """
    first = weights[0]
    storage, place, columns = first.untyped_storage().data_ptr(), first.storage_offset(), first.shape[1]
    for weight in weights:
        if not weight.is_contiguous() or weight.untyped_storage().data_ptr() != storage:
            return None
        if weight.storage_offset() != place or weight.shape[1] != columns:
            return None
        place += weight.numel()
    # Not the stride of the first, which may be any number when it has a single row.
    return first.as_strided((sum(map(len, weights)), columns), (columns, 1))


class MergedLinear(nn.Linear):
    """A linear layer that is a part of a wider product.

    The matrix of all of them and the layer's own weight are one memory only as long as neither is copied, moved or
    replaced; whoever runs the compiled product makes sure of that (`workbench.models.forwards.WeightPlaces`).

    Args:
        module: the layer, already merged with its neighbours; its parameter is taken over.
        shared: [all outputs, inputs] the matrix of all of them.
        first: its first row there.
    """

    def __init__(self, module: nn.Linear, shared: torch.Tensor, first: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.first = module.in_features, module.out_features, first
        self.weight = module.weight
        self.register_parameter("bias", None)
        self.register_buffer("shared", shared, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inputs] -> [..., outputs]."""
        if torch.compiler.is_compiling():
            whole = functional.linear(x, self.shared)
            return whole[..., self.first : self.first + self.out_features]
        return functional.linear(x, self.weight)


def merge_layer(layer: nn.Module) -> int:
    """Merges q, k, v and gate, up of a decoder layer as transformers names them, where they are plain linear layers.

    Returns:
        Products saved.
    """
    saved = 0
    for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        for parent in layer.modules():
            members = [getattr(parent, name, None) for name in names]
            if all(type(m) is nn.Linear and m.bias is None for m in members):
                shared, first = merge_linears(members), 0
                for name, member in zip(names, members, strict=True):
                    setattr(parent, name, MergedLinear(member, shared, first))
                    first += member.out_features
                saved += len(names) - 1
    return saved


def merge_equal_products(graph: torch.fx.GraphModule) -> int:
    """Makes linear products of the same input and weight once; the graph is changed in place.

    Returns:
        Products saved.
    """
    first: dict[tuple, torch.fx.Node] = {}
    saved = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not functional.linear:
            continue
        key = (node.args, tuple(sorted(node.kwargs.items())))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.graph.erase_node(node)
            saved += 1
        else:
            first[key] = node
    graph.recompile()
    return saved
