"""From the merged product to rotated queries and a written cache: against float64 and against `transformers`.

Built to catch: heads taken from another place of the product, norms over the padding of a head or with the weights of
the other kind, halves exchanged, another layer written, dead rows that write, and queries that nothing writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decision_setup import DEVICE, captured, poison_empty, whole
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kernels.ref.rotate_write import rotate_write as reference
from kernels.rotate_write import rotate_write

#: Relative to the length of the rotated pair, and in absolute terms to the largest weight: up to three roundings in
#: half precision, of the norm, of its weighing and of the result.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3.1 * 2**-11, torch.bfloat16: 3.1 * 2**-8}
SMALL = [torch.float32, torch.float16]
EPS = 1e-6
LAYERS, SLOTS, LENGTH, LAYER = 3, 4, 21, 1
#: (query heads, KV heads, head dim); the last takes several programs for the keys of a row.
SHAPES = [(4, 2, 16), (9, 3, 64), (6, 2, 12), (2, 1, 96), (3, 3, 2), (5, 5, 256)]

Arguments = dict[str, object]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def arguments(
    shape: tuple[int, int, int], dtype: torch.dtype, norm: bool = True, num_rows: int = 9, live: int = 6
) -> Arguments:
    """Rows of two requests in slots 3 and 0; those of nobody point at the first live row, as badly as they can."""
    heads, kv_heads, dim = shape
    angles = torch.rand(num_rows, dim // 2) * 6.3
    slot_of_row = [3] * min(4, live) + [0] * (live - 4) + [3] * (num_rows - live)
    kv_row = [*range(7, 11), *range(live - 4), *[7] * (num_rows - live)]
    tensors = {
        "qkv": torch.randn(num_rows, (heads + 2 * kv_heads) * dim) * 3,
        "q_weight": torch.rand(dim) + 0.5 if norm else None,
        "k_weight": torch.rand(dim) * 2 if norm else None,
        "kv": torch.randn(LAYERS, 2, SLOTS, max(LENGTH, live), kv_heads, dim),
    }
    given = {name: None if t is None else t.to(DEVICE, dtype) for name, t in tensors.items()}
    given |= {"cos": angles.cos().to(DEVICE), "sin": angles.sin().to(DEVICE)}
    given |= {"slot_of_row": whole(slot_of_row), "kv_row": whole(kv_row), "starts": whole([0, 4, live, live])}
    return given | {"eps": EPS, "layer": LAYER, "num_heads": heads}


def exact(given: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(query, key, value) [M, heads, D] in float64, rounded nowhere."""
    heads, (kv_heads, dim) = given["num_heads"], given["kv"].shape[4:]
    parts = list(given["qkv"].double().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1))
    cos, sin = (given[name].double()[:, None, : dim // 2] for name in ("cos", "sin"))
    for place, weight in enumerate((given["q_weight"], given["k_weight"])):
        x = parts[place]
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + given["eps"]).sqrt() * weight.double()
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
        parts[place] = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return tuple(parts)


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Each number to within the tolerance times the length of the pair that it was rotated from."""
    assert got.shape == want.shape and got.isfinite().all()
    first, second = want.chunk(2, dim=-1)
    length = torch.hypot(first, second).repeat_interleave(2, 0).view(len(want), 2, *first.shape[1:])
    length = torch.cat([length[:, 0], length[:, 1]], dim=-1)
    off = (got.double() - want).abs() - TOLERANCES[got.dtype] * length
    assert float(off.max()) <= (2e-7 if got.dtype == torch.float16 else 0.0)


def live_rows(given: Arguments) -> torch.Tensor:
    slot, place, kv = given["slot_of_row"], given["kv_row"], given["kv"]
    inside = (slot >= 0) & (slot < kv.shape[2]) & (place >= 0) & (place < kv.shape[3])
    return (inside & (torch.arange(len(slot), device=DEVICE) < given["starts"][-1])).nonzero()[:, 0]


def check(given: Arguments, function: object = rotate_write, before: torch.Tensor | None = None) -> torch.Tensor:
    """Runs the function, compares all that it returns and writes, and returns the cache."""
    before = given["kv"].clone() if before is None else before
    assert_effects(given, before, function(**given))
    return given["kv"]


def assert_effects(given: Arguments, before: torch.Tensor, query: torch.Tensor) -> None:
    assert query.is_contiguous() and query.dtype == given["qkv"].dtype
    want_query, key, value = exact(given)
    assert_near(query, want_query)
    live, written = live_rows(given), before.clone()
    slots, places = given["slot_of_row"][live], given["kv_row"][live]
    layer = given["kv"][given["layer"]]
    if len(live):
        assert_near(layer[0, slots, places], key[live])
    written[given["layer"], 0, slots, places] = layer[0, slots, places]
    written[given["layer"], 1, slots, places] = value[live].to(written.dtype)
    assert torch.equal(given["kv"], written)  # values as they were, and nothing else


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_float64(shape: tuple[int, int, int], norm: bool, dtype: torch.dtype) -> None:
    for function in (rotate_write, reference):
        check(arguments(shape, dtype, norm), function)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_equals_the_reference(dtype: torch.dtype) -> None:
    """Half precision to the bit, but for a rounding that falls the other way once in a while."""
    ours = arguments((9, 3, 64), dtype)
    theirs = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in ours.items()}
    for a, b in ((rotate_write(**ours), reference(**theirs)), (ours["kv"], theirs["kv"])):
        assert dtype == torch.float32 or (a == b).float().mean() > 0.99
        torch.testing.assert_close(a, b, rtol=0.0, atol=32 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [*SMALL, torch.bfloat16], ids=str)
def test_reference_follows_transformers(dtype: torch.dtype) -> None:
    """Its layers round the two products of the rotation; in float32 nothing tells them apart."""
    given = arguments((6, 2, 16), dtype, live=9)
    given["cos"], given["sin"] = (torch.cat([given[name]] * 2, dim=1).to(dtype) for name in ("cos", "sin"))
    given["kv_row"] = whole(range(9))
    parts = []
    query, key, _ = given["qkv"].unflatten(1, (-1, 16)).split([6, 2, 2], 1)
    for part, weight in ((query, "q_weight"), (key, "k_weight")):
        layer = Qwen3RMSNorm(16, EPS).to(DEVICE, dtype)
        layer.weight.data.copy_(given[weight])
        parts.append(layer(part).detach())
    want_query, want_key = apply_rotary_pos_emb(*parts, given["cos"], given["sin"])
    query = reference(**given)
    key = given["kv"][LAYER, 0, given["slot_of_row"], given["kv_row"]]
    limits = {"rtol": 0.0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(query, want_query, **limits)
    torch.testing.assert_close(key, want_key, **limits)


@pytest.mark.parametrize("which", ["q_weight", "k_weight"])
def test_one_kind_alone_is_normed(which: str) -> None:
    for function in (rotate_write, reference):
        check({**arguments((5, 2, 16), torch.float32), which: None}, function)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_angles_of_other_types_and_more_columns(kind: torch.dtype) -> None:
    """What follows the first half of a head's numbers is never read."""
    given = arguments((4, 2, 12), torch.float32)
    for name in ("cos", "sin"):
        given[name] = torch.cat([given[name], torch.full((9, 7), torch.nan, device=DEVICE)], dim=1).to(kind)
    for function in (rotate_write, reference):
        check(dict(given), function)


@pytest.mark.parametrize(("slot", "row"), [(4, 0), (-1, 0), (0, LENGTH), (0, -1), (1 << 40, 0), (0, 1 << 40)])
def test_places_outside_the_cache_are_left_out(slot: int, row: int) -> None:
    for function in (rotate_write, reference):
        given = arguments((4, 2, 16), torch.float32)
        given["slot_of_row"][1], given["kv_row"][1] = slot, row
        assert live_rows(given).tolist() == [0, 2, 3, 4, 5]
        check(given, function)


def test_rows_apart_and_a_cache_of_another_order() -> None:
    given = arguments((4, 2, 16), torch.float32)
    width = given["qkv"].shape[1]
    apart = torch.full((9, width + 11), torch.nan, device=DEVICE)[:, 3 : width + 3]
    heads_first = given["kv"].transpose(3, 4).contiguous().transpose(3, 4)
    check({**given, "qkv": apart.copy_(given["qkv"]), "kv": heads_first})


@pytest.mark.parametrize("live", [0, 9])
def test_nobody_or_everybody_is_live(live: int) -> None:
    given = arguments((4, 2, 16), torch.float32)
    given["starts"] = whole([0, live])
    given["kv_row"] = whole(range(9))
    before = given["kv"].clone()
    assert torch.equal(check(given), before) is (live == 0)


def test_no_rows() -> None:
    given = arguments((4, 2, 16), torch.float32)
    before = given["kv"].clone()
    given |= {name: given[name][:0] for name in ("qkv", "cos", "sin", "slot_of_row", "kv_row")}
    for function in (rotate_write, reference):
        assert function(**given).shape == (0, 4, 16)
    assert torch.equal(given["kv"], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 3}, r"layer=3 of kv"),
        ({"layer": -1}, r"layer=-1 of kv"),
        ({"kv": torch.zeros(2, 4, 21, 2, 16)}, r"expected \[layers, 2, slots, L, Hk, D\]"),
        ({"kv": torch.zeros(2, 2, 4, 21, 2, 15)}, "head_dim=15"),
        ({"kv": torch.zeros(2, 2, 4, 21, 2, 258)}, "head_dim=258"),
        ({"kv": torch.zeros(2, 2, 4, 21, 2, 16).half()}, "kv is torch.float16; expected torch.float32"),
        ({"num_heads": -1}, "num_heads=-1"),
        ({"num_heads": 5}, r"qkv is \[9, 128\]; expected \[M, \(5 \+ 2 \* 2\) \* 16\]"),
        ({"q_weight": torch.zeros(8)}, r"q_weight is \[8\]; expected \[16\]"),
        ({"k_weight": torch.zeros(16).half()}, "k_weight is torch.float16"),
        ({"cos": torch.zeros(9, 7)}, r"cos is .* \[9, 7\]; expected floats \[9, 8 or more\]"),
        ({"sin": torch.zeros(9, 8).long()}, "sin is torch.int64"),
        ({"sin": torch.zeros(8, 9).T}, "sin has stride 9"),
        ({"kv_row": torch.zeros(8, dtype=torch.int64)}, r"kv_row is .*\[9\]"),
        ({"starts": torch.zeros(0, dtype=torch.int64)}, r"starts is .*\[1\]"),
    ],
)
def test_refuses_what_does_not_fit(change: Arguments, message: str) -> None:
    given = arguments((4, 2, 16), torch.float32)
    given |= {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    for function in (rotate_write, reference):
        with pytest.raises(ValueError, match=message):
            function(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", [(32, 8, 128), (9, 3, 64), (32, 32, 96), (8, 1, 256)], ids=str)
def test_real_sizes(shape: tuple[int, int, int], norm: bool, dtype: torch.dtype) -> None:
    for num_rows, live in ((1, 1), (512, 500)):
        given = arguments(shape, dtype, norm, num_rows=max(num_rows, 4), live=max(live, 4))
        if num_rows == 1:
            given |= {name: given[name][:1] for name in ("qkv", "cos", "sin", "slot_of_row", "kv_row")}
            given["starts"] = whole([0, 1])
        for angles in (torch.float32, dtype):
            check({**given, "cos": given["cos"].to(angles), "sin": given["sin"].to(angles)})


@pytest.mark.gpu
def test_captured_over_changed_contents() -> None:
    given = arguments((32, 8, 128), torch.bfloat16, num_rows=300, live=40)
    graph, query = captured(lambda: rotate_write(**given))
    given["kv"].normal_()
    for live in (0, 1, 60, 300):
        given["starts"].copy_(whole([0, live, live, live]))
        given["slot_of_row"].copy_(torch.arange(300) % SLOTS)
        given["kv_row"].copy_(torch.arange(300) // SLOTS)
        for name in ("qkv", "q_weight", "cos"):
            given[name].normal_()
        before = given["kv"].clone()
        query.fill_(torch.nan)
        graph.replay()
        assert_effects(given, before, query)
