"""The RMS norm of rows: against float64 and against the layer of `transformers`.

Built to catch: a mean over the padding of a row, a product that is rounded elsewhere, rows read at another stride, and
elements of the result that nothing writes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decision_setup import DEVICE, captured, poison_empty
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kernels.ref.rms_norm import rms_norm as reference
from kernels.rms_norm import rms_norm

#: Relative to the exact value. Half precision rounds twice, half a unit in the last place each time.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1.01 * 2**-10, torch.bfloat16: 1.01 * 2**-7}
#: Of roundings where a half has fewer digits, times the largest weight.
SLACK = {torch.float32: 1e-30, torch.float16: 2e-7, torch.bfloat16: 1e-30}
SMALL = [torch.float32, torch.float16]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def inputs(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of very different size, weights of both signs."""
    sizes = torch.logspace(-2, 1.5, max(num_rows, 1))[:num_rows, None]
    x, weight = torch.randn(num_rows, width) * sizes, torch.randn(width)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def assert_right(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> None:
    assert got.dtype == x.dtype and got.is_contiguous()
    limits = {"rtol": TOLERANCES[x.dtype], "atol": SLACK[x.dtype]}
    torch.testing.assert_close(got.double(), exact(x, weight, eps), **limits)


@pytest.mark.parametrize("dtype", SMALL, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (3, 7), (2, 64), (5, 576), (4, 1000)])
def test_equals_float64(num_rows: int, width: int, dtype: torch.dtype) -> None:
    given = inputs(num_rows, width, dtype)
    for norm in (rms_norm, reference):
        assert_right(norm(*given, EPS), *given)
        assert_right(norm(*given, 0.5), *given, 0.5)


@pytest.mark.parametrize("dtype", [*SMALL, torch.bfloat16], ids=str)
def test_reference_is_the_layer_of_transformers(dtype: torch.dtype) -> None:
    x, weight = inputs(9, 130, dtype)
    layer = LlamaRMSNorm(130, EPS).to(DEVICE, dtype)
    layer.weight.data.copy_(weight)
    with torch.no_grad():
        assert torch.equal(reference(x, weight, EPS), layer(x))


def test_rounds_before_the_weight() -> None:
    """Where a single rounding gives another number than two, the kernel gives that of two."""
    x, weight = inputs(16, 512, torch.float16)
    got, once = rms_norm(x, weight, EPS), exact(x, weight).half()
    twice = reference(x, weight, EPS)
    differ = once != twice
    assert differ.float().mean() > 0.1
    assert (got == twice)[differ].float().mean() > 0.99


def test_rows_apart_and_no_rows() -> None:
    x, weight = inputs(6, 100, torch.float32)
    apart = torch.full((6, 173), torch.nan, device=DEVICE)[:, 5:105].copy_(x)
    assert_right(rms_norm(apart, weight, EPS), x, weight)
    assert rms_norm(x[:0], weight, EPS).shape == (0, 100)


def test_a_row_of_zeros_is_zero() -> None:
    x, weight = inputs(3, 48, torch.float16)
    x[1] = 0
    assert not rms_norm(x, weight, EPS)[1].any()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3), torch.zeros(3), r"expected \[M, H\]"),
        (torch.zeros(2, 0), torch.zeros(0), r"expected \[M, H\]"),
        (torch.zeros(2, 4), torch.zeros(3), r"weight \[3\]"),
        (torch.zeros(2, 4), torch.zeros(4).half(), r"weight is torch.float16; expected torch.float32"),
        (torch.zeros(2, 4).double(), torch.zeros(4).double(), "x is torch.float64, allowed"),
        (torch.zeros(4, 2).T, torch.zeros(4), "x has stride 2"),
    ],
)
def test_refuses_what_does_not_fit(x: torch.Tensor, weight: torch.Tensor, message: str) -> None:
    for norm in (rms_norm, reference):
        with pytest.raises(ValueError, match=message):
            norm(x.to(DEVICE), weight.to(DEVICE), EPS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("width", [576, 2560, 4096, 5120, 8192])
def test_real_sizes(width: int, dtype: torch.dtype) -> None:
    given = inputs(512, width, dtype)
    assert_right(rms_norm(*given, EPS), *given)
    assert_right(reference(*given, EPS), *given)


@pytest.mark.gpu
def test_captured_over_changed_contents() -> None:
    x, weight = inputs(60, 4096, torch.bfloat16)
    graph, got = captured(lambda: rms_norm(x, weight, EPS))
    for _ in range(3):
        for tensor in (x, weight):
            tensor.copy_(torch.randn(tensor.shape))
        got.fill_(torch.nan)
        graph.replay()
        assert_right(got, x, weight)
