"""The kernels by name, each with the plain implementation that it must equal: same arguments, same results.

All of them launch from static shapes alone and read nothing on the host, so any call can be captured in a CUDA graph
(after one call outside, which compiles) and replayed over other contents. Those of the decision and the acceptance are
plain functions: they run between compiled models, and nothing traces through them.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.accept import accept
from kernels.allocate import allocate
from kernels.choose import choose
from kernels.compact import compact
from kernels.features import features
from kernels.pack import pack
from kernels.ref.accept import accept as accept_reference
from kernels.ref.allocate import allocate as allocate_reference
from kernels.ref.choose import choose as choose_reference
from kernels.ref.compact import compact as compact_reference
from kernels.ref.features import features as features_reference
from kernels.ref.pack import pack as pack_reference

#: Name -> (kernel, reference), in the order of a round.
KERNELS: dict[str, tuple[Callable, Callable]] = {
    "features": (features, features_reference),
    "allocate": (allocate, allocate_reference),
    "pack": (pack, pack_reference),
    "choose": (choose, choose_reference),
    "accept": (accept, accept_reference),
    "compact": (compact, compact_reference),
}
