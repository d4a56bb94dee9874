"""The commands that make a trie file of others: import, export, merge, threshold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from workbench import run
from workbench.__main__ import main
from workbench.search.trie import NgramTrie, vocabulary_fingerprint

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dart_ngram_cases.json").read_text())
EXAMPLE = bytes.fromhex(next(case["file_hex"] for case in GOLDEN["extra"] if "file_hex" in case))


def field(name: str, output: str) -> str:
    return re.search(rf"^{name} +(.*?) *$", output, re.M)[1]


def test_import_export_and_info(tmp_path, capsys):
    published, out, back = (str(tmp_path / name) for name in ("published.trie", "out.trie", "back.trie"))
    Path(published).write_bytes(EXAMPLE)
    assert main(["trie", "import", published, "--out", out, "--memory-mb", "64", "--temp", str(tmp_path)]) == run.OK
    assert field("nodes_per_level", capsys.readouterr().out) == "[2, 2]"
    assert main(["trie", "export", out, "--out", back]) == run.OK
    assert field("format", capsys.readouterr().out) == "as DART publishes it"
    assert main(["trie", "info", back]) == run.OK
    printed = capsys.readouterr().out
    assert [field(name, printed) for name in ("order", "num_nodes", "root_frequency", "bytes")] == [
        "2",
        "4",
        "3",
        "184",
    ]
    assert main(["trie", "import", published, "--out", out, "--vocab-size", "6"]) == run.USAGE
    assert "child_token is 6, allowed 0..5" in capsys.readouterr().err
    assert main(["trie", "import", out, "--out", back]) == run.USAGE
    assert "foreign file" in capsys.readouterr().err


def test_import_with_a_tokenizer(tmp_path, capsys):
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{i}": i for i in range(9)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "published.trie").write_bytes(EXAMPLE)
    out = str(tmp_path / "out.trie")
    argv = ["trie", "import", str(tmp_path / "published.trie"), "--out", out, "--tokenizer", str(tmp_path)]
    for flags, size in (([], "9"), (["--vocab-size", "12"], "12")):
        assert main([*argv, *flags]) == run.OK
        printed = capsys.readouterr().out
        assert field("vocab_size", printed) == size
        assert field("fingerprint", printed) == vocabulary_fingerprint(vocabulary)


def test_merge_and_threshold(tmp_path, capsys):
    rng = np.random.default_rng(0)
    corpora = [[rng.integers(0, 9, 50) for _ in range(4)] for _ in range(3)]
    paths = [str(tmp_path / f"{i}.trie") for i in range(3)]
    for corpus, path in zip(corpora, paths, strict=True):
        NgramTrie.count(corpus).save(path)
    out, expected = tmp_path / "out.trie", tmp_path / "expected.trie"
    assert main(["trie", "merge", *paths, "--out", str(out)]) == run.OK
    everything = [sequence for corpus in corpora for sequence in corpus]
    NgramTrie.count(everything).save(expected)
    assert out.read_bytes() == expected.read_bytes()
    for text, least in (("2", 2), ("1,2,4", (1, 2, 4))):
        assert main(["trie", "threshold", str(out), "--out", str(tmp_path / "kept"), "--min-count", text]) == run.OK
        NgramTrie.count(everything, min_count=least).save(expected)
        assert (tmp_path / "kept").read_bytes() == expected.read_bytes()
    capsys.readouterr()
    assert main(["trie", "threshold", str(out), "--out", str(out), "--min-count", "1,2"]) == run.USAGE
    assert "min_count is (1, 2)" in capsys.readouterr().err
    assert main(["trie", "merge", str(tmp_path / "none"), "--out", str(out)]) == run.USAGE


@pytest.mark.parametrize("action", ["import", "export", "merge", "threshold"])
def test_help_and_missing_output(action, capsys):
    for argv, code in ((["--help"], 0), (["x"], 2)):
        with pytest.raises(SystemExit) as stopped:
            main(["trie", action, *argv])
        assert stopped.value.code == code
    assert "--out" in capsys.readouterr().err
