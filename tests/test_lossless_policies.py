"""The promise again, with the verified part of every draft decided by each policy, at several budgets."""

import numpy as np
import pytest
import torch
from drafter_zoo import looked_up, make_drafter, random_prompts
from scipy.stats import chisquare
from test_lossless import next_probs
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.budget.policy import BudgetPolicy
from workbench.budget.table import ALLOCATORS, POLICIES
from workbench.decode.engine import Engine, FinishEvent, Request, SamplingConfig, generate
from workbench.drafters.ar import ArDrafter
from workbench.drafters.oracle import ForesightDrafter
from workbench.load import load_method
from workbench.models.target import Target

NUM_PROMPTS, NUM_TOKENS = 7, 24
#: (policy, mean rows a request, requests side by side)
CASES = [(name, 8.0, slots) for name in POLICIES for slots in (1, 6)]
CASES += [(name, rows, 6) for name in ("uniform", "dvl", "topk", "oracle") for rows in (4.0, 5.5, 16.0)]
TREES = [("dart", "uniform", 6.0), ("dart", "shared", 4.0), ("dart", "shared", 16.0), ("ngram", "shared", 5.0)]


@pytest.fixture(scope="module")
def greedy(target):
    """Prompts, limits of their own each, and what autoregressive decoding makes of them."""
    prompts = random_prompts(target.vocab_size, NUM_PROMPTS, seed=2)
    configs = [SamplingConfig(max_new_tokens=NUM_TOKENS + 3 * (i % 4), stop_ids=()) for i in range(NUM_PROMPTS)]
    return prompts, configs, [r.token_ids for r in generate(target, ArDrafter(), prompts, configs)]


