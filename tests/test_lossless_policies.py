"""The promise again, with the verified part of every draft decided by each policy, at several budgets.

The drafts here are mostly right, and every test asserts that some were accepted and some were cut: with random weights
nothing is accepted, and what is verified makes no difference.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from drafter_zoo import looked_up, make_drafter, random_prompts
from likely_setup import Guesses, LikelyDart, LikelyDFlash, ScatteredNgram, known
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.budget.features import DraftFeatures
from workbench.budget.policy import BudgetPolicy
from workbench.budget.predictor import AcceptancePredictor, PredictorScorer
from workbench.budget.table import ALLOCATORS, POLICIES, build_policy
from workbench.decode.engine import Engine, FinishEvent, Request, SamplingConfig, generate
from workbench.decode.rows import pack_chunks
from workbench.decode.sampling import target_probs
from workbench.drafters.ar import ArDrafter
from workbench.drafters.ngram import NgramDrafter
from workbench.drafters.oracle import ForesightDrafter, OracleScorer
from workbench.load import load_method
from workbench.models.target import Target
from workbench.search.trie import NgramTrie
from workbench.types import Drafter, GenerateResult, RoundStats

NUM_PROMPTS, NUM_TOKENS = 7, 24
#: (policy, mean rows a request, requests side by side); the block has 16 rows.
CASES = [(name, rows, slots) for name in POLICIES for rows in (4.0, 8.0, 12.0) for slots in (1, 6) if name != "full"]
CASES += [("full", 8.0, 1), ("full", 8.0, 6), ("dvl", 16.0, 6)]
CASES += [("dvl", 5.5, 6), ("shared", 12.5, 6), ("uniform", 5.5, 6)]
TREES = [("dart", "uniform", 6.0), ("dart", "shared", 4.0), ("dart", "shared", 12.0)]
TREES += [("ngram", "uniform", 4.0), ("ngram", "shared", 3.0), ("ngram", "shared", 5.5), ("scattered", "shared", 8.0)]

#: Requests that were in a round together: prompt and output before it, and its record.
Round = list[tuple[tuple[int, ...], RoundStats]]


class Decoded:
    """What autoregressive decoding makes of a few prompts; outputs end one after another."""

    def __init__(self, target: Target, sampled: bool) -> None:
        self.target = target
        self.prompts = random_prompts(target.vocab_size, NUM_PROMPTS, seed=2 + sampled)
        self.configs = [
            SamplingConfig(max_new_tokens=NUM_TOKENS + 3 * (i % 4), temperature=sampled * (0.3 + 0.3 * i), seed=50 + i,
                           stop_ids=())
            for i in range(NUM_PROMPTS)
        ]  # fmt: skip
        self.outputs = [r.token_ids for r in generate(target, ArDrafter(), self.prompts, self.configs, slots=4)]
        self.texts = [p + o for p, o in zip(self.prompts, self.outputs, strict=True)]
        self.guesses = Guesses(known(self.prompts, self.outputs), target.vocab_size)

    def rounds_of(self, drafter: Drafter, slots: int, count: int = NUM_PROMPTS) -> list[Round]:
        """Decodes the first `count` prompts, compares, and gives the rounds back."""
        results = generate(self.target, drafter, self.prompts[:count], self.configs[:count], slots, trace=True)
        assert [r.token_ids for r in results] == self.outputs[:count]
        return rounds_of(self.prompts, results)


def rounds_of(prompts: Sequence[Sequence[int]], results: Sequence[GenerateResult]) -> list[Round]:
    """Texts and records of requests that were in a round together: they share one record of seconds."""
    rounds: dict[int, Round] = {}
    for prompt, result in zip(prompts, results, strict=False):
        end = 1
        for stats in result.rounds:
            rounds.setdefault(id(stats.stage_s), []).append(((*prompt, *result.token_ids[:end]), stats))
            end += stats.num_emitted
    return list(rounds.values())


def count_used(rounds: Sequence[Round]) -> tuple[int, int]:
    """(accepted drafts, drafts of which less was verified than proposed)."""
    records = [stats for members in rounds for _, stats in members]
    return sum(s.num_accepted for s in records), sum(s.num_verified - 1 < s.num_drafted for s in records)


@pytest.fixture(
    scope="module", params=[("tiny_llama", False), ("tiny_qwen3", True)], ids=["greedy_llama", "sampled_qwen3"]
)
def decoded(request):
    name, sampled = request.param
    return Decoded(request.getfixturevalue(name), sampled)


def made_policy(
    name: str, rows: float, target: Target, texts: Sequence[Sequence[int]] = (), width: int = 16
) -> BudgetPolicy:
    """A policy of the table; its predictor has random weights, its oracle knows `texts`."""
    needed, scorer = POLICIES[name][0], None
    if needed == "predictor":
        torch.manual_seed(0)
        head = target.lm_head.weight.detach()
        scorer = PredictorScorer(AcceptancePredictor(width), DraftFeatures(target.hidden_size, head, width))
    elif needed == "oracle":
        scorer = OracleScorer(target, looked_up(texts))
    return build_policy(name, rows, scorer, seed=5)


def check_round(name: str, rows: float, members: Round, guesses: Guesses) -> int:
    """Lengths are what the policy promises, and each accepts what is right of them. Returns right drafts cut away."""
    allocator = POLICIES[name][1]
    runs = [guesses.run(text, stats.num_drafted) for text, stats in members]
    limits = [stats.num_drafted + 1 for _, stats in members]
    lengths = [stats.num_verified for _, stats in members]
    accepted = [stats.num_accepted for _, stats in members]
    assert accepted == [min(run, length - 1) for run, length in zip(runs, lengths, strict=True)]
    assert all(1 <= length <= limit for length, limit in zip(lengths, limits, strict=True))
    if allocator == "full":
        assert lengths == limits
    elif allocator == "uniform":
        assert lengths == [min(round(rows), limit) for limit in limits]
    elif allocator != "seed":
        assert sum(lengths) == min(round(rows * len(members)), sum(limits))
    if name == "oracle":  # no row is wasted on one request while another could use it
        assert sum(accepted) == min(sum(runs), sum(lengths) - len(members))
    return sum(runs) - sum(accepted)


@pytest.mark.parametrize(("policy", "rows", "slots"), CASES)
def test_likely_drafts_under_every_policy_and_budget(policy, rows, slots, decoded):
    chosen = made_policy(policy, rows, decoded.target, decoded.texts)
    drafter = LikelyDFlash(decoded.target, decoded.guesses, chosen)
    rounds = decoded.rounds_of(drafter, slots, count=NUM_PROMPTS if slots > 1 else 2)
    assert max(map(len, rounds)) == slots
    missed = sum(check_round(policy, rows, members, decoded.guesses) for members in rounds)
    accepted, cut = count_used(rounds)
    assert accepted > 10
    assert (cut > 0) == (policy != "full" and rows < 16)
    if rows == 4 and slots > 1:
        assert missed > 0  # right drafts were cut away, so that the next round begins in the middle of a run


def likely_trees(name: str, own: Decoded, policy: BudgetPolicy) -> Drafter:
    """DART that knows the outputs, or n-grams that were counted in them."""
    if name == "dart":
        return LikelyDart(own.target, own.guesses, policy)
    made = ScatteredNgram if name == "scattered" else NgramDrafter
    return made(NgramTrie.count(own.texts, order=2), num_nodes=24 if name == "scattered" else 12, policy=policy)


def check_tree(text: tuple[int, ...], stats: RoundStats, following: dict[tuple[int, ...], int]) -> None:
    """What was verified is a tree still, and the accepted path is the longest in it that the target goes."""
    tree, path = stats.tree, stats.path
    assert (tree.depths[1:] == tree.depths[tree.parents[1:]] + 1).all()
    accepted = tuple(tree.tokens[list(path[1:])].tolist())
    assert all(following[(*text, *accepted[:i])] == token for i, token in enumerate(accepted))
    assert following[(*text, *accepted)] not in tree.tokens[tree.parents == path[-1]]


@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.parametrize(("name", "policy", "rows"), TREES)
def test_likely_trees_under_a_budget(name, policy, rows, slots, decoded):
    drafter = likely_trees(name, decoded, build_policy(policy, rows))
    rounds = decoded.rounds_of(drafter, slots, count=NUM_PROMPTS if slots > 1 else 3)
    accepted, cut = count_used(rounds)
    assert accepted > 10 and cut > 10
    for members in rounds:
        for text, stats in members:
            check_tree(text, stats, decoded.guesses.following)
    records = [stats for members in rounds for _, stats in members]
    assert any(not s.tree.is_chain and s.num_verified - 1 < s.num_drafted for s in records)
    assert any(s.path != tuple(range(len(s.path))) for s in records)  # accepted rows lay apart behind the cut
    if policy == "shared":
        for members in rounds:
            drafted = sum(s.num_drafted + 1 for _, s in members)
            assert sum(s.num_verified for _, s in members) == min(round(rows * len(members)), drafted)


@pytest.mark.parametrize("policy", ["full", "uniform", "dvl", "gap", "oracle"])
def test_dscale_from_files(policy, decoded, tmp_path):
    """The builder, with weights that say nothing: its default of 8 rows must cut, and cuts must not show."""
    drafter = make_drafter("dscale", decoded.target, tmp_path, decoded.texts, policy=policy)
    rounds = decoded.rounds_of(drafter, 6)
    assert (count_used(rounds)[1] > 0) == (policy != "full")


@pytest.mark.parametrize("row_bucket", [1, 7, 128])
def test_a_round_spends_its_budget_and_no_more(row_bucket, tiny_llama):
    """Rows of every round with all requests far from their ends: exactly 8 a request; sentinels change nothing."""
    prompts = random_prompts(tiny_llama.vocab_size, 5, seed=4)
    config = SamplingConfig(max_new_tokens=60, stop_ids=())
    expected = [r.token_ids for r in generate(tiny_llama, ArDrafter(), prompts, config, slots=5)]
    texts = [p + e for p, e in zip(prompts, expected, strict=True)]
    policy = BudgetPolicy("dvl", ALLOCATORS["dvl"], 8.0)
    drafter = ForesightDrafter(tiny_llama, "coin", 0.7, 15, continuation=looked_up(texts), policy=policy)
    engine = Engine(tiny_llama, drafter, slots=5, max_len=200, row_bucket=row_bucket)
    for prompt in prompts:
        engine.submit(Request(tuple(prompt), config))
    results = {event.request: event.result for event in engine.stream() if isinstance(event, FinishEvent)}
    assert [results[i].token_ids for i in range(5)] == expected
    for early in range(3):
        assert sum(results[i].rounds[early].num_verified for i in range(5)) == 40


#: Prompt, tokens and configuration of the law test: few enough outcomes to enumerate them all, and several rounds.
LAW_PROMPT, LAW_TOKENS, NUM_SEEDS = (3, 1, 4), 6, 1000
LAW_CONFIG = {"max_new_tokens": LAW_TOKENS, "temperature": 0.9, "top_k": 3, "stop_ids": (), "accept_rule": "rejection"}
#: (drafter, policy, mean rows a request)
LAWS = [("dflash", "dvl", 2.0), ("dflash", "product", 2.5), ("dflash", "random", 2.5), ("dflash", "full", 8.0)]
LAWS += [("ngram", "shared", 2.5), ("dart", "shared", 4.0)]


@pytest.fixture(scope="module")
def toy():
    """A target of 16 tokens and 7 layers, the law of its outputs, and what its likeliest next token is anywhere."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=7, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4, eos_token_id=None,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config))
    law, likeliest = {LAW_PROMPT: 1.0}, {}
    for _ in range(LAW_TOKENS):
        longer = {}
        for (text, share), probs in zip(law.items(), next_probs(target, list(law)), strict=True):
            likeliest[text] = int(probs.argmax())
            longer |= {(*text, int(token)): share * probs[token] for token in probs.nonzero()[0]}
        law = longer
    return target, law, likeliest


