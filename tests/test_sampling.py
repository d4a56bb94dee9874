"""Filters against transformers' own processors, draws against exact distributions, keys against order."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workbench.decode.sampling import SamplingConfig, choose, target_probs, uniforms


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (7, 0.6), (1, 1.0), (500, 0.05)])
def test_filters_equal_transformers(temperature, top_k, top_p):
    logits = torch.randn(9, 101, generator=torch.Generator().manual_seed(1)).double() * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    got = target_probs(logits, SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(got, expected.softmax(-1), atol=1e-12, rtol=1e-9)


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -3.0]])
    config = SamplingConfig(temperature=0.7, seed=11)
    n = 6000
    ids = choose(logits.expand(n, -1), np.arange(n), config)
    expected = target_probs(logits, config)[0].numpy() * n
    assert chisquare(np.bincount(ids, minlength=6), expected).pvalue > 1e-3


def test_filtered_tokens_are_never_drawn():
    logits = torch.tensor([[5.0, 4.9, -20.0, 4.8, -20.0]])
    ids = choose(logits.expand(2000, -1), np.arange(2000), SamplingConfig(temperature=1.0, top_k=3, seed=2))
    assert set(ids.tolist()) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_an_error(bad, temperature):
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]])
    with pytest.raises(FloatingPointError, match="not finite"):
        choose(logits, np.arange(2), SamplingConfig(temperature=temperature))


def test_draws_depend_on_seed_and_position_only():
    np.testing.assert_array_equal(uniforms(7, [3, 1, 2]), uniforms(7, [1, 2, 3])[[2, 0, 1]])
    assert len(np.unique(np.concatenate([uniforms(s, range(50)) for s in range(5)]))) == 250


def test_greedy_takes_the_lowest_id_on_ties():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert choose(logits, np.array([0, 1]), SamplingConfig()).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -2}, "top_k=-2"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"stop_strings": ("",)}, "stop_strings"),
        ({"stop_strings": "stop"}, "stop_strings"),
        ({"stop_strings": None}, "stop_strings"),
        ({"stop_ids": 5}, "stop_ids=5"),
        ({"stop_ids": ("2",)}, "stop_ids"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"temperature": "1"}, "temperature='1'"),
    ],
)
def test_bad_values_are_named(kwargs, named):
    with pytest.raises(ValueError, match=named):
        SamplingConfig(**kwargs)
