"""One layer's step as one operator: the two kernels behind it, the layer they touch, and everything they must not."""

from __future__ import annotations

import pytest
import torch

from kernels.cached_attention import cached_attention
from kernels.ref.kv_write import kv_write as write_reference
from kernels.ref.tile_attention import tile_attention_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, SLOTS, LENGTH = 3, 4, 81
# Error over reference, both as Euclidean norms.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def _arguments(
    rows: tuple[int, ...] = (5, 0, 1, 16),
    contexts: tuple[int, ...] = (7, 3, 64, 0),
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    causal: bool = False,
    sentinels: int = 2,
    layer: int = 1,
) -> dict:
    """Requests in slots 3, 2, 1, 0; the cache holds NaN but for their contexts in one layer."""
    live, count = sum(rows), sum(rows) + sentinels
    slots = list(range(SLOTS))[::-1][: len(rows)]
    kv = torch.full((LAYERS, 2, SLOTS, LENGTH, heads[1], head_dim), torch.nan, dtype=dtype)
    slot_of_row, kv_row, bits = [], [], []
    for slot, number, context in zip(slots, rows, contexts, strict=True):
        kv[layer, :, slot, :context] = torch.randn(2, context, heads[1], head_dim).to(dtype)
        slot_of_row += [slot] * number
        kv_row += range(context, context + number)
        tree: list[int] = []
        for node in range(number):
            tree.append((tree[(node - 1) // 2] if node else 0) | 1 << node)
        bits += tree
    query = torch.randn(count, heads[0], head_dim).to(dtype)
    key, value = torch.randn(2, count, heads[1], head_dim).to(dtype)
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "kv": kv,
        "slot_of_row": torch.tensor(slot_of_row + [0] * sentinels),
        "kv_row": torch.tensor(kv_row + [0] * sentinels),
        "ancestors": None if causal else torch.tensor(bits + [-1] * sentinels),
        "slots": torch.tensor(slots),
        "starts": torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()]),
        "context_len": torch.tensor(contexts),
    }
    assert live == len(slot_of_row)
    given = {name: None if x is None else x.to(DEVICE) for name, x in tensors.items()}
    order = ["query", "key", "value", "kv", "layer", "slot_of_row", "kv_row", "ancestors", "slots", "starts"]
    given |= {"layer": torch.tensor(layer), "scale": head_dim**-0.5, "max_rows": 16, "max_context": 64}
    return {name: given[name] for name in [*order, "context_len", "scale", "max_rows", "max_context"]}


