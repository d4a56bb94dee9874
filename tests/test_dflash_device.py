"""DFlash's drafts and commits of fixed shapes against those of its eager session, which they share their state with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from dflash_setup import CONFIG, VOCAB, random_network
from test_dflash import TAP_WIDTH, NoTimer, Story, embedding_and_head, filled
from torch import nn

from workbench.batch import AcceptedRows, Batch, Chains, DeviceRows
from workbench.budget.policy import BudgetPolicy
from workbench.budget.table import build_policy
from workbench.drafters.dflash import DFlashDrafter, DFlashSession
from workbench.drafters.dflash_device import DFlashDevice
from workbench.types import Commit, DraftRequest, Signals

SHIFTED = dataclasses.replace(CONFIG, shifted=True)
MAX_LEN = 40


@pytest.fixture(autouse=True)
def _as_the_engine_runs():
    with torch.inference_mode():
        yield


def make_drafter(config=CONFIG, policy=None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    table, head = embedding_and_head()
    model = random_network(config).to(device, dtype)
    return DFlashDrafter(model, table.to(device, dtype), head.to(device, dtype), policy or build_policy("full"))


def make_session(drafter: DFlashDrafter, lengths: dict[int, int], slots: int = 6) -> DFlashSession:
    """A session with contexts of these lengths; all other rows of its cache are NaN."""
    session = drafter.session(slots, MAX_LEN)
    filled(session, {slot: Story(length, seed=slot) for slot, length in lengths.items()})
    kept = {slot: session._cache.kv[:, :, slot, :length].clone() for slot, length in lengths.items()}
    session._cache.kv.fill_(torch.nan)
    for slot, length in lengths.items():
        session._cache.kv[:, :, slot, :length] = kept[slot]
    return session


def make_batch(lengths: dict[int, int], size: int, anchors: Sequence[int], device: str = "cpu") -> Batch:
    """The requests of these slots, padded to `size`."""
    padding = size - len(lengths)

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([*values, *[0] * padding], device=device)

    return Batch(
        slots=column(list(lengths)),
        context_len=column(list(lengths.values())),
        anchors=column(anchors),
        limits=column([3 + i for i in range(len(lengths))]),
        num_live=torch.tensor([len(lengths)], device=device),
        budget=torch.tensor([9], device=device),
        max_context=max(lengths.values()) + 3,
    )


def anchors_of(count: int) -> list[int]:
    return [(7 * i + 5) % VOCAB for i in range(count)]


def close(found: torch.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    """Largest difference against the largest value."""
    assert found.shape == expected.shape
    assert (found.float() - expected.float()).abs().max() <= rtol * expected.float().abs().max()


#: Slot -> committed tokens, and the size of the bucket.
CASES = {
    "one": ({3: 11}, 1),
    "one padded": ({3: 11}, 4),
    "shortest": ({2: 1}, 2),
    "ragged": ({4: 7, 1: 1, 5: MAX_LEN, 2: 22}, 4),
    "ragged padded": ({4: 33, 1: 2, 5: 1}, 5),
    "equal": ({1: 9, 2: 9}, 3),
}


@pytest.mark.parametrize("config", [CONFIG, SHIFTED], ids=["same position", "shifted"])
@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_those_of_the_eager_session(case, config):
    lengths, size = CASES[case]
    drafter = make_drafter(config)
    session = make_session(drafter, lengths)
    before = session._cache.kv.clone()
    count, anchors = len(lengths), anchors_of(len(lengths))
    chains = session.on_device().draft(make_batch(lengths, size, anchors))
    assert chains.tokens.shape == (size, drafter.max_nodes) and chains.logits.dtype == torch.float32
    after = session._cache.kv.clone()
    for slot, length in lengths.items():  # its block lies behind the context
        rows = slice(length, length + drafter.block_size)
        assert after[:, :, slot, rows].isfinite().all()
        after[:, :, slot, rows] = before[:, :, slot, rows]
    assert torch.equal(after.nan_to_num(7.0), before.nan_to_num(7.0)), "nothing else is written, padding least of all"
    hidden, logits = session.draft(list(lengths), anchors)
    close(chains.hidden[:count], hidden)
    close(chains.logits[:count], logits)
    assert torch.equal(chains.tokens[:count], logits.argmax(-1))


def test_a_tie_goes_to_the_lowest_id():
    table, _ = embedding_and_head()
    head = nn.Linear(table.embedding_dim, VOCAB, bias=False)
    head.weight.copy_(torch.ones_like(head.weight))
    drafter = DFlashDrafter(random_network(), table, head, build_policy("full"))
    chains = make_session(drafter, {0: 4}).on_device().draft(make_batch({0: 4}, 1, [3]))
    assert not chains.tokens.any()


def test_logits_keep_the_dtype_of_the_network():
    drafter = make_drafter(dtype=torch.bfloat16)
    session = make_session(drafter, {0: 4, 1: 9})
    chains = session.on_device().draft(make_batch({0: 4, 1: 9}, 2, [3, 4]))
    assert chains.logits.dtype == chains.hidden.dtype == torch.bfloat16
    close(chains.logits, session.draft([0, 1], [3, 4])[1], 0.05)
    assert torch.equal(chains.tokens, chains.logits.argmax(-1))


class Verified:
    """Rows as a verification leaves them.

    Args:
        paths: slot -> the accepted rows of its request, root first; the others of its `counts` rows are refused.
        counts: slot -> rows of its request.
        lengths: slot -> committed tokens.
        num_rows: rows in all, sentinels included.
        depths: depth of each row of a request, by slot; default: a chain.
    """

    def __init__(self, paths, counts, lengths, num_rows, depths=None, device="cpu") -> None:
        generator = torch.Generator().manual_seed(num_rows)
        self.paths, self.lengths = paths, lengths
        self.taps = torch.randn(num_rows, TAP_WIDTH, generator=generator).to(device)
        positions, slot_of_row, place, self.first = [], [], [], {}
        for slot, count in counts.items():
            self.first[slot] = len(positions)
            deep = depths[slot] if depths else range(count)
            positions += [lengths[slot] + d for d in deep]
            slot_of_row += [slot] * count
            place += [paths[slot].index(i) if i in paths[slot] else -1 for i in range(count)]
        live, fill = len(positions), num_rows - len(positions)
        self.taps[live:] = torch.nan
        padding = 6 - len(counts)  # requests in all, the same for every story that a graph is replayed over
        zeros = torch.zeros(6, dtype=torch.int64, device=device)
        starts = torch.tensor([*self.first.values(), *[live] * (padding + 1)], device=device)
        rows = [torch.tensor(x) for x in (positions + [0] * fill, slot_of_row + [0] * fill, place + [-1] * fill)]
        rows = [x.to(device) for x in rows]
        self.rows = DeviceRows(
            tokens=torch.zeros_like(rows[0]),
            positions=rows[0],
            slot_of_row=rows[1],
            kv_row=rows[0],
            ancestors=None,
            slots=torch.tensor([*counts, *[0] * padding], device=device),
            starts=starts,
            context_len=torch.tensor([*(lengths[s] for s in counts), *[0] * padding], device=device),
            max_rows=16,
            max_context=64,
        )
        self.accepted = AcceptedRows(rows[2], torch.zeros_like(rows[2]), zeros, zeros, zeros)

    def commit(self) -> Commit:
        """The same for the eager session."""
        taps = [self.taps[self.first[slot] + torch.tensor(path)] for slot, path in self.paths.items()]
        sizes = [len(path) for path in self.paths.values()]
        tokens = [np.zeros(size, np.int64) for size in sizes]
        starts = [self.lengths[slot] for slot in self.paths]
        return Commit(list(self.paths), starts, tokens, [0] * len(sizes), torch.cat(taps))


CHAINS = {
    "paths": {4: [0, 1, 2], 1: [0], 5: [0, 1, 2, 3, 4]},
    "counts": {4: 5, 1: 1, 5: 5},
    "lengths": {4: 7, 1: 1, 5: 22},
}
TREES = {
    "paths": {2: [0, 2, 5, 6], 0: [0, 3]},
    "counts": {2: 8, 0: 4},
    "lengths": {2: 12, 0: 3},
    "depths": {2: [0, 1, 1, 2, 2, 2, 3, 3], 0: [0, 1, 1, 1]},
}


@pytest.mark.parametrize("given", [CHAINS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("fill", [0, 5])
def test_a_commit_equals_that_of_the_eager_session(given, fill):
    drafter = make_drafter()
    verified = Verified(**given, num_rows=sum(given["counts"].values()) + fill)
    found, expected = make_session(drafter, given["lengths"]), make_session(drafter, given["lengths"])
    device = found.on_device()
    device.commit(verified.rows, verified.accepted, verified.taps)
    expected.observe(verified.commit())
    assert expected._cache.kv.isnan().any()
    torch.testing.assert_close(found._cache.kv, expected._cache.kv, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert found._lengths.tolist() != expected._lengths.tolist()
    device.advance(list(given["paths"]), [len(path) for path in given["paths"].values()])
    assert found._lengths.tolist() == expected._lengths.tolist()


def test_eager_and_device_rounds_take_turns():
    drafter, lengths = make_drafter(), {4: 5, 1: 1, 3: 9}
    found, expected = make_session(drafter, lengths), make_session(drafter, lengths)
    device = found.on_device()
    for step in range(4):
        anchors = [step + 11, step + 50, step + 70]
        paths = dict(zip(lengths, ([0, 1], [0], [0, 1, 2]), strict=True))
        verified = Verified(paths, {4: 4, 1: 3, 3: 3}, lengths, num_rows=12)
        _, logits = expected.draft(list(lengths), anchors)
        if step % 2:
            drafted = found.draft(list(lengths), anchors)[1]
            found.observe(verified.commit())
        else:
            drafted = device.draft(make_batch(lengths, 4, anchors)).logits[:3]
            device.commit(verified.rows, verified.accepted, verified.taps)
            device.advance(list(paths), [len(path) for path in paths.values()])
        close(drafted, logits)
        expected.observe(verified.commit())
        lengths = {slot: length + len(paths[slot]) for slot, length in lengths.items()}


def wants(lengths: dict[int, int], limits: Sequence[tuple[int, int]]) -> list[DraftRequest]:
    return [
        DraftRequest(slot, np.append(np.zeros(n, np.int64), anchor), *limit)
        for (slot, n), anchor, limit in zip(lengths.items(), anchors_of(len(lengths)), limits, strict=True)
    ]


@pytest.mark.parametrize("policy", ["uniform", "shared", "scorer"])
@pytest.mark.parametrize("limits", [[(9, 9), (2, 9), (9, 3)], [(9, 9), (0, 9), (9, 1)], [(0, 0)] * 3])
def test_trees_on_the_host_equal_those_of_propose(policy, limits):
    def scorer(signals: Signals) -> np.ndarray:
        assert len(signals.requests) == len(signals.tokens) == len(signals.hidden)
        return signals.logits.amax(-1).cpu().numpy() + np.array([[r.slot] for r in signals.requests], np.float32)

    chosen = (
        build_policy(policy) if policy != "scorer" else BudgetPolicy("x", build_policy("full").allocator, scorer=scorer)
    )
    drafter, lengths = make_drafter(policy=chosen), {4: 7, 1: 1, 5: 22}
    session = make_session(drafter, lengths)
    requests, timers = wants(lengths, limits), [NoTimer(), NoTimer()]
    device = session.on_device()
    found = device.trees(requests, device.draft(make_batch(lengths, 5, anchors_of(3))), timers[0])
    expected = session.propose(requests, timers[1])
    assert timers[0].names == timers[1].names
    for tree, other in zip(found, expected, strict=True):
        for name in ("tokens", "parents", "depths"):
            assert getattr(tree, name).tolist() == getattr(other, name).tolist()
        np.testing.assert_allclose(tree.scores, other.scores, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused():
    lengths = {4: 7, 1: 1}
    session = make_session(make_drafter(), lengths)
    device = session.on_device()
    verified = Verified({4: [0], 1: [0]}, {4: 1, 1: 1}, lengths, num_rows=3)
    for taps in (None, verified.taps[:2], verified.taps[:, 1:]):
        with pytest.raises(ValueError, match=r"taps .*needed: \[3, 48\]"):
            device.commit(verified.rows, verified.accepted, taps)
    for counts in ([1, -1], [MAX_LEN - 6, 1]):
        with pytest.raises(ValueError, match="allowed: 0 or more, ending at 40"):
            device.advance([1, 4], counts[::-1])
    assert session._lengths[[4, 1]].tolist() == [7, 1]
    device.advance([4], [MAX_LEN - 7])
    requests = wants(lengths, [(9, 9)] * 2)
    chains = Chains(*torch.zeros(3, 1, 4, dtype=torch.int64))
    for drafted in (None, chains):
        with pytest.raises(ValueError, match="no chains for 2 requests"):
            device.trees(requests, drafted, NoTimer())
    with pytest.raises(ValueError, match="slot 4: 8 tokens; needed: the 40 committed"):
        device.trees(requests[:1], chains, NoTimer())
    with pytest.raises(ValueError, match="block_size=65 must be at most 64"):
        make_session(make_drafter(dataclasses.replace(CONFIG, block_size=65)), {0: 2}).on_device()


@pytest.mark.parametrize("block_size", [2, 64])
def test_blocks_of_any_length_a_mask_can_hold(block_size):
    drafter = make_drafter(dataclasses.replace(CONFIG, block_size=block_size))
    lengths = {2: 5, 0: 13}
    session = make_session(drafter, lengths)
    chains = session.on_device().draft(make_batch(lengths, 3, [8, 9]))
    close(chains.logits[:2], session.draft([2, 0], [8, 9])[1])


def test_merged_weights_are_the_networks_own():
    drafter = make_drafter()
    before = {name: tensor.clone() for name, tensor in drafter.model.state_dict().items()}
    session = make_session(drafter, {0: 6})
    drafted = session.draft([0], [3])
    weights = [session.on_device()._weights, drafter.session(1, 8).on_device()._weights]
    assert weights[0] is weights[1], "every session would merge anew"
    after = drafter.model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    for found, expected in zip(session.draft([0], [3]), drafted, strict=True):
        assert torch.equal(found, expected)
    layer, merged = drafter.model.layers[1], weights[0].layers[1]
    storage = merged.qkv.untyped_storage().data_ptr()
    attention = layer.self_attn
    for module in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert module.weight.untyped_storage().data_ptr() == storage
        assert not module.weight.is_inference(), "could not be trained any more"
    assert layer.mlp.up_proj.weight.untyped_storage().data_ptr() == merged.gate_up.untyped_storage().data_ptr()


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("change", ["in place", "assigned", "cast", "layer replaced"])
def test_weights_changed_after_a_session_count_in_the_next(change, inference):
    with torch.inference_mode(inference):
        drafter, other = make_drafter(), random_network(seed=5)
    earlier, network = make_session(drafter, TREES["lengths"]).on_device()._weights, drafter.model
    with torch.inference_mode(inference):
        if change == "in place":
            network.load_state_dict(other.state_dict())
        elif change == "assigned":
            network.load_state_dict(other.state_dict(), assign=True)
        elif change == "cast":
            network.load_state_dict(other.double().state_dict(), assign=True)
            network.float()
        else:
            network.layers[1] = other.layers[1]
    verified = Verified(**TREES, num_rows=sum(TREES["counts"].values()))
    found, expected = (make_session(drafter, TREES["lengths"]) for _ in range(2))
    device = found.on_device()
    assert (device._weights is earlier) == (change == "in place"), "graphs over the former would keep old copies"
    device.commit(verified.rows, verified.accepted, verified.taps)
    expected.observe(verified.commit())
    torch.testing.assert_close(found._cache.kv, expected._cache.kv, rtol=1e-5, atol=1e-5, equal_nan=True)
    device.advance(list(TREES["paths"]), [len(path) for path in TREES["paths"].values()])
    lengths = {slot: int(found._lengths[slot]) for slot in TREES["lengths"]}
    close(device.draft(make_batch(lengths, 2, [3, 8])).logits, expected.draft(list(lengths), [3, 8])[1])


def captured(device: DFlashDevice, batch: Batch, verified: Verified) -> tuple[torch.cuda.CUDAGraph, Chains]:
    """One graph of a draft and a commit."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            device.draft(batch)
            device.commit(verified.rows, verified.accepted, verified.taps)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chains = device.draft(batch)
        device.commit(verified.rows, verified.accepted, verified.taps)
    return graph, chains


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["fp32", "bf16"])
def test_a_captured_round_is_replayed_over_other_contents(dtype, rtol):
    config = dataclasses.replace(CONFIG, head_dim=64, block_size=16)
    drafter = make_drafter(config, device="cuda", dtype=dtype)
    session = drafter.session(6, MAX_LEN)
    device = session.on_device()
    rounds = (
        ({4: 7, 1: 1, 5: 20}, {4: [0, 2, 3], 1: [0], 5: [0, 2]}),
        ({2: 1, 0: 31}, {2: [0, 1], 0: [0, 2, 3]}),
        ({3: 13, 5: 2, 0: 6, 1: 25}, {3: [0], 5: [0, 1], 0: [0, 2], 1: [0, 2, 3]}),
    )
    batch, verified, graph, chains = None, None, None, None
    for lengths, paths in rounds:
        anchors = anchors_of(len(lengths))
        new_batch = make_batch(lengths, 4, anchors, "cuda")
        depths = {slot: [0, 1, 1, 2] for slot in paths}
        new = Verified(paths, dict.fromkeys(paths, 4), lengths, num_rows=18, depths=depths, device="cuda")
        if graph is None:
            batch, verified = dataclasses.replace(new_batch, max_context=MAX_LEN), new
            graph, chains = captured(device, batch, verified)
        kept, other = make_session(drafter, lengths), make_session(drafter, lengths)
        session._cache.kv.copy_(kept._cache.kv)
        for name in ("slots", "context_len", "anchors", "limits", "num_live"):
            getattr(batch, name).copy_(getattr(new_batch, name))
        for name in ("positions", "slot_of_row", "starts"):
            getattr(verified.rows, name).copy_(getattr(new.rows, name))
        verified.accepted.place.copy_(new.accepted.place)
        verified.taps.copy_(new.taps.to(verified.taps))
        graph.replay()
        hidden, logits = other.draft(list(lengths), anchors)
        count = len(lengths)
        close(chains.hidden[:count], hidden, rtol)
        close(chains.logits[:count], logits, rtol)
        assert torch.equal(chains.tokens, chains.logits.argmax(-1))
        other.observe(new.commit())
        written = torch.zeros_like(session._cache.kv, dtype=torch.bool)
        for slot, length in lengths.items():
            rows = slice(length, length + len(paths[slot]))
            close(session._cache.kv[:, :, slot, rows], other._cache.kv[:, :, slot, rows], rtol)
            written[:, :, slot, length : length + drafter.block_size] = True
        untouched = session._cache.kv.where(~written, 0).nan_to_num(7.0)
        assert torch.equal(untouched, kept._cache.kv.where(~written, 0).nan_to_num(7.0))
