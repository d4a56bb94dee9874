"""Makes the project's `kernels` folder importable beside a foreign package of the same name.

`kernels/` has no `__init__.py`, so it is a namespace package and gives way to a regular package called `kernels` that
happens to be installed, which is what transformers wants when it asks for that package. Our modules are then reached
by extending the foreign package's search path; none of them bears the name of one of its modules.
"""

from __future__ import annotations

import importlib

from workbench.paths import repo_root


def add_own_kernels() -> None:
    """Appends our folder to `kernels.__path__` unless it is there. Call it before importing `kernels.<module>`."""
    package = importlib.import_module("kernels")
    own = str(repo_root() / "kernels")
    if own not in package.__path__:
        package.__path__.append(own)
