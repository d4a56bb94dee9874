"""Kernels whose launch overlaps the kernel in front wait for what that one writes, however early it lets them start.

None of ours lets its dependents start before it ends, so a chain of them comes out right even if none waits. Here the
kernel in front says so at once, spins, and only then writes all that the kernel behind reads. Until then the memory
holds NaN, or zeros where whole numbers lie, so what is read or written too early shows.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest
import torch
import triton
import triton.language as tl
from decision_setup import DEVICE, captured
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

import kernels.tile_attention as attention_module
from kernels.add_norm import add_norm
from kernels.overlap import wait_for_previous
from kernels.rms_norm import rms_norm
from kernels.rotate_attend import rotate_attend
from kernels.rotate_write import rotate_write
from kernels.silu_mul import silu_mul
from kernels.tile_attention import attend_rows

pytestmark = pytest.mark.usefixtures("loops_over_loaded_bounds")

#: How long the kernel in front spins: a launch takes the host some 0.1 ms, and it may be interrupted.
SPIN_SECONDS = 0.02

WIDTH, EPS = 1024, 1e-6
HEADS, KV_HEADS, DIM, LAYER = 4, 2, 64, 1
ROWS_OF_A_REQUEST, CONTEXT = 30, 500

Tensors = dict[str, torch.Tensor]
Call = Callable[..., torch.Tensor]


def on_hopper(test: Callable) -> Callable:
    """Marks a test that needs a device on which launches overlap."""
    return pytest.mark.gpu(pytest.mark.usefixtures("_overlapping")(test))


@pytest.fixture
def interpreted_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an H200, where there is no device to ask."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(attention_module, "_num_sms", lambda device: 132)


@pytest.fixture
def _overlapping() -> None:
    if torch.cuda.get_device_capability(DEVICE) < (9, 0):
        pytest.skip("launches overlap from compute capability 9.0 on")


@triton.jit
def _fill_late(source_ptr, target_ptr, count, nanoseconds, BLOCK: tl.constexpr):
    """Grid: (1,), so that there is room beside it. Copies `count` numbers once the time has passed."""
    gdc_launch_dependents()
    begin = globaltimer()
    while globaltimer() - begin < nanoseconds:
        pass
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        inside = offsets < count
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=inside), mask=inside)


def fill_late(source: torch.Tensor, target: torch.Tensor) -> float:
    """Launches the kernel in front, over two dense tensors of whole 32 bits, and says when it ends at the soonest."""
    begin = perf_counter()
    source, target = source.view(torch.int32), target.view(torch.int32)
    _fill_late[(1,)](source, target, source.numel(), int(1e9 * SPIN_SECONDS), BLOCK=4096, num_warps=8)
    return begin + SPIN_SECONDS


@triton.jit
def _copy(source_ptr, target_ptr, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (1,)."""
    wait_for_previous(WAIT)
    offsets = tl.arange(0, BLOCK)
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets))


def _rms_norm(num_rows: int, generator: torch.Generator) -> tuple[Tensors, Call]:
    x, weight = (torch.randn(*size, WIDTH, generator=generator).half() for size in ((num_rows,), ()))
    return {"x": x, "weight": weight}, lambda x, weight: rms_norm(x, weight, EPS)


def _add_norm(num_rows: int, generator: torch.Generator) -> tuple[Tensors, Call]:
    tensors, _ = _rms_norm(num_rows, generator)
    parts = torch.randn(2, num_rows, WIDTH, generator=generator)
    given = {"total": tensors["x"], "parts": parts, "weight": tensors["weight"]}
    return given, lambda total, parts, weight: add_norm(total, parts, weight, EPS)


def _silu_mul(num_rows: int, generator: torch.Generator) -> tuple[Tensors, Call]:
    return {"gate_up": torch.randn(num_rows, 2 * WIDTH, generator=generator).half()}, silu_mul


