"""The adapter against the stock model, and the cache against re-computation."""

import numpy as np
import pytest
import torch
from drafter_zoo import stock_model
from transformers import AutoModelForCausalLM, CohereConfig, GPT2Config, GraniteConfig, MistralConfig

from workbench.decode.rows import Workspace, pack_chunks
from workbench.models.target import Target
from workbench.types import DraftTree

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
#: fp32; different shapes add in different order
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}


def random_tree(rng, num_nodes, vocab):
    parents = np.array([-1, *[rng.integers(0, i) for i in range(1, num_nodes + 1)]], np.int32)
    depths = np.zeros(num_nodes + 1, np.int32)
    for i in range(1, num_nodes + 1):
        depths[i] = depths[parents[i]] + 1
    tokens = rng.integers(0, vocab, num_nodes + 1).astype(np.int32)
    return DraftTree(tokens, parents, depths, np.zeros(num_nodes + 1, np.float32))


def path_to(tree, node):
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[node])
    return path[::-1]


def prefill(target, cache, prompts, slots):
    out = target.forward(pack_chunks(prompts, slots, [0] * len(prompts), target.device), cache)
    return out.logits


def workspace(cache, target):
    return Workspace(3, 200, cache.max_len, target.device)


@pytest.mark.parametrize("num_sentinels", [1, 17, 64])
def test_sentinel_rows_change_neither_outputs_nor_live_cache(target, num_sentinels):
    """The cache is poisoned behind the context, where a stray write or read would show."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, target.vocab_size, n) for n in (5, 9)]
    trees = [random_tree(rng, 6, target.vocab_size), random_tree(rng, 1, target.vocab_size)]
    live = 7 + 2
    found = {}
    for extra in (0, num_sentinels):
        cache = target.new_cache(3, 40)
        prefill(target, cache, prompts, [0, 2])
        cache.kv[:, :, 0, 5:] = cache.kv[:, :, 2, 9:] = cache.kv[:, :, 1] = torch.nan
        out = target.forward(workspace(cache, target).pack(trees, [0, 2], [5, 9], live + extra), cache, taps=(1,))
        assert len(out.logits) == live + extra and bool(torch.isfinite(out.logits).all())
        found[extra] = out.logits[:live], out.taps[:live], cache.kv[:, :, :, :-1]
    for plain, padded in zip(found[0], found[num_sentinels], strict=True):
        torch.testing.assert_close(padded, plain, equal_nan=True, **TOLERANCE)
    assert torch.equal(torch.isnan(found[0][2]), torch.isnan(found[num_sentinels][2]))


def test_prefill_and_taps_equal_the_stock_model(target):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, target.vocab_size, n) for n in (1, 13, 30)]
    model = stock_model(target)
    cache = target.new_cache(3, 40)
    taps = (0, 2, 4)
    out = target.forward(pack_chunks(prompts, [2, 0, 1], [0, 0, 0], target.device), cache, taps)
    first = 0
    for prompt in prompts:
        with torch.no_grad():
            expected = model(torch.tensor(prompt)[None], output_hidden_states=True)
        own = slice(first, first + len(prompt))
        torch.testing.assert_close(out.logits[own], expected.logits[0], **TOLERANCE)
        states = torch.cat([expected.hidden_states[t][0] for t in taps], -1)
        torch.testing.assert_close(out.taps[own], states, **TOLERANCE)
        first += len(prompt)


@pytest.mark.parametrize("num_nodes", [1, 5, 36, 63])
def test_tree_forward_equals_path_by_path(target, num_nodes):
    rng = np.random.default_rng(num_nodes)
    model = stock_model(target)
    prompts = [rng.integers(0, target.vocab_size, n) for n in (9, 4)]
    trees = [
        random_tree(rng, num_nodes, target.vocab_size),
        random_tree(rng, max(1, num_nodes // 2), target.vocab_size),
    ]
    cache = target.new_cache(2, 90)
    prefill(target, cache, prompts, [0, 1])
    out = target.forward(workspace(cache, target).pack(trees, [0, 1], [9, 4]), cache)
    first = 0
    for prompt, tree in zip(prompts, trees, strict=True):
        for node in range(tree.num_nodes + 1):
            text = np.concatenate([prompt, tree.tokens[path_to(tree, node)]])
            with torch.no_grad():
                expected = model(torch.tensor(text)[None]).logits[0, -1]
            torch.testing.assert_close(out.logits[first + node], expected, **TOLERANCE)
        first += tree.num_nodes + 1


def test_cache_after_commit_equals_prefill(target):
    rng = np.random.default_rng(3)
    prompt = rng.integers(0, target.vocab_size, 11)
    tree = random_tree(rng, 20, target.vocab_size)
    deepest = int(tree.depths.argmax())
    path = path_to(tree, deepest)
    cache = target.new_cache(2, 64)
    prefill(target, cache, [prompt], [1])
    target.forward(workspace(cache, target).pack([tree], [1], [11]), cache)
    cache.keep_path(1, 11, path)
    fresh = target.new_cache(1, 64)
    prefill(target, fresh, [np.concatenate([prompt, tree.tokens[path]])], [0])
    length = 11 + len(path)
    torch.testing.assert_close(cache.kv[:, :, 1, :length], fresh.kv[:, :, 0, :length], **TOLERANCE)


def test_chunked_prefill_equals_one_prefill(target):
    prompt = np.random.default_rng(5).integers(0, target.vocab_size, 23)
    whole, parts = target.new_cache(1, 32), target.new_cache(1, 32)
    expected = prefill(target, whole, [prompt], [0])[-1]
    for start in range(0, 23, 7):
        chunk = prompt[start : start + 7]
        out = target.forward(pack_chunks([chunk], [0], [start], target.device), parts)
    torch.testing.assert_close(out.logits[-1], expected, **TOLERANCE)


def test_logit_rows_selects(target):
    prompt = np.arange(6)
    every = prefill(target, target.new_cache(1, 8), [prompt], [0])
    rows = pack_chunks([prompt], [0], [0], target.device)
    some = target.forward(rows, target.new_cache(1, 8), logit_rows=torch.tensor([5, 1])).logits
    torch.testing.assert_close(some, every[[5, 1]])


def test_two_engines_on_one_model_do_not_disturb_each_other(target):
    rng = np.random.default_rng(8)
    a, b = (rng.integers(0, target.vocab_size, n) for n in (7, 12))
    alone = prefill(target, target.new_cache(1, 20), [a], [0])[-1]
    first, second = target.new_cache(1, 20), target.new_cache(1, 20)
    target.forward(pack_chunks([a[:4]], [0], [0], target.device), first)
    prefill(target, second, [b], [0])
    out = target.forward(pack_chunks([a[4:]], [0], [4], target.device), first)
    torch.testing.assert_close(out.logits[-1], alone, **TOLERANCE)


def test_plain_call_of_an_adapted_model_is_refused(target):
    with pytest.raises(ValueError, match="packed rows"):
        target.model(torch.tensor([[1, 2]]))


def test_bad_taps_and_limits_are_named(target):
    rows = pack_chunks([np.arange(2)], [0], [0], target.device)
    with pytest.raises(ValueError, match=r"taps=\[99\]"):
        target.forward(rows, target.new_cache(1, 4), taps=(99,))
    with pytest.raises(ValueError, match="context_limit=0"):
        Target(target.model, context_limit=0)
    with pytest.raises(ValueError, match="context_limit="):
        Target(target.model, context_limit=10**9)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_positions_that_depend_on_the_batch_are_refused(kind, tiny_llama):
    model = stock_model(tiny_llama)
    model.config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match=f"rope_type='{kind}'"):
        Target(model)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (CohereConfig(**SMALL, logit_scale=0.0625), "other logits"),
        (GraniteConfig(**SMALL, logits_scaling=8.0), "other logits"),
        (GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64), "GPT2"),
    ],
)
def test_models_that_packed_rows_would_get_wrong_are_refused(config, named):
    model = AutoModelForCausalLM.from_config(config).eval()
    for _ in range(2):  # trying again must not find the model adapted
        with pytest.raises(ValueError, match=named):
            Target(model)


def test_sliding_window_attention_is_refused():
    config = MistralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="sliding"):
        Target(model)


def test_attention_through_the_kernels_operator_equals_the_plain_path(target):
    """On a CPU the operator runs its reference, so this tests the metadata: prefill chunks, trees, sentinels."""
    through = Target(stock_model(target), stop_ids=(), attention="tile")
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, target.vocab_size, n) for n in (70, 1, 6)]
    trees = [random_tree(rng, n, target.vocab_size) for n in (63, 0, 11)]
    found = []
    for model in (target, through):
        cache = model.new_cache(3, 140)
        space = Workspace(4, 100, cache.max_len, model.device)
        outs = [prefill(model, cache, prompts, [2, 0, 1])]
        outs.append(model.forward(space.pack(trees, [2, 0, 1], [70, 1, 6], num_rows=99), cache).logits[:77])
        chunk = pack_chunks([np.full(5, 3)], [1], [6], model.device)
        outs.append(model.forward(chunk, cache).logits)
        found.append(outs)
    for plain, kernel in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain, **TOLERANCE)


def test_unknown_attention_is_refused(target):
    with pytest.raises(ValueError, match="attention='tile:rows8'; allowed: auto, plain, tile, tile:paper"):
        Target(target.model, attention="tile:rows8")
