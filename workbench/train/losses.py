"""Distillation of a target's distribution into a draft head, without ever holding all logits.

    loss = sum over rows of weight * KL(softmax(teacher * scale) || softmax(states @ head.T))

Logits of a block of rows are made, turned into the loss and its gradient, and dropped; so 65,536 rows of 8,192 draft
ids need the memory of one block. The gradient with respect to logits is weight * (softmax(student) - softmax(teacher)).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: (student [n, V_d], teacher [N, V_d], index [n], scale [n], weight [n]) -> (kl [n], agree [n], gradient [n, V_d])
ChunkFunction = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def position_weights(depth: int, gamma: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """[d] fp32, gamma^t for t = 0..d-1: how much each draft position counts.

    Raises:
        ValueError: gamma outside 0..1 (0 excluded).
    """
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma={gamma} outside 0..1 (0 excluded)")
    return gamma ** torch.arange(depth, device=device, dtype=torch.float32)


def distill_chunk(
    student: torch.Tensor, teacher: torch.Tensor, index: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divergence of a block of rows and its gradient.

    Args:
        student: [n, V_d] draft logits.
        teacher: [N, V_d] target logits of the draft vocabulary.
        index: [n] int64, teacher row of each student row.
        scale: [n] fp32, inverse temperature of the teacher.
        weight: [n] fp32.

    Returns:
        (kl [n] fp32, agree [n] bool: both prefer the same id, gradient of sum(weight * kl) in the student's dtype).
    """
    wanted = teacher[index].float() * scale[:, None]
    drafted = student.float()
    log_wanted = wanted.log_softmax(-1)
    log_drafted = drafted.log_softmax(-1)
    share = log_wanted.exp()
    kl = (share * (log_wanted - log_drafted)).sum(-1)
    agree = wanted.argmax(-1) == drafted.argmax(-1)
    gradient = weight[:, None] * (log_drafted.exp() - share)
    return kl, agree, gradient.to(student.dtype)


class _Distill(torch.autograd.Function):
    """Computes the gradients of states and head in the forward pass, block by block."""

    @staticmethod
    def forward(ctx, states, head, teacher, index, scale, weight, chunk_rows, chunk):
        work = teacher.dtype
        head_work = head.detach().to(work)
        grad_states = torch.empty_like(states)
        grad_head = torch.zeros(head.shape, device=head.device, dtype=torch.float32)
        kls, agreements = [], []
        for start in range(0, len(states), chunk_rows):
            part = slice(start, start + chunk_rows)
            inputs = states[part].to(work)
            kl, agree, gradient = chunk(inputs @ head_work.T, teacher, index[part], scale[part], weight[part])
            grad_states[part] = gradient @ head_work
            grad_head += gradient.T @ inputs
            kls.append(kl)
            agreements.append(agree)
        ctx.save_for_backward(grad_states, grad_head)
        ctx.head_dtype = head.dtype
        kl, agree = torch.cat(kls), torch.cat(agreements)
        ctx.mark_non_differentiable(kl, agree)
        return (weight * kl).sum(), kl, agree

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_states, grad_head = ctx.saved_tensors
        return grad_loss * grad_states, (grad_loss * grad_head).to(ctx.head_dtype), *([None] * 6)


def distill(
    states: torch.Tensor,
    head: torch.Tensor,
    teacher: torch.Tensor,
    index: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    chunk_rows: int = 16384,
    chunk: ChunkFunction = distill_chunk,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted divergence of draft rows from their teacher rows.

    Args:
        states: [n, H] inputs of the draft head; gradients flow into them.
        head: [V_d, H] weight of the draft head; gradients flow into it.
        teacher: [N, V_d] target logits, no gradient; matrix products run in its dtype.
        index, scale, weight: as `distill_chunk`, for all n rows.
        chunk_rows: rows whose logits exist at once.
        chunk: `distill_chunk`, or a compiled form of it.

    Returns:
        (loss scalar, kl [n] fp32, agree [n] bool), the last two without gradient.
    """
    return _Distill.apply(states, head, teacher, index, scale, weight, chunk_rows, chunk)
