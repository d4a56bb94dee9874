"""The target's token after each row, greedy or sampled, in float64: the truth for `kernels.choose`."""

from __future__ import annotations

import torch

from kernels.tensor_checks import require_device, require_int64, require_rows

#: Temperatures below this are greedy.
GREEDY_TEMPERATURE = 1e-5
#: What a row gets whose logits are not finite; no drafted token equals it.
BROKEN = -1

_BITS = 64
_MASK = 2**_BITS - 1


def check_rows(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slot_of_row: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape or type than `choose` documents.
    """
    if logits.ndim != 2 or not 1 <= logits.shape[1] < 2**31:
        raise ValueError(f"logits {list(logits.shape)}, allowed [M, V] with V from 1 to 2^31 - 1")
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"logits are {logits.dtype}, allowed: float32, float16, bfloat16")
    if temperature.dtype != torch.float64 or temperature.shape != seed.shape or not temperature.is_contiguous():
        raise ValueError(
            f"temperature is {temperature.dtype} {list(temperature.shape)}; expected contiguous float64 "
            f"{list(seed.shape)}, as many as seeds"
        )
    require_rows(logits=logits)
    require_int64(len(logits), positions=positions, slot_of_row=slot_of_row)
    require_int64(seed.numel(), seed=seed)
    require_device(logits.device, positions=positions, slot_of_row=slot_of_row, temperature=temperature, seed=seed)


def choose(
    logits: torch.Tensor,
    positions: torch.Tensor,
    slot_of_row: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
) -> torch.Tensor:
    """The largest logit, or the token at which the cumulative distribution passes the uniform number of the position.

    The uniform number is the first double of numpy's generator Philox(key=seed, counter=position + 1), so a draw
    depends on nothing but the seed of the request and the position of the token. The distribution is that of all
    tokens at the temperature; the filters top_k and top_p, and rejection sampling, have no place here.

    Args:
        logits: [M, V] float32, float16 or bfloat16; rows may lie apart.
        positions: [M] int64, position of each row; its token gets the next one.
        slot_of_row: [M] int64, entry of the request in the next two.
        temperature: [slots] float64; below 1e-5 the largest logit is taken, the lowest id on ties.
        seed: [slots] int64, at least 0.

    Returns:
        [M] int64; -1 for a row with NaN or whose largest logit is infinite.

    Raises:
        ValueError: see `check_rows`.
    """
    check_rows(logits, positions, slot_of_row, temperature, seed)
    chosen = torch.full((len(logits),), BROKEN, dtype=torch.int64, device=logits.device)
    for row in range(len(logits)):
        scores = logits[row].double()
        if not bool(scores.max().isfinite()):  # the maximum of a row with NaN is NaN
            continue
        slot = int(slot_of_row[row])
        heat = float(temperature[slot])
        if heat < GREEDY_TEMPERATURE:
            chosen[row] = (scores == scores.max()).nonzero()[0, 0]
            continue
        cumulative = (scores / heat).softmax(-1).cumsum(-1)
        draw = uniform(int(seed[slot]), int(positions[row]) + 1) * cumulative[-1:]
        chosen[row] = torch.searchsorted(cumulative, draw, right=True).clamp(max=len(scores) - 1)[0]
    return chosen


def uniform(seed: int, position: int) -> float:
    """The first double in [0, 1) of numpy's Philox4x64-10 with this key and counter.

    Philox is the generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); numpy raises the
    counter once before its first block and keeps the upper 53 bits of a word.
    """
    words, keys = [(position + 1) & _MASK, 0, 0, 0], [seed, 0]
    for _ in range(10):
        even, odd = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [(odd >> _BITS) ^ words[1] ^ keys[0], odd & _MASK, (even >> _BITS) ^ words[3] ^ keys[1], even & _MASK]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & _MASK, (keys[1] + 0xBB67AE8584CAA73B) & _MASK]
    return (words[0] >> 11) * 2.0**-53
