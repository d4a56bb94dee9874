"""Reading a corpus document by document: JSON lines (plain, .gz, .zst), Parquet, text files, token arrays.

A bad line is reported with its file and number and counted; it ends the reading only if asked. A file that breaks off
(a damaged archive) counts as one bad line, and the rest of it is lost. A file of the wrong kind is always an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from workbench.search.corpus_lines import BrokenFile, missing_package, numbered_lines

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Token ids laid behind each other, and bounds [S + 1] of the sequences in them.
Batch = tuple[np.ndarray, np.ndarray]

_JSON = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_ARRAYS = (".npy", ".npz")
_BATCH_CHARS = 1 << 20
_BATCH_TEXTS = 1024


@dataclass(frozen=True)
class CorpusOptions:
    """How inputs are read.

    Attributes:
        tokenizer: path of a tokenizer.json; text needs one.
        field: which field of a JSON object, or column of a Parquet file, holds the text.
        eos_id: appended to every text (not to token arrays); None appends nothing.
        special_tokens: let the tokenizer add its special tokens to every text.
        responses: of token shards with prompt_len, take the responses only.
        text_suffixes: files that are one text each; only these and the fixed ones are found in folders.
        on_error: "report" counts bad lines and goes on, "raise" stops at the first.
        max_reports: most bad lines that are described, for every worker.
    """

    tokenizer: str | None = None
    field: str = "text"
    eos_id: int | None = None
    special_tokens: bool = False
    responses: bool = False
    text_suffixes: tuple[str, ...] = (".txt",)
    on_error: str = "report"
    max_reports: int = 20

    def __post_init__(self) -> None:
        if self.on_error not in ("report", "raise"):
            raise ValueError(f"on_error is {self.on_error!r}, allowed 'report' or 'raise'")
        if self.eos_id is not None and not 0 <= self.eos_id < 2**31:
            raise ValueError(f"eos_id is {self.eos_id}, allowed 0..{2**31 - 1} or None")
        if self.max_reports < 0:
            raise ValueError(f"max_reports is {self.max_reports}, allowed 0 or more")
        if wrong := [s for s in self.text_suffixes if not s.startswith(".") or s == "."]:
            raise ValueError(f"text_suffixes has {wrong[0]!r}, allowed: endings that begin with a dot, such as '.txt'")

    def suffixes(self) -> tuple[str, ...]:
        """Endings of the files that can be read."""
        return (*_ARRAYS, *_JSON, ".parquet", *self.text_suffixes)


@dataclass
class Problems:
    """Bad lines of the inputs.

    Attributes:
        options: decides whether a bad line is an error, and how many are described.
        count: bad lines so far.
        reports: "file, line n: what is wrong" of the first ones.
    """

    options: CorpusOptions
    count: int = 0
    reports: list[str] = field(default_factory=list)

    def add(self, path: Path, line: int, what: str) -> None:
        """Counts a bad line, or raises a ValueError that names it."""
        text = f"{path}, line {line}: {what}"
        if self.options.on_error == "raise":
            raise ValueError(text)
        self.count += 1
        if len(self.reports) < self.options.max_reports:
            self.reports.append(text)


def find_inputs(inputs: Sequence[str | Path], options: CorpusOptions) -> list[Path]:
    """The files named, and those with a known ending in the folders named, sorted inside each folder.

    Raises:
        ValueError: a file is missing or of an unknown kind, a folder holds none, or text has no tokenizer.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(options.suffixes()))
            if not found:
                raise ValueError(f"input {str(path)!r}: the folder holds no file ending in {options.suffixes()}")
            files += found
        elif path.is_file() and path.name.endswith(options.suffixes()):
            files.append(path)
        else:
            raise ValueError(f"input {str(path)!r}: need an existing folder or file ending in {options.suffixes()}")
    texts = [path for path in files if not path.name.endswith(_ARRAYS)]
    if texts and options.tokenizer is None:
        raise ValueError(f"input {str(texts[0])!r} is text; name its tokenizer with --tokenizer")
    return files


def read_tokens(files: Iterable[Path], options: CorpusOptions, problems: Problems) -> Iterator[tuple[Path, Batch]]:
    """Streams the token sequences of files, many short ones at a time; ids are not checked."""
    tokenizer = None
    for path in files:
        if path.suffix == ".npy":
            yield path, _array(path)
        elif path.suffix == ".npz":
            yield path, _shard(path, options.responses)
        else:
            tokenizer = tokenizer or _load_tokenizer(options.tokenizer)
            for texts in _batched(read_texts(path, options, problems)):
                yield path, _encode(tokenizer, texts, options)


def read_texts(path: Path, options: CorpusOptions, problems: Problems) -> Iterator[str]:
    """The texts of a file of JSON lines, of a Parquet file or of a text file (one)."""
    if path.suffix == ".parquet":
        yield from _parquet_texts(path, options.field, problems)
    elif path.name.endswith(_JSON):
        yield from _json_texts(path, options.field, problems)
    else:
        data = path.read_bytes()
        try:
            yield data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            problems.add(path, data.count(b"\n", 0, error.start) + 1, f"not UTF-8 ({error.reason})")


