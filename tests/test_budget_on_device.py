"""Lengths decided by tensors against the policies on draft trees.

Built to catch: limits or padding that are looked past, a live count that differs from the host's, another token judged
than the drafted one, half precision carried into the sums, a read on the host, and a broken draft that harms others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from decision_setup import DEVICE, captured, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.ref.features import LogitFeatures
from kernels.table import KERNELS
from workbench.batch import Batch, Chains
from workbench.budget import confidence, dvl, on_device
from workbench.budget.confidence import confidence_features, draft_log_probs, normaliser_and_entropy, top_logits
from workbench.budget.features import DraftFeatures
from workbench.budget.on_device import device_decision, device_scores, rows_of_bucket, rows_of_each
from workbench.budget.policy import BudgetPolicy, allocate_dvl, round_budget
from workbench.budget.predictor import AcceptancePredictor, PredictorScorer
from workbench.budget.scorers import gap_scores, minimum_scores, product_scores
from workbench.budget.table import POLICIES, build_policy
from workbench.types import DraftRequest, Signals, chain_tree

HIDDEN, VOCAB = 24, 97
SHARED = ["dvl", "product", "minimum", "own"]
DEVICE_POLICIES = ["full", "uniform", *SHARED]


def predictor_scorer(width: int = 16, hidden: int = HIDDEN, vocab: int = VOCAB) -> PredictorScorer:
    """Random weights, chosen so that scores are spread and fall along the chain."""
    generator = torch.Generator().manual_seed(7)
    head = torch.randn(vocab, hidden, generator=generator)
    model = AcceptancePredictor(width).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.08, generator=generator)
    model.layers[2].bias.copy_(torch.linspace(2.0, -2.0, width - 1))
    return PredictorScorer(model.to(DEVICE), DraftFeatures(hidden, head.to(DEVICE), width))


def policy(name: str, rows: float = 8.0, width: int = 16, **sizes: int) -> BudgetPolicy:
    if name == "own":  # scores are what the drafter says of its own drafts
        return BudgetPolicy("own", allocate_dvl, rows)
    return build_policy(name, rows, predictor_scorer(width, **sizes) if POLICIES[name][0] == "predictor" else None)


def chains(
    seed: int,
    num_requests: int,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    vocab: int = VOCAB,
    hidden: int = HIDDEN,
) -> Chains:
    """Drafts of very different certainty; one token in five is not the most likely one."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    new = {"generator": generator, "device": DEVICE}
    drafts = (num_requests, width - 1)
    sharpness = 12 * torch.rand(*drafts, 1, **new)
    logits = (torch.randn(*drafts, vocab, **new) * sharpness).to(dtype)
    best = logits.float().topk(2).indices
    tokens = torch.where(torch.rand(drafts, **new) < 0.2, best[..., 1], best[..., 0])
    return Chains(tokens, torch.randn(*drafts, hidden, **new).to(dtype), logits)


def batch(limits: list[int], budget: int) -> Batch:
    rows = whole(limits)
    empty = torch.zeros_like(rows)
    return Batch(empty, empty, empty, rows, whole([sum(n > 0 for n in limits)]), whole([budget]), 0)


def ragged(rng: np.random.Generator, num_live: int, num_padding: int, width: int) -> list[int]:
    return [*rng.integers(1, width + 1, num_live).tolist(), *[0] * num_padding]


def signals_of(drafted: Chains, limits: list[int]) -> Signals:
    """What the drafter hands a scorer: the requests that draft, all others left out."""
    places = torch.tensor([i for i, n in enumerate(limits) if n > 1], dtype=torch.int64)
    requests = [DraftRequest(i, np.arange(4), limits[i] - 1, limits[i] - 1) for i in places.tolist()]
    return Signals(requests, *(t.cpu()[places] for t in (drafted.tokens, drafted.hidden, drafted.logits)))


