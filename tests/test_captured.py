"""Rounds on the device: the same work that CUDA graphs hold, here uncaptured, against the eager round."""

import pytest
import torch
from drafter_zoo import make_drafter, random_prompts, tile_twin

from workbench.batch import DeviceRows
from workbench.decode.captured import CapturedRound
from workbench.decode.engine import Engine, Request, SamplingConfig, complete, generate
from workbench.drafters.ar import ArDrafter
from workbench.drafters.table import DRAFTERS
from workbench.search.prune import PruneConfig

NUM_PROMPTS, NUM_TOKENS = 9, 24


@pytest.fixture(scope="module")
def tiled(target):
    return tile_twin(target)


def run(target, drafter, prompts, configs, slots, graphs, row_bucket=1):
    longest = max(len(p) + c.max_new_tokens for p, c in zip(prompts, configs, strict=True))
    engine = Engine(target, drafter, slots, longest, trace=True, row_bucket=row_bucket, graphs=graphs)
    for prompt, config in zip(prompts, configs, strict=True):
        engine.submit(Request(tuple(prompt), config))
    done = {e.request: e.result for e in engine.stream() if hasattr(e, "result")}
    return engine, [done[i] for i in range(len(prompts))]


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize(("name", "search"), [*((name, None) for name in DRAFTERS), ("dart", "device")])
def test_same_output_and_same_rounds_as_eager(name, search, slots, target, tiled, tmp_path):
    prompts = random_prompts(target.vocab_size, NUM_PROMPTS)
    configs = [
        SamplingConfig(max_new_tokens=NUM_TOKENS + i % 4, stop_ids=(), temperature=0.8 * (i % 3 == 2), seed=i)
        for i in range(NUM_PROMPTS)
    ]
    expected = generate(target, ArDrafter(), prompts, configs)
    texts = [p + r.token_ids for p, r in zip(prompts, expected, strict=True)]
    # In half precision, drafts of one forward or another differ at near ties.
    options = {"dtype": "float32"} if name in ("dart", "dflash", "dscale") else {}
    if search:  # a narrow beam, since the search kernel's reference scores every node in Python
        options["prune"] = PruneConfig(beam_width=4, num_nodes=24)
    one = make_drafter(name, target, tmp_path / "a", texts, **options)
    if search:
        options["search"] = search
    other = make_drafter(name, tiled, tmp_path / "b", texts, **options)
    _, eager = run(target, one, prompts, configs, slots, False)
    _, device = run(tiled, other, prompts, configs, slots, True)
    assert [r.token_ids for r in device] == [r.token_ids for r in expected]
    for one, other in zip(eager, device, strict=True):
        assert [r.num_accepted for r in one.rounds] == [r.num_accepted for r in other.rounds]
        assert [r.num_verified for r in one.rounds] == [r.num_verified for r in other.rounds]
        assert [r.num_drafted for r in one.rounds] == [r.num_drafted for r in other.rounds]
        for a, b in zip(one.rounds, other.rounds, strict=True):
            assert a.path == b.path
            assert a.tree.tokens.tolist() == b.tree.tokens.tolist()
            assert a.tree.parents.tolist() == b.tree.parents.tolist()


@pytest.fixture
def poisoned(tiled, monkeypatch):
    """Lets `change` at the logits of the third round on the device."""

    def poison(change):
        forward, rounds = tiled.forward, []

        def changed(rows, *args, **kwargs):
            out = forward(rows, *args, **kwargs)
            # A round's rows carry bits, those of a prefill are causal.
            rounds.append(isinstance(rows, DeviceRows) and rows.ancestors is not None)
            if rounds[-1] and sum(rounds) == 3:
                change(out.logits, int(rows.starts[-1]))
            return out

        monkeypatch.setattr(tiled, "forward", changed)

    return poison


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["ar", "scripted"])
def test_logits_that_are_not_finite_stop_the_engine(name, temperature, value, tiled, tmp_path, poisoned):
    """One entry of a row that was accepted suffices; the engine takes no further step."""
    poisoned(lambda logits, live: logits[:live, 5].fill_(value))
    engine = Engine(tiled, make_drafter(name, tiled, tmp_path), 3, 60, graphs=True)
    for i, prompt in enumerate(random_prompts(tiled.vocab_size, 3)):
        engine.submit(Request(tuple(prompt), SamplingConfig(20, temperature, seed=i, stop_ids=())))
    with pytest.raises(FloatingPointError, match="not finite"):
        list(engine.stream())
    with pytest.raises(RuntimeError, match="interrupted or failed"):
        engine.step()


@pytest.mark.parametrize("name", ["ar", "dflash"])
def test_what_rows_of_nobody_say_stops_nothing(name, target, tiled, tmp_path, poisoned):
    """Three requests run in the bucket of four, so there is a padding one; sentinels may hold anything."""
    prompts = random_prompts(target.vocab_size, 3)
    configs = [SamplingConfig(10 + i, 0.8 * (i == 1), seed=i, stop_ids=()) for i in range(3)]
    expected = generate(target, ArDrafter(), prompts, configs)
    seen = []
    poisoned(lambda logits, live: seen.append(len(logits) - live) or logits[live:].fill_(torch.nan))
    options = {"dtype": "float32"} if name == "dflash" else {}
    prompts = [*prompts, [1, 2]]
    configs = [*configs, SamplingConfig(1, stop_ids=())]  # makes the engine one of four slots, and ends at once
    _, found = run(tiled, make_drafter(name, tiled, tmp_path, **options), prompts, configs, 4, True)
    assert [r.token_ids for r in found[:3]] == [r.token_ids for r in expected]
    assert len(seen) == 1 and seen[0] > 0


