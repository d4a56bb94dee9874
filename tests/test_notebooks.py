"""Style of every notebook: thin, clean, parameterised. The smoke runs themselves are `make smoke`."""

import ast
import json
import re
from pathlib import Path

import pytest

from workbench.measure.parameters import RUN_DIR, read_parameters, read_yaml
from workbench.paths import notebooks_dir

NOTEBOOKS = sorted(notebooks_dir().glob("*.ipynb"))
PRESETS = sorted((notebooks_dir() / "params").glob("*.yaml"))
MAX_LINES = 15

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str = "code") -> list[dict]:
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found if cell["cell_type"] == kind]


def is_parameters(cell: dict) -> bool:
    return "parameters" in cell["metadata"].get("tags", [])


def test_one_parameters_cell_with_a_help_text_each(path):
    assert sum(map(is_parameters, cells(path))) == 1
    declared = read_parameters(path)
    assert declared[RUN_DIR].default == "", "the runner says where a run writes"
    assert [p.name for p in declared.values() if not p.help] == []


def test_stripped(path):
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path))
    assert all(set(cell["metadata"]) <= {"tags"} for cell in cells(path))
    assert not any("injected-parameters" in cell["metadata"].get("tags", []) for cell in cells(path))
    assert set(whole["metadata"]) == {"kernelspec", "language_info"}
    assert whole["metadata"]["kernelspec"]["name"] == "python3"


def test_cells_are_thin(path):
    for cell in cells(path):
        if is_parameters(cell):
            continue
        tree = ast.parse(cell["source"])  # also rejects magics and shell lines
        assert len(cell["source"].splitlines()) <= MAX_LINES, cell["source"]
        banned = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Lambda | ast.Global)]
        assert not banned, cell["source"]


def test_no_absolute_or_relative_paths(path):
    for cell in cells(path):
        for node in ast.walk(ast.parse(cell["source"])):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.match(r"(/\w|\.\.?/|~|[A-Za-z]:\\)", node.value), node.value


def test_begins_with_a_title_and_ends_with_a_record(path):
    assert cells(path, "markdown")[0]["source"].startswith("# ")
    assert "save_record(" in cells(path)[-1]["source"]
    name = re.findall(r"make_record\(\s*\"([^\"]+)\"", cells(path)[-1]["source"])
    assert name == [path.stem]


def test_presets_fit_the_parameters(path):
    presets = [preset for preset in PRESETS if preset.name.split(".")[0] == path.stem]
    assert f"{path.stem}.smoke.yaml" in [preset.name for preset in presets]
    for preset in presets:
        read_yaml(preset, read_parameters(path))


def test_no_preset_without_its_notebook(path):
    assert {preset.name.split(".")[0] for preset in PRESETS} <= {notebook.stem for notebook in NOTEBOOKS}
