"""Kernel measurements: the timer, inputs of the cells, rows and checks."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch

from kernels.tile_choice import choose_tile
from workbench.measure import kernel_times
from workbench.measure.kernel_attention import attention_rows, split_rows
from workbench.measure.kernel_cases import AttentionCase, row_counts, tree_bits
from workbench.measure.kernel_checks import kernel_checks, main_cell
from workbench.measure.kernel_decision import decision_rows, kernel_and_reference
from workbench.measure.kernel_decision_cases import CASES, DecisionSizes
from workbench.measure.kernel_peers import PEERS, Absent
from workbench.measure.kernel_plan import Cell, HeadShape, KernelPlan
from workbench.measure.kernel_times import differing, sets_of, time_calls, worst_row_error
from workbench.measure.parameters import read_parameters
from workbench.paths import notebooks_dir

NOTEBOOK = notebooks_dir() / "08_kernels.ipynb"
CPU = torch.device("cpu")
SMALL = HeadShape("none", 6, 2, 16)
SIZES = DecisionSizes(3, 7, 4, 300, 2, SMALL, torch.float32, CPU)
TEXTS = (
    "3 x chain7 @ 33",
    "5 x ragged4 @ 20",
    "2 x tree60 @ 1",
    "1 x tree64 @ 0",
    "2 x prefill70 @ 9",
    "1 x chain1 @ 0",
)
TINY = {
    "shape": "SmolLM2-135M",
    "cells": ["2 x chain4 @ 10", "3 x chain4 @ 10", "1 x tree9 @ 5", "1 x prefill12 @ 0"],
    "other_shapes": ["Qwen3-1.7B"],
    "other_cells": ["2 x ragged3 @ 6"],
    "requests": [3, 2],
    "vocab": 50,
    "layers": 1,
    "repeats": 2,
}


def made_plan(**changes) -> KernelPlan:
    """The tiny plan, with changes."""
    values = {name: parameter.default for name, parameter in read_parameters(NOTEBOOK).items()}
    return KernelPlan.of(values | TINY | changes)


def made_case(text: str, shape: HeadShape = SMALL, device: torch.device = CPU, **options) -> AttentionCase:
    return AttentionCase(shape, Cell.parse(text), options.pop("dtype", torch.float32), device, seed=3, **options)


@pytest.fixture(scope="module")
def tables():
    plan = made_plan()
    return attention_rows(plan, 1e9), decision_rows(plan, 1e9)


# ---- timer ----------------------------------------------------------------------------------------------------------
def test_calls_take_turns_and_the_median_of_a_call_counts(monkeypatch):
    clock, seen = iter([0.0, 4.0, 10.0, 12.0, 20.0, 29.0]), []
    monkeypatch.setattr(kernel_times, "perf_counter", lambda: next(clock))
    timing = time_calls([partial(seen.append, i) for i in range(2)], CPU, repeats=3)
    assert seen == [0, 1] * 4, "one pass more, before the clock starts"
    assert (timing.median_us, timing.min_us, timing.max_us) == (2e6, 1e6, 4.5e6)
    assert (timing.calls, timing.repeats) == (2, 3)
    for calls, repeats in (([], 1), ([print], 0)):
        with pytest.raises(ValueError, match="allowed: at least one of each"):
            time_calls(calls, CPU, repeats)


def test_a_graph_is_captured_once_and_replayed_between_events(monkeypatch):
    """The order of what a GPU is told, without one."""
    log, elapsed = [], iter([8.0, 2.0, 4.0])

    class Graph:
        def replay(self):
            log.append("replay")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return next(elapsed)

    for name, stand_in in {
        "CUDAGraph": Graph,
        "Event": Event,
        "device": lambda device: nullcontext(),
        "graph": lambda graph: nullcontext(log.append("capture")),
        "synchronize": lambda: log.append("wait"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    calls = [partial(log.append, "a"), partial(log.append, "b")]
    timing = time_calls(calls, torch.device("cuda", 0), repeats=3)
    assert log[:7] == ["a", "b", "wait", "capture", "a", "b", "replay"]
    assert log[7:] == ["replay"] * 2 + ["event", "replay", "event", "wait"] * 3
    assert (timing.median_us, timing.min_us, timing.max_us) == pytest.approx((2000, 1000, 4000))


def test_inputs_outgrow_the_caches_of_a_gpu():
    cuda = torch.device("cuda")
    for num_bytes in (1, 4e6, 1e8, 1e10):
        sets = sets_of(num_bytes, cuda)
        assert 2 <= sets <= 64 and (sets * num_bytes >= kernel_times.ROTATED_BYTES or sets == 64)
    assert sets_of(1, CPU) == 2 and sets_of(4e6, cuda) == 64


def test_bandwidth_counts_reads_and_writes(monkeypatch):
    monkeypatch.setitem(kernel_times._COPIED, "cpu", 1000)
    monkeypatch.setattr(kernel_times, "_clocked", lambda *_: [1e-3])
    assert kernel_times.copy_bandwidth(CPU) == pytest.approx(2 * 1000 / 0.5e-3)


def test_errors_are_those_of_the_worst_row():
    exact = torch.ones(4, 2, 8, dtype=torch.float64)
    found = exact.clone()
    found[2] *= 1.25
    assert worst_row_error(found, exact) == pytest.approx(0.25)
    found[0, 0, 0] = math.nan
    assert math.isnan(worst_row_error(found, exact))
    a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])
    assert differing((a, a), (a, b)) == 0.25 and differing((a,), (a,)) == 0
    nan = torch.tensor([math.nan])
    assert differing((nan,), (nan,)) == 1


# ---- inputs ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["32 x ragged8 @ 0", "1 x ragged8 @ 0", "7 x ragged1 @ 0", "5 x chain16 @ 0"])
def test_rows_of_a_cell(text):
    cell = Cell.parse(text)
    counts = row_counts(cell, Random(0))
    assert len(counts) == cell.requests and sum(counts) == cell.requests * cell.rows
    assert min(counts) >= 1 and max(counts) <= cell.max_rows
    assert (len(set(counts)) > 3) == (text == "32 x ragged8 @ 0")


def test_ancestor_bits():
    assert tree_bits("chain", 3, Random(0)) == [1, 3, 7] and tree_bits("prefill", 3, Random(0)) == ()
    rows = [bits % 2**64 for bits in tree_bits("tree", 64, Random(0))]
    for row, bits in enumerate(rows):
        assert bits >> row == 1, "itself, and nothing behind"
        assert all(rows[j] | bits == bits for j in range(row) if bits >> j & 1), "ancestors of ancestors"
    assert rows != [bits % 2**64 for bits in tree_bits("chain", 64, Random(0))]


@pytest.mark.parametrize("text", TEXTS)
def test_exact_attention_is_that_of_every_row_by_itself(text):
    case = made_case(text)
    numbers, exact = case.exact()
    assert numbers.tolist() == sorted(set(numbers.tolist())) and exact.dtype == torch.float64
    assert len(numbers) == sum(case.lengths) or case.cell.kind == "prefill"
    for number, found in zip(numbers.tolist(), exact, strict=True):
        request = int((case.starts <= number).sum()) - 1
        row, context = number - int(case.starts[request]), case.cell.context
        bits = (1 << row + 1) - 1 if case.ancestors is None else int(case.ancestors[number]) % 2**64
        keys = [*range(context), *(context + j for j in range(row + 1) if bits >> j & 1)]
        k, v = case.caches[0][:, case.cell.requests - 1 - request, keys].double().repeat_interleave(3, dim=2)
        weights = (torch.einsum("hd,thd->ht", case.queries[0][number].double(), k) / 4).softmax(-1)
        assert torch.allclose(found, torch.einsum("ht,thd->hd", weights, v), atol=1e-12)


def test_floor_and_work_count_what_is_seen():
    case = made_case("2 x chain3 @ 10")
    assert case.kv_elements == 2 * 13 * 2 * 2 * 16
    assert case.flops == 4 * 6 * 16 * 2 * (3 * 10 + 6)
    tree = made_case("1 x tree64 @ 0")
    assert tree.flops == 4 * 6 * 16 * sum((bits % 2**64).bit_count() for bits in tree.ancestors.tolist())


@pytest.mark.parametrize("text", TEXTS)
def test_reference_and_library_attention_are_right(text):
    case = made_case(text)
    numbers, exact = case.exact()
    peer = PEERS["sdpa"](case)
    assert len(peer.calls) == len(case.reference_calls()) == 2
    for out in (case.reference_calls()[0](), peer.rows(peer.calls[0]())):
        assert worst_row_error(out[numbers], exact) < 1e-5
    assert worst_row_error(case.reference_calls()[1]()[numbers], exact) > 0.1, "another set of inputs"


@pytest.mark.parametrize("name", ["rows16", "packed", "split"])
def test_tiles_take_the_inputs(name):
    """Under Triton's interpreter where there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = made_case("2 x tree20 @ 70", device=device, sets=2)
    tile = choose_tile("packed" if name == "split" else name, 3, 2, 16, 2, 20, 70, 4, 132)
    calls = case.kernel_calls(replace(tile, splits=2 if name == "split" else 1))
    numbers, exact = case.exact()
    assert len(calls) == 2 and worst_row_error(calls[0]()[numbers], exact) < 1e-5


