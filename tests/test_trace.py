"""Traces as files and tables, and what the recorder writes into them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from dflash_setup import random_dflash
from safetensors.numpy import load_file, save_file
from trace_setup import FuzzyChain, made_trace

from workbench.budget.features import DraftFeatures, feature_size
from workbench.budget.policy import BudgetPolicy, allocate_full, allocate_uniform
from workbench.budget.predictor import AcceptancePredictor, PredictorScorer
from workbench.budget.scorers import gap_scores, minimum_scores, product_scores, random_scorer
from workbench.budget.trace import Trace, TracePrompt, concatenate, prompt_digest
from workbench.decode.engine import generate
from workbench.decode.live import Request
from workbench.decode.sampling import SamplingConfig
from workbench.drafters.dflash import build_dflash
from workbench.drafters.table import DRAFTERS
from workbench.train.data import Corpus
from workbench.train.predictor_objective import score_trace
from workbench.train.trace import RecordingScorer, collect_trace, corpus_requests, mark_prompts
from workbench.types import DraftRequest, Signals


def same(one: Trace, two: Trace) -> bool:
    names = ("step", "prompt", "position", "limit", "accepted", "gap")
    columns = all(np.array_equal(getattr(one, n), getattr(two, n)) for n in names)
    scores = one.scores.keys() == two.scores.keys() and all(
        np.array_equal(one.scores[n], two.scores[n]) for n in one.scores
    )
    features = (one.features is None) == (two.features is None) and (
        one.features is None or np.array_equal(one.features, two.features)
    )
    return columns and scores and features and (one.prompts, one.width) == (two.prompts, two.width)


def test_a_prompt_has_one_digest():
    assert prompt_digest([1, 2]) == prompt_digest(np.array([1, 2], np.int64)) != prompt_digest([2, 1])
    # The bytes 01 00 00 00 02 00 00 00.
    assert prompt_digest([1, 2]) == "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"


def test_a_file_gives_the_trace_back(tmp_path):
    trace = made_trace()
    trace.save(tmp_path / "deep" / "trace.safetensors")
    assert same(Trace.load(tmp_path / "deep" / "trace.safetensors"), trace)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trace.safetensors"]
    small = trace.without_features()
    small.save(tmp_path / "small", half_scores=True)
    loaded = Trace.load(tmp_path / "small")
    assert loaded.features is None and loaded.scores["predictor"].dtype == np.float32
    assert np.allclose(loaded.scores["predictor"], trace.scores["predictor"], atol=1e-3)
    assert (tmp_path / "small").stat().st_size < 0.7 * (tmp_path / "deep" / "trace.safetensors").stat().st_size


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "trace"
    made_trace().save(path)
    tensors = load_file(path)
    prompts = json.dumps([[p.digest, p.label, p.temperature, p.looped] for p in made_trace().prompts])
    header = {"format": "draft-trace-1", "width": "16", "prompts": prompts}

    def refused(words, drop=(), meta=None, **changed):
        kept = {n: t for n, t in (tensors | changed).items() if n not in drop}
        save_file(kept, path, metadata=header | (meta or {}))
        with pytest.raises(ValueError, match=words):
            Trace.load(path)

    refused("missing \\['gap'\\]", drop=("gap",))
    refused("unexpected \\['extra'\\]", extra=tensors["gap"])
    refused("unexpected \\['scores.'\\]", **{"scores.": tensors["scores.random"]})
    refused("its format is 'other'", meta={"format": "other"})
    refused("width=70", meta={"width": "70"})
    refused("limit has values in", meta={"width": "9"})
    refused("trace: ", meta={"width": "wide"})
    refused("trace: ", meta={"prompts": "[[1, 2]"})
    refused("trace: ", meta={"prompts": "[" * 500_000})
    refused("trace: ", meta={"width": "9" * 5000})
    refused("trace: ", meta={"prompts": "[" + "9" * 5000 + "]"})
    refused("finite number", meta={"prompts": f'[["aa", "", {"9" * 400}]]'})
    refused("needs a digest", meta={"prompts": "[[1]]"})
    refused("allowed are 0..0", meta={"prompts": json.dumps([["aa"]])})
    refused("allowed are 0..-1", meta={"prompts": "[]"})
    refused("accepted is int32", accepted=tensors["accepted"].astype(np.int32))
    refused("accepted has values", accepted=tensors["accepted"] - np.int16(1))
    refused("scores.random is float64", **{"scores.random": tensors["scores.random"].astype(np.float64)})
    refused("gap is float32 \\[99\\]", gap=tensors["gap"][1:])
    path.write_bytes(b"no file")
    for name in ("trace", "absent"):
        with pytest.raises(ValueError, match="no readable trace"):
            Trace.load(tmp_path / name)


def test_contradictions_are_refused():
    trace = made_trace()
    with pytest.raises(ValueError, match="accepted exceeds limit in row"):
        replace(trace, limit=np.zeros_like(trace.limit))
    with pytest.raises(ValueError, match="step falls behind row 4"):
        replace(trace, step=np.where(trace.step == 1, 0, trace.step + 1).astype(np.int32))
    with pytest.raises(ValueError, match=r"'up'.* rise along a row"):
        trace.with_scores("up", np.linspace(0, 1, 15) * np.ones((100, 1)))
    with pytest.raises(ValueError, match="NaN or an infinity"):
        trace.with_scores("nan", np.full((100, 15), np.nan))
    with pytest.raises(ValueError, match=r"scores\['short'\] is float32 \[100, 14\]"):
        trace.with_scores("short", np.zeros((100, 14)))
    with pytest.raises(ValueError, match="features is float32"):
        replace(trace, features=trace.features.astype(np.float32))
    for bad in ({"temperature": float("nan")}, {"temperature": -1.0}, {"looped": 1}, {"label": None}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TracePrompt(**({"digest": "aa"} | bad))


def test_rounds_and_selections():
    trace = made_trace(num_rounds=4, num_requests=3)
    assert trace.rounds() == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)]
    part = trace.select(trace.step % 2 == 1)
    assert part.rounds() == [slice(0, 3), slice(3, 6)] and set(part.step) == {1, 3}
    assert np.array_equal(part.features, trace.features[trace.step % 2 == 1])
    empty = trace.select(np.zeros(12, bool))
    assert empty.rounds() == [] and len(empty) == 0 and not len(empty.labels)
    assert set(trace.labels) <= {"even", "odd"} and ((trace.labels == "odd") == trace.sampled).all()
    assert (trace.looped == (trace.prompt == 3)).all()
    whole = made_trace()
    assert ((whole.limit == 15) == whole.uncensored).all() and 80 < whole.uncensored.sum() < 100


def test_a_split_keeps_every_prompt_on_one_side():
    trace = made_trace(num_rounds=60)
    rest, drawn = trace.split_by_prompt(0.3, seed=1)
    digests = [{t.prompts[i].digest for i in t.prompt} for t in (rest, drawn)]
    assert not digests[0] & digests[1] and len(digests[1]) == 2  # 0.3 of 6 digests, each of two requests
    assert len(rest) + len(drawn) == len(trace) and len(drawn)
    backwards = replace(trace, prompts=trace.prompts[::-1], prompt=(11 - trace.prompt).astype(np.int32))
    again = backwards.split_by_prompt(0.3, seed=1)[1]
    assert {again.prompts[i].digest for i in again.prompt} == digests[1]
    others = [made_trace(num_rounds=60).split_by_prompt(0.3, seed=s)[1] for s in range(6)]
    assert len({frozenset(t.prompts[i].digest for i in t.prompt) for t in others}) > 1
    for share, sizes in ((0.01, (5, 1)), (0.99, (1, 5))):
        sides = trace.split_by_prompt(share)
        assert tuple(len({t.prompts[i].digest for i in t.prompt}) for t in sides) == sizes
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"share={share} outside"):
            trace.split_by_prompt(share)
    with pytest.raises(ValueError, match="has 1 distinct prompts"):
        trace.select(trace.prompt < 2).split_by_prompt(0.5)  # two requests of one prompt


def test_concatenation_keeps_rounds_and_prompts_apart():
    one, two = made_trace(seed=1), made_trace(num_rounds=3, seed=2)
    both = concatenate([one, two, one.select(np.zeros(100, bool))])
    assert len(both) == 115 and len(both.rounds()) == 23 and len(both.prompts) == 36
    tail = both.select(slice(100, 115))
    assert [tail.prompts[i] for i in tail.prompt] == [two.prompts[i] for i in two.prompt]
    assert np.array_equal(tail.features, two.features) and np.array_equal(tail.scores["random"], two.scores["random"])
    with pytest.raises(ValueError, match="differ: some have features"):
        concatenate([one, two.without_features()])
    with pytest.raises(ValueError, match="differ: width 16 with scores"):
        concatenate([one, two.with_scores("more", np.zeros((15, 15)))])
    with pytest.raises(ValueError, match="traces is empty"):
        concatenate([])


def features_of(signals: Signals) -> torch.Tensor:
    return torch.cat([signals.hidden[:, 0, :3], torch.full((len(signals.requests), 1), len(signals.requests))], -1)


@pytest.fixture(scope="module")
def decoded(tiny_llama):
    """Prompts, their requests of odd lengths, and prompts with greedy outputs."""
    draw = np.random.default_rng(5)
    prompts = [tuple(draw.integers(0, 97, n).tolist()) for n in (3, 9, 1, 14, 6)]
    lengths = (40, 7, 2, 33, 1)
    requests = [
        Request(p, SamplingConfig(max_new_tokens=n, stop_ids=())) for p, n in zip(prompts, lengths, strict=True)
    ]
    greedy = generate(tiny_llama, DRAFTERS["ar"](tiny_llama), prompts, SamplingConfig(60, stop_ids=()), slots=5)
    return requests, [list(p) + r.token_ids for p, r in zip(prompts, greedy, strict=True)]


def test_collected_rows_are_what_happened(tiny_llama, decoded):
    """Every row's accepted length is found again by comparing the draft with the text, as is the limit near the end."""
    requests, texts = decoded
    drafts = {}

    def watching(signals: Signals) -> np.ndarray:
        for request, tokens in zip(signals.requests, signals.tokens.tolist(), strict=True):
            drafts[tuple(request.tokens.tolist())] = tokens
        return product_scores(signals)

    recording = collect_trace(
        tiny_llama,
        lambda policy: FuzzyChain(tiny_llama, policy, texts),
        requests,
        features_of,
        {"product": watching},
        labels=["a", "b", "c", "d", "e"],
        slots=3,
    )
    trace = recording.trace
    assert recording.num_finished == 5 and trace.width == 16
    assert recording.outputs == [
        t[len(r.prompt_ids) :][: r.sampling.max_new_tokens] for t, r in zip(texts, requests, strict=True)
    ]
    assert [p.label for p in trace.prompts] == ["a", "b", "c", "d", "e"]
    assert [p.digest for p in trace.prompts] == [prompt_digest(r.prompt_ids) for r in requests]
    assert len(trace) == len(drafts) > 12
    for i, prompt in enumerate(trace.prompt):
        length = trace.position[i] + 1
        text, request = texts[prompt], requests[prompt]
        draft = drafts[tuple(text[:length])]
        end = len(request.prompt_ids) + request.sampling.max_new_tokens
        assert trace.limit[i] == min(15, end - length - 1) > 0
        equal = np.array(draft[: trace.limit[i]]) == text[length : length + trace.limit[i]]
        assert trace.accepted[i] == np.cumprod(equal).sum(), i
    assert (trace.limit < 15).any() and trace.accepted.max() > 3
    sizes = [part.stop - part.start for part in trace.rounds()]
    assert max(sizes) == 3 and [n for n, size in enumerate(trace.features[:, 3]) if size != sizes[trace.step[n]]] == []
    # hidden[:, 0] is how far the draft is right.
    assert (trace.accepted == np.minimum(trace.features[:, 0], trace.limit)).all()
    assert trace.scores["product"].shape == (len(trace), 15)