def next_probs(target: Target, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """[N, V] law of the token behind each text."""
    slots, lengths = range(len(texts)), [len(t) for t in texts]
    rows = pack_chunks([np.array(t) for t in texts], slots, [0] * len(texts), target.device)
    out = target.forward(rows, target.new_cache(len(texts), max(lengths)))
    return target_probs(out.logits[np.cumsum(lengths) - 1], SamplingConfig(**LAW_CONFIG)).numpy()


@pytest.mark.parametrize(("name", "policy", "rows"), LAWS)
def test_law_of_the_rejection_rule_with_cut_drafts(name, policy, rows, toy):
    """Joint law of all six tokens, chi-square over every outcome that is likely enough."""
    target, law, likeliest = toy
    guesses = Guesses(likeliest, target.vocab_size)
    if name == "dflash":
        drafter = LikelyDFlash(target, guesses, made_policy(policy, rows, target, width=6), block_size=6)
    elif name == "dart":
        drafter = LikelyDart(target, guesses, build_policy(policy, rows), num_nodes=12)
    else:
        drafter = NgramDrafter(NgramTrie.count(list(law), order=2), 12, policy=build_policy(policy, rows))
    configs = [SamplingConfig(seed=seed, **LAW_CONFIG) for seed in range(NUM_SEEDS)]
    results = generate(target, drafter, [LAW_PROMPT] * NUM_SEEDS, configs, slots=100)
    accepted, cut = count_used(rounds_of([LAW_PROMPT] * NUM_SEEDS, results))
    assert accepted > NUM_SEEDS and (cut > NUM_SEEDS / 2) == (policy != "full")
    counts = dict.fromkeys(law, 0)
    for result in results:
        counts[(*LAW_PROMPT, *result.token_ids)] += 1  # an outcome that cannot be is a KeyError
    expected, observed = np.array(list(law.values())) * NUM_SEEDS, np.array(list(counts.values()))
    small = expected < 5  # pooled, as the test asks for
    assert (~small).sum() > 30
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
    with pytest.raises(ValueError, match="predictor is unset and none is shipped for"):
        load_method("dscale", tiny_llama, tmp_path / "dflash")
    drafter = load_method("dscale", tiny_llama, tmp_path / "dflash", policy="uniform", rows=4)
    assert drafter.name == "dscale" and drafter.policy.scorer is None


@pytest.mark.parametrize("name", ["dart", "ngram"])
def test_drafters_of_trees_refuse_policies_for_chains(name, tiny_llama, tmp_path):
    with pytest.raises(ValueError, match="policy is 'dvl', allowed for a drafter of trees: full, uniform, shared"):
        make_drafter(name, tiny_llama, tmp_path, policy="dvl")
