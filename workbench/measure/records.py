"""Run records: one JSON file a run, from which all tables and figures are made.

A record is `{schema, notebook, status, params, environment, rows, checks}` (and `error` after a failure). Two runs with
the same parameters differ only in measured times and in `environment`. Knows nothing about notebooks or plots.
"""

from __future__ import annotations

import json
import math
import operator
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.measure.environment import describe_environment
from workbench.paths import reports_dir

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
STATUSES = ("ok", "failed", "interrupted")
RECORD = "record.json"
_FIELDS: dict[str, type] = {
    "schema": int,
    "notebook": str,
    "status": str,
    "params": dict,
    "environment": dict,
    "rows": list,
    "checks": dict,
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Check:
    """A measured value with the goal it has to meet.

    Attributes:
        value: what was measured; None or NaN when it could not be.
        goal: what it is compared with; None makes the check informative only (`ok` is None).
        compare: ">=" (more is better), "<=" (less is better) or "==".
    """

    value: float | bool | str | None
    goal: float | bool | str | None
    compare: str = ">="

    def __post_init__(self) -> None:
        if self.compare not in _COMPARE:
            raise ValueError(f"compare={self.compare!r}; allowed: {', '.join(_COMPARE)}")

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; a value that is missing or NaN never meets one."""
        if self.goal is None:
            return None
        if self.value is None or (isinstance(self.value, float) and math.isnan(self.value)):
            return False
        return bool(_COMPARE[self.compare](self.value, self.goal))

    def to_dict(self) -> dict[str, Any]:
        """The form in a record."""
        return {"value": clean(self.value), "goal": clean(self.goal), "compare": self.compare, "ok": self.ok}


def clean(value: Any) -> Any:
    """`value` as plain JSON: numpy scalars and arrays become Python, tuples lists, NaN and infinities null.

    Raises:
        ValueError: a value of another type, or a mapping key that is no string.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.ndarray):
        return clean(value.tolist())
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise ValueError(f"record key {wrong[0]!r} has type {type(wrong[0]).__name__}; allowed: str")
        return {key: clean(item) for key, item in value.items()}
    raise ValueError(f"record value {value!r} has type {type(value).__name__}; allowed: plain values, lists, dicts")


def make_record(
    notebook: str,
    params: Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]] = (),
    checks: Mapping[str, Check] | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """A valid record of a run that went well; `device` is what it ran on ("cpu", "cuda:0")."""
    record = {
        "schema": SCHEMA,
        "notebook": notebook,
        "status": "ok",
        "params": clean(dict(params)),
        "environment": clean(describe_environment(device)),
        "rows": [clean(dict(row)) for row in rows],
        "checks": {name: check.to_dict() for name, check in (checks or {}).items()},
    }
    validate(record)
    return record


def validate(record: Mapping[str, Any]) -> None:
    """Checks that `record` has every field in the right type.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """
    for field, kind in _FIELDS.items():
        if field not in record:
            raise ValueError(f"record field {field!r} is missing; allowed: {', '.join(_FIELDS)}, error")
        if not isinstance(record[field], kind):
            raise ValueError(f"record field {field}={record[field]!r} is no {kind.__name__}")
    unknown = set(record) - set(_FIELDS) - {"error"}
    if unknown:
        raise ValueError(f"record fields {sorted(unknown)} are unknown; allowed: {', '.join(_FIELDS)}, error")
    if record["schema"] != SCHEMA:
        raise ValueError(f"record schema={record['schema']}; allowed: {SCHEMA}")
    if record["status"] not in STATUSES:
        raise ValueError(f"record status={record['status']!r}; allowed: {', '.join(STATUSES)}")
    if not all(isinstance(row, Mapping) for row in record["rows"]):
        raise ValueError("record rows: every row must be a dict")
    for name, check in record["checks"].items():
        if not isinstance(check, Mapping) or not {"value", "goal", "ok"} <= set(check):
            raise ValueError(f"record check {name}={check!r}; allowed: a dict with value, goal, ok")


def new_run_id() -> str:
    """A run id that sorts by time and that no other process draws: `20260131-235959-1a2b3c`."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def run_folder(run_dir: str | Path, notebook: str) -> Path:
    """The folder a notebook writes into: `run_dir` when the runner set it, else a new one below reports/runs."""
    folder = Path(run_dir) if run_dir else reports_dir() / "runs" / notebook / f"{new_run_id()}-interactive"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_record(record: Mapping[str, Any], folder: str | Path) -> Path:
    """Writes `record` as `folder`/record.json in one step (a reader never sees half of it) and returns the path.

    Raises:
        ValueError: the record is not valid, or holds NaN or an infinity.
    """
    validate(record)
    return write_json(record, Path(folder) / RECORD)


def write_json(value: Any, path: Path) -> Path:
    """Writes `value` as indented JSON through a temporary file beside `path`."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".tmp-{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def require(checks: Mapping[str, Check], names: Sequence[str]) -> None:
    """Stops a notebook whose result must not be used.

    Raises:
        ValueError: one of the named checks is not met.
    """
    failed = [
        f"{name}={checks[name].value!r} (goal {checks[name].compare} {checks[name].goal!r})"
        for name in names
        if not checks[name].ok
    ]
    if failed:
        raise ValueError(f"checks not met: {', '.join(failed)}")


def load_record(path: str | Path) -> dict[str, Any]:
    """The record in a file, or in a run folder.

    Raises:
        ValueError: not JSON or not valid; the message names the file.
    """
    file = Path(path)
    file = file / RECORD if file.is_dir() else file
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        validate(record)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None
    return record


def load_records(folder: str | Path, notebook: str | None = None) -> pd.DataFrame:
    """All rows of all good records below `folder`, one line a row.

    Columns: `run` (file or folder name), `notebook`, `param.<name>` of every parameter, then those of the rows. Runs
    that failed and folders that are still being written (their name starts with a dot) are left out.
    """
    import pandas as pd  # half a second to import, and only tables need it

    root = Path(folder)
    lines = []
    for file in sorted(root.rglob("*.json")):
        if any(part.startswith(".") for part in file.relative_to(root).parts) or not _is_record(file):
            continue
        record = load_record(file)
        if record["status"] != "ok" or (notebook is not None and record["notebook"] != notebook):
            continue
        run = file.parent.name if file.name == RECORD else file.stem
        head = {"run": run, "notebook": record["notebook"]}
        head |= {f"param.{name}": value for name, value in record["params"].items()}
        lines += [head | row for row in record["rows"]]
    return pd.DataFrame(lines)


def _is_record(file: Path) -> bool:
    """Run folders hold other JSON too (parameters, figures); committed records stand alone."""
    return file.name == RECORD or (file.name != "params.json" and file.parent.name != "figures")