def test_dflash_with_every_scorer(tiny_llama, decoded, tmp_path):
    """What a live predictor says is what it says of the recorded features, but for their rounding."""
    requests, _ = decoded
    path = random_dflash(tiny_llama, tmp_path)
    features = DraftFeatures(tiny_llama.hidden_size, tiny_llama.lm_head.weight.detach(), width=8)
    scorers = {
        "predictor": PredictorScorer(AcceptancePredictor(8), features),
        "product": product_scores,
        "minimum": minimum_scores,
        "gap": gap_scores,
        "random": random_scorer(0),
    }
    recording = collect_trace(
        tiny_llama, lambda p: build_dflash(tiny_llama, path, policy=p), requests, features, scorers, slots=3
    )
    trace = recording.trace
    assert trace.width == 8 and trace.features.shape == (len(trace), feature_size(8)) and recording.num_finished == 5
    again = score_trace(trace, scorers["predictor"].predictor, "again").scores
    assert np.abs(again["again"] - again["predictor"]).max() < 2e-3
    # Entry 1 of each position's 18 confidence values is the distance to the second logit.
    assert np.allclose(trace.features[:, 1 : 7 * 18 : 18].astype(np.float32).mean(1), trace.gap, rtol=1e-2)
    assert recording.outputs == [
        r.token_ids
        for r in generate(
            tiny_llama, DRAFTERS["ar"](tiny_llama), [r.prompt_ids for r in requests], [r.sampling for r in requests]
        )
    ]


