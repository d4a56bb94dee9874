"""Attention that norms, rotates and writes its own rows: what two launches give, interpreted bit for bit, and float64.

Built to catch: rows written by a program that does not own their keys, keys read before they are written, heads of
another kind or row rotated, dead rows or rows outside the cache that write, and cache rows read that hold NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, poison_empty, whole

from kernels.ref.rotate_attend import rotate_attend as reference
from kernels.rotate_attend import rotate_attend
from kernels.rotate_write import rotate_write
from kernels.tile_attention import Rotation, launch
from kernels.tile_choice import Tile, choose_tile, rotates

CUDA = DEVICE.type == "cuda"
EPS, LAYERS, LAYER = 1e-6, 2, 1
# Error over reference, both as Euclidean norms of all live rows: rotated queries and keys are rounded as stored.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Arguments = dict[str, object]


@dataclass(frozen=True)
class Case:
    """Rows and context of each request, head counts and size; `causal` in place of random masks."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    causal: bool = False
    sentinels: int = 2
    norm: str = "qk"  # which heads have one


SMALL = {
    "ragged": Case((0, 1, 8, 5), (7, 0, 1, 65)),
    "rows on both sides of a boundary": Case((8, 3, 1), (61, 31, 95)),
    "no contexts, causal": Case((8, 7, 0), (0, 0, 0), causal=True),
    "group of 3, no norm": Case((5, 4), (1, 40), heads=3, kv_heads=1, norm=""),
    "group of 1, head of 32": Case((7, 2), (31, 0), heads=2, kv_heads=2, head_dim=32, sentinels=0),
    "queries normed alone": Case((3, 8), (20, 9), norm="q"),
    "keys normed alone": Case((3, 8), (20, 9), norm="k"),
    "one row each": Case((1, 1, 1), (0, 32, 47), heads=7, kv_heads=1),
}
REAL = {
    "one row": Case((1,), (8191,), 32, 8, 128, sentinels=0),
    "one chain, split": Case((16,), (1025,), 32, 8, 128),
    "ragged": Case((0, 1, 16, 7, 16, 16), (8192, 8191, 0, 1, 513, 4097), 32, 8, 128, sentinels=5),
    "32 chains of 8": Case((8,) * 32, tuple(range(1000, 1032)), 32, 8, 128),
    "32 chains of 16, causal": Case((16,) * 32, tuple(range(1000, 1032)), 32, 8, 128, causal=True),
    "SmolLM2 heads": Case((16, 12, 0), (77, 1025, 3), 9, 3, 64, norm=""),
    "group of 5": Case((12, 1), (63, 2), 40, 8, 128),
    "head of 256: two launches": Case((16, 5), (300, 17), 8, 4, 256),
    "a tree of 60: two launches": Case((60, 3), (1024, 5), 32, 8, 128),
    "head of 96: two launches": Case((16, 1), (129, 0), 4, 4, 96),
}


