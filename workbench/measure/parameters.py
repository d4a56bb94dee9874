"""Parameters of a notebook: what its parameters cell declares, and strict checking of values for it.

A parameters cell holds annotated literals only, one a line, with a trailing comment as help:
`num_nodes: int = 16  # nodes of a draft tree`. Allowed annotations are int, float, bool, str, list and list[...] of
those. Reads notebooks as JSON; runs nothing.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SCALARS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
TYPES = (*SCALARS, "list", *(f"list[{name}]" for name in SCALARS))

#: Set by the runner, never by the user.
RUN_DIR = "run_dir"


class NumberLoader(yaml.SafeLoader):
    """Safe YAML in which `1e-3` is a number, as everywhere else (YAML 1.1 reads it as text)."""


NumberLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell: name, annotation (one of TYPES), default value and help text."""

    name: str
    type: str
    default: Any
    help: str


def read_parameters(notebook: str | Path) -> dict[str, Parameter]:
    """Parameters declared by `notebook` in order; empty when it has no cell tagged `parameters`.

    Raises:
        ValueError: not a notebook, more than one parameters cell, or a line that is no annotated literal.
    """
    path = Path(notebook)
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"notebook={str(path)!r} is not a notebook in format 4: {error}") from None
    tagged = [cell for cell in cells if "parameters" in cell.get("metadata", {}).get("tags", [])]
    if len(tagged) > 1:
        raise ValueError(f"notebook={str(path)!r} has {len(tagged)} cells tagged 'parameters'; allowed: 1")
    return parse_cell("".join(tagged[0]["source"])) if tagged else {}


def parse_cell(source: str) -> dict[str, Parameter]:
    """Parameters of the source text of a parameters cell.

    Raises:
        ValueError: a statement is not `name: type = literal`, or the default does not fit its type.
    """
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"parameters cell, line {error.lineno}: {error.msg}") from None
    lines = source.splitlines()
    found: dict[str, Parameter] = {}
    for node in statements:
        where = f"parameters cell, line {node.lineno}"
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            raise ValueError(f"{where}: only `name: type = literal` is allowed")
        kind = ast.unparse(node.annotation)
        if kind not in TYPES:
            raise ValueError(f"{where}: type {kind!r} is unknown; allowed: {', '.join(TYPES)}")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise ValueError(f"{where}: the default of {node.target.id!r} is not a literal") from None
        rest = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].decode()
        text = rest.strip().lstrip("#").strip()
        found[node.target.id] = Parameter(node.target.id, kind, coerce(node.target.id, kind, default), text)
    return found


def coerce(name: str, kind: str, value: Any) -> Any:
    """`value` as annotation `kind`; the only conversion is a whole number given for a float.

    Raises:
        ValueError: naming the field, the value and the allowed type.
    """
    if kind.startswith("list"):
        if not isinstance(value, list):
            raise ValueError(f"{name}={value!r} has type {type(value).__name__}; allowed: {kind}")
        inner = kind[5:-1]
        return [coerce(f"{name}[{i}]", inner, item) for i, item in enumerate(value)] if inner else list(value)
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = SCALARS[kind]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ValueError(f"{name}={value!r} has type {type(value).__name__}; allowed: {kind}")
    if kind == "float" and not math.isfinite(value):
        raise ValueError(f"{name}={value!r} is not finite; allowed: {kind}")
    return value


def _parse_bracketed(name: str, kind: str, text: str) -> list:
    """A list in YAML's flow style; the annotation decides what an item means, not its look."""
    inner = kind[5:-1]
    try:
        items = yaml.load(text, Loader=yaml.BaseLoader if inner else yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}={text!r} is no {kind}; allowed: [a, b] or a,b") from error
    if not inner:
        return coerce(name, kind, items)
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{name}={text!r} is no {kind}; allowed: [a, b] or a,b")
    return [parse_text(f"{name}[{i}]", inner, item) for i, item in enumerate(items)]


def parse_text(name: str, kind: str, text: str) -> Any:
    """The value that command-line text means for annotation `kind`; a list is `a,b` or `[a, b]`.

    Raises:
        ValueError: naming the field, the text and the allowed type.
    """
    if kind == "str":
        return text
    if kind.startswith("list"):
        inner = kind[5:-1]
        if text.strip().startswith("["):
            return _parse_bracketed(name, kind, text)
        items = [item.strip().strip("'\"") for item in text.split(",") if item.strip()]
        return [parse_text(f"{name}[{i}]", inner or "any", item) for i, item in enumerate(items)]
    if kind == "any":
        return yaml.safe_load(text)
    word = text.strip()
    if kind == "bool":
        if word.lower() not in ("true", "false"):
            raise ValueError(f"{name}={text!r} is no bool; allowed: true, false")
        return word.lower() == "true"
    try:
        return coerce(name, kind, SCALARS[kind](word))
    except ValueError:
        raise ValueError(f"{name}={text!r} is no {kind}; allowed: {kind}") from None


def check_names(given: Mapping[str, Any] | Sequence[str], declared: Mapping[str, Parameter], source: str) -> None:
    """Rejects names that the notebook does not declare, and the one that only the runner sets.

    Raises:
        ValueError: naming `source`, the unknown names, the closest match and all allowed names.
    """
    allowed = [name for name in declared if name != RUN_DIR]
    problems = []
    for name in given:
        if name == RUN_DIR:
            problems.append(f"{RUN_DIR!r} is set by the runner (choose the folder with --out)")
        elif name not in declared:
            close = difflib.get_close_matches(name, allowed, n=1)
            problems.append(f"unknown parameter {name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
    if problems:
        raise ValueError(f"{source}: {'; '.join(problems)}; allowed: {', '.join(allowed) or 'none'}")


def read_yaml(path: str | Path, declared: Mapping[str, Parameter]) -> dict[str, Any]:
    """Parameter values of a YAML file, names and types checked against `declared`.

    Raises:
        ValueError: unreadable, not a mapping, unknown names or wrong types; the message names the file.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=NumberLoader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ValueError(f"{path}: holds {type(values).__name__}; allowed: a mapping of parameter names to values")
    check_names(values, declared, str(path))
    try:
        return {name: coerce(name, declared[name].type, value) for name, value in values.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_options(pairs: Sequence[Sequence[str]], declared: Mapping[str, Parameter]) -> dict[str, Any]:
    """Parameter values of `-p name value` pairs; a later pair wins.

    Raises:
        ValueError: unknown name, or text that does not fit the type.
    """
    check_names([name for name, _ in pairs], declared, "-p")
    return {name: parse_text(name, declared[name].type, text) for name, text in pairs}


def collect(notebook: str | Path, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Values that the parameters of `notebook` have in `namespace` (a notebook's `globals()`), without `run_dir`."""
    return {name: namespace[name] for name in read_parameters(notebook) if name != RUN_DIR and name in namespace}
