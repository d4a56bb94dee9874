"""Losses through an output head in chunks, against plain autograd over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from workbench.train.losses import cross_entropy, cross_entropy_chunk, distill, position_weights


def inputs(num_rows: int = 29, width: int = 6, vocab: int = 11):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(num_rows, width, generator=generator, requires_grad=True)
    head = torch.randn(vocab, width, generator=generator, requires_grad=True)
    weight = torch.rand(num_rows, generator=generator)
    weight[3] = 0.0
    return states, head, weight, generator


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    (2 * loss).backward()
    found = [tensor.grad.clone() for tensor in of]
    for tensor in of:
        tensor.grad = None
    return found


def test_fused_distillation_equals_plain_autograd():
    states, head, weight, generator = inputs()
    teacher = torch.randn(17, 11, generator=generator) * 2
    index, scale = torch.randint(17, (29,), generator=generator), torch.rand(29, generator=generator) + 0.5
    loss, kl, agree = distill(states, head, teacher, index, scale, weight, chunk_rows=8)
    fused = gradients(loss, states, head)
    log_drafted = (states @ head.T).log_softmax(-1)
    log_wanted = (teacher[index] * scale[:, None]).log_softmax(-1)
    plain_kl = functional.kl_div(log_drafted, log_wanted, log_target=True, reduction="none").sum(-1)
    plain = (weight * plain_kl).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kl, plain_kl, rtol=1e-5, atol=1e-5)
    assert torch.equal(agree, log_drafted.argmax(-1) == log_wanted.argmax(-1))
    torch.testing.assert_close(fused, gradients(plain, states, head), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 8, 28, 29, 1000])
@pytest.mark.parametrize("frozen", [True, False])
def test_fused_cross_entropy_equals_plain_autograd(chunk_rows, frozen):
    states, head, weight, generator = inputs()
    labels = torch.randint(11, (29,), generator=generator)
    trained = [states] if frozen else [states, head]
    given = head.detach() if frozen else head
    loss, ce, agree = cross_entropy(states, given, labels, weight, chunk_rows)
    fused = gradients(loss, *trained)
    assert frozen == (head.grad is None and given.grad is None and not given.requires_grad)
    logits = states @ head.T
    plain_ce = functional.cross_entropy(logits, labels, reduction="none")
    plain = (weight * plain_ce).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ce, plain_ce, rtol=1e-5, atol=1e-5)
    assert torch.equal(agree, logits.argmax(-1) == labels) and not ce.requires_grad
    torch.testing.assert_close(fused, gradients(plain, *trained), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_over_a_whole_vocabulary_equals_that_of_torch(dtype):
    """The vocabulary of Qwen3, with labels at both of its ends: sums over so many ids are where precision is lost."""
    num_rows, vocab = 7, 151_936
    states, head, weight, generator = inputs(num_rows, 8, vocab)
    states, head = (tensor.detach().to(dtype).requires_grad_() for tensor in (states, head))
    labels = torch.randint(vocab, (num_rows,), generator=generator)
    labels[:2] = torch.tensor([0, vocab - 1])
    with torch.no_grad():
        labels[2] = (states[2] @ head.T).argmax()
    loss, ce, agree = cross_entropy(states, head, labels, weight, chunk_rows=3)
    fused = gradients(loss, states, head)
    logits = (states @ head.T).float()  # rounded to the type of the head first, as both sides see them
    plain_ce = functional.cross_entropy(logits, labels, reduction="none")
    plain = (weight * plain_ce).sum()
    torch.testing.assert_close(ce, plain_ce, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-5)
    assert torch.equal(agree, logits.argmax(-1) == labels) and agree[2]
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(fused, gradients(plain, states, head), **tolerance)


def test_only_one_chunk_of_logits_exists_at_a_time_and_chunks_are_equal():
    states, head, weight, generator = inputs(num_rows=24)
    labels = torch.randint(11, (24,), generator=generator)
    seen = []

    def spy(logits, *others):
        seen.append(len(logits))
        return cross_entropy_chunk(logits, *others)

    cross_entropy(states, head.detach(), labels, weight, chunk_rows=10, chunk=spy)
    assert seen == [8, 8, 8]  # not 10, 10, 4: a compiled chunk then sees one shape


def test_no_rows_give_no_loss():
    states = torch.zeros(0, 6, requires_grad=True)
    loss, ce, _ = cross_entropy(states, torch.ones(11, 6), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    loss.backward()
    assert float(loss.detach()) == 0.0 and ce.shape == (0,) and states.grad.shape == (0, 6)


def test_gradient_of_a_certain_label_survives_half_precision():
    """1 - p is far below the resolution of p near 1, so it must be formed before rounding."""
    logits = torch.tensor([[8.0, 0.0, 0.0]])
    _, _, exact = cross_entropy_chunk(logits, torch.tensor([0]), torch.ones(1))
    _, _, rounded = cross_entropy_chunk(logits.bfloat16(), torch.tensor([0]), torch.ones(1))
    assert rounded.dtype == torch.bfloat16 and float(exact[0, 0]) < 0
    torch.testing.assert_close(rounded.float(), exact, rtol=1e-2, atol=0)


def test_position_weights():
    torch.testing.assert_close(position_weights(8, 0.6).sum(), torch.tensor(2.458), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match="gamma=0"):
        position_weights(8, 0.0)