@pytest.mark.parametrize("name", ["ar", "oracle", "dflash"])
def test_requests_of_all_lengths_hand_their_slots_on(name, target, tiled, tmp_path):
    """Outputs of one token end in the prefill; others end rounds apart, and later requests take their slots."""
    prompts = random_prompts(target.vocab_size, 10, seed=4)
    lengths = [1, 20, 3, 2, 9, 1, 1, 17, 4, 2]
    configs = [SamplingConfig(n, 0.8 * (i % 2), seed=i, stop_ids=()) for i, n in enumerate(lengths)]
    expected = generate(target, ArDrafter(), prompts, configs)
    texts = [p + r.token_ids for p, r in zip(prompts, expected, strict=True)]
    options = {"dtype": "float32"} if name == "dflash" else {}
    engine, found = run(tiled, make_drafter(name, tiled, tmp_path, texts, **options), prompts, configs, 3, True)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [len(r.token_ids) for r in found] == lengths and {r.finish_reason for r in found} == {"length"}
    assert not found[0].rounds and engine._rounds.num_eager == 0
    assert len({s.num_requests for r in found for s in r.rounds}) > 1


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["oracle", "dflash"])
def test_a_stop_inside_an_accepted_run_ends_there(name, graphs, target, tiled, tmp_path):
    prompts = random_prompts(target.vocab_size, 4, seed=2)
    full = generate(target, ArDrafter(), prompts, SamplingConfig(30, stop_ids=()))
    stops = [r.token_ids[12] for r in full]
    configs = [SamplingConfig(30, stop_ids=(stop,)) for stop in stops]
    expected = generate(target, ArDrafter(), prompts, configs)
    texts = [p + r.token_ids for p, r in zip(prompts, full, strict=True)]
    options = {"dtype": "float32"} if name == "dflash" else {}
    drafter = make_drafter(name, tiled, tmp_path, texts, **options)
    _, found = run(tiled, drafter, prompts, configs, 2, graphs)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert [r.finish_reason for r in found] == [r.finish_reason for r in expected] == ["stop"] * 4
    assert sum(s.num_emitted for r in found for s in r.rounds) == sum(len(r.token_ids) - 1 for r in found)
    if name == "oracle":  # more was accepted than was emitted
        assert any(r.rounds[-1].num_emitted < r.rounds[-1].num_accepted + 1 for r in found)


def test_a_request_ends_at_the_limit_of_the_context(target, tiled, tmp_path):
    prompts = random_prompts(target.vocab_size, 3)
    limit = max(map(len, prompts)) + 3
    outputs = []
    for model, graphs in ((target, False), (tiled, True)):
        engine = Engine(model, make_drafter("scripted", model, tmp_path), 2, limit, graphs=graphs)
        for prompt in prompts:
            engine.submit(Request(tuple(prompt), SamplingConfig(200, stop_ids=())))
        done = {e.request: e.result for e in engine.stream() if hasattr(e, "result")}
        outputs.append([(done[i].token_ids, done[i].finish_reason) for i in range(3)])
    assert outputs[0] == outputs[1]
    assert [len(t) for t, _ in outputs[1]] == [limit - len(p) for p in prompts]


def test_row_buckets_are_those_of_the_graphs(target, tiled, tmp_path):
    """On the device the number of rows follows from that of the requests; `row_bucket` is for eager rounds."""
    prompts = random_prompts(target.vocab_size, 4)
    configs = [SamplingConfig(12, stop_ids=())] * 4
    drafter = make_drafter("scripted", tiled, tmp_path)
    scheduled = {}
    for graphs, row_bucket in ((True, 1), (True, 16), (False, 16)):
        _, found = run(tiled, drafter, prompts, configs, 3, graphs, row_bucket)
        scheduled[graphs, row_bucket] = [[s.num_scheduled for s in r.rounds] for r in found]
    assert scheduled[True, 1] == scheduled[True, 16]
    assert all(n % 16 == 0 for rounds in scheduled[False, 16] for n in rounds)
    assert any(n % 16 for rounds in scheduled[True, 16] for n in rounds)


@pytest.mark.parametrize("name", ["ar", "ngram", "dart", "dflash", "dscale"])
def test_preparing_leaves_nothing_behind(name, target, tiled, tmp_path):
    """All buckets and prefills run over nobody's rows: before the first request and between two of them."""
    prompts = random_prompts(target.vocab_size, 4, seed=6)
    configs = [SamplingConfig(9, 0.8 * (i % 2), seed=i, stop_ids=()) for i in range(4)]
    expected = [r.token_ids for r in generate(target, ArDrafter(), prompts, configs)]
    options = {"dtype": "float32"} if name in ("dart", "dflash", "dscale") else {}
    engine = Engine(tiled, make_drafter(name, tiled, tmp_path, **options), 3, 60, prefill_chunk=7, graphs=True)
    requests = [Request(tuple(p), c) for p, c in zip(prompts, configs, strict=True)]
    for _ in range(2):
        before = engine._cache.kv.clone()
        engine.prepare()
        assert torch.equal(engine._cache.kv, before)
        assert [r.token_ids for r in complete(engine, requests)] == expected
    engine.submit(requests[0])
    engine.step()
    with pytest.raises(RuntimeError, match="requests are live"):
        engine.prepare()


def test_what_rounds_on_the_device_cannot_be(tiled, tmp_path):
    with pytest.raises(ValueError, match="slots=257 must be at most 256"):
        Engine(tiled, ArDrafter(), 257, 4, graphs=True)
    engine = Engine(tiled, make_drafter("dflash", tiled, tmp_path), 2, 60, graphs=True)
    with pytest.raises(ValueError, match="a captured decision needs captured drafts"):
        CapturedRound(engine._rounds._parts, 60, capture=("decide", "verify"))
    CapturedRound(engine._rounds._parts, 60, capture=("draft", "verify"))
