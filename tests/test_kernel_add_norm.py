"""Parts of a product that join the residual stream, and its norm: against float64.

Built to catch: a part that is left out or read at the stride of another, a norm of what the stream was before, a sum
that is rounded part by part, rows read at another stride, and elements of the result that nothing writes.
"""

from __future__ import annotations

import pytest
import torch
from decision_setup import DEVICE, captured
from test_kernel_rms_norm import EPS, SMALL, TOLERANCES, _poisoned, assert_right  # noqa: F401

from kernels.add_norm import add_norm
from kernels.ref.add_norm import add_norm as reference

ALL = list(TOLERANCES)


def inputs(num_rows: int, width: int, parts: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The stream, parts that outweigh it in some rows and vanish beside it in others, and weights of both signs."""
    sizes = torch.logspace(-2, 1.5, max(num_rows, 1))[:num_rows, None]
    total, added = torch.randn(num_rows, width), torch.randn(parts, num_rows, width) * sizes
    return total.to(DEVICE, dtype), added.to(DEVICE), torch.randn(width).to(DEVICE, dtype)


def assert_added(add: object, total: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor) -> None:
    exact = total.double() + parts.double().sum(0)
    got = add(total, parts, weight, EPS)
    # One rounding to the dtype; sums in float32 have their own error, in proportion to what is added.
    scale = (total.abs().double() + parts.abs().double().sum(0)) * 2**-22
    step = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[total.dtype]
    assert ((total.double() - exact).abs() <= exact.abs() * step * 1.01 + scale + 6e-8).all()
    assert_right(got, total, weight)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize(("num_rows", "width", "parts"), [(1, 1, 1), (3, 7, 2), (2, 64, 3), (5, 576, 2), (4, 1000, 4)])
def test_equals_float64(num_rows: int, width: int, parts: int, dtype: torch.dtype) -> None:
    for add in (add_norm, reference):
        assert_added(add, *inputs(num_rows, width, parts, dtype))


def test_rounds_once() -> None:
    """Parts that only together reach half a unit in the last place of the stream."""
    total = torch.full((1, 8), 1.0, dtype=torch.float16, device=DEVICE)
    parts = torch.full((2, 1, 8), 0.4 * 2**-10, device=DEVICE)
    for add in (add_norm, reference):
        changed = total.clone()
        add(changed, parts, torch.ones(8, dtype=torch.float16, device=DEVICE), EPS)
        assert torch.equal(changed, torch.full_like(total, 1 + 2**-10))


def test_rows_apart_and_no_rows() -> None:
    total, parts, weight = inputs(5, 24, 2, torch.float32)
    wide = torch.full((5, 40), torch.nan, device=DEVICE)
    wide[:, :24] = total
    for add in (add_norm, reference):
        apart = wide.clone()
        got, dense = add(apart[:, :24], parts, weight, EPS), total.clone()
        assert torch.equal(got, add(dense, parts, weight, EPS))
        assert torch.equal(apart[:, :24], dense) and apart[:, 24:].isnan().all()
        assert add(total[:0], parts[:, :0].contiguous(), weight, EPS).shape == (0, 24)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (torch.zeros(2, 4), r"parts is \[2, 4\]; expected \[S, 2, 4\]"),
        (torch.zeros(1, 3, 4), r"parts is torch.float32 \[1, 3, 4\]"),
        (torch.zeros(1, 2, 4).half(), "parts is torch.float16"),
        (torch.zeros(1, 4, 2).mT, "expected contiguous"),
    ],
)
def test_refuses_what_does_not_fit(parts: torch.Tensor, message: str) -> None:
    for add in (add_norm, reference):
        with pytest.raises(ValueError, match=message):
            add(torch.zeros(2, 4, device=DEVICE), parts.to(DEVICE), torch.zeros(4, device=DEVICE), EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("width", [576, 4096, 5120])
def test_real_sizes(width: int, dtype: torch.dtype) -> None:
    for add in (add_norm, reference):
        assert_added(add, *inputs(256, width, 2, dtype))


@pytest.mark.gpu
def test_captured_over_changed_contents() -> None:
    total, parts, weight = inputs(60, 4096, 2, torch.bfloat16)
    graph, got = captured(lambda: add_norm(total, parts, weight, EPS))
    for _ in range(3):
        for tensor in (total, parts, weight):
            tensor.copy_(torch.randn(tensor.shape))
        got.fill_(torch.nan)
        before = total.clone()
        graph.replay()
        expected = before.double() + parts.double().sum(0)
        torch.testing.assert_close(total.double(), expected, rtol=1.01 * 2**-8, atol=1e-5)
        assert_right(got, total, weight)
