"""Launches that begin while the kernel before them ends: programmatic dependent launch, from compute capability 9.0 on.

A kernel so launched may start once all programs of the kernel before it have ended, or said that it may (ours never say
so), which hides the time of its own launch; it must wait before it touches memory. Every program waits, those with
nothing to do too: the kernel behind counts on it that what this one waited for is done when this one is.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """To be called before the first access to memory of a kernel launched with `overlap_options`."""
    if OVERLAP:
        gdc_wait()


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch on that device: `OVERLAP` for the kernel, and the attribute of the launch."""
    able = device.type == "cuda" and torch.version.hip is None and _capability(device) >= (9, 0)
    return {"OVERLAP": able, "launch_pdl": able}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
