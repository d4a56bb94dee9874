"""Packing of chains: the kernel against the workspace that the engine packs on the host.

Built to catch: rows given to a neighbour where a request has none, sentinels that differ from the engine's, bits of the
sixty-fourth row, and boundaries that are left from an earlier round.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, whole

from kernels.pack import pack
from kernels.ref.pack import ChainRows
from kernels.ref.pack import pack as reference
from workbench.decode.rows import Workspace
from workbench.types import chain_tree

DEAD_ROW = 777


def new_rows(num_requests: int, num_rows: int) -> ChainRows:
    """Fields full of rubbish."""
    sizes = [num_rows] * 5 + [num_requests + 1]
    return ChainRows(*(torch.full((size,), -(2**40), device=DEVICE) for size in sizes))


def random_round(rng: np.random.Generator, num_requests: int, count: int) -> dict[str, torch.Tensor]:
    return {
        "lengths": whole(rng.integers(0, count + 2, num_requests)),
        "anchors": whole(rng.integers(0, 1000, num_requests)),
        "drafts": whole(rng.integers(0, 1000, (num_requests, count))),
        "slots": whole(rng.permutation(num_requests + 3)[:num_requests]),
        "context_len": whole(rng.integers(0, 40_000, num_requests)),
    }


def assert_same(arguments: dict[str, torch.Tensor], num_rows: int) -> ChainRows:
    got, want = (new_rows(len(arguments["lengths"]), num_rows) for _ in range(2))
    pack(**arguments, dead_row=DEAD_ROW, out=got)
    reference(**arguments, dead_row=DEAD_ROW, out=want)
    for name in ChainRows._fields:
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    return got


@pytest.mark.parametrize(("lengths", "num_rows"), [([1], 1), ([6, 10, 7, 9], 32), ([16, 1, 64, 60, 5], 201)])
def test_equals_the_workspace(lengths, num_rows):
    rng = np.random.default_rng(0)
    given = random_round(rng, len(lengths), 63)
    given["lengths"] = whole(lengths)
    chains = torch.cat((given["anchors"][:, None], given["drafts"]), 1).tolist()
    trees = [chain_tree(chain[0], chain[1:n]) for chain, n in zip(chains, lengths, strict=True)]
    space = Workspace(len(lengths), num_rows, DEAD_ROW, torch.device("cpu"))
    space.pack(trees, given["slots"].tolist(), given["context_len"].tolist(), num_rows)
    got = assert_same(given, num_rows)
    for name in ChainRows._fields:
        assert torch.equal(getattr(got, name).cpu(), getattr(space, name)), name


@pytest.mark.parametrize(("num_requests", "count", "num_rows"), [(1, 1, 5), (3, 15, 64), (7, 63, 500), (33, 7, 300)])
def test_equals_the_reference(num_requests, count, num_rows):
    assert_same(random_round(np.random.default_rng(num_requests), num_requests, count), num_rows)


def test_requests_without_rows_anywhere():
    given = random_round(np.random.default_rng(1), 6, 15)
    given["lengths"] = whole([0, 3, 0, 0, 2, 0])
    got = assert_same(given, 8)
    assert got.starts.tolist() == [0, 0, 3, 3, 3, 5, 5]
    assert got.kv_row[5:].tolist() == [DEAD_ROW] * 3


def test_nobody_is_there():
    given = random_round(np.random.default_rng(1), 4, 15)
    given["lengths"].zero_()
    got = assert_same(given, 70)
    assert not got.tokens.any() and not got.ancestors.any() and (got.kv_row == DEAD_ROW).all()


def test_what_does_not_fit_is_cut():
    given = random_round(np.random.default_rng(2), 4, 15)
    given["lengths"] = whole([16, 10, 16, 4])
    assert assert_same(given, 30).starts.tolist() == [0, 16, 26, 30, 30]


def test_drafts_may_be_a_view():
    given = random_round(np.random.default_rng(3), 3, 15)
    given["drafts"] = whole(np.arange(3 * 15 * 16)).view(3, 15, 16)[..., 0]  # ids of the best logits, as features give
    assert_same(given, 48)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lengths": torch.zeros(3)}, "lengths is torch.float32"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots is torch.int64 \[2\]"),
        ({"drafts": torch.zeros(3, 64, dtype=torch.int64)}, r"drafts \[3, 64\]"),
        ({"drafts": torch.zeros(2, 4, dtype=torch.int64)}, r"drafts \[2, 4\]"),
        ({"anchors": torch.zeros(6, dtype=torch.int64)[::2]}, "anchors is"),
    ],
)
def test_bad_arguments_are_refused(change, named):
    given = random_round(np.random.default_rng(0), 3, 15) | {name: t.to(DEVICE) for name, t in change.items()}
    for function in (pack, reference):
        with pytest.raises(ValueError, match=named):
            function(**given, dead_row=0, out=new_rows(3, 48))


def test_bad_outputs_are_refused():
    given = random_round(np.random.default_rng(0), 3, 15)
    good = new_rows(3, 48)
    for bad in (good._replace(starts=good.starts[:3]), good._replace(kv_row=good.kv_row[:40]), new_rows(3, 0)):
        with pytest.raises(ValueError, match=r"starts is|kv_row is|0 rows"):
            pack(**given, dead_row=0, out=bad)
    many = random_round(np.random.default_rng(0), 257, 1)
    with pytest.raises(ValueError, match=r"257 requests, allowed 1\.\.256"):
        pack(**many, dead_row=0, out=new_rows(257, 600))


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [1, 8, 32, 256])
def test_many_rounds(num_requests):
    rng = np.random.default_rng(num_requests)
    for count in (1, 15, 63):
        assert_same(random_round(rng, num_requests, count), 8 * num_requests)
        assert_same(random_round(rng, num_requests, count), num_requests * (count + 1) + 5)


@pytest.mark.gpu
def test_replay_sees_new_boundaries_and_requests():
    rng = np.random.default_rng(0)
    given = random_round(rng, 16, 15)
    got = new_rows(16, 256)
    graph, _ = captured(lambda: pack(**given, dead_row=DEAD_ROW, out=got))
    for _ in range(4):
        for name, tensor in random_round(rng, 16, 15).items():
            given[name].copy_(tensor)
        graph.replay()
        want = new_rows(16, 256)
        reference(**given, dead_row=DEAD_ROW, out=want)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