pytestmark = pytest.mark.usefixtures("loops_over_loaded_bounds")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def arguments(case: Case, dtype: torch.dtype, seed: int = 0, length: int = 0, num_rows: int = 0) -> Arguments:
    """A call: shuffled slots, and a cache that holds NaN but for the contexts."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    live = sum(case.rows)
    num_rows = num_rows or live + case.sentinels
    length = length or max(c + n for c, n in zip(case.contexts, case.rows, strict=True)) + 3
    slots = rng.permutation(len(case.rows) + 1)[: len(case.rows)]
    kv = torch.full((LAYERS, 2, len(case.rows) + 1, length, case.kv_heads, case.head_dim), torch.nan)
    for slot, context in zip(slots, case.contexts, strict=True):
        kv[LAYER, :, slot, :context].normal_(generator=generator)
    bits = [int(rng.integers(1 << 62)) & (1 << n) - 1 | 1 << i for n in case.rows for i in range(n)]
    ancestors = torch.full((num_rows,), -1)
    ancestors[:live] = torch.tensor(bits)
    angles = torch.rand(num_rows, case.head_dim // 2, generator=generator) * 6.3
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    weights = torch.rand(2, case.head_dim, generator=generator) + 0.5
    beyond = num_rows - live  # rows of nobody claim the first live row's place
    of_row = np.repeat(np.arange(len(case.rows)), case.rows)
    places = [c + i for c, n in zip(case.contexts, case.rows, strict=True) for i in range(n)]
    return {
        "qkv": (torch.randn(num_rows, width, generator=generator) * 2).to(DEVICE, dtype),
        "q_weight": weights[0].to(DEVICE, dtype) if "q" in case.norm else None,
        "k_weight": weights[1].to(DEVICE, dtype) if "k" in case.norm else None,
        "eps": EPS,
        "cos": angles.cos().to(DEVICE),
        "sin": angles.sin().to(DEVICE).repeat(1, 2),  # rows of other lengths than those of the cosines
        "kv": kv.to(DEVICE, dtype),
        "layer": LAYER,
        "slot_of_row": whole([*slots[of_row], *[slots[of_row[0]] if live else 0] * beyond]),
        "kv_row": whole([*places, *[places[0] if live else 0] * beyond]),
        "slots": whole(slots),
        "starts": whole([0, *np.cumsum(case.rows)]),
        "context_len": whole(case.contexts),
        "ancestors": None if case.causal else ancestors.to(DEVICE),
        "num_heads": case.heads,
        "scale": case.head_dim**-0.5,
        "max_rows": max(case.rows),
        "max_context": max(case.contexts),
    }


def copied(given: Arguments) -> Arguments:
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}


def one_launch(given: Arguments, tile: Tile) -> torch.Tensor:
    """The kernel that rotates, whatever `rotate_attend` would choose."""
    kv, heads = given["kv"], given["num_heads"]
    assert rotates(tile, heads // kv.shape[4], kv.shape[5], given["max_rows"])
    raw = given["qkv"][:, : heads * kv.shape[5]].unflatten(1, (heads, kv.shape[5]))
    rotation = Rotation(*(given[name] for name in ("q_weight", "k_weight", "eps", "cos", "sin")))
    return _launched(raw, given, tile, rotation)


def two_launches(given: Arguments, tile: Tile) -> torch.Tensor:
    """Rotated before, attended by the same tile."""
    names = ("qkv", "q_weight", "k_weight", "eps", "cos", "sin", "kv", "layer", "slot_of_row", "kv_row", "starts")
    return _launched(rotate_write(*(given[n] for n in names), given["num_heads"]), given, tile, None)


def _launched(query: torch.Tensor, given: Arguments, tile: Tile, rotation: Rotation | None) -> torch.Tensor:
    metadata = (given[name] for name in ("slots", "starts", "context_len", "ancestors", "scale", "max_rows"))
    return launch(query, *given["kv"][given["layer"]], *metadata, tile, rotation)


def exact(given: Arguments) -> torch.Tensor:
    """In float64, from the numbers as they are stored; the cache is left alone."""
    wide = {n: given[n].double() for n in ("qkv", "q_weight", "k_weight", "cos", "sin", "kv") if given[n] is not None}
    heads, (kv_heads, dim) = given["num_heads"], given["kv"].shape[4:]
    query, key, value = wide["qkv"].unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        first, second = x.chunk(2, -1)
        cos, sin = (wide[name][:, None, : dim // 2] for name in ("cos", "sin"))
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    query, key = rotated(query, wide.get("q_weight")), rotated(key, wide.get("k_weight"))
    out = torch.zeros_like(query)
    for r, (first, stop) in enumerate(zip(given["starts"].tolist(), given["starts"].tolist()[1:], strict=False)):
        context, count = int(given["context_len"][r]), stop - first
        parts = []
        for which, new in ((0, key), (1, value)):
            cached = wide["kv"][LAYER, which, given["slots"][r], :context]
            parts.append(torch.cat([cached, new[first:stop]]).repeat_interleave(heads // kv_heads, 1))
        own = torch.arange(count, device=DEVICE)
        if given["ancestors"] is None:
            seen = own[None, :] <= own[:, None]
        else:
            seen = (given["ancestors"][first:stop, None] >> own[None, :] & 1).bool()
        seen = torch.cat([seen.new_ones(count, context), seen], 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:stop], parts[0]) * given["scale"]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[first:stop] = torch.einsum("hqk,khd->qhd", weights, parts[1])
    return out


def assert_near(out: torch.Tensor, want: torch.Tensor) -> None:
    assert bool(out.isfinite().all())
    error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert float(error) <= LIMITS[out.dtype]


def assert_same_cache(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Values to the bit, keys but for a rounding that falls the other way once in a while: the compiler's choice."""
    ours, theirs = (kv[LAYER].nan_to_num(7e3).float() for kv in (ours, theirs))
    assert torch.equal(ours[1], theirs[1])
    off = (ours[0] != theirs[0]).float().mean()
    assert float(off) < 1e-3 and float((ours[0] - theirs[0]).abs().max()) <= 0.07


