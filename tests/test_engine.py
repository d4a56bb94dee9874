"""The loop: exact stops, limits, streaming, statistics. That it is lossless is in test_lossless.py."""

import itertools
from dataclasses import replace

import pytest
from drafter_zoo import make_drafter, random_prompts

from workbench.decode.engine import Engine, FinishEvent, Request, SamplingConfig, TokenEvent, generate
from workbench.decode.live import LiveRequest
from workbench.decode.stopping import StopRules
from workbench.drafters.ar import ArDrafter
from workbench.drafters.oracle import ForesightDrafter, ScriptedDrafter
from workbench.models.reference import greedy_continuation
from workbench.models.target import Target


def test_oracle_and_anti_bound_the_rounds(target):
    prompts = random_prompts(target.vocab_size, 3)
    config = SamplingConfig(max_new_tokens=33, stop_ids=())
    for result in generate(target, ForesightDrafter(target, "oracle", 1.0, draft_len=7), prompts, config):
        assert [r.num_accepted for r in result.rounds] == [7, 7, 7, 7]  # 1 + 4 * 8 tokens
        assert result.tokens_per_round == 8
        assert result.acceptance_by_depth == [1.0] * 7
    for result in generate(target, ForesightDrafter(target, "anti", 0.0, draft_len=7), prompts, config):
        assert result.tokens_per_round == 1
        assert result.acceptance_by_depth == [0.0] * 7


@pytest.mark.parametrize("where", range(8))
def test_stop_id_inside_an_accepted_run_cuts_exactly(target, where):
    prompt = random_prompts(target.vocab_size, 1, seed=9)[0]
    truth = list(greedy_continuation(target, prompt, 40))
    firsts = [i for i, token in enumerate(truth) if token not in truth[:i]]  # where a new token appears
    first = firsts[where % len(firsts)]
    other = next(t for t in range(target.vocab_size) if t not in truth)
    config = SamplingConfig(max_new_tokens=40, stop_ids=(truth[first], other))
    for drafter in (ArDrafter(), ForesightDrafter(target, "oracle", 1.0, 5)):
        result = generate(target, drafter, [prompt], config)[0]
        assert result.token_ids == truth[: first + 1]
        assert result.finish_reason == "stop"
        assert sum(r.num_emitted for r in result.rounds) + 1 == len(result.token_ids)


def test_stop_string_cuts_tokens_and_text(target):
    """Without a tokenizer the text is the ids, so a stop string is a run of digits."""
    prompt = random_prompts(target.vocab_size, 1, seed=2)[0]
    truth = list(greedy_continuation(target, prompt, 12))
    config = SamplingConfig(max_new_tokens=12, stop_ids=(), stop_strings=(f" {truth[4]} ", "no such text"))
    for drafter in (ArDrafter(), ForesightDrafter(target, "oracle", 1.0, 7)):
        result = generate(target, drafter, [prompt], config)[0]
        whole = " ".join(str(t) for t in truth)
        cut = whole.index(f" {truth[4]} ")
        assert result.text == whole[:cut]
        assert result.finish_reason == "stop"
        assert result.token_ids == truth[: len(result.token_ids)]
        assert f" {truth[4]} " in " ".join(map(str, result.token_ids))
        assert f" {truth[4]} " not in " ".join(map(str, result.token_ids[:-1]))


@pytest.mark.parametrize("room", [0, 1, 2, 3, 6, 7, 8, 9])
@pytest.mark.parametrize("name", ["ar", "oracle", "coin", "dart", "ngram"])
def test_context_limit_edges(target, name, room, tmp_path):
    """The limit counts prompt and output; trees larger than the room must neither crash nor change the output."""
    prompt = random_prompts(target.vocab_size, 1, seed=4)[0]
    short = Target(target.model, context_limit=len(prompt) + room, stop_ids=())
    expected = list(greedy_continuation(target, prompt, room))
    result = generate(short, make_drafter(name, short, tmp_path), [prompt], SamplingConfig(max_new_tokens=50))[0]
    assert result.token_ids == expected
    assert result.finish_reason == "context"


def test_prompt_over_the_limit_is_refused(target):
    engine = Engine(target, ArDrafter(), max_len=8)
    with pytest.raises(ValueError, match="prompt of 9 tokens exceeds the limit of 8"):
        engine.submit(Request(tuple(range(9))))


@pytest.mark.parametrize(
    ("prompt", "named"), [((), "empty"), ((-1,), "-1"), ((10**6,), "1000000"), ((1.7, 2.2), "whole numbers")]
)
def test_bad_prompts_are_named(target, prompt, named):
    with pytest.raises(ValueError, match=named):
        Engine(target, ArDrafter(), max_len=8).submit(Request(prompt))