def _expected(given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and cache by the two references, in double precision, one after the other."""
    kv, layer = given["kv"].clone(), int(given["layer"])
    keys, values = kv[layer, 0], kv[layer, 1]
    places = given["slot_of_row"], given["kv_row"], given["starts"]
    write_reference(given["key"], given["value"], keys, values, *places)
    metadata = given["slots"], given["starts"], given["context_len"], given["ancestors"]
    attended = tile_attention_tensors(
        given["query"].double(), keys.double(), values.double(), *metadata, given["scale"]
    )
    return attended, kv


@pytest.mark.parametrize("variant", ["auto", "paper", "packed"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((3, 1), 12), ((2, 2), 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_then_attends_as_the_references_do(dtype, heads, head_dim, causal, variant):
    given = _arguments(heads=heads, head_dim=head_dim, dtype=dtype, causal=causal)
    attended, kv = _expected(given)
    found = cached_attention(**given, variant=variant)
    assert found.shape == given["query"].shape and found.dtype == dtype
    difference = (found.double() - attended).norm() / attended.norm()
    assert difference <= LIMITS[dtype]
    torch.testing.assert_close(given["kv"], kv, rtol=0, atol=0, equal_nan=True)
    assert not bool(found[22:].any())  # rows of no request


@pytest.mark.parametrize("layer", range(LAYERS))
def test_other_layers_are_not_touched(layer):
    given = _arguments(layer=layer)
    before = given["kv"].clone()
    found = cached_attention(**given)
    assert bool(torch.isfinite(found).all())
    for other in range(LAYERS):
        same = torch.equal(given["kv"][other].nan_to_num(7), before[other].nan_to_num(7))
        assert same == (other != layer)
    written = (torch.isfinite(given["kv"][layer]) & torch.isnan(before[layer])).any(-1).any(-1)
    places = torch.stack([given["slot_of_row"], given["kv_row"]], dim=1)[:22].tolist()
    assert written.nonzero().tolist() == sorted([k, *place] for k in (0, 1) for place in places)


def test_layers_differ():
    """The same call on two layers sees two contexts."""
    given = _arguments()
    given["kv"][2] = given["kv"][1] * 2
    one = cached_attention(**given)
    other = cached_attention(**{**given, "layer": torch.tensor(2)})
    assert not torch.allclose(one, other)
    attended, _ = _expected({**given, "layer": torch.tensor(2)})
    torch.testing.assert_close(other.double(), attended, rtol=1e-4, atol=1e-5)


def test_what_rows_of_nobody_hold_does_not_matter():
    """NaN in sentinels, and places that are those of live rows."""
    given, other = _arguments(), None
    expected = cached_attention(**{**given, "kv": given["kv"].clone()})
    other = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for name in ("query", "key", "value"):
        other[name][22:] = torch.nan
    other["slot_of_row"][22:], other["kv_row"][22:] = 3, 7
    assert torch.equal(cached_attention(**other), expected)
    assert bool(torch.isfinite(other["kv"][1, :, 3, :12]).all())


def test_a_request_sees_neither_others_nor_what_lies_behind_it():
    given = _arguments()
    expected = cached_attention(**{**given, "kv": given["kv"].clone()})
    alone = _arguments()
    alone = {**given, "starts": torch.tensor([0, 5], device=DEVICE)}
    alone |= {name: given[name][:1] for name in ("slots", "context_len")}
    found = cached_attention(**alone)
    torch.testing.assert_close(found[:5], expected[:5], rtol=1e-5, atol=1e-6)
    assert not bool(found[5:].any())


def test_no_row_is_live():
    given = _arguments()
    given["starts"].zero_()
    before = given["kv"].clone()
    assert not bool(cached_attention(**given).any())
    assert torch.equal(given["kv"].nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("causal", [False, True])
def test_operator_is_well_formed(causal):
    given = _arguments(causal=causal)
    given["kv"].nan_to_num_(0.5)  # the check compares contents
    torch.library.opcheck(cached_attention, tuple(given.values()))


def test_one_traced_program_serves_all_layers():
    """The number of the layer is a tensor, so it is no constant of the program; the cache is written in place."""
    given, programs = _arguments(), []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        programs.append(graph)
        return graph

    given["kv"][0] = given["kv"][2] = given["kv"][1]
    torch._dynamo.reset()
    step = torch.compile(cached_attention, backend=backend, fullgraph=True)
    for layer in range(LAYERS):
        arguments = {**given, "layer": torch.tensor(layer)}
        attended, kv = _expected(arguments)
        torch.testing.assert_close(step(**arguments).double(), attended, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(given["kv"], kv, rtol=0, atol=0, equal_nan=True)
    assert len(programs) == 1


@pytest.mark.parametrize("layer", [-1, LAYERS, 1 << 40])
def test_a_layer_that_is_not_there_is_refused(layer):
    given = _arguments()
    before = given["kv"].clone()
    with pytest.raises(ValueError, match=rf"layer={layer} of kv \[3, 2, 4, 81, 2, 16\]"):
        cached_attention(**{**given, "layer": torch.tensor(layer)})
    assert torch.equal(given["kv"].nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(2, 4, 81, 2, 16)}, r"expected \[layers, 2, slots, L, Hk, D\]"),
        ({"kv": torch.zeros(3, 1, 4, 81, 2, 16)}, r"expected \[layers, 2, slots, L, Hk, D\]"),
        ({"kv": torch.zeros(3, 2, 4, 81, 3, 16)}, "k_cache"),
        ({"kv": torch.zeros(3, 2, 4, 81, 2, 16).half()}, "k_cache is torch.float16"),
        ({"value": torch.zeros(23, 2, 16)}, "both alike"),
        ({"kv_row": torch.zeros(23, dtype=torch.int64)}, "kv_row"),
        ({"starts": torch.zeros(5)}, "starts is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = _arguments()
    with pytest.raises(ValueError, match=message):
        cached_attention(**{**given, **{name: x.to(DEVICE) for name, x in change.items()}})


def test_an_unknown_tile_is_refused():
    with pytest.raises(ValueError, match="variant"):
        cached_attention(**_arguments(), variant="rows8")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_over_changed_boundaries(dtype):
    cases = [
        _arguments((5, 0, 1, 16), (7, 3, 64, 0), (8, 2), 64, dtype, sentinels=2),
        _arguments((1, 16, 3, 0), (60, 0, 31, 8), (8, 2), 64, dtype, sentinels=4),
    ]
    buffers = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in cases[0].items()}
    for _ in range(2):
        cached_attention(**buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cached_attention(**buffers)
    for given in (cases[1], cases[0]):
        attended, kv = _expected(given)
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and name != "layer":
                buffers[name].copy_(x)
        out.fill_(torch.nan)
        graph.replay()
        assert (out.double() - attended).norm() / attended.norm() <= LIMITS[dtype]
        torch.testing.assert_close(buffers["kv"], kv, rtol=0, atol=0, equal_nan=True)