def small_tile(case: Case, splits: int) -> Tile:
    group = case.heads // case.kv_heads
    rows = max(16, 1 << (max(case.rows) * group - 1).bit_length())
    return Tile(group, rows, keys=16, splits=splits, num_warps=4, num_stages=1)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_equals_two_launches_to_the_bit(name: str, dtype: torch.dtype, splits: int) -> None:
    """The cache too: what was not a live row's place keeps its bits, NaN or not. Compilers round as they like."""
    given, tile = arguments(SMALL[name], dtype), small_tile(SMALL[name], splits)
    other, want = copied(given), exact(given)
    out = one_launch(given, tile)
    assert_near(out, want)
    assert CUDA or torch.equal(out, two_launches(other, tile))
    assert CUDA or torch.equal(given["kv"].nan_to_num(7e3), other["kv"].nan_to_num(7e3))


@pytest.mark.parametrize("name", SMALL)
def test_reference_equals_float64(name: str) -> None:
    given = arguments(SMALL[name], torch.float32)
    want = exact(given)
    assert_near(reference(**given), want)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: NaN is meant
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("slot", "context"), [(3, 5), (-1, 5), (0, 62)])
def test_places_outside_the_cache_are_not_written(slot: int, context: int, splits: int) -> None:
    """Rows of a slot before or behind a cache of 3, and rows 62 to 65 of one of 64, the last two in the next slot."""
    given, tile = arguments(Case((4, 4), (3, 5)), torch.float32, length=64), small_tile(Case((4, 4), (3, 5)), splits)
    margin = torch.full((3, *given["kv"].shape), 3.0, device=DEVICE)  # a cache amid memory that may be read
    margin[1] = given["kv"]
    given["kv"] = margin[1]
    given["slots"][1], given["context_len"][1] = slot, context
    first = int(given["slots"][0])
    before = margin.clone()
    one_launch(given, tile)
    changed = (margin.nan_to_num(7e3) != before.nan_to_num(7e3)).nonzero()
    places = {tuple(p) for p in changed[:, [0, 1, 3, 4]].tolist()}
    wanted = {(1, LAYER, first, 3 + i) for i in range(4)}
    assert places == wanted | ({(1, LAYER, 0, 62), (1, LAYER, 0, 63)} if context == 62 else set())


def test_angles_of_other_types_and_more_columns() -> None:
    case = SMALL["ragged"]
    for kind in (torch.float16, torch.float64):
        given = arguments(case, torch.float32)
        for name in ("cos", "sin"):
            padding = torch.full((len(given["qkv"]), 5), torch.nan, device=DEVICE)
            given[name] = torch.cat([given[name][:, :8].to(kind), padding.to(kind)], 1)[:, :12]
        other = copied(given)
        assert torch.equal(one_launch(given, small_tile(case, 1)), two_launches(other, small_tile(case, 1)))


def test_rows_of_the_product_may_lie_apart() -> None:
    case = SMALL["ragged"]
    given = arguments(case, torch.float32)
    other, width = copied(given), given["qkv"].shape[1]
    apart = torch.full((len(given["qkv"]), width + 11), torch.nan, device=DEVICE)[:, 3 : width + 3]
    given["qkv"] = apart.copy_(given["qkv"])
    given["kv"] = given["kv"].transpose(3, 4).contiguous().transpose(3, 4)
    assert torch.equal(one_launch(given, small_tile(case, 4)), one_launch(other, small_tile(case, 4)))


