"""Grids of settings: one call a point, resumable, rows that carry their settings.

Handed the function it repeats; knows nothing about what is measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from workbench.measure.records import clean

Rows = Iterable[Mapping[str, Any]]


def grid_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values, the last name varying fastest.

    Raises:
        ValueError: a name without values, or with text instead of a list.
    """
    for name, values in grid.items():
        if isinstance(values, str) or not len(values):
            raise ValueError(f"grid {name}={values!r}: need a list with at least one value")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def sweep(
    measure: Callable[..., Rows],
    points: Sequence[Mapping[str, Any]],
    store: str | Path | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Calls `measure(**point)` for every point and returns all its rows, each with the settings of its point.

    Args:
        measure: returns the rows of one point.
        points: settings, for example from `grid_points`.
        store: JSON-lines file of finished points; those found in it are not measured again, so an interrupted sweep
            goes on where it stopped. None keeps nothing.
        progress: show a bar over the points.
    """
    finished = _read_store(Path(store)) if store is not None else {}
    rows: list[dict[str, Any]] = []
    for point in tqdm(points, desc="sweep", unit="point", disable=not progress):
        key = _key(point)
        if key not in finished:
            finished[key] = [clean({**point, **row}) for row in measure(**point)]
            if store is not None:
                with Path(store).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"point": clean(dict(point)), "rows": finished[key]}) + "\n")
        rows += finished[key]
    return rows


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(clean(dict(point)), sort_keys=True)


def _read_store(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Finished points; a last line that was cut off in writing is dropped from the file, so that appending is safe.

    Raises:
        ValueError: another line is not of this form.
    """
    if not path.is_file():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[-1]:
        lines[-1] = ""
        path.write_text("\n".join(lines), encoding="utf-8")
    finished = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            entry = json.loads(line)
            finished[_key(entry["point"])] = entry["rows"]
        except (json.JSONDecodeError, KeyError, TypeError):
            raise ValueError(f"{path}, line {number}: not a finished point of a sweep") from None
    return finished
