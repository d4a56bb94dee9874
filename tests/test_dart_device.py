"""DART's rounds with fixed shapes against its rounds on the host: drafts, commits, trees, capture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from dart_rounds_setup import (
    MAX_LEN,
    SLOTS,
    STORIES,
    NoTimer,
    Round,
    assert_candidates,
    batch,
    drafter,
    prefilled,
)
from dart_setup import CONFIG, random_model
from decision_setup import captured

from workbench.batch import DraftTrees
from workbench.drafters.ar import ArDrafter
from workbench.drafters.dart import DartDrafter, DartSession
from workbench.drafters.ngram import NgramDrafter
from workbench.drafters.oracle import ScriptedDrafter
from workbench.search.encode import ancestor_masks
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie
from workbench.types import Commit, DraftRequest

GPU = torch.device("cuda")

TREES = dict(  # three requests, one of which accepts its root alone; rows between accepted ones are skipped
    lengths={3: 6, 0: 11, 4: 1}, sizes=[5, 1, 7], paths=[[0, 2, 4], [0], [0, 1, 3, 6]], num_rows=16, bucket=4
)
CHAINS = dict(lengths={1: 9, 2: 3}, sizes=[5, 5], paths=[[0, 1, 2, 3, 4], [0, 1]], num_rows=10, bucket=2)
SINGLE = dict(lengths={2: 4}, sizes=[6], paths=[[0, 3, 5]], num_rows=6, bucket=1)
ROOTS = dict(lengths={1: 2, 0: 5}, sizes=[1, 1], paths=[[0], [0]], num_rows=3, bucket=3)


def assert_states(got: DartSession, expected: DartSession, **close) -> None:
    """Real rows, newest rows and lengths are equal; nothing else of the cache is looked at."""
    np.testing.assert_array_equal(got._state.lengths, expected._state.lengths)
    slots = np.flatnonzero(expected._state.lengths)
    for slot in slots:
        length = expected._state.lengths[slot]
        kv = [s._state.cache.kv[0, :, slot, :length] for s in (got, expected)]
        torch.testing.assert_close(*kv, **close)
    torch.testing.assert_close(*(s._state.drafts[slots] for s in (got, expected)), **close)


@pytest.mark.parametrize(
    "lengths, bucket",
    [
        ({0: 7}, 1),
        ({4: 1}, 1),
        ({3: MAX_LEN}, 1),
        ({2: 3, 0: 12, 3: 7}, 3),
        ({1: 5}, 4),
        ({4: MAX_LEN, 1: 2, 0: 1}, 8),
    ],
)
def test_candidates_are_those_of_the_host(lengths: dict[int, int], bucket: int) -> None:
    session = prefilled(drafter(), lengths)
    got = session.on_device().draft(batch(lengths, bucket))
    assert got.ids.shape == got.probs.shape == (bucket, CONFIG.depth, 25)
    assert got.ids.dtype == torch.int64 and got.probs.dtype == torch.float32
    assert_candidates(got, session, list(lengths), rtol=1e-4, atol=1e-6)


def test_a_small_draft_vocabulary_gives_fewer_candidates() -> None:
    config = replace(CONFIG, draft_vocab_size=7, draft_length=1)
    maker = DartDrafter(random_model(config=config, double_norm=False), drafter().embedding, (2, 4, 5))
    session = prefilled(maker, {1: 4, 0: 2})
    got = session.on_device().draft(batch({1: 4, 0: 2}, 2))
    assert got.ids.shape == (2, 2, 7)
    assert_candidates(got, session, [1, 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_every_activation(activation: str) -> None:
    maker = drafter(config=replace(CONFIG, hidden_act=activation))
    session = prefilled(maker, {6: 9, 2: 5})
    assert_candidates(session.on_device().draft(batch({2: 5, 6: 9}, 3)), session, [2, 6], rtol=1e-4, atol=1e-6)


def test_as_many_masks_as_a_row_has_bits_for() -> None:
    most = prefilled(drafter(config=replace(CONFIG, draft_length=63)), {1: 7, 0: MAX_LEN})
    got = most.on_device().draft(batch({0: MAX_LEN, 1: 7}, 2))
    assert_candidates(got, most, [0, 1], rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"draft_length=64; allowed on the device: 1\.\.63"):
        drafter(config=replace(CONFIG, draft_length=64)).session(1, 8).on_device()


def test_a_draft_writes_masks_behind_real_rows_and_nothing_else() -> None:
    lengths = {3: 6, 1: MAX_LEN}
    session = prefilled(drafter(), {**lengths, 0: 9})
    state = session._state
    expected = state.cache.kv.clone()
    kept = state.drafts.clone()
    session.on_device().draft(batch(lengths, 6))
    changed = (state.cache.kv != expected)[0].flatten(3).any(-1).any(0)  # [slots, rows]
    wanted = torch.zeros_like(changed)
    for slot, length in lengths.items():
        wanted[slot, length : length + CONFIG.draft_length] = True
    assert torch.equal(changed, wanted)
    assert torch.equal(state.drafts, kept)


@pytest.mark.parametrize("options", [TREES, CHAINS, SINGLE, ROOTS], ids=["trees", "chains", "single", "roots"])
def test_a_commit_is_that_of_the_host(options: dict) -> None:
    maker = drafter()
    got, expected = prefilled(maker, options["lengths"]), prefilled(maker, options["lengths"])
    step, device = Round(**options), got.on_device()
    step.on_device(device)
    step.on_host(expected)
    assert_states(got, expected, rtol=1e-5, atol=1e-5)
    drafted = device.draft(batch(step.lengths, options["bucket"]))
    assert_candidates(drafted, expected, list(step.lengths), rtol=1e-4, atol=1e-6)


def test_a_commit_writes_accepted_rows_and_nothing_else() -> None:
    session = prefilled(drafter(), TREES["lengths"])
    state, step = session._state, Round(**TREES)
    before = state.cache.kv.clone()
    drafts = state.drafts.clone()
    step.on_device(session.on_device())
    changed = (state.cache.kv != before)[0].flatten(3).any(-1).any(0)
    wanted = torch.zeros_like(changed)
    for slot, length in step.lengths.items():
        wanted[slot, step.old[slot] : length] = True
    assert torch.equal(changed, wanted)
    changed = (state.drafts[:-1] != drafts[:-1]).any(-1)
    assert changed[:, 0].nonzero().flatten().tolist() == sorted(step.lengths)
    assert not changed[:, 1:].any()


def test_a_broken_choice_is_left_for_the_host_to_report() -> None:
    """Logits that are not finite give the token -1 behind the path; other requests of the round are not harmed."""
    maker = drafter()
    got, expected = prefilled(maker, CHAINS["lengths"]), prefilled(maker, CHAINS["lengths"])
    step = Round(**CHAINS)
    step.accepted.next_tokens[step.accepted.last[0]] = -1
    step.on_device(got.on_device())
    step.on_host(expected)
    torch.testing.assert_close(got._state.drafts[2], expected._state.drafts[2], rtol=1e-5, atol=1e-5)


def test_rounds_of_host_and_device_may_alternate() -> None:
    maker, lengths = drafter(), {2: 5, 0: 3}
    session, truth = prefilled(maker, lengths), maker.session(SLOTS, MAX_LEN)
    device = session.on_device()
    for index, paths in enumerate(([[0, 2], [0]], [[0], [0, 1, 3]], [[0, 3, 4], [0, 1]], [[0], [0]], [[0, 1], [0, 4]])):
        step = Round(lengths, [5, 5], paths, 12, 4)
        if index % 2:
            session.propose([DraftRequest(s, STORIES[s].tokens[: n + 1], 9, 9) for s, n in lengths.items()], NoTimer())
            step.on_host(session)
        else:
            device.draft(batch(lengths, 4))
            step.on_device(device)
        lengths = step.lengths
    for slot, length in lengths.items():
        truth.observe(STORIES[slot].commit(slot, 0, length))
    assert_states(session, truth, rtol=1e-5, atol=1e-5)
    session.observe(STORIES[5].commit(2, 0, 4))  # another request in a slot of this one
    truth.observe(STORIES[5].commit(2, 0, 4))
    drafted = device.draft(batch({2: 4, 0: lengths[0]}, 2))
    assert_candidates(drafted, truth, [2, 0], rtol=1e-4, atol=1e-6)


def test_trees_are_those_of_the_host() -> None:
    lengths = {3: 6, 0: 11, 4: 8, 1: 2}
    trie = NgramTrie.count([STORIES[3].tokens.tolist()], order=3)
    session = prefilled(drafter(trie=trie, prune=PruneConfig(num_nodes=30)), lengths)
    limits = [(59, 99), (3, 99), (0, 99), (59, 2)]
    requests = [
        DraftRequest(s, STORIES[s].tokens[: n + 1], *limit)
        for (s, n), limit in zip(lengths.items(), limits, strict=True)
    ]
    device = session.on_device()
    got = device.trees(requests, device.draft(batch(lengths, 6)), NoTimer())
    for tree, expected in zip(got, session.propose(requests, NoTimer()), strict=True):
        np.testing.assert_array_equal(tree.tokens, expected.tokens)
        np.testing.assert_array_equal(tree.parents, expected.parents)
        np.testing.assert_allclose(tree.scores, expected.scores, rtol=1e-4, atol=1e-5)
    assert [t.num_nodes for t in got[:3]] == [30, 3, 0]
    with pytest.raises(ValueError, match="drafted is NoneType"):
        device.trees(requests, None, NoTimer())


@pytest.mark.parametrize("order", [2, 3, 4, None])
@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_trees_of_the_device_are_those_of_the_host(order: int | None, weight: float) -> None:
    """With short contexts, limits of rows and of depth, and padding; also through a copy to the host."""
    lengths = {3: 6, 0: 11, 4: 1, 1: 2, 6: MAX_LEN}
    trie = None if order is None else NgramTrie.count([s.tokens.tolist() for s in STORIES], order=order)
    options = {"trie": trie, "prune": PruneConfig(num_nodes=30, ngram_weight=weight, eos_id=7)}
    session = prefilled(drafter(**options, search="device"), lengths)
    limits = [(59, 99), (3, 99), (0, 99), (59, 2), (59, 1)]
    requests = [
        DraftRequest(s, STORIES[s].tokens[: n + 1], *limit)
        for (s, n), limit in zip(lengths.items(), limits, strict=True)
    ]
    held = batch(lengths, 8, limits=[1 + most for most, _ in limits], depths=[depth for _, depth in limits])
    device = session.on_device()
    assert device.searches
    drafted = device.draft(held)
    assert isinstance(drafted, DraftTrees) and drafted.tokens.shape == (8, 31)
    assert drafted.sizes.tolist()[:3] == [31, 4, 1] and drafted.sizes.tolist()[5:] == [0] * 3
    on_host = device.trees(requests, drafted, NoTimer())
    for r, expected in enumerate(session.propose(requests, NoTimer())):
        size = len(expected.tokens)
        assert int(drafted.sizes[r]) == size == len(on_host[r].tokens)
        for name in ("tokens", "parents", "depths"):
            wanted = getattr(expected, name)
            np.testing.assert_array_equal(getattr(drafted, name)[r, :size].numpy(), wanted)
            np.testing.assert_array_equal(getattr(on_host[r], name), wanted)
            assert getattr(on_host[r], name).dtype == np.int32
        np.testing.assert_allclose(on_host[r].scores, expected.scores, rtol=1e-4, atol=1e-5)
        bits = drafted.ancestors[r, :size].numpy().view(np.uint64)
        np.testing.assert_array_equal(bits, ancestor_masks(expected.parents))


def test_what_a_search_on_the_device_needs() -> None:
    session = prefilled(drafter(search="device"), {1: 4})
    device, held = session.on_device(), batch({1: 4}, 1)
    for missing in ("tails", "depths"):
        with pytest.raises(ValueError, match="no tails or depths"):
            device.draft(replace(held, **{missing: None}))
    maker = drafter(search="device")
    maker.embedding = torch.nn.Embedding(CONFIG.vocab_size - 1, CONFIG.hidden_size)
    with pytest.raises(ValueError, match=r"vocab_size=97 of the draft network; allowed: up to 96"):
        maker.session(1, 8).on_device()
    with pytest.raises(ValueError, match="search='cpu'; allowed: auto, host, device"):
        drafter(search="cpu")


def test_bad_input_is_refused() -> None:
    session = prefilled(drafter(), TREES["lengths"])
    device, step = session.on_device(), Round(**TREES)
    for taps in (None, step.taps[1:], step.taps[:, 1:]):
        with pytest.raises(ValueError, match=r"taps .*; needed: \[16, 72\]"):
            device.commit(step.rows, step.accepted, taps)
    with pytest.raises(ValueError, match=r"room for 9 requests; allowed: up to 8"):
        device.draft(batch(TREES["lengths"], 9))
    for count in (-1, MAX_LEN - 5):
        with pytest.raises(ValueError, match=r"slot 3: .* allowed: 0..18"):
            device.advance([3], [count])
    device.advance([3], [18])


def test_sessions_share_merged_weights_whose_values_stay() -> None:
    maker = drafter()
    weights = {name: w.clone() for name, w in maker.model.state_dict().items()}
    first, second = (maker.session(2, 8).on_device() for _ in range(2))
    assert first._gate_up.data_ptr() == second._gate_up.data_ptr()
    assert first._qkv.data_ptr() == second._qkv.data_ptr()
    assert all(torch.equal(w, weights[name]) for name, w in maker.model.state_dict().items())


def test_merged_weights_can_still_be_trained() -> None:
    """Sessions are made in inference mode, which must not leave its mark on the network."""
    maker = drafter()
    with torch.inference_mode():
        maker.session(2, 8).on_device()
    layer = maker.model.midlayer
    attention, mlp = layer.self_attn, layer.mlp
    for module in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
        assert not module.weight.is_inference()
        module.weight.requires_grad_(True)
        module(torch.ones(2, module.in_features)).sum().backward()
        assert module.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("assign", [False, True], ids=["in place", "assigned"])
def test_weights_changed_after_a_session_count_in_the_next(assign: bool) -> None:
    maker = drafter()
    maker.session(2, 8).on_device()
    other = random_model(seed=5, double_norm=False)
    maker.model.load_state_dict(other.state_dict(), assign=assign)
    got, expected = prefilled(maker, TREES["lengths"]), prefilled(maker, TREES["lengths"])
    step, device = Round(**TREES), got.on_device()
    step.on_device(device)
    step.on_host(expected)
    assert_states(got, expected, rtol=1e-5, atol=1e-5)
    drafted = device.draft(batch(step.lengths, TREES["bucket"]))
    assert_candidates(drafted, expected, list(step.lengths), rtol=1e-4, atol=1e-6)


def test_drafters_without_state_draft_on_the_host() -> None:
    trie = NgramTrie.count([STORIES[0].tokens.tolist()], order=3)
    requests = [DraftRequest(0, STORIES[0].tokens[:9], 6, 6), DraftRequest(1, STORIES[0].tokens[:4], 6, 6)]
    commit = Commit([0, 1], [0, 0], [STORIES[0].tokens[:8], STORIES[0].tokens[:3]], [1, 2], None)
    step = Round(**TREES)
    for maker in (ArDrafter(), NgramDrafter(trie), ScriptedDrafter([(1, 2), (3,)])):
        session, twin = maker.session(2, 32), maker.session(2, 32)
        session.observe(commit)
        twin.observe(commit)
        device = session.on_device()
        for _ in range(2):
            assert device.draft(batch({0: 8, 1: 3}, 2)) is None
            device.commit(step.rows, step.accepted, None)
            device.advance([0, 1], [1, 1])
            got = device.trees(requests, None, NoTimer())
            for tree, expected in zip(got, twin.propose(requests, NoTimer()), strict=True):
                np.testing.assert_array_equal(tree.tokens, expected.tokens)


def overwrite(into: object, source: object) -> None:
    """Puts the tensors of one record into another of the same shapes."""
    for name, value in vars(into).items():
        if isinstance(value, torch.Tensor):
            value.copy_(getattr(source, name))


@pytest.mark.gpu
def test_captured_trees_are_those_of_the_host() -> None:
    """One capture of draft and search, replayed over other slots, contexts, limits and depths."""
    start = {0: 6, 1: 11, 2: 1, 3: 4, 4: 2}
    trie = NgramTrie.count([s.tokens.tolist() for s in STORIES], order=3)
    options = {"trie": trie, "prune": PruneConfig(num_nodes=40)}
    session = prefilled(drafter(GPU, **options, search="device"), start)
    twin = prefilled(drafter(GPU, **options), start).on_device()
    device, held = session.on_device(), batch({}, 4, GPU)
    graph, drafted = captured(lambda: device.draft(held))
    for slots, limits in ([[3, 0, 4], [(40, 9), (7, 9), (40, 2)]], [[2], [(40, 1)]], [[1, 4, 0, 2], [(40, 9)] * 4]):
        live = {slot: start[slot] for slot in slots}
        now = batch(live, 4, GPU, [1 + most for most, _ in limits], [depth for _, depth in limits])
        overwrite(held, now)
        graph.replay()
        requests = [
            DraftRequest(s, STORIES[s].tokens[: n + 1], *limit)
            for (s, n), limit in zip(live.items(), limits, strict=True)
        ]
        expected = twin.trees(requests, twin.draft(now), NoTimer())
        assert drafted.sizes.tolist()[len(live) :] == [0] * (4 - len(live))
        for tree, wanted in zip(device.trees(requests, drafted, NoTimer()), expected, strict=True):
            np.testing.assert_array_equal(tree.tokens, wanted.tokens)
            np.testing.assert_array_equal(tree.parents, wanted.parents)
            np.testing.assert_allclose(tree.scores, wanted.scores, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_captured_rounds_are_those_of_the_host(dtype: torch.dtype) -> None:
    """One capture, replayed over other slots, contexts, trees and paths."""
    close = dict(rtol=1e-3, atol=1e-3) if dtype == torch.float32 else dict(rtol=0.1, atol=0.1)
    maker = drafter(GPU, dtype)
    start = {0: 6, 1: 11, 2: 1, 3: 4, 4: 2}
    session, expected = prefilled(maker, start), prefilled(maker, start)
    device = session.on_device()
    lengths = dict(start)
    held, step = batch({}, 4, GPU), Round({0: 6}, [3], [[0]], 24, 4, GPU)
    step.accepted.place.fill_(-1)  # warm-up and capture commit nothing
    step.rows.starts.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            device.draft(held)
            device.commit(step.rows, step.accepted, step.taps)
    torch.cuda.synchronize()
    draft, commit = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(draft):
        drafted = device.draft(held)
    with torch.cuda.graph(commit):
        device.commit(step.rows, step.accepted, step.taps)
    rounds = [
        ([3, 0, 4], [5, 1, 7], [[0, 2, 4], [0], [0, 1, 3, 6]]),
        ([2], [24], [[0, 9, 23]]),
        ([1, 4, 0, 2], [6, 6, 6, 6], [[0], [0, 1], [0, 5], [0, 2, 3]]),
    ]
    for slots, sizes, paths in rounds:
        live = {slot: lengths[slot] for slot in slots}
        overwrite(held, batch(live, 4, GPU))
        draft.replay()
        ids, probs = expected._candidates(slots)
        torch.testing.assert_close(drafted.probs[: len(slots)].cpu(), torch.from_numpy(probs), **close)
        if dtype == torch.float32:
            torch.testing.assert_close(drafted.ids[: len(slots)].cpu(), torch.from_numpy(ids))
        now = Round(live, sizes, paths, 24, 4, GPU)
        for into, source in ((step.rows, now.rows), (step.accepted, now.accepted)):
            overwrite(into, source)
        step.taps.copy_(now.taps)
        commit.replay()
        now.advance(device)
        now.on_host(expected)
        lengths.update(now.lengths)
        assert_states(session, expected, **close)