def test_bad_engine_arguments_are_named(target):
    for kwargs, named in [({"slots": 0}, "slots=0"), ({"max_len": 0}, "max_len=0"), ({"prefill_chunk": 0}, "chunk=0")]:
        with pytest.raises(ValueError, match=named):
            Engine(target, ArDrafter(), **{"max_len": 8, **kwargs})
    with pytest.raises(ValueError, match="max_nodes=64"):
        Engine(target, ScriptedDrafter([range(64)]), max_len=8)
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        generate(target, ArDrafter(), [[1]], [SamplingConfig(), SamplingConfig()])
    for prompts in ([[]], [1, 2, 3], [None], [[1.5]]):
        with pytest.raises(ValueError, match="must be text, token ids"):
            generate(target, ArDrafter(), prompts)
    with pytest.raises(ValueError, match="prompts is one text"):
        generate(target, ArDrafter(), "why?")


def test_drafter_with_a_wrong_root_is_caught(target):
    class WrongRoot(ArDrafter):
        def propose(self, requests, timer):
            trees = super().propose(requests, timer)
            for t in trees:
                t.tokens[0] = (t.tokens[0] + 1) % target.vocab_size
            return trees

    with pytest.raises(ValueError, match="slot 0: draft starts at token"):
        generate(target, WrongRoot(), [[1, 2]], SamplingConfig(max_new_tokens=4, stop_ids=()))


def test_chunked_prefill_changes_nothing(target, tmp_path):
    prompts = random_prompts(target.vocab_size, 5)
    expected = [list(greedy_continuation(target, p, 16)) for p in prompts]
    for name in ("dart", "ar"):
        engine = Engine(target, make_drafter(name, target, tmp_path / name), slots=3, max_len=110, prefill_chunk=7)
        for p in prompts:
            engine.submit(Request(tuple(p), SamplingConfig(max_new_tokens=16, stop_ids=())))
        done = {e.request: e.result.token_ids for e in engine.stream() if isinstance(e, FinishEvent)}
        assert [done[i] for i in range(5)] == expected


def test_stream_adds_up_to_the_results(target):
    prompts = random_prompts(target.vocab_size, 7, seed=6)
    drafter = ForesightDrafter(target, "coin", 0.6, 6)
    config = SamplingConfig(max_new_tokens=21, stop_ids=())
    engine = Engine(target, drafter, slots=3, max_len=64)
    for p in prompts:
        engine.submit(Request(tuple(p), config))
    ids, texts, results = {}, {}, {}
    for event in engine.stream():
        if isinstance(event, TokenEvent):
            ids.setdefault(event.request, []).extend(event.token_ids)
            texts[event.request] = texts.get(event.request, "") + event.text
        else:
            results[event.request] = event.result
    assert not engine.busy
    assert sorted(results) == list(range(7))
    for i, result in results.items():
        assert ids[i] == result.token_ids
        assert texts[i] == result.text


def test_requests_may_be_submitted_while_others_run(target):
    engine = Engine(target, ArDrafter(), slots=2, max_len=40)
    config = SamplingConfig(max_new_tokens=8, stop_ids=())
    engine.submit(Request((1, 2, 3), config))
    stream = engine.stream()
    events = list(itertools.islice(stream, 3))
    late = engine.submit(Request((4, 5), config))
    events += list(stream)
    finished = {e.request: e.result.token_ids for e in events if isinstance(e, FinishEvent)}
    assert finished[late] == list(greedy_continuation(target, [4, 5], 8))
    assert finished[0] == list(greedy_continuation(target, [1, 2, 3], 8))


def test_two_engines_share_a_target_and_a_drafter(target, tmp_path):
    drafter = make_drafter("dart", target, tmp_path)
    config = SamplingConfig(max_new_tokens=15, stop_ids=())
    engines = [Engine(target, drafter, max_len=60) for _ in range(2)]
    prompts = [[1, 2, 3, 4], [9, 8]]
    for engine, prompt in zip(engines, prompts, strict=True):
        engine.submit(Request(tuple(prompt), config))
    done = {}
    while any(e.busy for e in engines):
        for i, engine in enumerate(engines):
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    done[i] = event.result.token_ids
    for i, prompt in enumerate(prompts):
        assert done[i] == list(greedy_continuation(target, prompt, 15))


def test_trace_holds_the_verified_trees(target, tmp_path):
    result = generate(
        target, make_drafter("dart", target, tmp_path), [[5, 6, 7]], SamplingConfig(max_new_tokens=12, stop_ids=()),
        trace=True,
    )[0]  # fmt: skip
    emitted = result.token_ids[:1]
    for r in result.rounds:
        assert r.num_verified == r.tree.num_nodes + 1
        assert int(r.tree.tokens[0]) == emitted[-1]
        assert r.path[0] == 0
        assert len(r.path) == r.num_accepted + 1
        assert r.num_drafted >= r.tree.num_nodes
        emitted += r.tree.tokens[list(r.path[1:])].tolist()
        emitted.append(result.token_ids[len(emitted)] if len(emitted) < len(result.token_ids) else -1)
    assert {"draft", "verify", "accept", "commit"} <= set(result.rounds[0].stage_s)


