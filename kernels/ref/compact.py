"""KV rows of accepted paths moved together, row by row: the truth for `kernels.compact`."""

from __future__ import annotations

import torch

from kernels.tensor_checks import require_device, require_int64


def check_paths(
    kv: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Refuses what no implementation takes; looks at no value.

    Raises:
        ValueError: another shape or type than `compact` documents.
    """
    if kv.ndim != 6 or kv.shape[1] != 2 or kv.stride(5) != 1 or kv.stride(4) != kv.shape[5]:
        raise ValueError(
            f"kv {list(kv.shape)} with strides {kv.stride()}, allowed [layers, 2, slots, rows, Hk, D] with each row "
            "(Hk, D) in one piece"
        )
    if path.ndim != 2 or path.dtype != torch.int64 or not path.is_contiguous():
        raise ValueError(f"path {list(path.shape)} {path.dtype}, allowed [R, P] int64, contiguous")
    require_int64(len(path), slots=slots, context_len=context_len, num_accepted=num_accepted)
    require_device(kv.device, slots=slots, context_len=context_len, path=path, num_accepted=num_accepted)


def compact(
    kv: torch.Tensor, slots: torch.Tensor, context_len: torch.Tensor, path: torch.Tensor, num_accepted: torch.Tensor
) -> None:
    """Moves cache row context + path[i] to context + i, for every accepted i, key and value, in all layers.

    Args:
        kv: [layers, 2, slots, rows, Hk, D] of any type, changed in place.
        slots, context_len: [R] int64, different slots.
        path: [R, P] int64, increasing, so path[i] >= i and no source is overwritten before it is read.
        num_accepted: [R] int64; path[: num_accepted + 1] is used. Entries below their place, such as -1, are skipped.

    Raises:
        ValueError: see `check_paths`.
    """
    check_paths(kv, slots, context_len, path, num_accepted)
    for r in range(len(path)):
        slot, start = int(slots[r]), int(context_len[r])
        for i, row in enumerate(path[r, : int(num_accepted[r]) + 1].tolist()):
            if row > i:
                kv[:, :, slot, start + i] = kv[:, :, slot, start + row]
