"""The tile kernels against the plain reference: interpreted on a CPU at small sizes, on a GPU at real ones.

Built to catch: rows of another request or of another branch that are seen, rows of nobody that are left unwritten,
cache rows that are read though nobody may see them (they hold NaN), and parts of a split that are joined wrongly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.kv_write import kv_write
from kernels.ref.tile_attention import tile_attention_tensors
from kernels.tile_attention import launch, tile_attention
from kernels.tile_attention_checks import VARIANTS
from kernels.tile_choice import Tile, choose_tile

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# Error over reference, both as Euclidean norms; the reference computes in double precision on the rounded inputs.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One call: rows and context of each request, head counts, head size; `causal` instead of random trees."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    causal: bool = False
    sentinels: int = 0


SMALL = {
    "ragged": Case((0, 1, 16, 5), (7, 0, 1, 65), sentinels=3),
    "60 rows on an odd context": Case((60, 60), (37, 0), heads=2, kv_heads=1),
    "all 64 bits": Case((64, 2), (0, 130)),
    "group of 3, padded head": Case((5, 4), (1, 40), heads=3, kv_heads=1, head_dim=12),
    "group of 7": Case((16, 1), (3, 33), heads=7, kv_heads=1),
    "group of 1, head of 96": Case((3, 17), (31, 0), heads=2, kv_heads=2, head_dim=96),
    "chains": Case((16, 8, 0), (0, 31, 5), causal=True, sentinels=1),
    "prefill": Case((130, 0, 3), (0, 9, 70), heads=2, kv_heads=1, causal=True),
}
REAL = {
    "ragged, Qwen3-8B heads": Case((0, 1, 16, 60, 16, 7), (8192, 8191, 0, 1, 513, 8191), 32, 8, 128, sentinels=5),
    "one row each": Case((1,) * 5, (0, 1, 63, 64, 4097), 32, 8, 128),
    "chains, N = 32": Case((16,) * 32, tuple(range(1000, 1032)), 32, 8, 128, causal=True),
    "SmolLM2 heads": Case((16, 60, 0), (77, 1025, 3), 9, 3, 64, sentinels=1),
    "group of 7": Case((16, 33), (8191, 2), 28, 4, 128),
    "group of 1, head of 96": Case((64, 1), (129, 0), 4, 4, 96),
    "head of 256": Case((16, 5), (300, 17), 8, 4, 256),
    "prefill": Case((700, 1, 0, 129), (0, 8191, 4, 55), 32, 8, 128, causal=True),
}


pytestmark = pytest.mark.usefixtures("loops_over_loaded_bounds")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _ancestors(rows: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Bits of one request after another as int64: by turns of a random tree, and at random besides the row itself."""
    bits = []
    for request, count in enumerate(rows):
        tree: list[int] = []
        for node in range(count):
            tree.append((tree[int(rng.integers(node))] if node else 0) | 1 << node)
        anything = [int(rng.integers(1 << 63)) * 2 + int(rng.integers(2)) | 1 << node for node in range(count)]
        bits += tree if request % 2 == 0 else [mask & (1 << count) - 1 for mask in anything]
    return torch.from_numpy(np.array(bits, dtype=np.uint64).view(np.int64))