def test_one_wrong_bit_is_an_error_above_every_tolerance():
    case = made_case("32 x chain16 @ 1024", HeadShape("none", 8, 4, 64))
    numbers, exact = case.exact()
    case.ancestors[77] ^= 1
    assert worst_row_error(case.reference_calls()[0]()[numbers], exact) > max(kernel_times.TOLERANCE.values())


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [("varlen", "1 x tree9 @ 4", "knows no trees"), ("varlen", "1 x chain9 @ 4", "CUDA"), ("flex", TEXTS[0], "CUDA")],
)
def test_absent_peers_say_why(name, text, reason):
    with pytest.raises(Absent, match=reason):
        PEERS[name](made_case(text))


# ---- rows and checks ------------------------------------------------------------------------------------------------
def test_attention_rows(tables):
    rows = tables[0]
    cells = [("SmolLM2-135M", text) for text in TINY["cells"]] + [("Qwen3-1.7B", TINY["other_cells"][0])]
    whats = ["reference", "sdpa", "varlen"]
    assert [(row["shape"], row["cell"], row["what"]) for row in rows] == [(*c, what) for c in cells for what in whats]
    for row in rows:
        if row["what"] == "varlen":
            assert row["us"] is None and row["ok"] is None and row["note"]
        else:
            assert row["ok"] and row["error"] <= row["tolerance"] == 1e-5 and row["note"] == ""
            assert row["share"] == pytest.approx(row["floor_us"] / row["us"])
            assert row["us_min"] <= row["us"] <= row["us_max"]
        assert row["floor_us"] == pytest.approx(row["kv_bytes"] / 1e3)
    first = rows[0]
    assert first["kv_bytes"] == 2 * 14 * 2 * 3 * 64 * 4 and (first["rows"], first["requests"]) == (8, 2)


