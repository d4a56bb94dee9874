"""Rules about the source tree that no linter knows."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workbench.paths import repo_root

ROOT = repo_root()
PACKAGES = ("workbench", "kernels")
CODE = sorted(path for top in (*PACKAGES, "tests") for path in (ROOT / top).rglob("*.py"))
SOURCES = [path for path in CODE if path.relative_to(ROOT).parts[0] in PACKAGES]
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".json", ".jsonl", ".cfg", ""}

#: Functions that must exist once, and where: there is one loop and one accept rule.
ONLY_IN = {
    r"generate\w*": {"workbench/decode/engine.py"},
    r"accept_\w+": {"workbench/decode/accept.py"},
}

#: Skips by file: how many calls or decorators, and why. Tests marked `gpu` are skipped in conftest.py.
SKIPS = {
    "tests/conftest.py": (1, "a test marked gpu runs only where there is a CUDA device"),
    "tests/test_overlap.py": (1, "a launch that overlaps the one before it needs a device of compute capability 9.0"),
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def text_files() -> list[Path]:
    """Every text file of the project, environments, caches and run folders aside."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        inside = Path(folder).relative_to(ROOT)
        folders[:] = [
            name
            for name in folders
            if (not name.startswith(".") or name == ".ci")
            and name not in ("__pycache__", "build", "dist")
            and not name.endswith(".egg-info")
            and inside / name != Path("reports/runs")
        ]
        found += [Path(folder) / name for name in files if Path(name).suffix in TEXT_SUFFIXES]
    return found


def test_something_is_looked_at() -> None:
    assert len(SOURCES) > 20
    assert {".ci/run", "Makefile", "pyproject.toml"} <= {name_of(path) for path in text_files()}


def test_init_files_hold_a_docstring_and_kernels_has_none() -> None:
    for path in SOURCES:
        if path.name == "__init__.py":
            body = parsed(path).body
            assert len(body) == 1 and ast.get_docstring(parsed(path)), f"{name_of(path)}: only a docstring belongs here"
    assert not list((ROOT / "kernels").rglob("__init__.py")), (
        "kernels is a namespace package, see workbench/kernel_path.py"
    )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_module_has_docstring_and_no_global_statement(path: Path) -> None:
    tree = parsed(path)
    assert ast.get_docstring(tree)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "." * node.level


def test_imports_that_only_some_modules_may_have() -> None:
    """Also what import-linter cannot see when another distribution owns the name `kernels`."""
    for path in SOURCES:
        name = name_of(path)
        tops = {module.split(".")[0] for module in imported(parsed(path))}
        if name.startswith("kernels/"):
            assert "workbench" not in tops, name
        else:
            assert "triton" not in tops, f"{name}: Triton belongs in kernels/"
        if not name.startswith("workbench/show/") and name != "workbench/run.py":
            assert not tops & {"plotly", "ipywidgets", "papermill"}, name
        if "kernels" in tops:
            allowed = name.startswith(("kernels/", "workbench/kernel_path"))
            found = "workbench.kernel_path" in set(imported(parsed(path)))
            assert allowed or found, f"{name}: call add_own_kernels() before importing from kernels"


def test_one_loop_and_one_accept_rule() -> None:
    for path in SOURCES:
        if not name_of(path).startswith("workbench/"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                for pattern, homes in ONLY_IN.items():
                    if re.fullmatch(pattern, node.name):
                        assert name_of(path) in homes, f"{name_of(path)}:{node.lineno}: {node.name} belongs in {homes}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr != "generate", f"{name_of(path)}:{node.lineno}: decode through the engine"


def is_skip(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("skip", "skipif", "importorskip", "xfail")
    return False


def test_every_skip_is_on_the_list() -> None:
    counts = {}
    for path in (ROOT / "tests").rglob("*.py"):
        if path != Path(__file__).resolve():
            count = sum(is_skip(node) for node in ast.walk(parsed(path)))
            if count:
                counts[name_of(path)] = count
    assert counts == {name: count for name, (count, _) in SKIPS.items()}


HOSTS = re.compile(
    r"pypi\.(?:org|python)|pythonhosted|registry\.npmjs|npmjs\.(?:com|org)|deb\.debian|repo\.maven|proxy\.golang"
    r"|conda\.anaconda|download\.pytorch|crates\.io"
)
#: A path that starts at the root of somebody's machine. The system's own folders are named in no text of ours either.
ABSOLUTE = re.compile(r"(?<![\w.:/~}\])-])/(?:home|root|Users|mnt|opt|srv|work|tmp|data|scratch|nfs|private)/\w|C:\\\\")


def test_text_names_no_registry_and_no_folder_of_a_machine() -> None:
    hits = []
    for path in text_files():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if HOSTS.search(line) or ABSOLUTE.search(line):
                hits.append(f"{name_of(path)}:{number}: {line.strip()[:100]}")
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        ('path = "/home/me/models"', ABSOLUTE, True),
        ("see https://example.com/data/x or data/prompts", ABSOLUTE, False),
        ("$HOME/tmp/x and repo/data/embedded", ABSOLUTE, False),
        ("files." + "pythonhosted" + ".org", HOSTS, True),
        ("the package index", HOSTS, False),
    ],
)
def test_patterns(text: str, pattern: re.Pattern, found: bool) -> None:
    assert bool(pattern.search(text)) is found


IMPORT_ALL = """
import json, os, socket, sys, threading, warnings

def refuse(*_, **__):
    raise RuntimeError("a module opened a network connection while it was imported")

socket.socket.connect = refuse
import torch, transformers, numpy
before = (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count())
random = (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist())
from workbench.kernel_path import add_own_kernels
import importlib

add_own_kernels()
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
after = (dict(os.environ), torch.get_num_threads(), torch.get_default_dtype(), threading.active_count())
assert before[1:] == after[1:], (before[1:], after[1:])
changed = {k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k)}
assert not changed, f"environment variables changed: {changed}"
assert random == (torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist()), "random state changed"
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_importing_everything_does_nothing(tmp_path: Path) -> None:
    """No GPU, no network, no files, no output, no changed process state."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES if path.name != "__init__.py"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "WORKBENCH_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-c", IMPORT_ALL, json.dumps(names)]
    (tmp_path / "cwd").mkdir()
    done = subprocess.run(command, cwd=tmp_path / "cwd", env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert list((tmp_path / "cwd").iterdir()) == []
    assert not (tmp_path / "cache").exists()
