"""The target's token after each row: the kernel against the sampler of the engine, bit for bit in its random numbers.

Built to catch: another random number than numpy's, a token beside the one that the draw falls on, ties that go to a
higher id, draws that leave the tile they fall in, and logits that are broken but give a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from decision_setup import DEVICE, captured, poison_empty, whole

from kernels.choose import _uniform, choose
from kernels.ref.choose import choose as reference
from kernels.ref.choose import uniform
from workbench.decode.sampling import SamplingConfig, target_probs, uniforms
from workbench.decode.sampling import choose as choose_on_host

TEMPERATURES = (0.0, 0.7, 1.0, 1.9, 1e-3)
SEEDS = (5, 0, 2**63 - 1, 12345, 2**33)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


@triton.jit
def _draw(seeds_ptr, positions_ptr, draws_ptr):
    place = tl.program_id(0)
    tl.store(draws_ptr + place, _uniform(tl.load(seeds_ptr + place), tl.load(positions_ptr + place)))


def settings() -> dict[str, torch.Tensor]:
    return {
        "temperature": torch.tensor(TEMPERATURES, dtype=torch.float64, device=DEVICE),
        "seed": whole(SEEDS),
    }


def random_rows(num_rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    rows = {"positions": rng.integers(0, 40_000, num_rows), "slot_of_row": rng.integers(0, len(SEEDS), num_rows)}
    return {name: whole(values) for name, values in rows.items()} | settings()


def host_tokens(logits: torch.Tensor, rows: dict[str, torch.Tensor]) -> list[int]:
    """What the engine would choose, row by row."""
    tokens = []
    for row, position, slot in zip(logits.cpu(), rows["positions"].tolist(), rows["slot_of_row"].tolist(), strict=True):
        config = SamplingConfig(temperature=TEMPERATURES[slot], seed=SEEDS[slot])
        tokens.append(int(choose_on_host(row[None], np.array([position + 1]), config)[0]))
    return tokens


def assert_near(logits: torch.Tensor, rows: dict[str, torch.Tensor], got: torch.Tensor, slack: float = 2e-5) -> None:
    """Half precision takes its exponentials in float32: the draw may fall just beside the token that is chosen."""
    want = reference(logits, **rows)
    for row in (got != want).nonzero()[:, 0].tolist():
        slot = int(rows["slot_of_row"][row])
        assert TEMPERATURES[slot] > 0
        config = SamplingConfig(temperature=TEMPERATURES[slot])
        ends = target_probs(logits[row : row + 1], config)[0].cumsum(-1)
        low, high = sorted((int(got[row]), int(want[row])))
        assert ends[high - 1] - ends[low] <= slack, (row, low, high)
        draw = uniform(SEEDS[slot], int(rows["positions"][row]) + 1)
        assert abs(float(ends[low]) - draw) <= slack, (row, low, high)
    assert (got != want).float().mean() <= 0.02


def test_random_numbers_are_those_of_numpy():
    seeds = [s for s in (0, 1, 7, 2**31, 2**63 - 1) for _ in range(4)]
    positions = [0, 1, 40_959, 2**40] * 5
    draws = torch.full((20,), torch.nan, dtype=torch.float64, device=DEVICE)
    _draw[(20,)](whole(seeds), whole(positions), draws)
    want = [uniforms(s, [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert draws.tolist() == want
    assert [uniform(s, p) for s, p in zip(seeds, positions, strict=True)] == want


@pytest.mark.parametrize("vocab", [1, 100, 2048, 4097, 9001])
def test_equals_the_host_in_float32(vocab):
    logits = (torch.randn(12, vocab) * 3).to(DEVICE)
    rows = random_rows(12, seed=vocab)
    got = choose(logits, **rows)
    assert got.tolist() == reference(logits, **rows).tolist() == host_tokens(logits, rows)


def test_half_precision_is_near():
    logits = (torch.randn(40, 5003) * 3).to(DEVICE, torch.float16)
    rows = random_rows(40)
    assert_near(logits, rows, choose(logits, **rows))


def test_flat_logits_spread_over_all_tiles():
    logits = torch.zeros(30, 7001, device=DEVICE)
    rows = random_rows(30, seed=3)
    got = choose(logits, **rows)
    assert got.tolist() == host_tokens(logits, rows)
    assert (got[rows["slot_of_row"] == 0] == 0).all()  # greedy: the lowest id
    assert len(set(got.tolist())) > 15


def test_the_largest_logit_with_the_lowest_id():
    logits = torch.randint(0, 3, (6, 5000), device=DEVICE).float()
    logits[5, 1::2] = -torch.inf
    rows = random_rows(6)
    rows["slot_of_row"].zero_()
    assert choose(logits, **rows).tolist() == logits.cpu().numpy().argmax(-1).tolist()


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((20, 6500), -torch.inf, device=DEVICE)
    logits[:, [3, 2047, 2048, 6499]] = torch.randn(20, 4, device=DEVICE)
    rows = random_rows(20, seed=1)
    got = choose(logits, **rows)
    assert set(got.tolist()) <= {3, 2047, 2048, 6499}
    assert got.tolist() == host_tokens(logits, rows)


def test_weights_that_vanish_beside_the_largest():
    logits = torch.randn(10, 4500, device=DEVICE) * 3000
    rows = random_rows(10, seed=2)
    assert choose(logits, **rows).tolist() == logits.argmax(-1).tolist() == host_tokens(logits, rows)


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_broken_rows_give_no_token(bad, slot):
    logits = torch.randn(3, 4500, device=DEVICE)
    logits[1, 4300 if bad > -torch.inf or bad != bad else slice(None)] = bad
    rows = random_rows(3)
    rows["slot_of_row"].fill_(slot)
    got = choose(logits, **rows).tolist()
    assert got[1] == -1 and min(got[0], got[2]) >= 0
    assert got == reference(logits, **rows).tolist()


def test_a_draw_depends_on_seed_and_position_only():
    logits = (torch.randn(1, 3000) * 2).to(DEVICE).expand(9, -1)
    rows = random_rows(9)
    rows["positions"].fill_(77)
    got = choose(logits, **rows)
    for slot in range(len(SEEDS)):
        assert len(set(got[rows["slot_of_row"] == slot].tolist())) <= 1


def test_rows_may_lie_apart_and_there_may_be_none():
    logits = torch.randn(4, 2, 300, device=DEVICE)[:, 1, 5:]
    rows = random_rows(4)
    assert choose(logits, **rows).tolist() == reference(logits, **rows).tolist()
    assert choose(logits[:0], **(rows | {n: rows[n][:0] for n in ("positions", "slot_of_row")})).shape == (0,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logits": torch.zeros(3, 5).double()}, "float64"),
        ({"logits": torch.zeros(3, 0)}, r"\[3, 0\]"),
        ({"logits": torch.zeros(5, 3).T}, "logits has stride 3"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions is"),
        ({"slot_of_row": torch.zeros(3, dtype=torch.int32)}, "slot_of_row is torch.int32"),
        ({"temperature": torch.zeros(5)}, "temperature is torch.float32"),
        ({"temperature": torch.zeros(4).double()}, "as many as seeds"),
        ({"seed": torch.zeros(5)}, "seed is torch.float32"),
    ],
)
def test_bad_arguments_are_refused(change, named):
    given = {"logits": torch.zeros(3, 5, device=DEVICE)} | random_rows(3)
    given |= {name: tensor.to(DEVICE) for name, tensor in change.items()}
    for function in (choose, reference):
        with pytest.raises(ValueError, match=named):
            function(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "vocab"), [(256, 151_936), (64, 49_152), (1, 151_643)])
def test_real_sizes(num_rows, vocab, dtype):
    logits = (torch.randn(num_rows, vocab, device=DEVICE) * 3).to(dtype)
    rows = random_rows(num_rows)
    got = choose(logits, **rows)
    if dtype == torch.float32:
        assert got.tolist() == reference(logits, **rows).tolist()
    else:
        assert_near(logits, rows, got)


@pytest.mark.gpu
def test_replay_sees_new_logits_positions_and_settings():
    logits, rows = torch.randn(64, 49_152, device=DEVICE) * 3, random_rows(64)
    graph, got = captured(lambda: choose(logits, **rows))
    for seed in range(3):
        logits.normal_(std=2)
        for name, tensor in random_rows(64, seed).items():
            rows[name].copy_(tensor)
        rows["temperature"].copy_(rows["temperature"].roll(seed))
        graph.replay()
        assert got.tolist() == reference(logits, **rows).tolist()
