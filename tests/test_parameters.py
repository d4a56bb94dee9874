"""Parameters of notebooks: the parameters cell, values from the command line and from files."""

import re
from pathlib import Path

import pytest

from workbench.measure.parameters import coerce, parse_cell, parse_text, read_parameters

NOTEBOOKS = Path(__file__).parent / "notebooks"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a = 1", "only `name: type = literal`"),
        ("a: int", "only `name: type = literal`"),
        ("a: int = 1\nb: int = a + 1", "line 2: the default of 'b' is not a literal"),
        ("a: dict = {}", "type 'dict' is unknown"),
        ("a: int = 'x'", "a='x' has type str"),
        ("a: int =", "line 1"),
    ],
)
def test_parameter_cells_hold_annotated_literals_only(source, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_cell(source)


def test_parameters_are_read_with_help(tmp_path):
    found = parse_cell('a: float = 1  # the é # factor\nb: list[int] = [\n    1,\n    2,\n]\nc: str = "# no help"\n')
    assert [(p.name, p.type, p.default, p.help) for p in found.values()] == [
        ("a", "float", 1.0, "the é # factor"),
        ("b", "list[int]", [1, 2], ""),
        ("c", "str", "# no help", ""),
    ]
    assert read_parameters(NOTEBOOKS / "bare.ipynb") == {}
    (tmp_path / "no.ipynb").write_text("{}")
    with pytest.raises(ValueError, match="not a notebook"):
        read_parameters(tmp_path / "no.ipynb")


def test_text_and_values():
    assert parse_text("x", "list[float]", "[1, 2e-3]") == [1.0, 2e-3]
    assert parse_text("x", "list", "a,2,true") == ["a", 2, True]
    assert parse_text("x", "list[str]", "") == []
    assert parse_text("x", "bool", "True") is True
    with pytest.raises(ValueError, match=r"x\[1\]='b' is no int"):
        parse_text("x", "list[int]", "1,b")
    assert coerce("x", "list", (value := [1, "a"])) == value