def test_a_broken_peer_is_a_note(monkeypatch):
    def broken(case):
        raise RuntimeError("no kernel for that\nand more")

    monkeypatch.setitem(PEERS, "sdpa", broken)
    rows = attention_rows(made_plan(), 1e9)
    assert {row["note"] for row in rows if row["what"] == "sdpa"} == {"RuntimeError: no kernel for that"}


def test_splits_are_measured_on_a_gpu_only():
    assert split_rows(made_plan(split_cells=TINY["cells"][:1]), 1e9) == []


def test_decision_rows(tables):
    rows = tables[1]
    assert [row["kernel"] for row in rows if row["role"] == "kernel"] == [*CASES, *CASES]
    assert [row["requests"] for row in rows if row["kernel"] == "pack"] == [2, 3]
    assert {row["what"] for row in rows} == {"reference", "torch"} and rows[-1]["kernel"] == "launch"
    for row in rows[:-1]:
        assert row["us"] > 0 and row["error"] is None and row["floor_us"] == pytest.approx(row["bytes"] / 1e3)
    features = next(row for row in rows if row["kernel"] == "features")
    assert features["bytes"] == 2 * 15 * 50 * 4 and features["share"] > 0
    searches = {row["case"]: row for row in rows if row["kernel"].startswith("prune")}
    assert [text.split(",")[0] for text in searches] == [f"{n} x 7 levels of 25" for n in (2, 1, 3)]
    assert all(row["share"] is None for row in searches.values())
    trees = next(row for row in rows if row["kernel"] == "pack_trees")
    assert trees["bytes"] == 2 * 60 * 64 and trees["case"] == "2 trees of 60"