def _arguments(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor | float | None]:
    """Tensors of a case, shuffled slots, the cache NaN except where a request may look."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    length = max(c + n for c, n in zip(case.contexts, case.rows, strict=True)) + 3
    slots = rng.permutation(len(case.rows) + 1)[: len(case.rows)]
    kv = torch.full((2, len(case.rows) + 1, length, case.kv_heads, case.head_dim), torch.nan, dtype=dtype)
    for slot, context, rows in zip(slots, case.contexts, case.rows, strict=True):
        shape = (2, context + rows, case.kv_heads, case.head_dim)
        kv[:, slot, : context + rows] = torch.randn(shape, generator=generator).to(dtype)
    live = sum(case.rows)
    query = torch.randn(live + case.sentinels, case.heads, case.head_dim, generator=generator).to(dtype)
    ancestors = torch.full((live + case.sentinels,), -1)
    ancestors[:live] = _ancestors(case.rows, rng) if not case.causal else 0
    kv = kv.to(DEVICE)
    return {
        "query": query.to(DEVICE),
        "k_cache": kv[0],
        "v_cache": kv[1],
        "slots": torch.from_numpy(slots).to(DEVICE),
        "starts": torch.tensor([0, *np.cumsum(case.rows)]).to(DEVICE),
        "context_len": torch.tensor(case.contexts).to(DEVICE),
        "ancestors": None if case.causal else ancestors.to(DEVICE),
        "scale": case.head_dim**-0.5,
    }


def _expected(arguments: dict) -> torch.Tensor:
    exact = {name: arguments[name].double() for name in ("query", "k_cache", "v_cache")}
    return tile_attention_tensors(**{**arguments, **exact})


def _run(arguments: dict, case: Case, variant: str) -> torch.Tensor:
    """The operator on a GPU, its kernels interpreted on a CPU, where the operator itself takes the reference."""
    bounds = (max(case.rows), max(case.contexts))
    if CUDA:
        return tile_attention(**arguments, max_rows=bounds[0], max_context=bounds[1], variant=variant)
    group = case.heads // case.kv_heads
    # The tiles of half precision for every dtype: those of float32 are all the same on a GPU.
    tile = choose_tile(variant, group, case.kv_heads, case.head_dim, len(case.rows), *bounds, 2, num_sms=4)
    return launch(**arguments, max_rows=bounds[0], tile=tile)


def _assert_close(out: torch.Tensor, expected: torch.Tensor, live: int, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    assert bool(out.isfinite().all())
    assert bool((out[live:] == 0).all())
    error = (out.double() - expected).norm() / expected.norm()
    assert error <= LIMITS[dtype], f"error {error:.2e}"


def test_reference_is_the_formula() -> None:
    case = Case((3, 0, 5), (4, 2, 0), heads=6, kv_heads=2, head_dim=4, sentinels=2)
    given = _arguments(case, torch.float32)
    out = tile_attention_tensors(**given)
    assert bool((out[8:] == 0).all())
    for request, (rows, context) in enumerate(zip(case.rows, case.contexts, strict=True)):
        first, slot = int(given["starts"][request]), int(given["slots"][request])
        for row in range(rows):
            bits = int(given["ancestors"][first + row])
            seen = list(range(context)) + [context + j for j in range(rows) if bits >> j & 1]
            for head in range(case.heads):
                keys, values = given["k_cache"][slot, seen, head // 3], given["v_cache"][slot, seen, head // 3]
                weights = torch.softmax(keys @ given["query"][first + row, head] * given["scale"], dim=0)
                torch.testing.assert_close(out[first + row, head], weights @ values)


@pytest.mark.parametrize("variant", ["rows16", "rows128", "packed"])
@pytest.mark.parametrize("name", SMALL)
def test_equals_reference(name: str, variant: str) -> None:
    arguments = _arguments(SMALL[name], torch.float32)
    out = _run(arguments, SMALL[name], variant)
    _assert_close(out, _expected(arguments), sum(SMALL[name].rows), torch.float32)


@pytest.mark.parametrize("name", ["ragged", "group of 3, padded head", "chains"])
def test_equals_reference_in_half_precision(name: str) -> None:
    arguments = _arguments(SMALL[name], torch.float16)
    out = _run(arguments, SMALL[name], "auto")
    _assert_close(out, _expected(arguments), sum(SMALL[name].rows), torch.float16)


@pytest.mark.parametrize(("splits", "heads", "causal"), [(2, 1, True), (4, 2, False), (8, 2, True)])
def test_splits_equal_reference(splits: int, heads: int, causal: bool) -> None:
    """Up to more parts than there are keys for: those stay empty, and one may hold only keys that a row cannot see."""
    case = Case((0, 1, 40, 5), (90, 0, 1, 65), causal=causal, sentinels=2)
    arguments = _arguments(case, torch.float32)
    tile = Tile(heads, rows=16, keys=16, splits=splits, num_warps=4, num_stages=1)
    out = launch(**arguments, max_rows=40, tile=tile)
    _assert_close(out, _expected(arguments), sum(case.rows), torch.float32)


@pytest.mark.parametrize("splits", [1, 4])
def test_changed_metadata_in_the_same_buffers(splits: int) -> None:
    """What a captured call goes through: other boundaries, contexts, slots and masks at the same addresses."""
    tile = Tile(2, rows=32, keys=16, splits=splits, num_warps=4, num_stages=1)
    buffers: dict = {}
    for seed, rows, contexts in ((0, (4, 0, 8), (9, 30, 50)), (1, (1, 7, 2), (0, 33, 49)), (2, (0, 0, 0), (5, 5, 5))):
        case = Case(rows, contexts, sentinels=12 - sum(rows))
        fresh = _arguments(dataclasses.replace(case), torch.float32, seed)
        cache = torch.full((2, 4, 64, 2, 16), torch.nan, device=DEVICE)
        for index, name in enumerate(("k_cache", "v_cache")):
            cache[index, :, : fresh[name].shape[1]] = fresh[name]
            fresh[name] = cache[index]
        if not buffers:
            buffers = dict(fresh)
        for name, value in fresh.items():
            if isinstance(value, torch.Tensor):
                buffers[name].copy_(value)
        out = launch(**buffers, max_rows=8, tile=tile)
        assert torch.equal(out, launch(**fresh, max_rows=8, tile=tile))
        expected = _expected(fresh)
        assert bool(out.isfinite().all())
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_nothing_to_do() -> None:
    arguments = _arguments(Case((2,), (3,)), torch.float32)
    tile = Tile(2, rows=16, keys=16, splits=1, num_warps=4, num_stages=1)
    empty = {**arguments, "query": arguments["query"][:0], "ancestors": arguments["ancestors"][:0]}
    assert launch(**empty, max_rows=2, tile=tile).shape == (0, 4, 16)
    nobody = {**arguments, **{name: arguments[name][:0] for name in ("slots", "context_len")}}
    assert bool((launch(**nobody, max_rows=2, tile=tile) == 0).all())


def test_nan_in_what_is_seen_shows() -> None:
    """A broken model must not be hidden by an unwritten or skipped part."""
    torch.use_deterministic_algorithms(False)  # the NaN must come from the cache, not from fresh memory
    case = Case((2,), (70,))
    for splits in (1, 4):
        arguments = _arguments(case, torch.float32)
        arguments["k_cache"][arguments["slots"][0], 40] = torch.nan
        tile = Tile(2, rows=16, keys=16, splits=splits, num_warps=4, num_stages=1)
        assert bool(launch(**arguments, max_rows=2, tile=tile).isnan().all())


def test_other_strides() -> None:
    """Queries from a fused projection, and a cache whose heads lie apart."""
    case = SMALL["ragged"]
    arguments = _arguments(case, torch.float32)
    plain = _run(arguments, case, "packed")
    wide = torch.cat([arguments["query"], arguments["query"] * torch.nan], dim=1)
    apart = {name: arguments[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    assert torch.equal(_run({**arguments, "query": wide[:, :4], **apart}, case, "packed"), plain)


def test_route_and_splits_follow_from_sizes() -> None:
    def tile(variant: str, requests: int, rows: int, context: int = 8192, size: int = 2, sms: int = 132) -> Tile:
        return choose_tile(variant, 4, 8, 128, requests, rows, context, size, sms)

    assert [tile("paper", 8, n).rows for n in (1, 16, 17, 500)] == [16, 16, 128, 128]
    assert [tile("auto", 8, n).rows for n in (1, 8, 16, 60, 64, 65)] == [16, 64, 64, 128, 128, 128]
    assert [tile("auto", 8, n).heads for n in (64, 65)] == [4, 1]
    assert [tile("packed", n, 16).splits for n in (1, 2, 8, 16, 32)] == [16, 8, 2, 1, 1]
    assert [tile("packed", n, 60).splits for n in (1, 4, 8)] == [8, 2, 1]
    assert [tile("packed", 1, 16, context).splits for context in (0, 300, 1024)] == [1, 2, 8]
    assert {tile(variant, 1, 16).splits for variant in ("rows16", "rows128", "paper")} == {1}
    assert [tile("packed", n, 16).keys for n in (16, 17, 33, 34)] == [64, 32, 32, 64]
    assert tile("packed", 8, 16, size=4).rows == 16


@pytest.mark.parametrize("causal", [False, True])
def test_operator_is_well_formed(causal: bool) -> None:
    case = Case((3, 2), (4, 1), causal=causal)
    arguments = _arguments(case, torch.float32)
    torch.library.opcheck(tile_attention, tuple(arguments.values()), {"max_rows": 3, "max_context": 4})


def _round(kv: torch.Tensor, rows: torch.Tensor, arguments: dict, places: dict) -> torch.Tensor:
    """Two layers: each writes into its part of the cache, then attends to what it wrote."""
    out = arguments["query"]
    for layer in range(2):
        k_cache, v_cache = kv[layer, 0], kv[layer, 1]
        kv_write(rows * 2, rows + 1, k_cache, v_cache, **places, starts=arguments["starts"])
        caches = {"query": out, "k_cache": k_cache, "v_cache": v_cache}
        out = out + tile_attention(**{**arguments, **caches}, max_rows=8, max_context=40)
    return out


def test_compiled_whole_and_without_a_copy_of_the_cache() -> None:
    """The cache enters a compiled function whole and is cut into layers inside; layers as arguments get copied."""
    case = Case((8, 3), (40, 9), sentinels=1)
    arguments = _arguments(case, torch.float32)
    places = {
        "slot_of_row": torch.repeat_interleave(arguments["slots"], torch.tensor([8, 4], device=DEVICE)),
        "kv_row": torch.tensor([*range(40, 48), 9, 10, 11, 40], device=DEVICE),
    }
    rows = torch.randn(12, 2, 16, device=DEVICE)
    caches = [torch.zeros(2, 2, 3, 1 << 16 if CUDA else 60, 2, 16, device=DEVICE) for _ in range(2)]
    compiled = torch.compile(_round, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    out = compiled(caches[0], rows, arguments, places)
    torch.testing.assert_close(out, _round(caches[1], rows, arguments, places))
    torch.testing.assert_close(caches[0], caches[1])
    if CUDA:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compiled(caches[0], rows, arguments, places)
        assert torch.cuda.max_memory_allocated() - before < caches[0].nbytes / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(5, 4, 8)}, "k_cache is"),
        ({"query": torch.zeros(5, 3, 16)}, "3 query heads are no multiple of 2"),
        ({"query": torch.zeros(5, 4, 16, dtype=torch.float64)}, "expected .M, H, D"),
        ({"query": torch.zeros(5, 16, 4).transpose(1, 2)}, "query has stride 4"),
        ({"v_cache": torch.zeros(3, 9, 2, 16)}, "both alike"),
        ({"k_cache": torch.zeros(3, 10, 2, 16, dtype=torch.float16)}, "expected torch.float32 as query"),
        ({"starts": torch.tensor([0, 5])}, r"starts is .*\[3\]"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots is torch.int32"),
        ({"ancestors": torch.zeros(4, dtype=torch.int64)}, r"ancestors is .*\[5\]"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"max_rows": 65}, "max_rows=65 outside 1..64"),
        ({"max_context": -1}, "max_context=-1"),
        ({"variant": "rows64"}, "variant='rows64' is not one of auto"),
    ],
)
def test_refuses_what_does_not_fit(change: dict, message: str) -> None:
    given = {
        "query": torch.zeros(5, 4, 16),
        "k_cache": torch.zeros(3, 10, 2, 16),
        "v_cache": torch.zeros(3, 10, 2, 16),
        "slots": torch.tensor([0, 1]),
        "starts": torch.tensor([0, 2, 5]),
        "context_len": torch.tensor([1, 1]),
        "ancestors": torch.zeros(5, dtype=torch.int64),
        "scale": 1.0,
        "max_rows": 3,
        "max_context": 1,
    }
    with pytest.raises(ValueError, match=message):
        tile_attention(**{**given, **change})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.bfloat16) for variant in VARIANTS),
        ("rows16", torch.float32),
        ("packed", torch.float32),
        ("auto", torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name: str, variant: str, dtype: torch.dtype) -> None:
    arguments = _arguments(REAL[name], dtype)
    out = _run(arguments, REAL[name], variant)
    _assert_close(out, _expected(arguments), sum(REAL[name].rows), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 8])
def test_replayed_over_changed_boundaries(splits: int) -> None:
    """A captured call, replayed after its buffers were refilled, equals a fresh one bit by bit."""
    cases = [Case((16, 0, 60, 3), (8191, 5, 1, 700), 32, 8, 128), Case((1, 64, 8, 5), (0, 4096, 33, 1), 32, 8, 128)]
    tile = dataclasses.replace(choose_tile("packed", 4, 8, 128, 4, 64, 8192, 2, 132), splits=splits)
    filled = []
    for seed, case in enumerate(cases):
        arguments = _arguments(dataclasses.replace(case, sentinels=80 - sum(case.rows)), torch.bfloat16, seed)
        cache = torch.full((2, 5, 8300, 8, 128), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        for index, name in enumerate(("k_cache", "v_cache")):
            cache[index, :, : arguments[name].shape[1]] = arguments[name]
            arguments[name] = cache[index]
        filled.append(arguments)
    buffers = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in filled[0].items()}
    launch(**buffers, max_rows=64, tile=tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch(**buffers, max_rows=64, tile=tile)
    for arguments in (*reversed(filled), *filled):
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                buffers[name].copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, launch(**arguments, max_rows=64, tile=tile))
        _assert_close(out, _expected(arguments), int(arguments["starts"][-1]), torch.bfloat16)
