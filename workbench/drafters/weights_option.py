"""The `path` option that drafters with weights share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from workbench.drafters.checkpoint_files import as_path
from workbench.models.target import Target
from workbench.paths import data_dir


def weights_folder(target: Target, path: str | Path | None, method: str) -> Path:
    """The folder meant by an option.

    Args:
        target: whose drafter is wanted.
        path: the folder; None takes the shipped weights of the embedded target.
        method: as its authors write it; its folder bears the name in lower case.

    Raises:
        ValueError: `path` is no path, or unset and no weights are shipped for the target.
    """
    if path is not None:
        return as_path("path", path)
    if target.name != "embedded":
        raise ValueError(f"path is unset and no {method} weights are shipped for target {target.name!r}; name a folder")
    return data_dir() / "embedded" / method.lower()


def require_fit(folder: Path, sizes: Iterable[tuple[str, int, int]]) -> None:
    """Makes sure that weights were made for the target.

    Args:
        folder: where they are from.
        sizes: (name, the network's, the target's).

    Raises:
        ValueError: two sizes differ.
    """
    for name, found, needed in sizes:
        if found != needed:
            raise ValueError(f"{folder}: {name}={found}, but the target has {needed}")