def test_output_does_not_depend_on_the_batch(target):
    prompts = random_prompts(target.vocab_size, 9, seed=12)
    configs = [SamplingConfig(max_new_tokens=11, temperature=1.0, seed=i, stop_ids=()) for i in range(9)]
    drafter = ForesightDrafter(target, "coin", 0.5, 4)
    orders = [list(range(9)), list(range(9))[::-1]]
    outputs = []
    for order, slots in zip(orders, (2, 4), strict=True):
        results = generate(target, drafter, [prompts[i] for i in order], [configs[i] for i in order], slots=slots)
        outputs.append({i: r.token_ids for i, r in zip(order, results, strict=True)})
    assert outputs[0] == outputs[1]


def test_accepted_paths_are_moved_together(target, tmp_path):
    """Some accepted nodes must lie apart in the tree, or nothing here would test that the cache follows the path."""
    drafter = make_drafter("ngram", target, tmp_path)
    prompts = random_prompts(target.vocab_size, 8)
    config = SamplingConfig(max_new_tokens=40, stop_ids=())
    results = generate(target, drafter, prompts, config, slots=4, trace=True)
    paths = [r.path for result in results for r in result.rounds]
    assert any(path != tuple(range(len(path))) for path in paths)
    for result, prompt in zip(results, prompts, strict=True):
        assert result.token_ids == list(greedy_continuation(target, prompt, 40))


def test_an_interrupted_engine_refuses_to_go_on(target, monkeypatch):
    """Half a prefill is in the cache: going on would silently decode another text."""
    engine = Engine(target, ArDrafter(), max_len=60, prefill_chunk=4)
    engine.submit(Request(tuple(range(20)), SamplingConfig(max_new_tokens=4)))
    forward, calls = target.forward, itertools.count()

    def interrupted(*args, **kwargs):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream())
    with pytest.raises(RuntimeError, match="make a new engine"):
        list(engine.stream())


def test_drafted_ids_outside_the_vocabulary_are_caught(target):
    drafter = ScriptedDrafter([[target.vocab_size]])
    with pytest.raises(ValueError, match="draft holds ids outside"):
        generate(target, drafter, [[1, 2]], SamplingConfig(max_new_tokens=4, stop_ids=()))


def test_streamed_text_is_final_text_with_split_characters():
    """A character of several tokens is unfinished for a while; it must not use up what a stop string holds back."""
    pieces = [b"x", b"y", b" ", b"\xf0\x9f", b"\x98\x80", b" ", b"z", b"\xe6\x97", b"\xa5", b"!"]

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")

    for stop in ("y \U0001f600", "\u65e5!", "zz"):
        for sizes in ([1] * 10, [2] * 5, [3, 1, 1, 4, 1], [10]):
            live = LiveRequest.enter(0, 0, Request((0,)), StopRules(frozenset(), (stop,), 10, "length", decode))
            sent, first = "", 0
            for size in sizes:
                live.extend(list(range(first, first + size)))
                first += size
                sent += live.new_text()
                if live.finish_reason:
                    break
            assert sent == live.result().text == live.rules.cut_text(decode(live.output))


def test_requests_that_would_share_their_draws_are_refused(tiny_llama):
    """Under rejection and a shared budget one draft may decide about another, which must not know the draws."""
    engine = Engine(tiny_llama, ArDrafter(), slots=2, max_len=64)
    config = SamplingConfig(max_new_tokens=4, temperature=1.0, seed=3, stop_ids=(), accept_rule="rejection")
    engine.submit(Request((1, 2), config))
    with pytest.raises(ValueError, match="seed=3: an unfinished request has the same prompt and seed"):
        engine.submit(Request((1, 2), config))
    engine.submit(Request((1, 3), config))
    engine.submit(Request((1, 2), replace(config, accept_rule="match")))
    assert sum(isinstance(event, FinishEvent) for event in engine.stream()) == 3
    engine.submit(Request((1, 2), config))  # the first has ended


@pytest.mark.parametrize("option", [{"slots": 1.5}, {"row_bucket": True}, {"prefill_chunk": "8"}, {"row_bucket": 0}])
def test_sizes_of_an_engine_are_whole_numbers(option, tiny_llama):
    with pytest.raises(ValueError, match=f"{next(iter(option))}=.* must be a whole number"):
        Engine(tiny_llama, ArDrafter(), **option)
