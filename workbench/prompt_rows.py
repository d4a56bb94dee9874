"""Rows of prompt files: from the dialects in use to one record, with errors that name file, line and field.

Dialects, told apart by the field they have: `turns` (MT-Bench and relatives), `messages` (chat records), `question`
(GSM8K), `prompt` (HumanEval, MBPP), `instruction` with an optional `input` (Alpaca, self-instruct).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Suffixes of files that are read, longest first.
SUFFIXES = (".jsonl.gz", ".jsonl", ".json")
#: Limits that no sensible prompt file reaches: bytes of a line, bytes of a .json file, rows of any file.
MAX_LINE_BYTES = 1 << 20
MAX_JSON_BYTES = 256 << 20
MAX_ROWS = 200_000

_FIELDS = ("turns", "messages", "question", "prompt", "instruction")


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer.

    Attributes:
        id: unique within its set.
        turns: what the user says, in order; at least one.
        category: label of the row's file, "" without.
        system: system message, None to leave it to the chat template.
    """

    id: str
    turns: tuple[str, ...]
    category: str = ""
    system: str | None = None

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """Chat messages that ask for the answer to turn `len(answers)`, the earlier answers in their places.

        Raises:
            ValueError: every turn has its answer.
        """
        if len(answers) >= len(self.turns):
            raise ValueError(f"prompt {self.id!r} has {len(self.turns)} turns and {len(answers)} answers already")
        said = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": self.turns[len(answers)]}]


def read_rows(path: Path) -> Iterator[tuple[str, object]]:
    """Yields (place for error messages, decoded row) of a .jsonl, .jsonl.gz or .json file, blank lines skipped.

    Raises:
        ValueError: another suffix, a line that is no JSON, a line or file beyond the limits, broken compression.
    """
    if path.name.endswith(".json"):
        yield from _rows_of_json(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _rows_of_lines(path)
    else:
        raise ValueError(f"{path}: suffix is not one of {', '.join(SUFFIXES)}")


def _rows_of_lines(path: Path) -> Iterator[tuple[str, object]]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                place = f"{path}, line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise ValueError(f"{place}: longer than {MAX_LINE_BYTES} bytes")
                if number > MAX_ROWS:
                    raise ValueError(f"{place}: more than {MAX_ROWS} lines")
                if line.strip():
                    yield place, _decoded(line, place)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: broken gzip data ({error})") from error


def _rows_of_json(path: Path) -> Iterator[tuple[str, object]]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
    rows = _decoded(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: top level is {type(rows).__name__}, expected a list of rows")
    if len(rows) > MAX_ROWS:
        raise ValueError(f"{path}: more than {MAX_ROWS} rows")
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _decoded(data: bytes, place: str) -> object:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: not UTF-8 text") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply") from error


def parse_row(row: object, place: str, default_id: str, template: str = "{prompt}") -> Prompt:
    """One row as a prompt.

    Args:
        row: decoded JSON.
        place: file and line, for error messages.
        default_id: id of a row that has none.
        template: wraps the text of a `question` or `prompt` field; `{prompt}` stands for it.

    Raises:
        ValueError: the row is no object, has no known field, or a field of the wrong kind.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: row is {type(row).__name__}, expected an object")
    kind = next((field for field in _FIELDS if field in row), None)
    if kind is None:
        raise ValueError(
            f"{place}: none of the fields {', '.join(_FIELDS)}; found {', '.join(map(str, row)) or 'none'}"
        )
    system = None
    if kind == "turns":
        turns = _turns(row["turns"], place)
    elif kind == "messages":
        turns, system = _from_messages(row["messages"], place)
    elif kind == "instruction":
        turns = (_instruction(row, place),)
    else:
        turns = (template.replace("{prompt}", _text(row[kind], f"{place}: field {kind!r}")),)
    category = row.get("category")
    return Prompt(_row_id(row, default_id), turns, category if isinstance(category, str) else "", system)


def _row_id(row: Mapping, default: str) -> str:
    for field in ("id", "question_id", "task_id"):
        if isinstance(row.get(field), str | int):
            return str(row[field])
    return default


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{what} must be a non-empty string, got {_shown(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{what} holds half of a surrogate pair, which is no text")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _turns(value: object, place: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: field 'turns' must be a non-empty list of strings, got {_shown(value)}")
    return tuple(_text(turn, f"{place}: field 'turns', entry {i}") for i, turn in enumerate(value))


def _instruction(row: Mapping, place: str) -> str:
    """Instruction and input, separated by a blank line; self-instruct keeps the input in its first instance."""
    text = _text(row["instruction"], f"{place}: field 'instruction'")
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else {}
    given = row.get("input", first.get("input") if isinstance(first, Mapping) else None)
    if given in (None, ""):
        return text
    return text + "\n\n" + _text(given, f"{place}: field 'input'")


def _from_messages(value: object, place: str) -> tuple[tuple[str, ...], str | None]:
    """User turns and system message; recorded assistant messages are left out, the target gives its own."""
    if not isinstance(value, list):
        raise ValueError(f"{place}: field 'messages' must be a list of objects, got {_shown(value)}")
    turns: list[str] = []
    system = None
    for i, message in enumerate(value):
        what = f"{place}: field 'messages', entry {i}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{what} must be an object with role and content, got {_shown(message)}")
        role = message.get("role")
        if role == "user":
            turns.append(_text(message.get("content"), f"{what}, content"))
        elif role == "system" and i == 0:
            system = _text(message.get("content"), f"{what}, content")
        elif role != "assistant":
            raise ValueError(f"{what} has role {_shown(role)}; allowed: user, assistant, and system in entry 0")
    if not turns:
        raise ValueError(f"{place}: field 'messages' has no message of the user")
    return tuple(turns), system
