"""Rounds of DART whose search is part of the work on the device, against the search on the host and eager rounds.

Built to catch: a tail of another request or an old round, limits of depth taken for limits of size, trees of padding
requests, scores that lose their bits on the way to the host, a whole round repeated behind its own commit, and pieces
of a round that see each other's leavings.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_zoo import random_dart, random_prompts, stock_model, tile_twin

from workbench.batch import DeviceRows
from workbench.decode.captured import CapturedRound
from workbench.decode.engine import Engine, Request, SamplingConfig, generate
from workbench.drafters.ar import ArDrafter
from workbench.drafters.dart import DartDrafter, build_dart
from workbench.models.reference import greedy_continuation
from workbench.models.target import Target
from workbench.search.prune import PruneConfig
from workbench.search.trie import NgramTrie
from workbench.types import GenerateResult

NUM_NODES, NUM_TOKENS = 24, 12
PIECES = [False, (), ("draft", "verify"), ("draft", "decide", "verify"), ("round",)]


@pytest.fixture(scope="module")
def plain(tiny_llama) -> Target:
    return tiny_llama


@pytest.fixture(scope="module")
def tiled(plain) -> Target:
    return tile_twin(plain)


@pytest.fixture(scope="module")
def on_gpu(plain) -> Target:
    return Target(stock_model(plain).to("cuda"), stop_ids=())


@pytest.fixture(scope="module")
def weights(plain, tmp_path_factory) -> Path:
    return random_dart(plain, tmp_path_factory.mktemp("dart"))


@pytest.fixture(scope="module")
def outputs(plain) -> list[list[int]]:
    prompts = [[i % plain.vocab_size, (7 * i + 1) % plain.vocab_size] for i in range(12)]
    return [p + list(greedy_continuation(plain, p, 20)) for p in prompts]


@pytest.fixture
def dart(weights, outputs):
    """Makes a drafter; `order` of its trie, None for none."""

    def make(target: Target, search: str, order: int | None = 3, prune: dict | None = None, **options) -> DartDrafter:
        trie = None if order is None else NgramTrie.count(outputs, order=order)
        # A narrow beam, since on a CPU the kernel's reference scores every node of it in Python.
        config = PruneConfig(**{"num_nodes": NUM_NODES, "beam_width": 4, "eos_id": 5, **(prune or {})})
        return build_dart(target, weights, trie=trie, prune=config, dtype="float32", search=search, **options)

    return make


def run(
    target: Target, drafter: DartDrafter, prompts, configs, slots: int, graphs: bool, limit: int = 200, capture=True
) -> tuple[Engine, list[GenerateResult]]:
    engine = Engine(target, drafter, slots, limit, trace=True, graphs=graphs)
    if capture is not True:
        engine._rounds = CapturedRound(engine._rounds._parts, engine._cache.max_len, capture)
    for prompt, config in zip(prompts, configs, strict=True):
        engine.submit(Request(tuple(prompt), config))
    done = {e.request: e.result for e in engine.stream() if hasattr(e, "result")}
    return engine, [done[i] for i in range(len(prompts))]


def assert_same(got: list[GenerateResult], expected: list[GenerateResult], close: float = 1e-3) -> None:
    """Outputs, trees, what was accepted, and all counts; scores up to `close`."""
    for one, other in zip(got, expected, strict=True):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        assert len(one.rounds) == len(other.rounds)
        for a, b in zip(one.rounds, other.rounds, strict=True):
            for name in ("num_drafted", "num_verified", "num_accepted", "num_emitted", "max_depth", "path"):
                assert getattr(a, name) == getattr(b, name), name
            for name in ("tokens", "parents", "depths"):
                found = getattr(a.tree, name)
                assert found.dtype == np.int32
                np.testing.assert_array_equal(found, getattr(b.tree, name))
            assert a.tree.scores.dtype == np.float32
            np.testing.assert_allclose(a.tree.scores, b.tree.scores, rtol=close, atol=close)


def mixed_configs(count: int, tokens: int = NUM_TOKENS) -> list[SamplingConfig]:
    return [SamplingConfig(tokens + i % 4, 0.8 * (i % 3 == 2), seed=i, stop_ids=()) for i in range(count)]


@pytest.mark.parametrize(
    ("slots", "order", "prune", "counted"),
    [
        (1, 3, {}, {}),
        (3, 2, {}, {}),
        (5, 4, {}, {}),
        (2, 5, {"beam_width": 20}, {}),
        (4, 3, {"ngram_weight": 0.0}, {}),
        (5, None, {}, {}),
        (3, 3, {"num_nodes": 63, "eos_id": None}, {}),
        (3, 3, {"num_nodes": 1}, {}),
        (4, 3, {}, {"policy": "uniform", "rows": 7.0}),
        (4, 3, {}, {"policy": "shared", "rows": 6.0}),
    ],
)
def test_rounds_are_those_of_the_host(slots, order, prune, counted, plain, tiled, dart):
    prompts = [[3], *random_prompts(plain.vocab_size, max(3, slots))]
    configs = mixed_configs(len(prompts))
    made = [
        run(plain, dart(plain, "host", order, prune, **counted), prompts, configs, slots, False)[1],
        run(tiled, dart(tiled, "host", order, prune, **counted), prompts, configs, slots, True)[1],
    ]
    engine, got = run(tiled, dart(tiled, "device", order, prune, **counted), prompts, configs, slots, True)
    assert engine._rounds.searches and engine._rounds.num_eager == 0
    assert [r.token_ids for r in got] == [r.token_ids for r in generate(plain, ArDrafter(), prompts, configs)]
    for expected in made:
        assert_same(got, expected)
    rows = [[(s.num_scheduled, s.num_requests) for s in r.rounds] for r in got]
    assert rows == [[(s.num_scheduled, s.num_requests) for s in r.rounds] for r in made[1]]
    if prune.get("num_nodes", 24) > 1:
        assert sum(s.num_accepted for r in got for s in r.rounds) > 0


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_few_tokens_left_limit_the_depth(tokens, plain, tiled, dart):
    prompts = random_prompts(plain.vocab_size, 5, seed=3)
    configs = mixed_configs(5, tokens)
    expected = run(plain, dart(plain, "host"), prompts, configs, 3, False)[1]
    got = run(tiled, dart(tiled, "device"), prompts, configs, 3, True)[1]
    assert_same(got, expected)
    depths = [s.max_depth for r in got for s in r.rounds]
    assert not depths or min(depths) < max(1, tokens)
    if tokens == 5:  # as many nodes as ever, though not as deep
        assert any(s.num_verified == 1 + NUM_NODES and s.max_depth < 5 for r in got for s in r.rounds)


@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
def test_the_limit_of_the_context(room, plain, tiled, dart):
    prompts = random_prompts(plain.vocab_size, 4, seed=1)
    limit = max(map(len, prompts)) + room
    configs = [SamplingConfig(200, stop_ids=()) for _ in prompts]
    expected = run(plain, dart(plain, "host"), prompts, configs, 2, False, limit)[1]
    got = run(tiled, dart(tiled, "device"), prompts, configs, 2, True, limit)[1]
    assert_same(got, expected)
    assert {r.finish_reason for r in got} == {"context"}


def test_a_stop_inside_an_accepted_run(plain, tiled, dart):
    prompts = [[1, 8], [4, 29], [6, 43]]  # what the trie was counted over
    full = generate(plain, ArDrafter(), prompts, SamplingConfig(16, stop_ids=()))
    configs = [SamplingConfig(30, stop_ids=(r.token_ids[9],)) for r in full]
    expected = run(plain, dart(plain, "host"), prompts, configs, 2, False)[1]
    got = run(tiled, dart(tiled, "device"), prompts, configs, 2, True)[1]
    assert_same(got, expected)
    assert [r.finish_reason for r in got] == ["stop"] * 3


@pytest.mark.parametrize("capture", PIECES)
@pytest.mark.parametrize("policy", ["full", "uniform"])
def test_the_pieces_of_a_round(policy, capture, plain, tiled, dart):
    prompts, configs = random_prompts(plain.vocab_size, 3, seed=2), mixed_configs(3, 6)
    expected = run(tiled, dart(tiled, "host", policy=policy), prompts, configs, 3, True)[1]
    got = run(tiled, dart(tiled, "device", policy=policy), prompts, configs, 3, True, capture=capture)[1]
    assert_same(got, expected)
    stages = set().union(*(s.stage_s for r in got for s in r.rounds))
    assert stages == {"draft", "verify", "accept", "commit"} | (set() if capture == ("round",) else {"allocate"})


def test_a_captured_decision_needs_captured_trees(tiled, dart):
    engine = Engine(tiled, dart(tiled, "device"), 2, 60, graphs=True)
    with pytest.raises(ValueError, match="a captured decision needs captured drafts"):
        CapturedRound(engine._rounds._parts, 60, capture=("decide", "verify"))


def test_eager_rounds_in_between(plain, tiled, dart):
    """A request that samples with top_k makes every round eager that it is in."""
    prompts = random_prompts(plain.vocab_size, 5, seed=8)
    configs = mixed_configs(5, 12)
    configs[2] = SamplingConfig(7, 0.9, top_k=5, seed=3, stop_ids=())
    expected = run(plain, dart(plain, "host"), prompts, configs, 2, False)[1]
    engine, got = run(tiled, dart(tiled, "device"), prompts, configs, 2, True)
    assert_same(got, expected)
    everything = sum(len(r.rounds) for r in got)
    assert 0 < engine._rounds.num_eager < everything


def test_preparing_leaves_nothing_behind(plain, tiled, dart):
    prompts, configs = random_prompts(plain.vocab_size, 4, seed=6), mixed_configs(4, 9)
    expected = [r.token_ids for r in generate(plain, ArDrafter(), prompts, configs)]
    engine = Engine(tiled, dart(tiled, "device"), 3, 80, graphs=True)
    for _ in range(2):
        before = engine._cache.kv.clone()
        engine.prepare()
        assert torch.equal(engine._cache.kv, before)
        for prompt, config in zip(prompts, configs, strict=True):
            engine.submit(Request(tuple(prompt), config))
        done = {e.request: e.result for e in engine.stream() if hasattr(e, "result")}
        assert [done[i].token_ids for i in sorted(done)] == expected


def test_requests_of_all_lengths_hand_their_slots_on(plain, tiled, dart):
    prompts = random_prompts(plain.vocab_size, 7, seed=4)
    configs = [SamplingConfig(n, 0.8 * (i % 2), seed=i, stop_ids=()) for i, n in enumerate([1, 9, 3, 2, 1, 4, 7])]
    expected = run(plain, dart(plain, "host"), prompts, configs, 3, False)[1]
    got = run(tiled, dart(tiled, "device"), prompts, configs, 3, True)[1]
    assert_same(got, expected)
    assert not got[0].rounds and len({s.num_requests for r in got for s in r.rounds}) > 1


def test_what_rows_of_nobody_say_stops_nothing(plain, tiled, dart, monkeypatch):
    """Three requests run in the bucket of four, so there is a padding one; sentinels may hold anything."""
    prompts, configs = random_prompts(plain.vocab_size, 4, seed=5), mixed_configs(3, 8)
    configs.append(SamplingConfig(1, stop_ids=()))  # makes the engine one of four slots, and ends at once
    expected = run(plain, dart(plain, "host"), prompts, configs, 4, False)[1]
    forward, seen = tiled.forward, []

    def poisoned(rows, *args, **kwargs):
        out = forward(rows, *args, **kwargs)
        if isinstance(rows, DeviceRows) and rows.ancestors is not None:
            live = int(rows.starts[-1])
            seen.append(len(out.logits) - live)
            out.logits[live:], out.taps[live:] = torch.nan, torch.nan
        return out

    monkeypatch.setattr(tiled, "forward", poisoned)
    assert_same(run(tiled, dart(tiled, "device"), prompts, configs, 4, True)[1], expected)
    assert max(seen) > NUM_NODES


def test_logits_that_are_not_finite_stop_the_engine(tiled, dart, monkeypatch):
    forward, rounds = tiled.forward, []

    def broken(rows, *args, **kwargs):
        out = forward(rows, *args, **kwargs)
        rounds.append(rows.ancestors is not None)
        if sum(rounds) == 2:
            out.logits[:, 5] = torch.nan
        return out

    monkeypatch.setattr(tiled, "forward", broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        run(tiled, dart(tiled, "device"), [[1, 2], [3]], mixed_configs(2), 2, True)


# The option


def test_where_it_searches(tiled, dart):
    assert dart(tiled, "auto").search == "host"  # on a CPU
    assert dart(tiled, "device").search == "device"
    for search, expected in (("host", "host"), ("auto", "host"), ("device", "device")):
        assert Engine(tiled, dart(tiled, search), 1, 60, graphs=True).searches == expected
    without = Engine(tiled, ArDrafter(), 1, 60, graphs=True)
    assert without._rounds.searches is False and without.searches is None


@pytest.mark.parametrize("search", ["gpu", "", None, True])
def test_another_place_is_refused_before_anything_is_read(search, tiled, tmp_path):
    with pytest.raises(ValueError, match=r"search=.*; allowed: auto, host, device"):
        build_dart(tiled, tmp_path / "none", search=search)


def test_sessions_share_one_trie_on_the_device(tiled, dart):
    drafter = dart(tiled, "device")
    assert "device_search" not in vars(drafter)  # nothing is copied before a round on the device is made
    sessions = [drafter.session(2, 40).on_device() for _ in range(2)]
    assert sessions[0]._device_search is sessions[1]._device_search is drafter.device_search
    host = dart(tiled, "host")
    assert not host.session(2, 40).on_device().searches and "device_search" not in vars(host)


def test_a_trie_too_large_for_the_device_names_the_way_out(tiled, dart, monkeypatch):
    def full(trie, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("workbench.search.device_trie.device_trie", full)
    with pytest.raises(RuntimeError, match=r"does not fit into the memory of cpu; take search='host'"):
        Engine(tiled, dart(tiled, "device"), 1, 60, graphs=True)
    Engine(tiled, dart(tiled, "device", None), 1, 60, graphs=True)


# Captured


@pytest.mark.gpu
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("slots", "order", "prune", "counted"),
    [
        (1, 3, {"beam_width": 20}, {}),
        (3, 2, {"beam_width": 20}, {}),
        (5, 4, {"beam_width": 20}, {}),
        (4, 3, {"ngram_weight": 0.0}, {}),
        (5, None, {"num_nodes": 63, "beam_width": 20}, {}),
        (4, 3, {}, {"policy": "uniform", "rows": 7.0}),
        (4, 3, {}, {"policy": "shared", "rows": 6.0}),
    ],
)
def test_captured_rounds_are_those_of_the_host(slots, order, prune, counted, prepared, plain, on_gpu, dart):
    """The same draft kernels give the same candidates, so trees are equal down to the last node."""
    prompts, configs = [[3], *random_prompts(plain.vocab_size, 8)], mixed_configs(9)
    expected = run(on_gpu, dart(on_gpu, "host", order, prune, **counted), prompts, configs, slots, True)[1]
    drafter = dart(on_gpu, "auto", order, prune, **counted)
    assert drafter.search == "device"
    engine = Engine(on_gpu, drafter, slots, 200, trace=True, graphs=True)
    if prepared:
        engine.prepare()
    captures = len(engine.graph_report.captures)
    for prompt, config in zip(prompts, configs, strict=True):
        engine.submit(Request(tuple(prompt), config))
    done = {e.request: e.result for e in engine.stream() if hasattr(e, "result")}
    got = [done[i] for i in range(9)]
    assert_same(got, expected, 1e-5)
    assert [r.token_ids for r in got] == [r.token_ids for r in generate(on_gpu, ArDrafter(), prompts, configs)]
    kinds = {key[0] for key in engine.graph_report.captures}
    assert kinds == ({"prefill", "draft", "verify"} if counted.get("policy") == "shared" else {"prefill", "round"})
    if prepared:
        assert len(engine.graph_report.captures) == captures


@pytest.mark.gpu
@pytest.mark.parametrize("capture", PIECES)
def test_captured_pieces(capture, plain, on_gpu, dart):
    prompts, configs = random_prompts(plain.vocab_size, 6, seed=2), mixed_configs(6, 12)
    expected = run(on_gpu, dart(on_gpu, "host"), prompts, configs, 3, True)[1]
    got = run(on_gpu, dart(on_gpu, "device"), prompts, configs, 3, True, capture=capture)[1]
    assert_same(got, expected, 1e-5)


@pytest.mark.gpu
def test_captured_ends(plain, on_gpu, dart):
    """Little room and few tokens; requests of all lengths hand their slots on."""
    prompts, tokens = random_prompts(plain.vocab_size, 10, seed=4), [1, 9, 3, 2, 5, 1, 4, 7, 2, 90]
    configs = [SamplingConfig(n, 0.8 * (i % 2), seed=i, stop_ids=()) for i, n in enumerate(tokens)]
    limit = max(map(len, prompts)) + 6
    expected = run(on_gpu, dart(on_gpu, "host"), prompts, configs, 3, True, limit)[1]
    got = run(on_gpu, dart(on_gpu, "device"), prompts, configs, 3, True, limit)[1]
    assert_same(got, expected, 1e-5)
