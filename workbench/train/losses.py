"""Losses over a vocabulary without ever holding all logits: distillation into a draft head, and cross-entropy.

    distillation:  sum over rows of weight * KL(softmax(teacher * scale) || softmax(states @ head.T))
    cross-entropy: sum over rows of weight * -log softmax(states @ head.T)[label]

Logits of a chunk of rows are made, turned into the loss and its gradient, and dropped; so 65,536 rows of 8,192 draft
ids, or 32,768 rows of a target's 151,936 ids, need the memory of one chunk. The gradient with respect to logits is
weight * (softmax(student) - wanted), where `wanted` is the teacher's law or the label alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: What a chunk gives: (loss [n], agree [n], gradient [n, V]).
Chunk = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: (logits [n, V], tensors of the loss, see `distill_chunk` and `cross_entropy_chunk`) -> Chunk
ChunkFunction = Callable[..., Chunk]


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
) -> Chunk:
    """Divergence of a chunk of rows and its gradient.

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


def cross_entropy_chunk(student: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> Chunk:
    """Cross-entropy of a chunk of rows and its gradient.

    Args:
        student: [n, V] draft logits.
        labels: [n] int64 in 0..V-1.
        weight: [n] fp32.

    Returns:
        (ce [n] fp32, agree [n] bool: the label is preferred, gradient of sum(weight * ce) in the student's dtype).
    """
    # Written so that a compiler passes over the logits for the total and once more for the gradient, and keeps no copy.
    drafted = student.float()
    log_total = drafted.logsumexp(-1)
    ce = log_total - student.gather(1, labels[:, None]).squeeze(1).float()
    agree = student.argmax(-1) == labels
    # Subtracted before rounding: near a certain label the difference is far below the resolution of either side.
    wanted = torch.arange(student.shape[1], device=student.device) == labels[:, None]
    gradient = weight[:, None] * ((drafted - log_total[:, None]).exp() - wanted.float())
    return ce, agree, gradient.to(student.dtype)


class _ThroughHead(torch.autograd.Function):
    """Computes the gradients of states and, if it wants one, of the head in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx, states, head, weight, dtype, chunk_rows, chunk):
        head_work = head.detach().to(dtype)
        grad_states = torch.empty_like(states)
        grad_head = torch.zeros(head.shape, device=head.device) if ctx.needs_input_grad[1] else None
        losses, agreements = [], []
        # Equal chunks: a compiled function sees one shape, or two where the rows do not divide.
        num_rows = max(1, len(states))
        chunk_rows = -(-num_rows // -(-num_rows // chunk_rows))
        for start in range(0, num_rows, chunk_rows):
            part = slice(start, start + chunk_rows)
            inputs = states[part].to(dtype)
            loss, agree, gradient = chunk(inputs @ head_work.T, part)
            grad_states[part] = gradient @ head_work
            if grad_head is not None:
                grad_head += gradient.T @ inputs
            losses.append(loss)
            agreements.append(agree)
        ctx.save_for_backward(grad_states, grad_head)
        ctx.head_dtype = head.dtype
        loss, agree = torch.cat(losses), torch.cat(agreements)
        ctx.mark_non_differentiable(loss, agree)
        return (weight * loss).sum(), loss, agree

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_states, grad_head = ctx.saved_tensors
        grad_head = None if grad_head is None else (grad_loss * grad_head).to(ctx.head_dtype)
        return grad_loss * grad_states, grad_head, None, None, None, None


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
        chunk_rows: most rows whose logits exist at once.
        chunk: `distill_chunk`, or a compiled form of it.

    Returns:
        (loss scalar, kl [n] fp32, agree [n] bool), the last two without gradient.
    """

    def part_of(logits: torch.Tensor, part: slice) -> Chunk:
        return chunk(logits, teacher, index[part], scale[part], weight[part])

    return _ThroughHead.apply(states, head, weight, teacher.dtype, chunk_rows, part_of)


def cross_entropy(
    states: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor,
    chunk_rows: int = 8192,
    chunk: ChunkFunction = cross_entropy_chunk,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of draft rows under an output head.

    Args:
        states: [n, H] inputs of the head; gradients flow into them.
        head: [V, H] weight of the head; matrix products run in its dtype. Gradients flow into it only if it asks for
            them, so a frozen one costs none.
        labels, weight: as `cross_entropy_chunk`, for all n rows.
        chunk_rows: most rows whose logits exist at once.
        chunk: `cross_entropy_chunk`, or a compiled form of it.

    Returns:
        (loss scalar, ce [n] fp32, agree [n] bool), the last two without gradient.
    """

    def part_of(logits: torch.Tensor, part: slice) -> Chunk:
        return chunk(logits, labels[part], weight[part])

    return _ThroughHead.apply(states, head, weight, head.dtype, chunk_rows, part_of)
