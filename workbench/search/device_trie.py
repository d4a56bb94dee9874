"""The arrays of an n-gram trie on a device, as the search kernel reads them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from workbench.kernel_path import add_own_kernels
from workbench.search.trie import NgramTrie

if TYPE_CHECKING:
    from kernels.ref.ngrams import DeviceTrie


def device_trie(trie: NgramTrie, device: torch.device | str) -> DeviceTrie:
    """Copies every array of the trie to the device, a memory-mapped one straight from its file.

    Args:
        trie: stays as it is; of any order.
        device: takes as many bytes as the trie has, see `NgramTrie.info`.
    """
    add_own_kernels()
    from kernels.ref.ngrams import DeviceTrie

    *arrays, num_roots, max_context, code_counts = trie.arrays()
    return DeviceTrie(*(_upload(array, device) for array in (*arrays, code_counts)), num_roots, max_context)


def _upload(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A copy; unsigned integers come as the signed ones of the same width, which torch knows all operations of."""
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.view(f"i{array.dtype.itemsize}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        return torch.from_numpy(array).to(device, copy=True)
