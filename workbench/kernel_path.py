"""Makes the project's `kernels` folder importable beside a foreign package of the same name.

`kernels/` has no `__init__.py`, so it is a namespace package and gives way to a regular package called `kernels` that
happens to be installed, which is what transformers wants when it asks for that package. Our modules are then reached
by extending the foreign package's search path; none of them bears the name of one of its modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch

from workbench.paths import repo_root


def add_own_kernels() -> None:
    """Appends our folder to `kernels.__path__` unless it is there. Call it before importing `kernels.<module>`."""
    package = importlib.import_module("kernels")
    own = str(repo_root() / "kernels")
    if own not in package.__path__:
        package.__path__.append(own)


def kernel(name: str, device: torch.device) -> Callable:
    """A kernel of `kernels.table`: the fast one on a CUDA device, its plain reference elsewhere.

    Raises:
        KeyError: no kernel of that name.
    """
    return _kernels(device.type == "cuda")[name]


@cache
def _kernels(fast: bool) -> dict[str, Callable]:
    """All of one kind; looked up hundreds of times in a round that is launched kernel by kernel."""
    add_own_kernels()
    from kernels.table import KERNELS  # after the path is known

    return {name: pair[0 if fast else 1] for name, pair in KERNELS.items()}


def register_operators() -> None:
    """Makes our operators known to torch, as `torch.ops.workbench`; calling it again changes nothing."""
    add_own_kernels()
    importlib.import_module("kernels.cached_attention")  # and those it calls
