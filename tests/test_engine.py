"""The loop: lossless for every drafter of the table, exact stops, limits, streaming, statistics."""

import itertools

import numpy as np
import pytest
import torch
from drafter_zoo import make_drafter, stock_model
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.decode.engine import Engine, FinishEvent, Request, SamplingConfig, TokenEvent, generate
from workbench.decode.rows import pack_chunks
from workbench.decode.sampling import target_probs
from workbench.drafters.ar import ArDrafter
from workbench.drafters.oracle import ForesightDrafter, ScriptedDrafter
from workbench.drafters.table import DRAFTERS
from workbench.models.reference import greedy_continuation
from workbench.models.target import Target

NUM_PROMPTS, NUM_TOKENS = 20, 64


@pytest.fixture(scope="module")
def toy_target():
    """Twelve tokens, so that joint laws can be enumerated."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.6, eos_token_id=None,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config))


def random_prompts(vocab, count=NUM_PROMPTS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n).tolist() for n in rng.integers(1, 40, count)]


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen3"])
def target(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(target):
    """Prompts and their greedy outputs from `generate` of the untouched transformers model: nothing of ours runs."""
    prompts = random_prompts(target.vocab_size)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = stock_model(target).generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=NUM_TOKENS, max_new_tokens=NUM_TOKENS,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return prompts, out[:, longest:].tolist()


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_equals_autoregressive(name, slots, target, reference, tmp_path):
    prompts, expected = reference
    texts = [p + t for p, t in zip(prompts, expected, strict=True)]
    drafter = make_drafter(name, target, tmp_path, texts)
    lengths = [NUM_TOKENS - 3 * (i % 4) for i in range(NUM_PROMPTS)]  # ragged ends, so slots change hands mid-way
    configs = [SamplingConfig(max_new_tokens=n, stop_ids=()) for n in lengths]
    results = generate(target, drafter, prompts, configs, slots=slots)
    for result, tokens, n in zip(results, expected, lengths, strict=True):
        assert result.token_ids == tokens[:n]
        assert result.finish_reason == "length"


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_output_equals_autoregressive_with_the_same_seed(name, slots, target, tmp_path):
    prompts = random_prompts(target.vocab_size, 6, seed=1)
    configs = [
        SamplingConfig(max_new_tokens=20, temperature=0.4 + 0.3 * i, top_k=(0, 8)[i % 2], top_p=(1.0, 0.9)[i // 3],
                       seed=100 + i, stop_ids=())
        for i in range(6)
    ]  # fmt: skip
    expected = generate(target, ArDrafter(), prompts, configs)
    results = generate(target, make_drafter(name, target, tmp_path), prompts, configs, slots=slots)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]


def next_probs(target, text, config):
    out = target.forward(pack_chunks([np.array(text)], [0], [0], target.device), target.new_cache(1, len(text)))
    return target_probs(out.logits[-1:], config)[0].numpy()


@pytest.mark.parametrize("name", ["ar", "coin", "scripted"])
def test_sampled_law_inside_a_round(name, toy_target, tmp_path):
    """Joint law of the second and third output token (the first comes from prefill), 12 tokens, chi-square."""
    prompt, num_seeds = [3, 1, 4], 2000
    config = SamplingConfig(temperature=0.9)
    vocab = toy_target.vocab_size
    first = next_probs(toy_target, prompt, config)
    law = np.zeros((vocab, vocab))
    for a in range(vocab):
        second = next_probs(toy_target, [*prompt, a], config)
        for b in range(vocab):
            law[b] += first[a] * second[b] * next_probs(toy_target, [*prompt, a, b], config)
    drafter = make_drafter(name, toy_target, tmp_path)
    configs = [SamplingConfig(max_new_tokens=3, temperature=0.9, seed=s, stop_ids=()) for s in range(num_seeds)]
    results = generate(toy_target, drafter, [prompt] * num_seeds, configs, slots=64)
    counts = np.zeros((vocab, vocab))
    for r in results:
        counts[r.token_ids[1], r.token_ids[2]] += 1
    expected, observed = law.ravel() * num_seeds, counts.ravel()
    small = expected < 5  # pooled, as the test asks for
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    assert chisquare(observed, expected).pvalue > 1e-3


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


@pytest.mark.parametrize("where", range(1, 9))
def test_stop_id_inside_an_accepted_run_cuts_exactly(target, where):
    prompt = random_prompts(target.vocab_size, 1, seed=9)[0]
    truth = list(greedy_continuation(target, prompt, 16))
    stop = truth[where]
    first = truth.index(stop)
    config = SamplingConfig(max_new_tokens=16, stop_ids=(stop, target.vocab_size - 1))
    for drafter in (ArDrafter(), ForesightDrafter(target, "oracle", 1.0, 5)):
        result = generate(target, drafter, [prompt], config)[0]
        if target.vocab_size - 1 not in truth[:first]:
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


@pytest.mark.parametrize(("prompt", "named"), [((), "empty"), ((-1,), "-1"), ((10**6,), "1000000")])
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
    with pytest.raises(ValueError, match="must be text, token ids"):
        generate(target, ArDrafter(), [[]])


def test_drafter_with_a_wrong_root_is_caught(target):
    class WrongRoot(ArDrafter):
        def propose(self, requests, timer):
            trees = super().propose(requests, timer)
            for t in trees:
                t.tokens[0] = (t.tokens[0] + 1) % target.vocab_size
            return trees

    with pytest.raises(ValueError, match="slot 0: draft starts at token"):
        generate(target, WrongRoot(), [[1, 2]], SamplingConfig(max_new_tokens=4, stop_ids=()))


def test_chunked_prefill_changes_nothing(target, reference, tmp_path):
    prompts, expected = reference
    for name in ("dart", "ar"):
        engine = Engine(target, make_drafter(name, target, tmp_path / name), slots=3, max_len=110, prefill_chunk=7)
        for p in prompts[:5]:
            engine.submit(Request(tuple(p), SamplingConfig(max_new_tokens=16, stop_ids=())))
        done = {e.request: e.result.token_ids for e in engine.stream() if isinstance(e, FinishEvent)}
        assert [done[i] for i in range(5)] == [t[:16] for t in expected[:5]]


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_is_lossless_on_cuda_in_fp32(name, target, reference, tmp_path):
    prompts, expected = reference
    on_gpu = Target(stock_model(target).to("cuda"), stop_ids=())
    drafter = make_drafter(name, on_gpu, tmp_path, [p + t for p, t in zip(prompts, expected, strict=True)])
    results = generate(on_gpu, drafter, prompts, SamplingConfig(max_new_tokens=NUM_TOKENS), slots=5)
    assert [r.token_ids for r in results] == expected
