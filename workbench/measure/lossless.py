"""The losslessness check: does a method emit exactly what autoregressive decoding emits?

In fp32 the answer is token equality. In bf16 and fp16 two correct implementations round differently and may part at a
near-tie; there the first divergence is accepted only if the target itself holds the two tokens to be as good as equal.
Tokens after the first divergence have another context and prove nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workbench.decode.rows import pack_chunks
from workbench.models.target import Target

#: Logit margins up to this many units in the last place of the largest logit count as noise. bf16 has a spacing of
#: 0.125 at logits of 16 to 32; outputs of two correct bf16 implementations were seen to part at margins of 0.05
#: (median) and 0.12 (ninetieth percentile), so four spacings leave room and still catch a real error.
NOISE_ULPS = 4.0


@dataclass(frozen=True)
class Divergence:
    """The first place where an output leaves the reference.

    Attributes:
        position: index in the output.
        reference, output: token ids there; None where one of them had ended.
        margin: largest logit less the smaller logit of the two tokens, in the dtype of the target; NaN when one ended.
        top2_margin: largest logit less the second largest.
        noise: margin up to which rounding may explain the divergence; 0 in fp32.
    """

    position: int
    reference: int | None
    output: int | None
    margin: float
    top2_margin: float
    noise: float

    @property
    def is_noise(self) -> bool:
        """True if rounding of the dtype explains it (never when one output ended: NaN compares false)."""
        return self.margin <= self.noise


def first_divergence(reference: Sequence[int], output: Sequence[int]) -> int | None:
    """Index of the first differing token, the shorter length if one continues the other, None if they are equal."""
    shared = min(len(reference), len(output))
    different = np.flatnonzero(np.asarray(reference[:shared]) != np.asarray(output[:shared]))
    if len(different):
        return int(different[0])
    return None if len(reference) == len(output) else shared


def check_greedy(
    target: Target,
    prompt_ids: Sequence[int],
    reference: Sequence[int],
    output: Sequence[int],
    noise_ulps: float = NOISE_ULPS,
) -> Divergence | None:
    """Compares a greedy output with the autoregressive one.

    Args:
        target: the model both came from; asked for the logits at the divergence, if there is one.
        prompt_ids: token ids of the prompt.
        reference: token ids of autoregressive decoding.
        output: token ids of the method.
        noise_ulps: see `NOISE_ULPS`; ignored in fp32 and fp64, where any divergence is an error.

    Returns:
        None when equal; else the first divergence, whose `is_noise` says whether it is acceptable.
    """
    position = first_divergence(reference, output)
    if position is None:
        return None
    ids = [tokens[position] if position < len(tokens) else None for tokens in (reference, output)]
    logits = next_logits(target, [*prompt_ids, *reference[:position]])
    top = torch.topk(logits, 2).values
    noise = noise_ulps * torch.finfo(target.dtype).eps * top[0].abs().item() if target.dtype.itemsize < 4 else 0.0
    margin = float("nan")
    if None not in ids:
        margin = (top[0] - logits[ids].min()).item()
    return Divergence(position, ids[0], ids[1], margin, (top[0] - top[1]).item(), noise)


def next_logits(target: Target, token_ids: Sequence[int]) -> torch.Tensor:
    """[V] float32 logits of the target after `token_ids`, from one prefill."""
    cache = target.new_cache(1, len(token_ids))
    rows = pack_chunks([np.asarray(token_ids, np.int64)], [0], [0], target.device)
    last = torch.tensor([len(token_ids) - 1], device=target.device)
    return target.forward(rows, cache, logit_rows=last).logits[0].float()