@pytest.fixture(scope="module")
def toy_target():
    """Sixteen tokens, so that joint laws can be enumerated, and layers enough for DFlash to read."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def sampled(target):
    prompts = random_prompts(target.vocab_size, 6, seed=3)
    configs = [SamplingConfig(max_new_tokens=12, temperature=0.3 + 0.3 * i, seed=50 + i, stop_ids=()) for i in range(6)]
    return prompts, configs, [r.token_ids for r in generate(target, ArDrafter(), prompts, configs)]


@pytest.mark.parametrize(("policy", "rows", "slots"), CASES)
def test_dscale_under_every_policy_and_budget(policy, rows, slots, target, greedy, sampled, tmp_path):
    for prompts, configs, expected in (greedy, sampled):
        texts = [p + t for p, t in zip(prompts, expected, strict=True)]
        drafter = make_drafter("dscale", target, tmp_path, texts, policy=policy, rows=rows)
        results = generate(target, drafter, prompts, configs, slots=slots)
        assert [r.token_ids for r in results] == expected


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("rows", [4.0, 8.0, 12.5, 16.0])
def test_drafts_that_are_mostly_right_under_every_allocator(allocator, rows, target, greedy):
    """Long accepted runs, cut anywhere; six requests of different ends share the budget."""
    prompts, configs, expected = greedy
    texts = [p + t for p, t in zip(prompts, expected, strict=True)]
    policy = BudgetPolicy(allocator, ALLOCATORS[allocator], rows)
    drafter = ForesightDrafter(target, "coin", 0.9, 15, continuation=looked_up(texts), policy=policy)
    results = generate(target, drafter, prompts, configs, slots=6)
    assert [r.token_ids for r in results] == expected
    assert sum(s.num_accepted for r in results for s in r.rounds) > NUM_PROMPTS * NUM_TOKENS / 2  # the drafts were used


@pytest.mark.parametrize(("name", "policy", "rows"), TREES)
def test_trees_under_a_shared_budget(name, policy, rows, target, greedy, sampled, tmp_path):
    for prompts, configs, expected in (greedy, sampled):
        drafter = make_drafter(name, target, tmp_path, policy=policy, rows=rows)
        results = generate(target, drafter, prompts, configs, slots=6)
        assert [r.token_ids for r in results] == expected


@pytest.mark.parametrize("row_bucket", [1, 7, 128])
def test_a_round_spends_its_budget_and_no_more(row_bucket, tiny_llama):
    """Rows of every round with all requests far from their ends: exactly 8 a request; sentinels change nothing."""
    prompts = random_prompts(tiny_llama.vocab_size, 5, seed=4)
    policy = BudgetPolicy("dvl", ALLOCATORS["dvl"], 8.0)
    drafter = ForesightDrafter(tiny_llama, "coin", 0.7, 15, policy=policy)
    engine = Engine(tiny_llama, drafter, slots=5, max_len=200, row_bucket=row_bucket)
    config = SamplingConfig(max_new_tokens=60, stop_ids=())
    for prompt in prompts:
        engine.submit(Request(tuple(prompt), config))
    results = {event.request: event.result for event in engine.stream() if isinstance(event, FinishEvent)}
    expected = generate(tiny_llama, ArDrafter(), prompts, config)
    assert [results[i].token_ids for i in range(5)] == [r.token_ids for r in expected]
    for early in range(3):
        assert sum(results[i].rounds[early].num_verified for i in range(5)) == 40


@pytest.mark.parametrize("name", ["coin", "scripted", "ngram", "dflash", "dscale"])
def test_law_of_the_rejection_rule_inside_a_round(name, toy_target, tmp_path):
    """As in test_lossless: second and third token, 16 tokens, chi-square."""
    prompt, num_seeds, vocab = [3, 1, 4], 2000, toy_target.vocab_size
    config = SamplingConfig(temperature=0.9)
    first = next_probs(toy_target, prompt, config)
    law = np.zeros((vocab, vocab))
    for a in range(vocab):
        second = next_probs(toy_target, [*prompt, a], config)
        for b in range(vocab):
            law[b] += first[a] * second[b] * next_probs(toy_target, [*prompt, a, b], config)
    configs = [
        SamplingConfig(max_new_tokens=3, temperature=0.9, seed=s, stop_ids=(), accept_rule="rejection")
        for s in range(num_seeds)
    ]
    results = generate(toy_target, make_drafter(name, toy_target, tmp_path), [prompt] * num_seeds, configs, slots=64)
    counts = np.zeros((vocab, vocab))
    for r in results:
        counts[r.token_ids[1], r.token_ids[2]] += 1
    expected, observed = law.ravel() * num_seeds, counts.ravel()
    small = expected < 5  # pooled, as the test asks for
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    assert chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "policy is 'best', allowed full, uniform"),
        ({"rows": 0.5}, "rows is 0.5, allowed 1..64"),
        ({"predictor": "nowhere.safetensors"}, "nowhere.safetensors is no file"),
    ],
)
def test_dscale_refuses_bad_options(options, message, tiny_llama, tmp_path):
    make_drafter("dscale", tiny_llama, tmp_path)
    given = {"predictor": tmp_path / "predictor.safetensors"} | options
    with pytest.raises(ValueError, match=message):
        load_method("dscale", tiny_llama, tmp_path / "dflash", **given)


def test_no_predictor_is_shipped_for_other_targets(tiny_llama, tmp_path):
    make_drafter("dscale", tiny_llama, tmp_path)
    with pytest.raises(ValueError, match="predictor is unset and none is shipped for target 'tiny_llama'"):
        load_method("dscale", tiny_llama, tmp_path / "dflash")
    drafter = load_method("dscale", tiny_llama, tmp_path / "dflash", policy="uniform", rows=4)
    assert drafter.name == "dscale" and drafter.policy.scorer is None


@pytest.mark.parametrize("name", ["dart", "ngram"])
def test_drafters_of_trees_refuse_policies_for_chains(name, tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="policy is 'dvl', allowed for a drafter of trees: full, uniform, shared"):
        make_drafter(name, tiny_llama, tmp_path, policy="dvl")
