"""The predictor's input vector against a plain version that projects the whole centred logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench.budget.confidence import draft_log_probs, normaliser_and_entropy, top_logits
from workbench.budget.features import DraftFeatures, feature_size, gaussian_matrix
from workbench.types import DraftRequest, Signals

HIDDEN, VOCAB = 24, 97


def make_signals(
    rows: int, head: torch.Tensor, length: int = 15, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Signals:
    """Drafts whose logits are those of the head, rounded to `dtype` like the hidden states."""
    hidden = torch.randn(rows, length, head.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype)
    logits = (hidden.float() @ head.T).to(dtype)
    requests = [DraftRequest(i, np.arange(4), length, length) for i in range(rows)]
    return Signals(requests, logits.argmax(-1), hidden, logits)


def make_head(vocab_size: int = VOCAB, hidden_size: int = HIDDEN) -> torch.Tensor:
    return torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(5))


def plain_features(signals: Signals, num_live: int, seeds: tuple[int, int] = (0, 1)) -> np.ndarray:
    """One request and one position after another, in float64, with a pass over the centred vocabulary."""
    hidden, logits = signals.hidden.double().numpy(), signals.logits.double().numpy()
    hidden_matrix = np.random.RandomState(seeds[0]).standard_normal((hidden.shape[2], 64)) / hidden.shape[2] ** 0.5
    logit_matrix = np.random.RandomState(seeds[1]).standard_normal((logits.shape[2], 32)) / logits.shape[2] ** 0.5
    vectors = []
    for h, x in zip(hidden, logits, strict=True):
        confidence, first, second = [], [], []
        for position in range(len(x)):
            ranked = np.sort(x[position])[::-1]
            normaliser = np.log(np.exp(x[position] - ranked[0]).sum()) + ranked[0]
            log_probs = x[position] - normaliser
            confidence += [ranked[0], *(ranked[0] - ranked[1:16]), log_probs.max()]
            confidence.append(-(np.exp(log_probs) * log_probs).sum())
            first += (h[position] @ hidden_matrix).tolist()
            second += ((x[position] - x[position].mean()) @ logit_matrix).tolist()
        context = [0.0] * 25
        context[1 - 1], context[4 - 1] = num_live, 1.0
        vectors.append(confidence + first + second + context)
    return np.array(vectors)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab_size", [16, VOCAB, 5003], ids=lambda size: f"V{size}")
def test_equals_the_plain_version(rows, vocab_size):
    """Vocabularies of exactly the ranks, below and above what is searched by blocks."""
    head = make_head(vocab_size)
    signals = make_signals(rows, head)
    features = DraftFeatures(HIDDEN, head)(signals)
    assert features.shape == (rows, 1735) and features.dtype == torch.float32
    np.testing.assert_allclose(features.numpy(), plain_features(signals, rows), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 2e-2), (torch.bfloat16, 1.5e-1)], ids=str)
def test_half_precision_drafts(dtype, limit):
    """What is read from the rounded values is exact; the folded group does not see the rounding of the logits."""
    head = make_head(3001)
    signals = make_signals(2, head, dtype=dtype)
    features = DraftFeatures(HIDDEN, head)(signals).numpy()
    plain = plain_features(signals, 2)
    np.testing.assert_allclose(features[:, : 270 + 960], plain[:, : 270 + 960], rtol=2e-4, atol=2e-4)
    assert features.dtype == np.float32 and np.abs(features - plain)[:, 1230:].max() < limit


def test_half_precision_head_is_folded_in_float32():
    head = make_head(513).bfloat16()
    signals = make_signals(2, head.float())
    np.testing.assert_allclose(DraftFeatures(HIDDEN, head)(signals), plain_features(signals, 2), rtol=2e-4, atol=2e-4)


def test_order_and_sizes_of_the_groups():
    assert feature_size(16) == 270 + 960 + 480 + 25 == 1735
    head = make_head()
    features = DraftFeatures(HIDDEN, head)
    signals = make_signals(2, head)
    before = features(signals)
    hidden = signals.hidden.clone()
    hidden[1, 4] += 1.0  # request 1, position 4, hidden state alone
    changed = features(Signals(signals.requests, signals.tokens, hidden, signals.logits)) != before
    expected = torch.zeros_like(changed)
    expected[1, 270 + 4 * 64 : 270 + 5 * 64] = True
    expected[1, 1230 + 4 * 32 : 1230 + 5 * 32] = True
    assert torch.equal(changed, expected)
    logits = signals.logits.clone()
    logits[0, 14] = logits[0, 14] * 1.5 + 1.0
    changed = features(Signals(signals.requests, signals.tokens, signals.hidden, logits)) != before
    assert changed.nonzero().tolist() == [[0, column] for column in range(14 * 18, 15 * 18)]


def test_batch_context_is_the_live_count_and_a_flag():
    head = make_head()
    features = DraftFeatures(HIDDEN, head)
    signals = make_signals(3, head)
    for num_live, expected in ((None, 3.0), (32, 32.0), (1, 1.0)):
        context = features(signals, num_live)[:, -25:]
        assert torch.equal(context[:, 0], torch.full((3,), expected)) and torch.equal(context[:, 3], torch.ones(3))
        assert not context[:, [1, 2, *range(4, 25)]].any()


def test_a_request_does_not_depend_on_the_others():
    head = make_head()
    features, signals = DraftFeatures(HIDDEN, head), make_signals(4, head)
    alone = Signals(signals.requests[2:3], signals.tokens[2:3], signals.hidden[2:3], signals.logits[2:3])
    torch.testing.assert_close(features(signals)[2:3], features(alone, num_live=4), rtol=1e-5, atol=1e-5)


def test_other_widths():
    head = make_head()
    for width in (2, 8, 17):
        signals = make_signals(2, head, length=width - 1)
        features = DraftFeatures(HIDDEN, head, width)
        assert features.size == feature_size(width) == (width - 1) * 114 + 25
        np.testing.assert_allclose(features(signals), plain_features(signals, 2), rtol=2e-4, atol=2e-4)


def test_seeds_choose_the_matrices_and_the_stream_is_fixed():
    head = make_head()
    signals = make_signals(1, head)
    base, other = DraftFeatures(HIDDEN, head)(signals), DraftFeatures(HIDDEN, head, 16, 9, 1)(signals)
    assert not torch.isclose(base[:, 270:1230], other[:, 270:1230]).all()
    assert torch.equal(base[:, 1230:], other[:, 1230:])
    np.testing.assert_allclose(
        DraftFeatures(HIDDEN, head, 16, 3, 4)(signals), plain_features(signals, 1, (3, 4)), rtol=2e-4, atol=2e-4
    )
    # Known numbers of this stream: a saved predictor relies on them.
    np.testing.assert_allclose(gaussian_matrix(0, 4, 2)[0], [1.7640524 / 2, 0.4001572 / 2], rtol=1e-6)
    assert abs(float(gaussian_matrix(1, 4096, 64).std()) * 64 - 1) < 0.01


def test_global_random_state_is_left_alone():
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    DraftFeatures(HIDDEN, make_head())
    np.testing.assert_array_equal(np.random.get_state()[1], before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [16, 255, 4096, 4097, 5000], ids=str)
def test_top_logits_are_those_of_a_full_search(vocab_size, dtype):
    logits = (3 * torch.randn(5, 3, vocab_size)).to(dtype)  # many ties in bfloat16
    logits[0, 0] = 1.0
    logits[1, 1] = torch.arange(vocab_size).to(dtype)  # the largest all in the last blocks or in what is left over
    logits[2, 2] = -logits[1, 1]
    for count in (1, 2, 16):
        assert torch.equal(top_logits(logits, count), logits.topk(count).values.float())


def test_normaliser_and_entropy_at_extremes():
    logits = torch.randn(7, 300) * 20
    logits[0] = 0.0
    logits[1] = torch.tensor([1e4] + [-1e4] * 299)
    logits[2, 3:] = -torch.inf
    logits[3] += 1e6
    normaliser, entropy = normaliser_and_entropy(logits)
    exact = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(normaliser, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy, exact.entropy().float(), rtol=1e-4, atol=1e-5)


def test_rows_are_taken_in_pieces_that_do_not_matter(monkeypatch):
    logits = torch.randn(3, 5, 331)
    whole = normaliser_and_entropy(logits)
    for size in (1, 700, 2000):
        monkeypatch.setattr("workbench.budget.confidence._PIECE", {"cpu": size})
        for one, other in zip(whole, normaliser_and_entropy(logits), strict=True):
            assert one.shape == (3, 5) and torch.equal(one, other)


def test_log_probs_of_drafted_tokens():
    signals = make_signals(2, make_head(700), dtype=torch.bfloat16)
    expected = signals.logits.double().log_softmax(-1).gather(-1, signals.tokens[..., None])[..., 0]
    torch.testing.assert_close(draft_log_probs(signals), expected.float(), rtol=1e-5, atol=1e-5)


def test_nan_logits_stay_visible():
    head = make_head(5000)
    signals = make_signals(2, head)
    signals.logits[1, 3, 4321] = torch.nan
    features = DraftFeatures(HIDDEN, head)(signals)
    assert features[1, 3 * 18 : 4 * 18].isnan().all() and features[0].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((HIDDEN + 1, make_head()), r"head_weight \[97, 24\], allowed \[V, 25\]"),
        ((HIDDEN, make_head(15)), r"head_weight \[15, 24\], allowed \[V, 24\] with V >= 16"),
        ((HIDDEN, make_head()[0]), r"head_weight \[24\]"),
        ((HIDDEN, make_head(), 1), r"width is 1, allowed 2..64"),
        ((HIDDEN, make_head(), 65), r"width is 65"),
        ((HIDDEN, make_head(), 16, -1), r"hidden_seed is -1, allowed 0..4294967295"),
        ((HIDDEN, make_head(), 16, 0, 2**32), r"logit_seed is 4294967296"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        DraftFeatures(*arguments)


@pytest.mark.parametrize(("length", "hidden_size", "vocab_size"), [(14, 24, 97), (15, 20, 97), (15, 24, 96)])
def test_drafts_of_another_shape_are_refused(length, hidden_size, vocab_size):
    signals = make_signals(2, make_head(vocab_size, hidden_size), length)
    with pytest.raises(ValueError, match=r"allowed \[2, 15, 24\] and \[..., 97\]"):
        DraftFeatures(HIDDEN, make_head())(signals)


@pytest.mark.gpu
def test_features_on_the_device():
    head = make_head(49152)
    for dtype in (torch.float32, torch.bfloat16):
        signals = make_signals(8, head, dtype=dtype)
        moved = Signals(signals.requests, signals.tokens.cuda(), signals.hidden.cuda(), signals.logits.cuda())
        there, here = DraftFeatures(HIDDEN, head.cuda())(moved), DraftFeatures(HIDDEN, head)(signals)
        torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)
