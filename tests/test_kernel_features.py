"""Best logits, normaliser and entropy: the kernel against the reference and against what the scorers compute.

Built to catch: ties that come out in another order, a vocabulary that ends inside a tile or group, groups whose best is
passed over, weights lost when tiles are joined, and logits of minus infinity that turn into NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from decision_setup import DEVICE, captured, poison_empty

from kernels.features import features
from kernels.ref.features import LogitFeatures
from kernels.ref.features import features as reference
from workbench.budget.confidence import normaliser_and_entropy, top_logits


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    poison_empty(True)
    yield
    poison_empty(False)


def assert_equal(got: LogitFeatures, want: LogitFeatures) -> None:
    """Values and ids are copies and must be equal; sums of float32 in another order may differ in the last digits."""
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.normaliser, want.normaliser, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy, want.entropy, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [16, 100, 128 * 16 + 1, 4096, 4097, 9001])
def test_equals_the_reference(vocab, dtype):
    logits = (torch.randn(3, vocab) * 4).to(DEVICE, dtype)
    assert_equal(features(logits), reference(logits))


@pytest.mark.parametrize("levels", [1, 3])
def test_of_equal_logits_the_lowest_ids_come_first(levels):
    logits = torch.randint(0, levels, (4, 6001), device=DEVICE).float() * 0.5
    logits[3, 5::128] = -0.0  # as large as 0.0
    assert_equal(features(logits), reference(logits))


def test_equal_logits_in_all_groups():
    got = features(torch.full((2, 5000), -3.5, device=DEVICE))
    assert got.ids.tolist() == [list(range(16))] * 2
    torch.testing.assert_close(got.entropy, torch.tensor(5000.0, device=DEVICE).log().expand(2))


def test_best_of_one_group_and_of_sixteen():
    logits = torch.randn(2, 8000, device=DEVICE)
    logits[0, 256:272] += 50  # all in one group
    logits[1, 300 + 450 * torch.arange(16, device=DEVICE)] += 50  # one in each
    assert_equal(features(logits), reference(logits))


def test_tokens_of_no_probability():
    logits = torch.randn(3, 9000, device=DEVICE)
    logits[0, 4096:8192] = -torch.inf  # a whole tile
    logits[1, 5:] = -torch.inf  # fewer than 16 left
    logits[2, 1:] = -torch.inf
    got = features(logits)
    assert_equal(got, reference(logits))
    assert 0 <= got.entropy[2] < 1e-30 and got.normaliser[2] == logits[2, 0]


def test_extreme_logits():
    logits = torch.randn(3, 4500, device=DEVICE) * 1e4
    logits[1] = -1e30
    logits[1, 4400] = 1e30
    logits[2] = 6e4 + torch.randn(4500, device=DEVICE)
    got, want = features(logits), reference(logits)
    assert torch.equal(got.ids, want.ids)
    torch.testing.assert_close(got.normaliser, want.normaliser)
    torch.testing.assert_close(got.entropy, want.entropy, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_rows_have_no_normaliser_and_spare_the_others(bad):
    logits = torch.randn(3, 4200, device=DEVICE)
    logits[1, 4150] = bad
    got = features(logits)
    assert got.normaliser[1].isnan() and got.entropy[1].isnan() and (got.ids[1] < 4200).all()
    kept = LogitFeatures(*(part[[0, 2]] for part in got))
    assert_equal(kept, reference(logits[[0, 2]]))


def test_strided_rows_and_doubles_and_nothing():
    logits = torch.randn(4, 2, 300, device=DEVICE, dtype=torch.float64)[:, 1, 7:]
    assert_equal(features(logits), reference(logits))
    assert [part.shape[0] for part in features(logits[:0])] == [0] * 4


def test_agrees_with_the_scorers():
    logits = torch.randn(3, 2, 5003).to(DEVICE) * 3
    got = features(logits.flatten(0, 1))
    normaliser, entropy = normaliser_and_entropy(logits)
    assert torch.equal(got.values, top_logits(logits, 16).flatten(0, 1))
    assert torch.equal(got.ids[:, 0], logits.argmax(-1).flatten())
    torch.testing.assert_close(got.normaliser, normaliser.flatten(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy, entropy.flatten(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("logits", "named"),
    [
        (torch.zeros(2, 15), r"logits \[2, 15\]"),
        (torch.zeros(2, 3, 20), r"\[2, 3, 20\]"),
        (torch.zeros(2, 20, dtype=torch.int64), "int64"),
        (torch.zeros(20, 20).T[:, :17].T[:17].T, "stride 20"),
    ],
)
def test_bad_logits_are_refused(logits, named):
    for function in (features, reference):
        with pytest.raises(ValueError, match=named):
            function(logits)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(480, 151_936), (15, 49_152), (1, 151_643), (33, 128_257)])
def test_real_sizes(rows, vocab, dtype):
    logits = (torch.randn(rows, vocab, device=DEVICE) * 4).to(dtype)
    assert_equal(features(logits), reference(logits))


@pytest.mark.gpu
def test_replay_sees_new_logits():
    logits = torch.randn(30, 49_152, device=DEVICE, dtype=torch.bfloat16)
    graph, got = captured(lambda: features(logits))
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert_equal(got, reference(logits))