@pytest.mark.parametrize("name", CASES)
def test_decision_inputs_suit_kernel_and_reference(name):
    """Kernels under Triton's interpreter where there is no GPU; what they must be told apart from is a wrong result."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = CASES[name](replace(SIZES, device=device))
    kernel, reference = kernel_and_reference(case.kernel)
    assert case.error(kernel, reference) <= case.tolerance

    def wrong(first, *others):
        if isinstance(first, tuple):
            return reference(first._replace(tokens=first.tokens.flip(0)), *others)
        return reference(first.flip(0 if len(first) > 1 else 1), *others)

    assert case.error(wrong, reference) > case.tolerance


@pytest.mark.parametrize(
    ("field", "value", "seen"),
    [("scores", -1.25, True), ("scores", math.nan, True), ("ancestors", 0, True), ("tokens", 1, False)],
)
def test_trees_are_compared_row_by_row(field, value, seen):
    """One entry of the last request is wrong, or one behind its tree."""
    case = CASES["prune"](replace(SIZES, requests=7))
    reference = kernel_and_reference("prune")[1]

    def wrong(*given):
        reference(*given)
        out = given[-1]
        if not seen:
            out.sizes[-1] = 30
            out.tokens[-1, 30:] = 5
        getattr(out, field)[-1, 40] = value

    def right(*given):
        reference(*given)
        given[-1].sizes[-1] = given[-1].sizes[-1] if seen else 30

    sizes = case.outcome(reference, case.inputs[0])[-2].tolist()
    assert [number for number, size in enumerate(sizes) if size] == [0, 2, 4, 6] and max(sizes) == 60
    assert (case.error(wrong, right) > case.tolerance) == seen


def test_a_long_call_is_made_once_an_input():
    case = CASES["pack_trees"](SIZES)
    assert len(case.calls(print)) == 16 and len(replace(case, short=False).calls(print)) == 1


@pytest.mark.parametrize("name", ["features", "choose, greedy", "compact", "kv_write"])
def test_plain_torch_does_the_same(name):
    case = CASES[name](SIZES)
    reference = kernel_and_reference(case.kernel)[1]
    if case.kernel in ("compact", "kv_write"):
        place = 0 if case.kernel == "compact" else 2
        wanted = case.outcome(reference, case.inputs[0])[0]
        case.plain[0]()
        assert torch.equal(case.inputs[0][place], wanted)
    else:
        assert (
            case.off(case.outcome(lambda *_: case.plain[0](), case.inputs[0]), case.outcome(reference, case.inputs[0]))
            < 1e-4
        )


def row_of(what, role, us, share, error=1e-3, **more) -> dict:
    ok = None if error is None else error <= 5e-3
    cell = {"shape": "a", "kind": "chain", "requests": 32, "cell": "32 x chain16 @ 1024"}
    return {**cell, "what": what, "role": role, "us": us, "share": share, "error": error, "ok": ok, **more}


CELL = [
    row_of("rows16", "kernel", 50.0, 0.6),
    row_of("rows128", "kernel", 120.0, 0.25),
    row_of("packed", "kernel", 40.0, 0.8, error=2e-3),
    row_of("sdpa", "peer", 300.0, 0.1),
    row_of("varlen", "peer", 60.0, 0.5, error=0.5),
    row_of("flex", "peer", None, None, error=None),
]


def test_checks():
    small = [row_of("packed", "kernel", 9.0, 0.1, requests=8, cell="8 x chain16 @ 1024")]
    other = [
        row_of("packed", "kernel", 9.0, 0.1, cell="32 x chain16 @ 8192"),
        row_of("packed", "kernel", 1.0, 1.0, shape="b"),
    ]
    found = kernel_checks([*small, *CELL, *other], [], [], 0.75, "_x")
    values = {name: check.value for name, check in found.items()}
    assert values == {
        "kernel_errors_x": 0,
        "worst_attention_error_x": 2e-3,
        "attention_floor_share_n32_x": 0.8,
        "rows16_over_rows128_n32_x": pytest.approx(2.4),
        "packed_over_rows128_n32_x": pytest.approx(3.0),
        "packed_over_peer_n32_x": pytest.approx(7.5),
    }
    assert found["kernel_errors_x"].ok and found["attention_floor_share_n32_x"].ok
    assert kernel_checks(CELL, [], [], 0.85)["attention_floor_share_n32"].ok is False
    assert kernel_checks(CELL, [], [])["attention_floor_share_n32"].ok is None


@pytest.mark.parametrize("table", ["attention", "splits", "decision"])
@pytest.mark.parametrize("error", [0.1, math.nan])
def test_a_wrong_kernel_fails_the_checks(table, error):
    wrong = {"attention": CELL, "splits": [], "decision": []}
    wrong[table] = [
        *wrong[table],
        row_of("packed", "kernel", 1.0, 1.0, error=error, cell="1 x chain16 @ 1024", requests=1),
    ]
    found = kernel_checks(**wrong)
    assert found["kernel_errors"].ok is False and found["kernel_errors"].value == 1
    if table != "decision" and error != error:
        assert math.isnan(found["worst_attention_error"].value)


def test_main_cell_without_chains():
    assert main_cell([row_of("packed", "kernel", 1.0, 1.0, kind="tree")]) == []
    assert list(kernel_checks([row_of("packed", "kernel", 1.0, 1.0, kind="tree")], [], [])) == [
        "kernel_errors",
        "worst_attention_error",
    ]
