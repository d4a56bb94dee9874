"""The kernels by name, each with the plain implementation that it must equal: same arguments, same results.

All of them launch from static shapes alone and read nothing on the host, so any call can be captured in a CUDA graph
(after one call outside, which compiles) and replayed over other contents. They are plain functions: they run between
matrix products and compiled models, and nothing traces through them.
"""

from __future__ import annotations

from collections.abc import Callable

from kernels.accept import accept
from kernels.add_norm import add_norm
from kernels.allocate import allocate
from kernels.choose import choose
from kernels.compact import compact
from kernels.features import features
from kernels.matvec import matvec, matvec_silu
from kernels.pack import pack
from kernels.pack_trees import pack_trees
from kernels.prune import prune
from kernels.ref.accept import accept as accept_reference
from kernels.ref.add_norm import add_norm as add_norm_reference
from kernels.ref.allocate import allocate as allocate_reference
from kernels.ref.choose import choose as choose_reference
from kernels.ref.compact import compact as compact_reference
from kernels.ref.features import features as features_reference
from kernels.ref.matvec import matvec as matvec_reference
from kernels.ref.matvec import matvec_silu as matvec_silu_reference
from kernels.ref.pack import pack as pack_reference
from kernels.ref.pack_trees import pack_trees as pack_trees_reference
from kernels.ref.prune import prune as prune_reference
from kernels.ref.rms_norm import rms_norm as rms_norm_reference
from kernels.ref.rotate_attend import rotate_attend as rotate_attend_reference
from kernels.ref.rotate_write import rotate_write as rotate_write_reference
from kernels.ref.silu_mul import silu_mul as silu_mul_reference
from kernels.rms_norm import rms_norm
from kernels.rotate_attend import rotate_attend
from kernels.rotate_write import rotate_write
from kernels.silu_mul import silu_mul
from kernels.tile_attention import attend_rows, attend_rows_plainly

#: Name -> (kernel, reference), in the order of a round.
KERNELS: dict[str, tuple[Callable, Callable]] = {
    "prune": (prune, prune_reference),
    "features": (features, features_reference),
    "allocate": (allocate, allocate_reference),
    "pack": (pack, pack_reference),
    "pack_trees": (pack_trees, pack_trees_reference),
    "rms_norm": (rms_norm, rms_norm_reference),
    "rotate_write": (rotate_write, rotate_write_reference),
    "rotate_attend": (rotate_attend, rotate_attend_reference),
    "attend_rows": (attend_rows, attend_rows_plainly),
    "add_norm": (add_norm, add_norm_reference),
    "silu_mul": (silu_mul, silu_mul_reference),
    "choose": (choose, choose_reference),
    "accept": (accept, accept_reference),
    "compact": (compact, compact_reference),
    "matvec": (matvec, matvec_reference),
    "matvec_silu": (matvec_silu, matvec_silu_reference),
}
