"""Linear layers of one row: sums, residual and activation against torch, and what may be handed in.

Built to catch: rows or columns beyond a tile that are lost or added, outputs left unwritten, a residual rounded before
it is added, gate and up mixed up, and roundings other than those of torch's separate operators.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from decision_setup import DEVICE, captured, poison_empty

from kernels.matvec import MatvecConfig, choose_config, launch, launch_silu, matvec, matvec_silu
from kernels.ref.matvec import matvec as reference
from kernels.ref.matvec import matvec_silu as silu_reference

DTYPES = [torch.float32, torch.float16]  # those in which the interpreter is right
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # one rounding of the largest
SIZES = [(1, 1), (3, 7), (5, 130), (24, 256), (19, 520), (64, 576)]
CUTS = [MatvecConfig(1, 1), MatvecConfig(4, 2), MatvecConfig(8, 1, reach=2), MatvecConfig(2, 4, stages=3)]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def made(num_rows: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weight, residual) whose products are about as large as the residual."""
    x, weight, residual = torch.randn(1, width), torch.randn(num_rows, width) / width**0.5, torch.randn(1, num_rows)
    return tuple(tensor.to(DEVICE, dtype) for tensor in (x, weight, residual))


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    scale = float(want.double().abs().max().clamp(min=1.0))
    assert float((got.double() - want.double()).abs().max()) <= TOLERANCE[got.dtype] * scale


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_product_and_residual(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, residual = made(num_rows, width, dtype)
    for function in (matvec, reference):
        assert_near(function(x, weight), exact(x, weight).to(dtype))
        assert_near(function(x, weight, residual), (exact(x, weight) + residual.double()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_gate_and_up(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, _ = made(2 * num_rows, width, dtype)
    gate, up = F.linear(x, weight * 3).chunk(2, dim=-1)
    for function in (matvec_silu, silu_reference):
        assert_near(function(x, weight * 3), F.silu(gate) * up)


@pytest.mark.parametrize("config", CUTS, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(5, 130), (8, 1024)])
def test_every_cut_gives_the_same(num_rows: int, width: int, config: MatvecConfig) -> None:
    x, weight, residual = made(num_rows, width, torch.float32)
    assert_near(launch(x, weight, residual, None, config), reference(x, weight, residual))
    weight = torch.cat([weight, weight.flip(0)])
    assert_near(launch_silu(x, weight, None, config), silu_reference(x, weight))


def test_residual_is_added_before_the_one_rounding() -> None:
    """1 + 2^-12 is 1 in float16, 1 + 2^-12 - 1 is not 0."""
    x = torch.tensor([[1.0, 2.0**-6]], device=DEVICE).half()
    weight = torch.tensor([[1.0, 2.0**-6]], device=DEVICE).half()
    residual = -torch.ones(1, 1, device=DEVICE).half()
    for function in (matvec, reference):
        assert function(x, weight, residual).item() == 2.0**-12


def test_steps_are_rounded_like_separate_operators() -> None:
    """Equal to torch's own bit for bit where the sums are exact: values of few bits."""
    x = torch.randint(-2, 3, (1, 40), device=DEVICE).half()
    weight = (torch.randint(-9, 10, (34, 40), device=DEVICE) / 16).half()
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    want = F.silu(gate) * up
    for function in (matvec_silu, silu_reference):
        got = function(x, weight)
        assert float((got == want).float().mean()) >= 0.9  # exponentials differ in their last bit
        assert_near(got, want)


def test_up_is_rounded_before_the_product() -> None:
    """20 * 2049 would be 40992 in float16, but 2049 is 2048."""
    x, weight = torch.ones(1, 2, device=DEVICE).half(), torch.tensor([[20.0, 0.0], [2048.0, 1.0]], device=DEVICE)
    for function in (matvec_silu, silu_reference):
        assert function(x, weight.half()).item() == 40_960


def test_nothing_is_written_beyond_the_last_row() -> None:
    x, weight, residual = made(10, 40, torch.float32)
    space = torch.full((1, 32), 7.0, device=DEVICE)
    for function, inputs in ((launch, (x, weight[:5], residual[:, :5])), (launch_silu, (x, weight))):
        space.fill_(7.0)
        function(*inputs, space[:, 8:13], MatvecConfig(8, 1))
        assert (space[0] != 7).nonzero()[:, 0].tolist() == [8, 9, 10, 11, 12]


def test_large_gates_do_not_overflow() -> None:
    x = torch.full((1, 2), 100.0, device=DEVICE)
    weight = torch.tensor([[-5.0, -5.0], [5.0, 5.0], [1.0, 0.0], [0.0, 1.0]], device=DEVICE)
    for function in (matvec_silu, silu_reference):
        assert function(x, weight).tolist() == [[0.0, 100_000.0]]


def test_out_is_written_and_may_be_the_residual() -> None:
    x, weight, residual = made(11, 72, torch.float32)
    want = reference(x, weight, residual)
    for function in (matvec, reference):
        out = torch.full((1, 13), torch.nan, device=DEVICE)
        assert function(x, weight, residual, out[:, 1:12]).data_ptr() == out[:, 1:].data_ptr()
        assert_near(out[:, 1:12], want)
        assert bool(out[0, [0, 12]].isnan().all())
        stream = residual.clone()
        assert function(x, weight, stream, stream) is stream
        assert_near(stream, want)


def test_rows_of_larger_tensors() -> None:
    """A row of many, at an address that is not a multiple of 16 bytes, and a slice of fused weights."""
    x, weight, _ = made(30, 65, torch.float32)
    rows = torch.cat([x, x + 1, x - 1])[:, 1:]
    weight = weight[:, 1:].contiguous()
    for function in (matvec, reference):
        assert_near(function(rows[1:2], weight[3:17]), exact(rows[1:2], weight[3:17]).float())


def test_nothing_to_do() -> None:
    x = torch.randn(1, 8, device=DEVICE)
    for functions in ((matvec, matvec_silu), (reference, silu_reference)):
        assert [function(x, x[:0]).shape for function in functions] == [(1, 0), (1, 0)]


@pytest.mark.parametrize(
    ("sizes", "programs"),
    [((6144, 4096), 3072), ((2560, 4096), 1280), ((4096, 12_288), 2048), ((576, 1536), 576), ((1, 1), 1)],
)
def test_cuts_leave_enough_programs(sizes: tuple[int, int], programs: int) -> None:
    config = choose_config(*sizes, 2)
    assert -(-sizes[0] // config.rows) == programs
    assert config == choose_config(*sizes, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(1, 5).double()}, "float64"),
        ({"x": torch.zeros(2, 5)}, r"x is \[2, 5\]"),
        ({"x": torch.zeros(1, 0)}, r"x is \[1, 0\]"),
        ({"x": torch.zeros(1, 10)[:, ::2]}, "x has stride 2"),
        ({"weight": torch.zeros(6, 4)}, r"weight is \[6, 4\]"),
        ({"weight": torch.zeros(5, 6).T}, "expected dense"),
        ({"weight": torch.zeros(6, 5).half()}, "weight is torch.float16"),
        ({"residual": torch.zeros(6)}, r"residual is \[6\]"),
        ({"out": torch.zeros(1, 5)}, r"out is \[1, 5\]"),
        ({"out": torch.zeros(1, 6).half()}, "out is torch.float16"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, torch.Tensor], named: str) -> None:
    given = {"x": torch.zeros(1, 5), "weight": torch.zeros(6, 5), "residual": torch.zeros(1, 6)} | change
    given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    for function in (matvec, reference):
        with pytest.raises(ValueError, match=named):
            function(**given)


def test_odd_gates_and_shared_memory_are_refused() -> None:
    space, weight = torch.zeros(1, 12, device=DEVICE), torch.zeros(3, 3, device=DEVICE)
    for function, silu in ((matvec, matvec_silu), (reference, silu_reference)):
        with pytest.raises(ValueError, match="7 rows"):
            silu(space, torch.zeros(7, 12, device=DEVICE))
        for x, residual, out in ((0, 6, 2), (6, 1, 0)):
            with pytest.raises(ValueError, match="shares memory"):
                function(*(space[:, x : x + 3], weight), *(space[:, part : part + 3] for part in (residual, out)))
        with pytest.raises(ValueError, match="shares memory"):
            function(space[:, :3], weight, None, weight[2:])
        function(space[:, :3], weight, space[:, 6:9], space[:, 3:6])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "width"), [(6144, 4096), (4096, 12_288), (2560, 9728), (151_936, 2560), (576, 1536), (1003, 4100)]
)
def test_real_sizes(num_rows: int, width: int, dtype: torch.dtype) -> None:
    x, weight, residual = made(num_rows, width, dtype)
    assert_near(matvec(x, weight, residual), reference(x, weight, residual))
    if num_rows % 2 == 0:
        assert_near(matvec_silu(x, weight), silu_reference(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 4])
def test_replay_over_a_stream_in_place(stages: int) -> None:
    """Layers one behind another, each reading what the one before has just written."""
    dtype, width = torch.bfloat16, 2048
    _, weight, stream = made(width, width, dtype)
    gate_up = made(2 * width, width, dtype)[1]
    weight *= 0.05  # so that the stream stays about as large as it is
    config = MatvecConfig(8, 4, stages=stages)

    def layers() -> None:
        for _ in range(20):
            launch(launch_silu(stream, gate_up, None, config), weight, stream, stream, config)

    graph, _ = captured(layers)
    start = torch.randn(1, width, device=DEVICE).to(dtype)
    ends = []
    for _ in range(3):
        stream.copy_(start)
        graph.replay()
        ends.append(stream.clone())
    want = start.clone()
    for _ in range(20):
        want = reference(silu_reference(want, gate_up), weight, want)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert float((ends[0].double() - want.double()).norm() / want.double().norm()) <= 0.03
