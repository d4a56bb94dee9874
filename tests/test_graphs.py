"""Graphs by key, what is staged for them, who can have rounds on the device, and rounds that cannot run there."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafter_zoo import make_drafter, random_prompts, tile_twin

from workbench.decode.captured import CapturedRound
from workbench.decode.eager import EagerRound
from workbench.decode.engine import Engine, Request, SamplingConfig
from workbench.decode.graphs import GraphPool, request_buckets
from workbench.decode.staging import Staging
from workbench.drafters.ar import ArDrafter

CPU = torch.device("cpu")
CUDA = torch.device("cuda")

# The pool


def test_a_cpu_runs_the_work_each_time():
    pool, calls = GraphPool(CPU), []
    for i in range(3):
        assert pool.run(("draft", 1), lambda i=i: calls.append(i) or i) == i
    assert calls == [0, 1, 2]
    assert not pool.captures
    assert pool.report.captures == {} and pool.report.replays == pool.report.reserved_bytes == 0


@pytest.mark.parametrize("capture", [True, False, (), ("draft",), {"verify", "decide"}])
def test_no_choice_of_kinds_captures_on_a_cpu(capture):
    pool = GraphPool(CPU, capture)
    assert not pool.captures
    assert [pool.run((kind, 4), lambda kind=kind: kind) for kind in ("draft", "verify")] == ["draft", "verify"]


def test_errors_of_the_work_pass_through():
    def fails() -> None:
        raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        GraphPool(CPU).run(("draft",), fails)


@pytest.mark.parametrize("slots", range(1, 65))
def test_buckets_cover_every_number_of_requests(slots):
    buckets = request_buckets(slots)
    assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == slots
    for live in range(1, slots + 1):
        bucket = next(b for b in buckets if b >= live)
        assert bucket - live < (4 if live <= 32 else 8)
    assert len(buckets) <= 2 + 8 + 4


@pytest.mark.gpu
def test_a_replay_sees_new_contents():
    pool = GraphPool(CUDA)
    x, calls = torch.ones(4, device=CUDA), []

    def work() -> torch.Tensor:
        calls.append(0)
        return x * 2 + 1

    first = pool.run(("double", 4), work)
    assert first.tolist() == [3] * 4
    made = len(calls)
    x.fill_(10)
    again = pool.run(("double", 4), work)
    assert again is first and again.tolist() == [21] * 4 and len(calls) == made
    assert list(pool.report.captures) == [("double", 4)] and pool.report.captures["double", 4] > 0
    assert pool.report.replays == 2


@pytest.mark.gpu
def test_work_that_changes_its_buffers_is_replayed_in_order():
    """Capturing warms up, so work that adds up counts more than once; each replay adds one."""
    pool, total = GraphPool(CUDA), torch.zeros(1, device=CUDA)
    pool.run(("add",), lambda: total.add_(1))
    before = float(total)
    for _ in range(5):
        pool.run(("add",), lambda: total.add_(1))
    assert float(total) == before + 5


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [("draft",), {"draft"}, ["draft", "decide"]])
def test_only_named_kinds_are_captured(capture):
    pool, calls = GraphPool(CUDA, capture), []
    x = torch.ones(2, device=CUDA)
    for kind in ("draft", "verify"):
        for _ in range(4):
            pool.run((kind, 1), lambda kind=kind: calls.append(kind) or x + 1)
    assert list(pool.report.captures) == [("draft", 1)]
    assert calls.count("verify") == 4 and calls.count("draft") == 2  # a warm-up and the capture
    assert pool.report.replays == 4


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, ()])
def test_nothing_is_captured_when_off(capture):
    pool, calls = GraphPool(CUDA, capture), []
    for _ in range(3):
        pool.run(("draft",), lambda: calls.append(0))
    assert not pool.captures and len(calls) == 3 and not pool.report.captures


@pytest.mark.gpu
def test_graphs_of_a_pool_share_its_memory():
    """Ten captures of one size take little more than one, and what one returned was read before the next ran."""
    pool, x = GraphPool(CUDA), torch.ones(1 << 20, device=CUDA)
    size = x.numel() * 4
    reserved = []
    for key in range(10):
        out = pool.run(("work", key), lambda key=key: (x * 2).add_(key))
        assert bool((out == 2 + key).all())
        reserved.append(pool.report.reserved_bytes)
    assert len(pool.report.captures) == 10
    assert reserved[-1] <= reserved[0] + 10 * size + (1 << 22)
    x.fill_(3)
    for key in (7, 0, 9):
        assert bool((pool.run(("work", key), lambda: None) == 6 + key).all())


# Staging


def test_staged_fields_stand_in_the_views():
    staging = Staging(4, 100, CPU)
    batch = staging.batch(3)
    staging.stage([2, 0], [17, 5], [9, 8], [3, 1], budget=11)
    assert batch.slots.tolist() == [2, 0, 0]
    assert batch.context_len.tolist() == [17, 5, 0]
    assert batch.anchors.tolist() == [9, 8, 0]
    assert batch.limits.tolist() == [3, 1, 0]
    assert batch.num_live.tolist() == [2] and batch.budget.tolist() == [11] and batch.max_context == 100
    assert all(x.dtype == torch.int64 for x in (batch.slots, batch.limits, batch.num_live, batch.budget))


def test_what_was_staged_before_is_gone():
    staging = Staging(3, 10, CPU)
    batch = staging.batch(3)
    addresses = [x.data_ptr() for x in (batch.slots, batch.anchors, batch.budget)]
    staging.stage([2, 1, 0], [9, 9, 9], [7, 7, 7], [5, 5, 5], budget=15)
    staging.stage([1], [4], [6], [2], budget=1)
    fields = (batch.slots, batch.context_len, batch.anchors, batch.limits)
    assert [x.tolist() for x in fields] == [[1, 0, 0], [4, 0, 0], [6, 0, 0], [2, 0, 0]]
    assert batch.num_live.tolist() == [1] and batch.budget.tolist() == [1]
    again = staging.batch(3)
    assert [x.data_ptr() for x in (again.slots, again.anchors, again.budget)] == addresses


def test_tails_are_right_aligned():
    staging = Staging(4, 100, CPU)
    batch = staging.batch(4)
    texts = [np.arange(10, 17), np.array([5]), np.array([8, 9, 10])]
    staging.stage([2, 0, 1], [6, 0, 2], [16, 5, 10], [60, 60, 1], 16, [7, 3, 0], texts)
    assert batch.tails.tolist() == [[13, 14, 15, 16], [-1, -1, -1, 5], [-1, 8, 9, 10], [-1] * 4]
    assert batch.depths.tolist() == [7, 3, 0, 0] and batch.limits.tolist() == [60, 60, 1, 0]
    assert batch.num_live.tolist() == [3] and batch.budget.tolist() == [16]
    assert batch.tails.dtype == torch.int64 and batch.tails.is_contiguous()
    staging.stage([1], [4], [6], [2], budget=1)
    assert batch.tails.tolist() == [[-1] * 4] * 4 and batch.depths.tolist() == [0] * 4
    assert staging.batch(2).tails.data_ptr() == batch.tails.data_ptr() and staging.batch(2).tails.shape == (2, 4)


def test_sampling_is_kept_by_slot():
    staging = Staging(3, 10, CPU)
    staging.set_sampling(2, 0.7, 2**63 - 1)
    staging.set_sampling(0, 1.5, 3)
    staging.stage([1], [4], [6], [2], budget=1)
    assert staging.temperature.tolist() == [1.5, 0, 0.7] and staging.temperature.dtype == torch.float64
    assert staging.seed.tolist() == [3, 0, 2**63 - 1]
    staging.set_sampling(2, 0.0, 0)
    assert staging.temperature.tolist() == [1.5, 0, 0] and staging.seed.tolist() == [3, 0, 0]


@pytest.mark.gpu
def test_staging_reaches_the_device_in_place():
    staging = Staging(2, 10, CUDA)
    batch = staging.batch(2)
    for anchor in range(5):
        staging.stage([1], [4], [anchor], [2], anchor, [3], [np.array([7, anchor])])
        assert batch.anchors.tolist() == [anchor, 0] and batch.budget.tolist() == [anchor]
        assert batch.tails.tolist() == [[-1, -1, 7, anchor], [-1] * 4] and batch.depths.tolist() == [3, 0]


# Who has rounds on the device


@pytest.fixture(scope="module")
def tiled(tiny_llama):
    return tile_twin(tiny_llama)


def test_plain_attention_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="attention='tile'"):
        Engine(tiny_llama, ArDrafter(), graphs=True)


def test_a_drafter_without_a_device_part_is_refused(tiled):
    """And decodes where nobody asks for graphs."""
    session = SimpleNamespace(observe=lambda commit: None, propose=ArDrafter().propose)
    drafter = SimpleNamespace(name="host only", taps=(), max_nodes=0, policy=ArDrafter().policy)
    drafter.session = lambda slots, max_len: session
    with pytest.raises(ValueError, match=r"drafter 'host only' has no part that runs on the device.*graphs=False"):
        Engine(tiled, drafter, graphs=True)
    for graphs in (None, False):
        engine = Engine(tiled, drafter, max_len=20, graphs=graphs)
        engine.submit(Request((1, 2, 3), SamplingConfig(max_new_tokens=4, stop_ids=())))
        assert [len(e.result.token_ids) for e in engine.stream() if hasattr(e, "result")] == [4]


@pytest.mark.parametrize(("graphs", "kind"), [(None, EagerRound), (False, EagerRound), (True, CapturedRound)])
def test_a_cpu_takes_the_device_round_only_when_asked(graphs, kind, tiled):
    assert type(Engine(tiled, ArDrafter(), max_len=8, graphs=graphs)._rounds) is kind


# Requests that the device cannot draw

MIXED = ("ar", "ngram", "scripted", "dart", "dflash", "dscale")
FOREIGN = {
    "top_k": {"temperature": 0.9, "top_k": 5},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "rejection": {"temperature": 0.9, "accept_rule": "rejection"},
}
#: Settings that change nothing, as the largest logit wins in any case.
GREEDY = [{"top_k": 3}, {"top_p": 0.5}, {"temperature": 1e-6, "top_k": 3}, {"accept_rule": "rejection"}]


def decode(target, drafter, prompts, configs, slots, graphs):
    longest = max(len(p) + c.max_new_tokens for p, c in zip(prompts, configs, strict=True))
    engine = Engine(target, drafter, slots, longest, graphs=graphs)
    for prompt, config in zip(prompts, configs, strict=True):
        engine.submit(Request(tuple(prompt), config))
    done = {e.request: e.result for e in engine.stream() if hasattr(e, "result")}
    return engine, [done[i] for i in range(len(prompts))]


def configs_of(count, *foreign):
    """Greedy and sampled requests by turns, with other settings at the places (place, settings)."""
    plain = [
        SamplingConfig(max_new_tokens=14 + i, stop_ids=(), temperature=0.8 * (i % 2), seed=i) for i in range(count)
    ]
    for place, settings in foreign:
        plain[place] = SamplingConfig(max_new_tokens=7, stop_ids=(), seed=50 + place, **settings)
    return plain


@pytest.fixture(scope="module")
def drafters(tiny_llama, tiled, tmp_path_factory):
    """By name, one for the plain target and one for the tiled."""
    made = {}

    def pair(name):
        if name not in made:
            options = {"dtype": "float32"} if name in ("dart", "dflash", "dscale") else {}
            folder = tmp_path_factory.mktemp(name)
            made[name] = [
                make_drafter(name, target, folder / part, **options)
                for part, target in (("a", tiny_llama), ("b", tiled))
            ]
        return made[name]

    return pair


@pytest.mark.parametrize(("name", "slots"), [("ar", 1), ("ngram", 1), *((n, 3) for n in MIXED)])
def test_they_run_eagerly_and_the_others_as_ever(name, slots, tiny_llama, tiled, drafters, caplog):
    """Rounds change between host and device while requests are under way, and back."""
    prompts = random_prompts(tiled.vocab_size, 6)
    configs = configs_of(6, (1, FOREIGN["top_k"]), (4, FOREIGN["top_p"]))
    _, expected = decode(tiny_llama, drafters(name)[0], prompts, configs, slots, False)
    with caplog.at_level(logging.WARNING):
        engine, found = decode(tiled, drafters(name)[1], prompts, configs, slots, True)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert [r.num_accepted for r in one.rounds] == [r.num_accepted for r in other.rounds]
        assert [r.num_verified for r in one.rounds] == [r.num_verified for r in other.rounds]
    eager = [len(found[i].rounds) for i in (1, 4)]
    everything = sum(len(r.rounds) for r in found)
    count = engine._rounds.num_eager
    assert count == sum(eager) if slots == 1 else max(eager) <= count <= sum(eager)
    assert 0 < count < everything
    warnings = [r for r in caplog.records if "eagerly" in r.getMessage()]
    assert len(warnings) == 1 and "request 1 " in warnings[0].getMessage() and "top_k=5" in warnings[0].getMessage()


@pytest.mark.parametrize("kind", FOREIGN)
def test_each_kind_falls_back_and_keeps_its_law(kind, tiny_llama, tiled, drafters, caplog):
    prompts = random_prompts(tiled.vocab_size, 2)
    configs = configs_of(2, (0, FOREIGN[kind]))
    one, other = drafters("ngram")
    _, expected = decode(tiny_llama, one, prompts, configs, 2, False)
    with caplog.at_level(logging.WARNING):
        engine, found = decode(tiled, other, prompts, configs, 2, True)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert engine._rounds.num_eager == len(found[0].rounds)
    assert sum("eagerly" in r.getMessage() for r in caplog.records) == 1


def test_greedy_requests_stay_on_the_device_whatever_else_they_say(tiny_llama, tiled, drafters, caplog):
    prompts = random_prompts(tiled.vocab_size, len(GREEDY))
    configs = [SamplingConfig(max_new_tokens=12, stop_ids=(), seed=i, **c) for i, c in enumerate(GREEDY)]
    _, expected = decode(tiny_llama, ArDrafter(), prompts, configs, 4, False)
    with caplog.at_level(logging.WARNING):
        engine, found = decode(tiled, drafters("ngram")[1], prompts, configs, 4, True)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert engine._rounds.num_eager == 0 and not caplog.records


def test_settings_of_a_slot_are_those_of_its_request(tiny_llama, tiled):
    """One slot, by turns greedy, hot, eager, greedy again."""
    prompts = random_prompts(tiled.vocab_size, 6)
    configs = configs_of(6, (2, FOREIGN["top_k"]))
    _, expected = decode(tiny_llama, ArDrafter(), prompts, configs, 1, False)
    engine, found = decode(tiled, ArDrafter(), prompts, configs, 1, True)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert engine._rounds.num_eager == len(found[2].rounds)
    sampled = np.array([r.token_ids[:7] for r in found])
    assert len(np.unique(sampled, axis=0)) == 6
