"""The gated product: against float64 and against what torch computes.

Built to catch: gate and up exchanged, a product that is rounded elsewhere, tiles beyond the end of a row, gates whose
exponential overflows, and elements of the result that nothing writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from decision_setup import DEVICE, captured, poison_empty

import kernels.silu_mul as module
from kernels.ref.silu_mul import silu_mul as reference
from kernels.silu_mul import silu_mul

#: Relative to the exact value. Half precision rounds twice, half a unit in the last place each time.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 1.01 * 2**-10, torch.bfloat16: 1.01 * 2**-7}
#: Of one rounding of a silu so small that a half has fewer digits, times the largest `up`.
SLACK = {torch.float32: 1e-30, torch.float16: 2e-7, torch.bfloat16: 1e-30}
SMALL = [torch.float32, torch.float16]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Gates from -12 to 12 or so, ups in -4 .. 4."""
    gate, up = torch.randn(num_rows, width) * 3, torch.randn(num_rows, width).clamp(-4, 4)
    return torch.cat([gate, up], dim=1).to(DEVICE, dtype)


def assert_right(got: torch.Tensor, gate_up: torch.Tensor) -> None:
    assert got.dtype == gate_up.dtype and got.is_contiguous()
    gate, up = gate_up.double().chunk(2, dim=1)
    want = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCES[got.dtype], atol=SLACK[got.dtype])


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 5), (2, 256), (3, 1536), (2, 1000)])
def test_equals_float64(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = rows(num_rows, width, dtype)
    for function in (silu_mul, reference):
        assert_right(function(gate_up), gate_up)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_large_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large result, over rows that they do not divide."""
    monkeypatch.setattr(module, "SMALL_RESULT", 0)
    gate_up = rows(2, 2100, dtype)
    assert_right(silu_mul(gate_up), gate_up)


def test_rounds_the_silu_before_the_product() -> None:
    gate_up = rows(8, 512, torch.float16)
    gate, up = gate_up.chunk(2, dim=1)
    once = (F.silu(gate.double()) * up.double()).half()
    twice = F.silu(gate) * up
    assert torch.equal(reference(gate_up), twice)
    differ = once != twice
    assert differ.float().mean() > 0.1
    assert (silu_mul(gate_up) == twice)[differ].float().mean() > 0.99


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter: an infinite exponential is meant
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_extreme_gates(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-60_000.0, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 60_000.0]], device=DEVICE, dtype=dtype)
    got = silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.equal(got[:, 3:], gate[:, 3:])
    assert got[:, :3].float().abs().max() < 1e-30


def test_rows_apart_and_no_rows() -> None:
    gate_up = rows(5, 37, torch.float32)
    apart = torch.full((5, 91), torch.nan, device=DEVICE)[:, 3:77].copy_(gate_up)
    assert torch.equal(silu_mul(apart), silu_mul(gate_up))
    assert silu_mul(gate_up[:0]).shape == (0, 37)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(4), r"expected \[M, 2F\]"),
        (torch.zeros(4, 3), r"expected \[M, 2F\]"),
        (torch.zeros(4, 0), r"expected \[M, 2F\]"),
        (torch.zeros(4, 2).int(), "gate_up is torch.int32, allowed"),
        (torch.zeros(4, 2).T, "gate_up has stride 2"),
    ],
)
def test_refuses_what_does_not_fit(gate_up: torch.Tensor, message: str) -> None:
    for function in (silu_mul, reference):
        with pytest.raises(ValueError, match=message):
            function(gate_up.to(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 12_288), (17, 1536), (512, 12_288), (300, 9728)])
def test_real_sizes(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = rows(num_rows, width, dtype)
    assert_right(silu_mul(gate_up), gate_up)
    assert_right(reference(gate_up), gate_up)


@pytest.mark.gpu
def test_captured_over_changed_contents() -> None:
    gate_up = rows(60, 12_288, torch.bfloat16)
    graph, got = captured(lambda: silu_mul(gate_up))
    for _ in range(3):
        gate_up.copy_(rows(60, 12_288, torch.bfloat16))
        got.fill_(torch.nan)
        graph.replay()
        assert_right(got, gate_up)