def on_cpu(rule: BudgetPolicy) -> BudgetPolicy:
    if not isinstance(rule.scorer, PredictorScorer):
        return rule
    features, model = rule.scorer.features, AcceptancePredictor(rule.scorer.predictor.width)
    model.load_state_dict({name: t.cpu() for name, t in rule.scorer.predictor.state_dict().items()})
    moved = DraftFeatures(features.hidden_size, torch.zeros(features.vocab_size, features.hidden_size), features.width)
    moved.matrix = features.matrix.cpu()
    return replace(rule, scorer=PredictorScorer(model, moved))


def host_scores(rule: BudgetPolicy, drafted: Chains, limits: list[int]) -> np.ndarray:
    """[R, n], zeros for requests that do not draft; by the scorer on a CPU."""
    scores = np.zeros(tuple(drafted.tokens.shape), np.float32)
    places = [i for i, n in enumerate(limits) if n > 1]
    if places and rule.reads_scores:
        signals = signals_of(drafted, limits)
        found = on_cpu(rule).scorer
        scores[places] = draft_log_probs(signals).cumsum(-1).numpy() if found is None else found(signals)
    return scores


def host_lengths(rule: BudgetPolicy, scores: np.ndarray, limits: list[int]) -> list[int]:
    live = [i for i, n in enumerate(limits) if n > 0]
    trees = [chain_tree(1, [5] * (limits[i] - 1), scores[i, : limits[i] - 1]) for i in live]
    lengths = [0] * len(limits)
    for i, tree in zip(live, rule.allocate(trees), strict=True):
        lengths[i] = tree.num_nodes + 1
    return lengths


def scored(rule: BudgetPolicy, drafted: Chains, round_: Batch) -> np.ndarray:
    """Scores on the device, made to fall as both allocators do."""
    form = device_scores(rule.scorer, drafted.tokens.shape[1] + 1)
    return np.minimum.accumulate(form(drafted, confidence_features(drafted.logits), round_).cpu().numpy(), axis=1)


def check_round(rule: BudgetPolicy, drafted: Chains, limits: list[int], exact: bool = True) -> list[int]:
    """The device's lengths. They are the host's from the same scores; `exact`: from its own scores too."""
    num_live = sum(n > 0 for n in limits)
    round_ = batch(limits, round_budget(rule.rows, num_live))
    before = [t.clone() for t in (*vars(drafted).values(), round_.limits, round_.budget)]
    lengths = device_decision(rule, drafted.tokens.shape[1] + 1)(drafted, round_)
    assert lengths.dtype == torch.int64 and lengths.device == round_.limits.device
    for tensor, copy in zip((*vars(drafted).values(), round_.limits, round_.budget), before, strict=True):
        assert torch.equal(tensor, copy)
    host = host_scores(rule, drafted, limits)
    if rule.reads_scores:
        there = scored(rule, drafted, round_)
        drafting = np.array(limits) > 1
        np.testing.assert_allclose(there[drafting], host[drafting], rtol=1e-4, atol=2e-5)
        assert lengths.tolist() == host_lengths(rule, there, limits)
    if exact:
        assert lengths.tolist() == host_lengths(rule, host, limits)
    assert int(lengths.sum()) <= rows_of_bucket(rule, len(limits), drafted.tokens.shape[1] + 1)
    return lengths.tolist()


@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_equals_the_policy_on_trees(name):
    rng = np.random.default_rng(1)
    cut, spread = 0, set()
    for case, num_live in enumerate((1, 2, 3, 7, 8, 20, 32)):
        for rows in (1, 2.5, 5, 8, 13, 64):
            limits = ragged(rng, num_live, case % 3, 16)
            lengths = check_round(policy(name, rows), chains(case, len(limits)), limits)
            assert lengths[num_live:] == [0] * (len(limits) - num_live)
            cut += sum(limits) - sum(lengths)
            spread |= set(lengths)
    assert (cut > 0) == (name != "full") and len(spread) > 8


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_drafts_are_judged_in_float32(name, dtype):
    drafted = chains(3, 9, dtype=dtype, vocab=3001)
    check_round(policy(name, 6, vocab=3001), drafted, [16, 3, 16, 9, 16, 1, 16, 16, 0])