def test_gap_and_sampling(tiny_llama, decoded):
    requests, texts = decoded
    hot = [replace(r, sampling=replace(r.sampling, temperature=1.0, seed=7)) for r in requests]
    seen = []

    def gaps(signals: Signals) -> np.ndarray:
        best = signals.logits.topk(2).values
        seen.extend((best[..., 0] - best[..., 1]).mean(-1).tolist())
        return np.zeros(tuple(signals.tokens.shape), np.float32)

    recording = collect_trace(
        tiny_llama, lambda p: FuzzyChain(tiny_llama, p, texts, width=7), hot, scorers={"zero": gaps}, slots=2
    )
    assert np.allclose(recording.trace.gap, seen) and recording.trace.width == 7 and recording.trace.features is None
    assert recording.trace.sampled.all() and recording.trace.accepted.max() <= 6
    plain = generate(tiny_llama, DRAFTERS["ar"](tiny_llama), [r.prompt_ids for r in hot], [r.sampling for r in hot])
    assert recording.outputs == [r.token_ids for r in plain]


def test_recording_stops_early(tiny_llama, decoded):
    requests, texts = decoded

    def collect(**limits):
        return collect_trace(tiny_llama, lambda p: FuzzyChain(tiny_llama, p, texts), requests, slots=2, **limits)

    short = collect(max_rows=3)
    assert 3 <= len(short.trace) <= 4 and short.num_finished < 5 and short.trace.features is None
    with pytest.raises(ValueError, match="no draft was recorded"):
        collect(seconds=1e-9)
    for bad in ({"max_rows": 0}, {"seconds": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            collect(**bad)


class Deaf(FuzzyChain):
    """Never asks its scorer."""

    def propose(self, requests, timer):
        scorer, self.policy = self.policy, BudgetPolicy("deaf", allocate_full)
        trees = super().propose(requests, timer)
        self.policy = scorer
        return trees


def test_drafters_that_cannot_be_recorded(tiny_llama, decoded):
    requests, texts = decoded
    uniform = BudgetPolicy("uniform", allocate_uniform, rows=4)
    with pytest.raises(ValueError, match="'fuzzy' goes by policy 'uniform'"):
        collect_trace(tiny_llama, lambda p: FuzzyChain(tiny_llama, replace(uniform, scorer=p.scorer), texts), requests)
    with pytest.raises(ValueError, match="never drafts"):
        collect_trace(tiny_llama, lambda p: FuzzyChain(tiny_llama, p, texts), requests[-1:])
    with pytest.raises(RuntimeError, match=r"the scorer saw requests of \[\] tokens"):
        collect_trace(tiny_llama, lambda p: Deaf(tiny_llama, p, texts), requests)
    with pytest.raises(ValueError, match="5 requests with 1 labels"):
        collect_trace(tiny_llama, lambda p: FuzzyChain(tiny_llama, p, texts), requests, labels=["x"])
    with pytest.raises(ValueError, match="0 requests"):
        collect_trace(tiny_llama, lambda p: FuzzyChain(tiny_llama, p, texts), [])


def test_the_recorder_is_asked_once_a_round():
    recorder = RecordingScorer()
    assert recorder.take() is None
    signals = Signals(
        [DraftRequest(0, np.arange(4), 5, 5)], torch.zeros(1, 5), torch.zeros(1, 5, 2), torch.rand(1, 5, 9)
    )
    assert recorder(signals).tolist() == [[0.0] * 5]
    assert recorder.take().lengths.tolist() == [4] and recorder.take() is None
    recorder(signals)
    recorder(signals)
    with pytest.raises(RuntimeError, match="2 times in one round"):
        recorder.take()


def test_loops_are_marked_by_request():
    trace = made_trace()
    marked = mark_prompts(trace, [i == 5 for i in range(12)])
    assert (marked.looped == (trace.prompt == 5)).all() and len(marked) == len(trace)
    with pytest.raises(ValueError):
        mark_prompts(trace, [True])


def test_requests_of_a_corpus():
    """Each prompt once, whatever its responses; a tenth of any beginning is sampled."""
    corpus = Corpus.from_responses([([3, i // 2], [i]) for i in range(200)])
    corpus = replace(corpus, source=(np.arange(200) // 100).astype(np.int16))
    requests, labels = corpus_requests(corpus, ["first"], 0.1, max_new_tokens=9, seed=2)
    assert sorted(r.prompt_ids for r in requests) == [(3, i) for i in range(100)]
    assert [r.prompt_ids for r in requests] != sorted(r.prompt_ids for r in requests)
    assert labels == ["first" if r.prompt_ids[1] < 50 else "1" for r in requests]
    hot = [r.sampling.temperature == 1.0 for r in requests]
    assert [sum(hot[i : i + 10]) for i in range(0, 100, 10)] == [1] * 10
    assert {r.sampling.max_new_tokens for r in requests} == {9} and len({r.sampling.seed for r in requests}) == 100
    assert corpus_requests(corpus, seed=2)[0][0].prompt_ids == requests[0].prompt_ids
    assert all(r.sampling.greedy for r in corpus_requests(corpus, sampled_share=0.0)[0])
    assert not any(r.sampling.greedy for r in corpus_requests(corpus, sampled_share=1.0)[0])
    with pytest.raises(ValueError, match=r"sampled_share=1\.5"):
        corpus_requests(corpus, sampled_share=1.5)
