"""The promise: every drafter of the table emits what autoregressive decoding emits, greedy and sampled."""

import numpy as np
import pytest
import torch
from drafter_zoo import make_drafter, random_prompts, stock_model
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.decode.engine import SamplingConfig, generate
from workbench.decode.rows import pack_chunks
from workbench.decode.sampling import target_probs
from workbench.drafters.ar import ArDrafter
from workbench.drafters.table import DRAFTERS
from workbench.models.target import Target

NUM_PROMPTS, NUM_TOKENS = 20, 64
#: Outputs are up to this much longer, so that slots change hands mid-way.
RAGGED = 9


@pytest.fixture(scope="module")
def reference(target):
    """Prompts and their greedy outputs from `generate` of the untouched transformers model: nothing of ours runs."""
    prompts = random_prompts(target.vocab_size, NUM_PROMPTS)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    out = stock_model(target).generate(
        ids, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0,
        min_new_tokens=NUM_TOKENS + RAGGED, max_new_tokens=NUM_TOKENS + RAGGED,
    )  # fmt: skip
    return prompts, out[:, longest:].tolist()


@pytest.fixture(scope="module")
def toy_target():
    """Twelve tokens, so that joint laws can be enumerated."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.6, eos_token_id=None,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config))


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_equals_autoregressive(name, slots, target, reference, tmp_path):
    prompts, expected = reference
    texts = [p + t for p, t in zip(prompts, expected, strict=True)]
    drafter = make_drafter(name, target, tmp_path, texts)
    lengths = [NUM_TOKENS + 3 * (i % 4) for i in range(NUM_PROMPTS)]
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


@pytest.mark.parametrize("name", ["ar", "coin", "scripted", "ngram"])
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_is_lossless_on_cuda_in_fp32(name, target, reference, tmp_path):
    prompts, expected = reference
    on_gpu = Target(stock_model(target).to("cuda"), stop_ids=())
    drafter = make_drafter(name, on_gpu, tmp_path, [p + t for p, t in zip(prompts, expected, strict=True)])
    results = generate(on_gpu, drafter, prompts, SamplingConfig(max_new_tokens=NUM_TOKENS + RAGGED), slots=5)
    assert [r.token_ids for r in results] == expected
