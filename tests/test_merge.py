"""Products of one input made one: where weights lie, what a compiler sees, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from workbench.models.forwards import ForwardReport
from workbench.models.merge import MergedLinear, merge_equal_products, merge_layer, merge_linears


def linears(*outputs: int, inputs: int = 6) -> list[nn.Linear]:
    return [nn.Linear(inputs, n, bias=False) for n in outputs]


def begins_at(weight: torch.Tensor) -> int:
    return weight.data_ptr() // weight.element_size()


@pytest.mark.parametrize("outputs", [(4,), (3, 5), (7, 1, 2), (1, 1)])
@pytest.mark.parametrize("inputs", [1, 6])
def test_weights_become_rows_of_one_matrix(outputs, inputs):
    modules = linears(*outputs, inputs=inputs)
    before = [m.weight.detach().clone() for m in modules]
    shared = merge_linears(modules)
    assert shared.shape == (sum(outputs), inputs) and not shared.requires_grad
    assert torch.equal(shared, torch.cat(before))
    place = begins_at(shared)
    for module, weight in zip(modules, before, strict=True):
        assert torch.equal(module.weight, weight) and begins_at(module.weight) == place
        place += weight.numel()
    with torch.no_grad():
        modules[-1].weight.fill_(2.5)  # a view, not a copy
    assert bool((shared[-outputs[-1] :] == 2.5).all()) and not bool((shared[: -outputs[-1]] == 2.5).any())


def test_merging_again_moves_nothing():
    modules = linears(3, 5, 2)
    first = merge_linears(modules)
    parameters = [m.weight for m in modules]
    again = merge_linears(modules)
    assert again.data_ptr() == first.data_ptr() and again.shape == first.shape and again.stride() == first.stride()
    assert all(m.weight is p for m, p in zip(modules, parameters, strict=True))
    part = merge_linears(modules[1:])
    assert part.data_ptr() == modules[1].weight.data_ptr() and torch.equal(part, first[3:])


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (0, 2), (0, 1, 1, 2)])
def test_merged_ones_in_another_order_are_moved(order):
    modules = linears(3, 3, 3)
    merge_linears(modules)
    asked = [modules[i] for i in order]
    expected = torch.cat([m.weight.detach() for m in asked])
    assert torch.equal(merge_linears(asked), expected)


def test_tied_weights_keep_their_values():
    """Twice the same parameter lies at one place, so it cannot be two neighbours."""
    one, other = linears(4, 4)
    other.weight = one.weight
    weight = one.weight.detach().clone()
    shared = merge_linears([one, other])
    assert torch.equal(shared, torch.cat([weight, weight]))
    assert torch.equal(one.weight, weight) and torch.equal(other.weight, weight)
    assert begins_at(other.weight) == begins_at(one.weight) + weight.numel()


def test_another_owner_of_a_weight_keeps_it():
    one, other = linears(4, 4)
    owner = nn.Embedding(4, 6, _weight=one.weight)
    weight = owner.weight.detach().clone()
    merge_linears([one, other])
    assert torch.equal(owner.weight, weight) and torch.equal(one.weight, weight)


def test_neighbours_with_the_stride_of_a_wider_matrix():
    """Single rows cut from a wider one lie next to each other, but their stride is that of the wide one."""
    wide = torch.randn(1, 12)
    modules = linears(1, 1)
    modules[0].weight, modules[1].weight = nn.Parameter(wide[:, :6]), nn.Parameter(wide[:, 6:])
    assert torch.equal(merge_linears(modules), wide.view(2, 6))


@pytest.mark.parametrize("gap", [0, 1])
def test_weights_in_one_storage_with_and_without_a_gap(gap):
    storage = torch.randn(40)
    modules = linears(3, 2)
    modules[0].weight = nn.Parameter(storage[:18].view(3, 6))
    modules[1].weight = nn.Parameter(storage[18 + gap : 30 + gap].view(2, 6))
    expected = torch.cat([m.weight.detach() for m in modules])
    shared = merge_linears(modules)
    assert torch.equal(shared, expected)
    assert (shared.data_ptr() == storage.data_ptr()) == (gap == 0)


def test_transposed_weights_are_moved():
    modules = linears(4, 4, inputs=4)
    for module in modules:
        module.weight = nn.Parameter(torch.randn(4, 4).t())
    expected = torch.cat([m.weight.detach() for m in modules])
    shared = merge_linears(modules)
    assert shared.is_contiguous() and torch.equal(shared, expected)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_wanted_as_before(frozen):
    modules = linears(2, 3)
    for module in modules:
        module.requires_grad_(not frozen)
    merge_linears(modules)
    assert all(m.weight.requires_grad != frozen and m.weight.is_leaf for m in modules)
    if not frozen:
        modules[1](torch.ones(1, 6)).sum().backward()
        assert torch.equal(modules[1].weight.grad, torch.ones(3, 6)) and modules[0].weight.grad is None


@pytest.mark.parametrize(
    "modules",
    [
        [],
        [nn.Linear(6, 2, bias=False), nn.Linear(5, 2, bias=False)],
        [nn.Linear(6, 2, bias=False), nn.Linear(6, 2, bias=False).half()],
        [nn.Linear(6, 2, bias=False), nn.Linear(6, 2, bias=False, device="meta")],
        [nn.Linear(6, 2, bias=False), nn.Linear(6, 2)],
    ],
    ids=["none", "inputs", "dtype", "device", "bias"],
)
def test_what_cannot_be_merged_is_refused_untouched(modules):
    weights = [m.weight for m in modules]
    with pytest.raises(ValueError, match="modules"):
        merge_linears(modules)
    assert all(m.weight is w for m, w in zip(modules, weights, strict=True))


def layer() -> nn.Module:
    """The projections of a decoder layer under their names, in two blocks."""
    attention, mlp = nn.Module(), nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = linears(8, 4, 4)
    attention.o_proj = nn.Linear(8, 6, bias=False)
    mlp.gate_proj, mlp.up_proj = linears(5, 5)
    whole = nn.Module()
    whole.self_attn, whole.mlp = attention, mlp
    return whole


def test_a_layer_keeps_names_values_and_results():
    whole = layer()
    state, x = copy.deepcopy(whole.state_dict()), torch.randn(2, 3, 6)
    expected = [p(x) for p in (whole.self_attn.q_proj, whole.self_attn.v_proj, whole.mlp.up_proj)]
    assert merge_layer(whole) == 3
    assert list(whole.state_dict()) == list(state)
    assert all(torch.equal(whole.state_dict()[name], state[name]) for name in state)
    found = [p(x) for p in (whole.self_attn.q_proj, whole.self_attn.v_proj, whole.mlp.up_proj)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    attention = whole.self_attn
    assert [m.first for m in (attention.q_proj, attention.k_proj, attention.v_proj)] == [0, 8, 12]
    assert attention.q_proj.shared is attention.v_proj.shared  # compilers tell tensors apart by identity
    assert type(attention.o_proj) is nn.Linear
    assert merge_layer(whole) == 0  # merged already


def test_a_merged_layer_takes_other_weights():
    """State loaded later must be what the merged product sees too."""
    whole, other = layer(), layer()
    merge_layer(whole)
    whole.load_state_dict(other.state_dict())
    attention = whole.self_attn
    expected = torch.cat([getattr(other.self_attn, n).weight for n in ("q_proj", "k_proj", "v_proj")])
    assert torch.equal(attention.k_proj.shared, expected)


@pytest.mark.parametrize("change", ["bias", "missing", "subclass"])
def test_other_parts_are_left_alone(change):
    class Other(nn.Linear):
        pass

    whole = layer()
    attention = whole.self_attn
    if change == "missing":
        del attention.v_proj
    else:
        attention.k_proj = nn.Linear(6, 4) if change == "bias" else Other(6, 4, bias=False)
    kept = attention.q_proj
    assert merge_layer(whole) == 1  # gate and up
    assert attention.q_proj is kept and isinstance(whole.mlp.gate_proj, MergedLinear)


class Projections(nn.Module):
    """Three products of one input, one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linears(8, 4, 3)
        self.other = nn.Linear(6, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        return y, self.q_proj(self.other(x))


def count(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is functional.linear for node in graph.graph.nodes)


def test_a_compiler_makes_the_merged_product_once():
    module, report = Projections(), ForwardReport("compiled")
    x = torch.randn(3, 6)
    expected = module(x)
    report.merged += merge_layer(module)
    products = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        before = count(graph)
        products.append((before, merge_equal_products(graph), count(graph)))
        return graph

    torch._dynamo.reset()
    found = torch.compile(module, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(found, expected)
    # q, k, v of x are one; `other`, and q behind it, have an input or a weight of their own.
    assert report.merged == 2 and products == [(5, 2, 3)]


def test_products_that_differ_stay():
    class Different(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            plain = functional.linear(x, w) + functional.linear(y, w)
            return plain + functional.linear(x, w, b) + functional.linear(x, w, bias=b) + functional.linear(x, w)

    graph = torch.fx.symbolic_trace(Different())
    x, y, w, b = torch.randn(2, 3), torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)
    expected = graph(x, y, w, b)
    assert merge_equal_products(graph) == 1
    assert count(graph) == 4
    graph.graph.lint()
    torch.testing.assert_close(graph(x, y, w, b), expected)
    assert merge_equal_products(graph) == 0
