"""Where files live. Nothing else in the project builds a path from `__file__` or from a home folder."""

from __future__ import annotations

import os
from pathlib import Path


def repo_root() -> Path:
    """The folder that holds `workbench/`: the checkout, or site-packages for a wheel."""
    return Path(__file__).resolve().parent.parent


def in_checkout() -> bool:
    """True when running from a source checkout (editable install or plain clone)."""
    return (repo_root() / "pyproject.toml").is_file()


def cache_dir() -> Path:
    """Folder of converted models and compiled caches; `WORKBENCH_CACHE` overrides it. Not created here."""
    override = os.environ.get("WORKBENCH_CACHE")
    if override:
        return Path(override).expanduser().resolve()
    if in_checkout():
        return repo_root() / ".cache" / "workbench"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftbench"


def data_dir() -> Path:
    """Shipped data: prompt sets and embedded drafters."""
    return repo_root() / "data"


def external_data_dir() -> Path | None:
    """The user's folder of extra prompt sets and training shards, from `WORKBENCH_DATA`; None when unset.

    Raises:
        ValueError: the variable names something that is no folder.
    """
    value = os.environ.get("WORKBENCH_DATA")
    if not value:
        return None
    path = Path(value).expanduser().resolve()
    if not path.is_dir():
        raise ValueError(f"WORKBENCH_DATA={value!r} is not a folder; unset it or name an existing one")
    return path


def reports_dir() -> Path:
    """Folder of run records; `runs/` below it is ignored by git, `reference/` is committed."""
    return repo_root() / "reports" if in_checkout() else Path.cwd() / "reports"


def notebooks_dir() -> Path:
    """Folder of the parameterised notebooks."""
    return repo_root() / "notebooks"
