"""The write of packed rows into the slot cache: what is written, and above all what is not."""

from __future__ import annotations

import pytest
import torch

from kernels.kv_write import kv_write, launch
from kernels.ref.kv_write import kv_write as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]  # nothing is computed, so bfloat16 is right when interpreted


def _arguments(heads: int, head_dim: int, dtype: torch.dtype, rows: int = 9, live: int = 6) -> dict[str, torch.Tensor]:
    """Rows of two requests in slots 3 and 0; those of nobody point at the first live row, as badly as they can."""
    key, value = torch.randn(2, rows, heads, head_dim).to(dtype)
    key[live:], value[live:] = torch.nan, torch.nan
    kv = torch.zeros(2, 4, 21, heads, head_dim, dtype=dtype)
    slot_of_row = torch.tensor([3] * 4 + [0] * (live - 4) + [3] * (rows - live))
    kv_row = torch.tensor([*range(7, 11), *range(live - 4), *[7] * (rows - live)])
    tensors = {
        "key": key,
        "value": value,
        "k_cache": kv[0],
        "v_cache": kv[1],
        "slot_of_row": slot_of_row,
        "kv_row": kv_row,
        "starts": torch.tensor([0, 4, live, live]),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (2, 16), (3, 12), (8, 96)])
def test_writes_live_rows_and_nothing_else(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    for write in (launch, kv_write, reference):
        given = _arguments(heads, head_dim, dtype)
        expected = given["k_cache"].clone(), given["v_cache"].clone()
        for cache, rows in zip(expected, (given["key"], given["value"]), strict=True):
            cache[3, 7:11], cache[0, :2] = rows[:4], rows[4:6]
        write(**given)
        assert torch.equal(given["k_cache"], expected[0])
        assert torch.equal(given["v_cache"], expected[1])


@pytest.mark.parametrize(("slot", "row"), [(4, 0), (-1, 0), (0, 21), (0, -1), (1 << 40, 0), (0, 1 << 40)])
def test_places_outside_the_cache_are_left_out(slot: int, row: int) -> None:
    for write in (launch, reference):
        given = _arguments(2, 16, torch.float32)
        given["slot_of_row"][1], given["kv_row"][1] = slot, row
        write(**given)
        written = (given["k_cache"] != 0).any(-1).any(-1).nonzero().tolist()
        assert written == [[0, 0], [0, 1], [3, 7], [3, 9], [3, 10]]


def test_rows_with_other_strides() -> None:
    """Heads before rows, as a model makes them, and rows out of a fused projection."""
    given, plain = (_arguments(2, 16, torch.float32) for _ in range(2))
    for name in ("key", "value"):
        plain[name] = given[name]
    given["key"] = given["key"].transpose(0, 1).contiguous().transpose(0, 1)
    given["value"] = torch.cat([given["value"], given["value"]], dim=1)[:, 2:]
    launch(**given)
    launch(**plain)
    assert torch.equal(given["k_cache"], plain["k_cache"])
    assert torch.equal(given["v_cache"], plain["v_cache"])


def test_nobody_is_live() -> None:
    given = _arguments(2, 16, torch.float32)
    given["starts"].zero_()
    launch(**given)
    launch(**{**given, **{name: given[name][:0] for name in ("key", "value", "slot_of_row", "kv_row")}})
    assert not bool(given["k_cache"].any())


def test_operator_is_well_formed() -> None:
    torch.library.opcheck(kv_write, tuple(_arguments(2, 16, torch.float32).values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(9, 32)}, r"expected \[M, Hk, D\]"),
        ({"value": torch.zeros(8, 2, 16)}, "both alike"),
        ({"k_cache": torch.zeros(4, 21, 3, 16)}, r"expected \[slots, L, 2, 16\]"),
        ({"v_cache": torch.zeros(4, 20, 2, 16)}, "both alike"),
        ({"v_cache": torch.zeros(4, 21, 2, 16).half()}, "v_cache is torch.float16, key torch.float32"),
        ({"key": torch.zeros(9, 16, 2).transpose(1, 2)}, "key has stride 2"),
        ({"kv_row": torch.zeros(8, dtype=torch.int64)}, r"kv_row is .*\[9\]"),
        ({"slot_of_row": torch.zeros(9)}, "slot_of_row is torch.float32"),
        ({"starts": torch.zeros(0, dtype=torch.int64)}, r"starts is .*\[1\]"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, torch.Tensor], message: str) -> None:
    given = _arguments(2, 16, torch.float32)
    with pytest.raises(ValueError, match=message):
        kv_write(**{**given, **{name: tensor.to(DEVICE) for name, tensor in change.items()}})


@pytest.mark.gpu
def test_captured_over_changed_places() -> None:
    """Replays read places and the number of live rows from the same buffers."""
    given = _arguments(8, 128, torch.bfloat16, rows=300, live=40)
    given["k_cache"], given["v_cache"] = torch.zeros(2, 4, 100, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    launch(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(**given)
    for live in (0, 1, 300):
        given["starts"].fill_(live)
        given["slot_of_row"].copy_(torch.arange(300) % 4)
        given["kv_row"].copy_(torch.arange(300) // 4)
        expected = {
            **given,
            "k_cache": torch.zeros_like(given["k_cache"]),
            "v_cache": torch.zeros_like(given["v_cache"]),
        }
        reference(**expected)
        given["k_cache"].zero_()
        graph.replay()
        torch.testing.assert_close(given["k_cache"], expected["k_cache"], equal_nan=True)