def _json_texts(path: Path, field: str, problems: Problems) -> Iterator[str]:
    """Texts of a file of JSON lines; blank lines are fine."""
    try:
        for number, line in numbered_lines(path):
            text = _line_text(path, number, line, field, problems) if line.strip() else None
            if text is not None:
                yield text
    except BrokenFile as error:
        problems.add(path, error.line, f"the file breaks off here: {error}")


def _line_text(path: Path, number: int, line: bytes, field: str, problems: Problems) -> str | None:
    """The text of a line that is a JSON string or an object with a string in `field`; None for a bad line."""
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        problems.add(path, number, f"not UTF-8 ({error.reason})")
        return None
    except (ValueError, RecursionError) as error:  # also an integer with too many digits
        problems.add(path, number, f"not JSON ({error})")
        return None
    return _text(path, number, value.get(field) if isinstance(value, dict) else value, field, problems)


def _text(path: Path, number: int, text: object, field: str, problems: Problems) -> str | None:
    if not isinstance(text, str):
        problems.add(path, number, f"need a JSON string or an object with a string {field!r}")
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        problems.add(path, number, "the text holds half of a surrogate pair")
        return None
    return text


def _parquet_texts(path: Path, column: str, problems: Problems) -> Iterator[str]:
    """Texts of a Parquet file; the number of a bad line is that of the row, from 1."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise missing_package(path, "pyarrow") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise ValueError(f"input {str(path)!r} lacks the column {column!r}, it has {file.schema_arrow.names}")
            for batch in file.iter_batches(batch_size=_BATCH_TEXTS, columns=[column]):
                for value in batch.column(0):
                    number += 1
                    try:
                        text = _text(path, number, value.as_py(), column, problems)
                    except UnicodeDecodeError as error:
                        text = problems.add(path, number, f"not UTF-8 ({error.reason})")
                    if text is not None:
                        yield text
    except (pyarrow.ArrowException, OSError) as error:
        problems.add(path, number + 1, f"the file breaks off here: {error}")


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of texts, large enough to keep a tokenizer busy and small enough to be short-lived."""
    batch, chars = [], 0
    for text in texts:
        batch.append(text)
        chars += len(text)
        if chars >= _BATCH_CHARS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _load_tokenizer(path: str | None) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _encode(tokenizer: Tokenizer, texts: list[str], options: CorpusOptions) -> Batch:
    """Token ids of texts, each with the eos id behind it if there is one."""
    eos = [] if options.eos_id is None else [options.eos_id]
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=options.special_tokens)
    arrays = [np.array(encoding.ids + eos, np.int64) for encoding in encodings]
    return np.concatenate(arrays), _bounds([array.size for array in arrays])


def _bounds(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Whatever numpy says about a damaged or foreign file becomes an error that names it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of zip files, compression, Python's tokenizer, ...
        raise ValueError(f"input {str(path)!r} is damaged or of another kind: {error}") from error


def _array(path: Path) -> Batch:
    """A .npy file: one sequence, or one in every row. Mapped, not loaded."""
    with _loading(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"input {str(path)!r} is an archive, allowed: one array, or the ending .npz")
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise ValueError(f"input {str(path)!r} has {array.ndim} axes of {array.dtype}, allowed: 1 or 2, of integers")
    rows, length = (1, array.size) if array.ndim == 1 else array.shape
    return array.reshape(-1), _bounds(np.full(rows, length))


def _shard(path: Path, responses: bool) -> Batch:
    """Samples of a token shard with arrays tokens [T], offsets [n + 1] and, for responses, prompt_len [n]."""
    names = {"tokens", "offsets", *(["prompt_len"] if responses else [])}
    with _loading(path), np.load(path, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in names & set(archive.files)}
    if missing := names - set(arrays):
        raise ValueError(f"input {str(path)!r} lacks the arrays {sorted(missing)}")
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in "iu":
            kind = f"{array.ndim} axes of {array.dtype}"
            raise ValueError(f"input {str(path)!r}: {name} has {kind}, allowed: one, of integers")
    tokens, offsets = arrays["tokens"], arrays["offsets"].astype(np.int64)
    if offsets.size == 0 or (responses and arrays["prompt_len"].size != offsets.size - 1):
        raise ValueError(f"input {str(path)!r}: offsets needs one entry more than there are samples")
    starts = offsets[:-1] + (arrays["prompt_len"].astype(np.int64) if responses else 0)
    places = np.concatenate([starts, offsets])
    if (starts > offsets[1:]).any() or places.min() < 0 or places.max() > tokens.size:
        raise ValueError(f"input {str(path)!r}: offsets or prompt_len point outside the tokens or backwards")
    if not responses:
        return tokens, offsets
    parts = [tokens[start:stop] for start, stop in zip(starts, offsets[1:], strict=True)]
    return np.concatenate([tokens[:0], *parts]), _bounds(offsets[1:] - starts)
