"""Reading corpora: formats, bad lines, damaged and foreign files."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from workbench.search.corpus import CorpusOptions, Problems, find_inputs, read_tokens

WORDS = ["a", "b", "c", "?", "</s>"]
#: Formats of optional packages are covered where these are installed.
PACKED = [".gz"] + [".zst"] * (importlib.util.find_spec("zstandard") is not None)
COLUMNS = [".parquet"] * (importlib.util.find_spec("pyarrow") is not None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 4)])
    made.save(str(path))
    return str(path)


def read(path: Path, options: CorpusOptions) -> tuple[list[list[int]], Problems]:
    problems = Problems(options)
    sequences = []
    for _, (tokens, bounds) in read_tokens(find_inputs([path], options), options, problems):
        sequences += [tokens[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    return sequences, problems


def pack(path: Path, data: bytes) -> Path:
    """Writes `data` in the format of the path's ending."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif path.suffix == ".zst":
        import zstandard

        half = len(data) // 2  # two frames: readers often stop at the first
        path.write_bytes(b"".join(zstandard.compress(part) for part in (data[:half], data[half:])))
    else:
        path.write_bytes(data)
    return path


LINES = (
    b'\xef\xbb\xbf"a b"\n\n'
    b'{"text": "b\xe2\x80\xa8c", "other": 1}\n'
    b"{broken\n"
    b'{"other": "a"}\n'
    b'{"text": 3}\n'
    b'"\xff"\n'
    b'"\\ud800"\n'
    b"7\n" + b"[" * 200_000 + b'\n{"text": ""}\r\n'
    b'{"text": "c c c"}'
)
GOOD = [[0, 1], [1, 2], [], [2, 2, 2]]
BAD = [4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("ending", ["", *PACKED])
def test_json_lines_and_their_bad_lines(tmp_path, tokenizer, ending):
    path = pack(tmp_path / f"x.jsonl{ending}", LINES)
    sequences, problems = read(path, CorpusOptions(tokenizer))
    assert sequences == GOOD
    assert problems.count == len(BAD)
    for line, report in zip(BAD, problems.reports, strict=True):
        assert report.startswith(f"{path}, line {line}: ")
    assert "'text'" in problems.reports[1] and "not UTF-8" in problems.reports[3]
    _, few = read(path, CorpusOptions(tokenizer, max_reports=2))
    assert (few.count, few.reports) == (problems.count, problems.reports[:2])
    with pytest.raises(ValueError, match=r"x\.jsonl.*, line 4: not JSON"):
        read(path, CorpusOptions(tokenizer, on_error="raise"))


def test_field_eos_and_special_tokens(tmp_path, tokenizer):
    path = pack(tmp_path / "x.jsonl", b'{"body": "a b"}\n"c"\n{"text": "b"}\n{"body": ""}\n')
    sequences, problems = read(path, CorpusOptions(tokenizer, field="body", eos_id=4))
    assert sequences == [[0, 1, 4], [2, 4], [4]]
    assert problems.reports == [f"{path}, line 3: need a JSON string or an object with a string 'body'"]
    sequences, _ = read(path, CorpusOptions(tokenizer, special_tokens=True))
    assert sequences == [[4, 2], [4, 1]]


@pytest.mark.parametrize("ending", PACKED)
def test_a_file_that_breaks_off_keeps_what_came_before(tmp_path, tokenizer, ending):
    rng = np.random.default_rng(0)
    lines = [json.dumps(" ".join(rng.choice(WORDS[:3], 20))).encode() for _ in range(20_000)]
    path = pack(tmp_path / f"x.jsonl{ending}", b"\n".join(lines))
    whole, _ = read(path, CorpusOptions(tokenizer))
    assert len(whole) == len(lines)
    path.write_bytes(path.read_bytes()[:-40_000])
    some, problems = read(path, CorpusOptions(tokenizer))
    assert problems.count == 1 and "breaks off" in problems.reports[0]
    assert 0 < len(some) < len(whole) and some == whole[: len(some)]
    with pytest.raises(ValueError, match="breaks off"):
        read(path, CorpusOptions(tokenizer, on_error="raise"))
    path.write_bytes(b"no archive at all")
    assert read(path, CorpusOptions(tokenizer))[1].count == 1


@pytest.mark.parametrize("ending", COLUMNS)
def test_parquet(tmp_path, tokenizer, ending):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / f"x{ending}"
    parquet.write_table(pyarrow.table({"body": ["a b", None, "c"] * 1000, "n": range(3000)}), path)
    sequences, problems = read(path, CorpusOptions(tokenizer, field="body"))
    assert sequences == [[0, 1], [2]] * 1000
    assert problems.count == 1000 and problems.reports[1].startswith(f"{path}, line 5: ")
    with pytest.raises(ValueError, match=r"lacks the column 'text', it has \['body', 'n'\]"):
        read(path, CorpusOptions(tokenizer))
    path.write_bytes(b"PAR1 nothing")
    assert "breaks off" in read(path, CorpusOptions(tokenizer))[1].reports[0]


@pytest.mark.parametrize(("name", "package"), [("x.jsonl.zst", "zstandard"), ("x.parquet", "pyarrow")])
def test_a_missing_package_is_named(tmp_path, tokenizer, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(RuntimeError, match=f"{name}.*needs the package '{package}'"):
        read(tmp_path / name, CorpusOptions(tokenizer))


def test_folders_of_text_files(tmp_path, tokenizer):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.txt", "b\nb"), ("sub/a.txt", "a"), ("c.md", "c"), ("d.bin", "d")):
        (tmp_path / name).write_text(text)
    (tmp_path / "e.txt").write_bytes(b"a\n\xe9")
    sequences, problems = read(tmp_path, CorpusOptions(tokenizer))
    assert sequences == [[1, 1], [0]]
    assert problems.reports == [f"{tmp_path / 'e.txt'}, line 2: not UTF-8 (unexpected end of data)"]
    sequences, problems = read(tmp_path, CorpusOptions(tokenizer, text_suffixes=(".md",)))
    assert (sequences, problems.count) == ([[2]], 0)


def test_token_arrays(tmp_path):
    np.save(tmp_path / "flat.npy", np.arange(5, dtype=np.uint16))
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(2, 3))
    np.savez(tmp_path / "s.npz", tokens=np.arange(7), offsets=[0, 3, 3, 7], prompt_len=[1, 0, 2])
    assert read(tmp_path / "flat.npy", CorpusOptions(eos_id=9))[0] == [[0, 1, 2, 3, 4]]
    assert read(tmp_path / "rows.npy", CorpusOptions())[0] == [[0, 1, 2], [3, 4, 5]]
    assert read(tmp_path / "s.npz", CorpusOptions())[0] == [[0, 1, 2], [], [3, 4, 5, 6]]
    assert read(tmp_path / "s.npz", CorpusOptions(responses=True))[0] == [[1, 2], [], [5, 6]]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"tokens": [1, 2]}, r"lacks the arrays \['offsets', 'prompt_len'\]"),
        ({"tokens": [1.5], "offsets": [0, 1], "prompt_len": [0]}, "tokens has 1 axes of float64"),
        ({"tokens": [1], "offsets": [[0, 1]], "prompt_len": [0]}, "offsets has 2 axes"),
        ({"tokens": [1, 2], "offsets": [0, 2], "prompt_len": [0, 0]}, "one entry more"),
        ({"tokens": [1, 2], "offsets": [0, 3], "prompt_len": [0]}, "outside the tokens"),
        ({"tokens": [1, 2], "offsets": [0, 2], "prompt_len": [3]}, "outside the tokens"),
    ],
)
def test_broken_shards_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "s.npz", **{name: np.array(values) for name, values in arrays.items()})
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "s.npz", CorpusOptions(responses=True))