@pytest.mark.parametrize("width", [2, 3, 8, 17, 64])
@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_other_widths(name, width):
    limits = ragged(np.random.default_rng(width), 4, 1, width)
    check_round(policy(name, 1.5, width), chains(width, 5, width), limits)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_round(data):
    width = data.draw(st.sampled_from([2, 5, 16]))
    limits = data.draw(st.lists(st.integers(1, width), min_size=1, max_size=12)) + [0] * data.draw(st.integers(0, 3))
    rule = policy(data.draw(st.sampled_from(DEVICE_POLICIES)), data.draw(st.floats(1, 20)), width)
    # Scores that differ in the last digit only may be ordered differently by the host, so not its own are compared.
    check_round(rule, chains(data.draw(st.integers(0, 1000)), len(limits), width), limits, exact=False)


@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_what_pads_changes_nothing(name):
    rule, limits = policy(name, 4), [16, 5, 1, 16]
    drafted = chains(4, 4)
    alone = check_round(rule, drafted, limits)
    for broken in (float("nan"), float("inf"), 0.0):
        wider = Chains(*(torch.cat((t, torch.zeros_like(t[:3]))) for t in vars(drafted).values()))
        wider.logits[4:], wider.hidden[4:] = broken, broken
        lengths = device_decision(rule, 16)(wider, batch([*limits, 0, 0, 0], 16))
        assert lengths.tolist() == [*alone, 0, 0, 0]