def _requests(num_rows: int, generator: torch.Generator) -> Tensors:
    """Requests of 30 rows, or of all if fewer, in the slots from the last one down to 1, and random trees."""
    count = max(num_rows // ROWS_OF_A_REQUEST, 1)
    rows = torch.arange(num_rows)
    of_row, own = rows // ROWS_OF_A_REQUEST, rows % ROWS_OF_A_REQUEST
    assert num_rows <= ROWS_OF_A_REQUEST or num_rows % ROWS_OF_A_REQUEST == 0
    slots, context_len = torch.arange(count, 0, -1), CONTEXT - 7 * torch.arange(count)
    bits = torch.randint(1 << 62, (num_rows,), generator=generator)
    return {
        "slots": slots,
        "starts": torch.arange(count + 1) * min(num_rows, ROWS_OF_A_REQUEST),
        "context_len": context_len,
        "ancestors": bits & (1 << own) - 1 | 1 << own,
        "slot_of_row": slots[of_row],
        "kv_row": context_len[of_row] + own,
    }


def _heads(num_rows: int, generator: torch.Generator) -> Tensors:
    """Raw heads, what norms and rotates them, and the cache."""
    angles = torch.rand(num_rows, DIM // 2, generator=generator) * 6.3
    num_slots, length = max(num_rows // ROWS_OF_A_REQUEST, 1) + 1, CONTEXT + ROWS_OF_A_REQUEST
    return {
        "qkv": torch.randn(num_rows, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).half(),
        "q_weight": torch.rand(DIM, generator=generator).half(),
        "k_weight": torch.rand(DIM, generator=generator).half(),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "kv": torch.randn(LAYER + 1, 2, num_slots, length, KV_HEADS, DIM, generator=generator).half(),
    }


def _rotate_write(num_rows: int, generator: torch.Generator) -> tuple[Tensors, Call]:
    rows = _requests(num_rows, generator)
    tensors = _heads(num_rows, generator) | {name: rows[name] for name in ("slot_of_row", "kv_row", "starts")}
    return tensors, lambda **given: rotate_write(**given, eps=EPS, layer=LAYER, num_heads=HEADS)


def _attend(variant: str) -> Callable[[int, torch.Generator], tuple[Tensors, Call]]:
    def make(num_rows: int, generator: torch.Generator) -> tuple[Tensors, Call]:
        rows, heads = _requests(num_rows, generator), _heads(num_rows, generator)
        del rows["slot_of_row"], rows["kv_row"]
        tensors = {"query": heads["qkv"].unflatten(1, (-1, DIM))[:, :HEADS].contiguous(), "kv": heads["kv"][LAYER]}

        def call(kv: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
            bounds = {"max_rows": min(num_rows, ROWS_OF_A_REQUEST), "max_context": CONTEXT, "variant": variant}
            return attend_rows(k_cache=kv[0], v_cache=kv[1], **given, scale=DIM**-0.5, **bounds)

        return tensors | rows, call

    return make


def _rotate_attend(num_rows: int, generator: torch.Generator) -> tuple[Tensors, Call]:
    rows = _requests(num_rows, generator)
    # A single launch does not read the places row by row.
    places = {name: rows.pop(name).to(DEVICE) for name in ("slot_of_row", "kv_row")}
    places |= {"eps": EPS, "layer": LAYER, "num_heads": HEADS, "scale": DIM**-0.5}
    bounds = {"max_rows": min(num_rows, ROWS_OF_A_REQUEST), "max_context": CONTEXT}
    return _heads(num_rows, generator) | rows, lambda **given: rotate_attend(**given, **places, **bounds)


CASES = {
    "rms_norm": _rms_norm,
    "add_norm": _add_norm,
    "silu_mul": _silu_mul,
    "rotate_write": _rotate_write,
    "attend_rows": _attend("rows16"),
    "attend_rows, split": _attend("packed"),
    "rotate_attend": _rotate_attend,
}
INPUTS = [(case, name) for case, make in CASES.items() for name in make(1, torch.Generator())[0]]


class Given:
    """What a call reads and changes, side by side in one buffer, so that a single launch can fill it.

    Attributes:
        here: bytes that the call works on.
        right, wrong: what belongs there, and what lies there before.
        tensors: the parts of each of the three, by name.
    """

    def __init__(self, case: str, num_rows: int) -> None:
        tensors, self._call = CASES[case](num_rows, torch.Generator().manual_seed(num_rows))
        sizes = [-(-t.nbytes // 256) * 256 for t in tensors.values()]
        buffers = torch.zeros(3, sum(sizes), dtype=torch.uint8, device=DEVICE).unbind()
        self.here, self.right, self.wrong = buffers
        pieces = [zip(tensors.items(), buffer.split(sizes), strict=True) for buffer in buffers]
        self.tensors = [
            {name: piece[: t.nbytes].view(t.dtype).view(t.shape) for (name, t), piece in named} for named in pieces
        ]
        for name, tensor in tensors.items():
            self.tensors[1][name].copy_(tensor)
            self.tensors[2][name].fill_(torch.nan if tensor.is_floating_point() else 0)

    def call(self) -> torch.Tensor:
        return self._call(**self.tensors[0])

    def outcome(self, result: torch.Tensor) -> torch.Tensor:
        """All bits that a call has returned or left."""
        return torch.cat([result.view(torch.uint8).flatten(), self.here])

    def expected(self) -> torch.Tensor:
        """The outcome of a call that nothing else runs beside."""
        self.here.copy_(self.right)
        _wait()
        result = self.call()
        _wait()
        return self.outcome(result)


def behind(given: Given, call: Callable[[], torch.Tensor], in_graph: bool) -> torch.Tensor:
    """What `call` returns when the launch right in front of its own fills the memory late."""

    def both() -> tuple[torch.Tensor, float]:
        soonest = fill_late(given.right, given.here)
        return call(), soonest

    if in_graph:
        graph, (result, _) = captured(both)
    else:
        both()  # compiles, and finds memory for the result
        _wait()  # a copy behind a kernel that does not wait could come before what is written late
    given.here.copy_(given.wrong)
    _wait()
    if in_graph:
        graph.replay()
    else:
        result, soonest = both()
        assert perf_counter() < soonest, "the host was too slow: the kernel in front had ended before the launch"
    _wait()
    return result


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("case", CASES)
def test_a_call_repeats_to_the_bit(case: str, interpreted_sizes: None) -> None:
    given = Given(case, 6)
    expected = given.expected()
    assert torch.equal(given.expected(), expected)
    assert not given.wrong.equal(given.right) and given.call().isfinite().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter: NaN is meant
@pytest.mark.parametrize(("case", "name"), INPUTS)
def test_any_input_that_is_read_too_early_changes_the_outcome(case: str, name: str, interpreted_sizes: None) -> None:
    """The tests below can see it. What is written before the kernel in front writes is lost, and shows as well."""
    given = Given(case, 6)
    expected = given.expected()
    here, right, wrong = (tensors[name] for tensors in given.tensors)
    given.here.copy_(given.right)
    here.copy_(wrong)
    result = given.call()
    here.copy_(right)
    assert not torch.equal(given.outcome(result), expected)


@on_hopper
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("waits", [False, True])
def test_only_a_kernel_that_does_not_wait_reads_what_was_there_before(waits: bool, in_graph: bool) -> None:
    """Shows that launches do overlap here, without which no test below could fail."""
    given = Given("rms_norm", 1)

    def call() -> torch.Tensor:
        copied = torch.empty(1024, dtype=torch.uint8, device=DEVICE)
        _copy[(1,)](given.here, copied, WAIT=waits, BLOCK=1024, launch_pdl=True)
        return copied

    copied = behind(given, call, in_graph)
    assert torch.equal(copied, (given.right if waits else given.wrong)[:1024])


@on_hopper
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("num_rows", [1, 60, 720])
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_waits_for_the_one_in_front(case: str, num_rows: int, in_graph: bool) -> None:
    given = Given(case, num_rows)
    expected = given.expected()
    result = behind(given, given.call, in_graph)
    assert torch.equal(given.outcome(result), expected)


@on_hopper
@pytest.mark.parametrize("case", ["attend_rows, split", "rotate_attend"])
def test_the_kernel_that_joins_splits_waits_for_their_sums(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile kernel, which runs before it, is followed by one that takes the sums away and writes them late."""
    given = Given(case, 60)
    expected = given.expected()
    attend, soonest = attention_module.attend, []

    class AttendLate:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: object, **options: object) -> None:
                attend[grid](*args, **options)
                assert options["SPLIT"] and bool(options["NEW_ROWS"]) == (case == "rotate_attend")
                lse = args[attend.arg_names.index("lse_ptr")]
                right = lse.clone()
                lse.fill_(torch.nan)
                _wait()
                soonest.append(fill_late(right, lse))

            return launch

    monkeypatch.setattr(attention_module, "attend", AttendLate())
    for _ in range(2):  # the first one compiles
        given.here.copy_(given.right)
        result = given.call()
        ended = perf_counter()
        _wait()
        assert torch.equal(given.outcome(result), expected)
    assert ended < soonest[-1], "the host was too slow: the kernel in front had ended before the launch"


@on_hopper
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", CASES)
def test_a_launch_between_holds_the_one_behind_back(case: str, in_graph: bool) -> None:
    """One that reads nothing of what is written late, and has no live rows: the next one waits for it alone."""
    given, between = Given("rms_norm", 60), Given(case, 60)
    expected = given.expected()
    between.here.copy_(between.right)
    if "starts" in between.tensors[0]:
        between.tensors[0]["starts"].zero_()

    def call() -> torch.Tensor:
        between.call()
        return given.call()

    assert torch.equal(given.outcome(behind(given, call, in_graph)), expected)