def test_which_tiles_rotate() -> None:
    def of(variant: str, rows: int, dim: int = 128, group: int = 4) -> bool:
        tile = choose_tile(variant, group, 8, dim, 32, rows, 1024, 2, 132)
        return rotates(tile, group, dim, rows)

    assert of("auto", 1) and of("auto", 16) and of("packed", 32)
    assert not of("auto", 60)  # several tiles a request: none owns the new keys
    assert not of("rows16", 16) and not of("paper", 8)  # several programs share a KV head
    assert not of("auto", 16, dim=96) and not of("auto", 16, dim=256) and of("auto", 16, dim=64)
    assert of("rows16", 16, group=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 2}, "layer=2 of kv"),
        ({"scale": 0.0}, "scale=0"),
        ({"max_rows": 65}, "max_rows=65"),
        ({"variant": "wide"}, "variant='wide'"),
        ({"num_heads": 3}, "qkv is"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "context_len|slots"),
        ({"cos": torch.zeros(16, 7)}, "cos is"),
    ],
)
def test_refuses_what_does_not_fit(change: Arguments, message: str) -> None:
    given = arguments(SMALL["ragged"], torch.float32)
    before = given["kv"].clone()
    given |= {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    for function in (rotate_attend, reference):
        with pytest.raises(ValueError, match=message):
            function(**given)
    assert torch.equal(given["kv"].nan_to_num(7e3), before.nan_to_num(7e3))


def test_a_tile_that_cannot_rotate_is_refused() -> None:
    given = arguments(Case((8, 4), (1, 2)), torch.float32)
    rotation = Rotation(None, None, EPS, given["cos"], given["sin"])
    raw = given["qkv"][:, :64].unflatten(1, (4, 16))
    for tile in (Tile(1, 16, 16, 1, 4, 1), Tile(2, 8, 16, 1, 4, 1)):
        with pytest.raises(ValueError, match="does not rotate 8 rows of 4 heads of 16"):
            _launched(raw, given, tile, rotation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name: str, dtype: torch.dtype) -> None:
    given = arguments(REAL[name], dtype)
    other, want = copied(given), exact(given)
    out = rotate_attend(**given)
    assert_near(out, want)
    case = REAL[name]
    bounds = (given["max_rows"], given["max_context"], given["qkv"].element_size())
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    tile = choose_tile("auto", case.heads // case.kv_heads, case.kv_heads, case.head_dim, len(case.rows), *bounds, sms)
    assert_near(out, two_launches(other, tile).double())
    assert_same_cache(given["kv"], other["kv"])


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 4])
def test_replayed_over_changed_boundaries(requests: int) -> None:
    """A captured call equals an eager one over other rows, contexts, slots and masks at the same addresses."""
    shapes = [((16, 0, 12, 3), (8191, 5, 1, 700)), ((1, 16, 8, 5), (0, 4096, 33, 1)), ((0,) * 4, (9, 8, 7, 6))]
    filled = []
    for seed, (rows, contexts) in enumerate(shapes):
        case = Case(rows[:requests], contexts[:requests], 32, 8, 128)
        given = arguments(case, torch.bfloat16, seed, length=8300, num_rows=48)
        filled.append(given | {"max_rows": 16, "max_context": 8300})
    buffers = copied(filled[0])
    graph, out = captured(lambda: rotate_attend(**buffers))
    for given in (*reversed(filled), *filled):
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                buffers[name].copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        fresh = copied(given)
        assert torch.equal(out, rotate_attend(**fresh))
        assert torch.equal(buffers["kv"].nan_to_num(7e3), fresh["kv"].nan_to_num(7e3))


@pytest.mark.gpu
def test_the_cache_is_read_back_as_written() -> None:
    """Many calls over one cache, each behind the last: a key read before it is written would show now and then."""
    case = Case((16,) * 40, (200,) * 40, 32, 8, 128)
    given = arguments(case, torch.float16, length=700)
    other = copied(given)
    bound = 700  # the number of splits rests on it
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    tile = choose_tile("auto", 4, 8, 128, 40, 16, bound, 2, sms)
    given["max_context"] = other["max_context"] = bound
    for step in range(25):
        for each in (given, other):
            each["context_len"].fill_(200 + 16 * step)
            each["kv_row"][:640] = torch.arange(16, device=DEVICE).repeat(40) + 200 + 16 * step
        assert_near(rotate_attend(**given), two_launches(other, tile).double())
    assert_same_cache(given["kv"], other["kv"])
