"""What is packaged, and life beside the foreign package `kernels` that transformers asks for.

The foreign package is a stand-in with a version that the installed transformers accepts, so that transformers really
imports from it. Every case runs in a process of its own, in another folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version
from transformers.utils import import_utils

from workbench.paths import repo_root

ROOT = repo_root()

#: Top-level modules of the foreign package, releases 0.16 and 0.17: with one of these names, one of the two would hide
#: or overwrite the other.
FOREIGN_MODULES = {
    *("_rust", "_system", "_versions", "_windows", "archs", "backends", "benchmark", "benchmarks", "cli", "compat"),
    *("deps", "hf_hub", "importer", "install", "layer", "load", "lockfile", "locking", "minver", "python_deps"),
    *("resolver", "status", "utils", "validate", "variants", "verify"),
}

#: Any name can be imported from it, called, used as decorator, base class or namespace.
STAND_IN = """
class _Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls()


class Anything(metaclass=_Anything):
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, first=None, *args, **kwargs):
        return first


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
"""

PROBE = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

torch.manual_seed(0)
config = LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
logits = LlamaForCausalLM(config)(torch.arange(6)[None]).logits
from workbench.kernel_path import add_own_kernels

add_own_kernels()
import kernels
import kernels.ref.tile_attention

once = list(kernels.__path__)
add_own_kernels()
print(json.dumps({
    "available": is_kernels_available(),
    "foreign": getattr(kernels, "__file__", None),
    "own": kernels.ref.tile_attention.__file__,
    "idempotent": list(kernels.__path__) == once,
    "shape": list(logits.shape),
    "finite": bool(logits.isfinite().all()),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built from a copy of the tree that also holds folders which must not get in."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("workbench", "kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for folder in ("tests", "data", "notebooks", "reports"):
        (tree / folder).mkdir()
        (tree / folder / "decoy.py").write_text("")
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    (tree / "README.md").write_text("# stand-in\n")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tree / "out")], cwd=tree, check=True, capture_output=True)
    (archive,) = (tree / "out").glob("draftbench-*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(archive) as file:
        file.extractall(site)
    return site


def add_foreign(site: Path) -> None:
    """Installs the stand-in into a folder, as pip would."""
    version = import_utils.KERNELS_MIN_VERSION
    for module in ("__init__", "layer/__init__", "layer/mode"):
        path = site / "kernels" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STAND_IN)
    info = site / f"kernels-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")


def probe(path: list[Path], cwd: Path) -> dict:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [False, True], ids=["alone", "beside-kernels"])
@pytest.mark.parametrize("layout", ["checkout", "wheel"])
def test_transformers_and_our_kernels_get_along(layout: str, foreign: bool, wheel: Path, tmp_path: Path) -> None:
    """In a checkout the foreign package lies in another folder, as with an editable install; in a wheel in the same."""
    site = tmp_path / "site"
    if layout == "wheel":
        shutil.copytree(wheel, site)
    if foreign:
        add_foreign(site)
    home = site if layout == "wheel" else ROOT
    found = probe([site] if layout == "wheel" else [site, ROOT], cwd=tmp_path)
    assert (found["shape"], found["finite"]) == ([1, 6, 20], True)
    assert found["own"] == str(home / "kernels" / "ref" / "tile_attention.py")
    assert found["idempotent"]
    if foreign:
        assert found["available"], "the stand-in was not accepted, so this case proves nothing"
        assert found["foreign"] == str(site / "kernels" / "__init__.py")
    elif importlib.util.find_spec("kernels").origin is None:
        assert not found["available"]
        assert found["foreign"] is None


def test_wheel_holds_all_modules_and_nothing_else(wheel: Path) -> None:
    packed = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*.py")}
    ours = {
        path.relative_to(ROOT).as_posix() for top in ("workbench", "kernels") for path in (ROOT / top).rglob("*.py")
    }
    assert packed == ours
    assert "kernels/__init__.py" not in packed
    assert {path.name for path in wheel.iterdir()} == {"workbench", "kernels", "draftbench-0.1.0.dist-info"}


def test_no_kernel_bears_a_foreign_name() -> None:
    names = {path.stem for path in (ROOT / "kernels").iterdir()}
    assert names & FOREIGN_MODULES == set()


def test_version_is_not_taken_for_the_foreign_one() -> None:
    """transformers reads the version of any distribution that owns the name `kernels`, ours included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert Version(project["version"]) < Version(import_utils.KERNELS_MIN_VERSION)
    assert project["name"] == "draftbench"