def test_arrays_of_the_wrong_kind_are_refused(tmp_path):
    np.save(tmp_path / "f.npy", np.zeros(3))
    with pytest.raises(ValueError, match="1 axes of float64"):
        read(tmp_path / "f.npy", CorpusOptions())


def test_inputs_are_checked_before_anything_is_read(tmp_path, tokenizer):
    (tmp_path / "x.txt").write_text("a")
    (tmp_path / "x.doc").write_text("a")
    (tmp_path / "empty").mkdir()
    for name, options, message in (
        ("x.txt", CorpusOptions(), "name its tokenizer"),
        ("x.doc", CorpusOptions(tokenizer), "need an existing folder or file"),
        ("none.txt", CorpusOptions(tokenizer), "need an existing folder or file"),
        ("empty", CorpusOptions(tokenizer), "holds no file"),
    ):
        with pytest.raises(ValueError, match=message):
            find_inputs([tmp_path / name], options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"eos_id": -1}, "eos_id is -1"),
        ({"max_reports": -1}, "max_reports is -1"),
        ({"text_suffixes": ("txt",)}, "text_suffixes has 'txt'"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        CorpusOptions(**options)


def test_an_integer_with_too_many_digits_is_a_bad_line(tmp_path, tokenizer):
    path = pack(tmp_path / "x.jsonl", b'"a"\n' + b"1" * 5000 + b'\n"b"\n')
    sequences, problems = read(path, CorpusOptions(tokenizer=tokenizer))
    assert sequences == [[0], [1]]
    assert problems.count == 1 and "x.jsonl, line 2: not JSON" in problems.reports[0]


@pytest.mark.parametrize("ending", COLUMNS)
def test_a_row_of_parquet_that_is_not_utf8_is_a_bad_line(tmp_path, tokenizer, ending):
    import pyarrow
    from pyarrow import parquet

    ends = pyarrow.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes())
    column = pyarrow.StringArray.from_buffers(3, ends, pyarrow.py_buffer(b"a\xff\xfeb"))
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"x{ending}")
    sequences, problems = read(tmp_path / f"x{ending}", CorpusOptions(tokenizer=tokenizer))
    assert sequences == [[0], [1]]
    assert problems.count == 1 and "x.parquet, line 2: not UTF-8" in problems.reports[0]


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
@pytest.mark.parametrize("kind", ["empty", "cut", "junk", "other", "flipped"])
def test_damaged_token_files_are_named(tmp_path, name, kind):
    path, tokens = tmp_path / name, np.arange(4000) * 7919 % 1009
    np.save(tmp_path / "a.npy", tokens)
    np.savez_compressed(tmp_path / "a.npz", tokens=tokens, offsets=[0, 4000])
    data = bytearray((tmp_path / name.replace("x", "a")).read_bytes())
    if kind == "other":
        data = (tmp_path / ("a.npz" if name == "x.npy" else "a.npy")).read_bytes()
    elif kind == "flipped":
        data[60:400] = bytes(byte ^ 0x5A for byte in data[60:400])
    path.write_bytes({"empty": b"", "cut": bytes(data[: len(data) // 2]), "junk": b"\x93 junk " * 40}.get(kind, data))
    with pytest.raises(ValueError, match=rf"input '.*{name}' is "):
        read(path, CorpusOptions())