@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_only_padding(name):
    assert device_decision(policy(name), 16)(chains(0, 3), batch([0, 0, 0], 24)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_limits_beyond_the_drafts_are_cut(name):
    rule, drafted = policy(name, 6, 8), chains(2, 3, 8)
    for budget in (18, 60):
        rounds = batch([64, 5, 9], budget), batch([8, 5, 8], budget)
        long, fitting = (device_decision(rule, 8)(drafted, round_).tolist() for round_ in rounds)
        assert long == fitting and max(long) <= 8


def test_the_predictor_is_told_how_many_requests_draft():
    """As on the host: a request that has room for its root alone brings no draft to count."""
    rule = policy("dvl")
    with torch.no_grad():
        rule.scorer.predictor.layers[0].weight[:, -25] = 0.5  # the live count
    drafted = chains(5, 6)
    for limits in ([16, 16, 1, 16, 1, 0], [16, 16, 16, 16, 16, 16], [16, 1, 1, 0, 0, 0]):
        check_round(rule, drafted, limits)
    few, many = (scored(rule, drafted, batch(n, 48)) for n in ([16, 16, 1, 16, 1, 0], [16] * 6))
    assert np.abs(few - many).max() > 0.01


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("rows", [2, 5, 12, 16])
def test_a_broken_draft_harms_no_other(name, rows):
    """It counts as one of the lowest scores; here the host refuses the round."""
    rule, limits = policy(name, rows), [16, 16, 9, 16, 2]
    good, round_ = chains(6, 5), batch(limits, round(5 * rows))
    spoilt = Chains(good.tokens, good.hidden, good.logits.clone())
    spoilt.logits[1, 0, 40] = torch.nan
    lengths = device_decision(rule, 16)(spoilt, round_).tolist()
    scores = scored(rule, good, round_)
    scores[1] = -3e38
    assert lengths == dvl.allocate(scores, round(5 * rows), 16, np.array(limits)).tolist()
    assert lengths[1] == 1 or (lengths[0] == 16 and lengths[3] == 16)
    with pytest.raises(ValueError, match="scores are not finite: chain 1"):
        host_lengths(rule, host_scores(rule, spoilt, limits), limits)


def test_rows_before_a_broken_one_still_count():
    good = chains(6, 2)
    good.logits[0] = 0.0
    good.logits[0].scatter_(-1, good.tokens[0, :, None], 30.0)
    good.logits[0, 5, 3] = torch.nan
    good.logits[1] = 0.0
    assert device_decision(policy("product", 4), 16)(good, batch([16, 16], 8)).tolist() == [6, 2]


def test_one_pass_serves_draft_and_decision():
    for dtype in (torch.float32, torch.bfloat16):
        logits = chains(8, 3, dtype=dtype, vocab=2500).logits
        tokens, values, normaliser, entropy = confidence_features(logits)
        assert torch.equal(tokens, logits.float().cpu().argmax(-1).to(DEVICE)) and tokens.shape == (3, 15)
        assert torch.equal(values, top_logits(logits, 16))
        for got, want in zip((normaliser, entropy), normaliser_and_entropy(logits), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    with pytest.raises(ValueError, match=r"logits \[6, 15\]"):
        confidence_features(logits[:2, :3, :15].contiguous())


@pytest.mark.parametrize("name", SHARED)
def test_with_the_kernels_themselves(name, monkeypatch):
    """On a CPU they are interpreted."""
    for module in (on_device, confidence):
        monkeypatch.setattr(module, "kernel", lambda name, device: KERNELS[name][0])
    check_round(policy(name, 2, 4), chains(9, 4, 4), [4, 1, 4, 0])
    check_round(policy(name, 2, 4), chains(9, 3, 4, torch.float16), [4, 4, 0])


@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_nothing_is_read_on_the_host(name, monkeypatch):
    """With tensors that have no contents; any look at a value raises. The kernels' references look, so not them."""

    def features(logits: torch.Tensor) -> LogitFeatures:
        n = len(logits)
        return LogitFeatures(logits.new_empty(n, 16, dtype=torch.float32), torch.empty(n, 16, dtype=torch.int64),
                             torch.empty(n), torch.empty(n))  # fmt: skip

    def allocate(scores: torch.Tensor, limits: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
        assert scores.dtype == torch.float32 and scores.is_contiguous() and budget.shape == (1,)
        return torch.empty_like(limits)

    blind = {"features": features, "allocate": allocate}
    for module in (on_device, confidence):
        monkeypatch.setattr(module, "kernel", lambda name, device: blind[name])
    decide = device_decision(on_cpu(policy(name)), 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        drafted = Chains(torch.zeros(4, 15, dtype=torch.int64), torch.zeros(4, 15, HIDDEN), torch.zeros(4, 15, VOCAB))
        rows = torch.zeros(4, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        lengths = decide(drafted, Batch(rows, rows, rows, rows, one, one, 0))
    assert lengths.shape == (4,) and lengths.dtype == torch.int64


def test_who_needs_the_host():
    def zeros(signals: Signals) -> np.ndarray:
        return np.zeros(tuple(signals.tokens.shape), np.float32)

    class Own(BudgetPolicy):
        pass

    class OwnScorer(PredictorScorer):
        pass

    class Unhashable:
        __hash__ = None

        __call__ = zeros

    scorer = predictor_scorer()
    for name, (needed, _) in POLICIES.items():
        made = build_policy(name, scorer={"predictor": scorer, "oracle": zeros}.get(needed))
        assert (device_decision(made, 16) is None) == (name not in DEVICE_POLICIES), name
    for other in (zeros, gap_scores, Unhashable(), OwnScorer(scorer.predictor, scorer.features)):
        assert device_decision(build_policy("dvl", scorer=other), 16) is None
    assert device_decision(Own("dvl", allocate_dvl, 8.0, product_scores), 16) is None
    assert device_decision(object(), 16) is None
    assert device_decision(build_policy("full", scorer=zeros), 16) is not None
    assert device_decision(build_policy("dvl", scorer=minimum_scores), 16) is not None


def test_bad_widths_are_named():
    for width in (1, 0, 65):
        with pytest.raises(ValueError, match=rf"width is {width}, allowed 2..64"):
            device_decision(policy("full"), width)
    with pytest.raises(ValueError, match="the predictor is for 16 rows, the drafts have 8"):
        device_decision(policy("dvl"), 8)
    with pytest.raises(ValueError, match=r"hidden \[2, 7, 24\] and logits \[2, 7, 97\], allowed \[2, 15, 24\]"):
        device_decision(policy("dvl"), 16)(chains(0, 2, 8), batch([8, 8], 16))


def test_rows_of_a_bucket():
    expected = {"full": 128, "seed": 128, "uniform": 32, "dvl": 36, "topk": 36, "shared": 36, "oracle": 36, "gap": 36}
    for name, rows in expected.items():
        needed = POLICIES[name][0]
        made = build_policy(name, 4.5, product_scores if needed in ("predictor", "oracle") else None)
        assert rows_of_bucket(made, 8, 16) == rows, name
    assert (
        rows_of_bucket(build_policy("product", 20), 8, 16) == rows_of_bucket(build_policy("uniform", 20), 8, 16) == 128
    )
    assert rows_of_bucket(object(), 3, 16) == 48
    for sizes in ((0, 16), (3, 0)):
        with pytest.raises(ValueError, match="=0 must be at least 1"):
            rows_of_bucket(build_policy("full"), *sizes)


def test_which_policies_keep_the_first_rows_of_each():
    """Trees too are cut so; what looks at scores, or is of somebody else, needs another way."""
    for name, (scorer, _) in POLICIES.items():
        made = build_policy(name, 4.5, product_scores if scorer in ("predictor", "oracle") else None)
        assert rows_of_each(made, 60) == {"full": 60, "uniform": 4}.get(name), name
    assert rows_of_each(build_policy("uniform", 20), 16) == 16

    class Mine(BudgetPolicy):
        pass

    assert rows_of_each(Mine("full", build_policy("full").allocator), 16) is None
    assert rows_of_each(object(), 16) is None


@settings(max_examples=200, deadline=None)
@given(st.floats(1, 64), st.integers(1, 64), st.sampled_from(["dvl", "uniform", "full"]))
def test_fewer_requests_fit_into_the_bucket(rows, size, name):
    made = build_policy(name, rows, product_scores)
    room = rows_of_bucket(made, size, 16)
    assert size <= room <= 16 * size
    for num_live in range(1, size + 1):
        scores = np.full((num_live, 15), 0.5, np.float32)
        assert sum(host_lengths(made, scores, [16] * num_live)) <= room


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEVICE_POLICIES)
@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_real_vocabulary_in_half_precision(name, num_requests):
    drafted = chains(num_requests, num_requests, dtype=torch.bfloat16, vocab=151_936, hidden=256)
    limits = ragged(np.random.default_rng(0), num_requests - num_requests // 5, num_requests // 5, 16)
    check_round(policy(name, 6, vocab=151_936, hidden=256), drafted, limits, exact=False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DEVICE_POLICIES)
def test_replay_sees_new_drafts_limits_and_budget(name):
    rule = policy(name, 6, vocab=151_936, hidden=256)
    sizes = {"dtype": torch.bfloat16, "vocab": 151_936, "hidden": 256}
    drafted, round_ = chains(0, 16, **sizes), batch([16] * 16, 96)
    decide = device_decision(rule, 16)
    with torch.inference_mode():
        graph, lengths = captured(lambda: decide(drafted, round_))
    rng = np.random.default_rng(3)
    seen = set()
    for seed, num_live in enumerate((16, 11, 1), start=1):
        limits = ragged(rng, num_live, 16 - num_live, 16)
        for old, new in zip(vars(drafted).values(), vars(chains(seed, 16, **sizes)).values(), strict=True):
            old.copy_(new)
        round_.limits.copy_(whole(limits))
        round_.num_live.fill_(num_live)
        round_.budget.fill_(round_budget(6, num_live))
        graph.replay()
        assert lengths.tolist() == check_round(rule, drafted, limits, exact=False)
        seen.add(tuple(lengths.tolist()))
    assert len(seen) == 3
