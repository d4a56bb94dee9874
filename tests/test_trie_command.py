"""The trie commands of the command line."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from workbench import run
from workbench.__main__ import main
from workbench.search import count_corpus
from workbench.search.trie import NgramTrie


def test_trie_commands(tmp_path, capsys):
    shard = tmp_path / "a.npz"
    np.savez(shard, tokens=np.array([9, 1, 2, 9, 1, 2, 3], np.uint16), offsets=[0, 3, 7], prompt_len=[1, 1])
    for flags, tokens in (([], 7), (["--responses"], 5)):
        assert main(["trie", "build", str(shard), "--out", str(tmp_path / "t.trie"), *flags]) == run.OK
        assert re.search(rf"^total_tokens +{tokens}$", capsys.readouterr().out, re.M)
    assert main(["trie", "info", str(tmp_path / "t.trie")]) == run.OK
    assert re.search(r"^order +3$", capsys.readouterr().out, re.M)
    (tmp_path / "b.txt").write_text("words")
    np.savez(tmp_path / "d.npz", tokens=[1])
    np.savez(tmp_path / "e.npz", tokens=[1, 2, 3], offsets=[0, 3, -1])
    for argv, message in (
        (["info", str(shard)], "not an n-gram trie"),
        (["build", str(tmp_path / "b.txt"), "--out", "x"], "name its tokenizer"),
        (["build", str(tmp_path / "d.npz"), "--out", "x"], "lacks the arrays ['offsets']"),
        (["build", str(tmp_path / "e.npz"), "--out", "x"], "point outside the tokens"),
        (["build", str(tmp_path / "none.npz"), "--out", "x"], "need an existing"),
        (["build", str(shard), "--out", "x", "--tokenizer", str(tmp_path)], "tokenizer.json does not exist"),
    ):
        assert main(["trie", *argv]) == run.USAGE
        assert message in capsys.readouterr().err


def test_trie_quantise(tmp_path, capsys):
    rng = np.random.default_rng(0)
    shard, exact, small, wide = (tmp_path / name for name in ("a.npz", "exact.trie", "small.trie", "wide.trie"))
    np.savez(shard, tokens=rng.integers(0, 70_000, 500), offsets=[0, 200, 500])
    assert main(["trie", "build", str(shard), "--out", str(exact)]) == run.OK
    assert re.search(r"^counts +exact$", capsys.readouterr().out, re.M)
    assert main(["trie", "quantise", str(exact), "--out", str(small), "--temp", str(tmp_path)]) == run.OK
    assert re.search(r"^counts +quantised$", capsys.readouterr().out, re.M)
    assert small.stat().st_size < exact.stat().st_size
    assert main(["trie", "build", str(shard), "--out", str(exact), "--quantised"]) == run.OK
    assert exact.read_bytes() == small.read_bytes()
    NgramTrie.count([[2**24]]).save(wide)
    for argv, message in (
        (["quantise", str(small)], "small.trie: counts are quantised, allowed: a trie with exact counts"),
        (["merge", str(small), str(small)], "small.trie: counts are quantised"),
        (["threshold", str(small), "--min-count", "2"], "small.trie: counts are quantised"),
        (["quantise", str(wide)], "wide.trie: vocab_size of a quantised trie is 16777217, allowed 1..16777216"),
        (["quantise", str(wide), "--temp", str(tmp_path / "none")], "allowed: an existing folder"),
    ):
        assert main(["trie", *argv, "--out", str(tmp_path / "out")]) == run.USAGE
        assert message in capsys.readouterr().err
    assert main(["trie", "export", str(small), "--out", str(tmp_path / "out")]) == run.OK
    with pytest.raises(SystemExit) as stopped:
        main(["trie", "--help"])
    assert stopped.value.code == 0 and "up to 4.2% off" in " ".join(capsys.readouterr().out.split())


def test_trie_from_text(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # A byte order mark, a blank line, and a line separator inside a string.
    text = '\ufeff"a b a"\n\n{"text": "b\u2028b"}\n'
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("a b\na b")
    (tmp_path / "c.jsonl").write_text('"fine"\n{"txt": 1}\n')
    argv = ["trie", "build", "--out", str(tmp_path / "t.trie"), "--tokenizer", str(tmp_path), "--order", "2"]
    assert main([*argv, str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]) == run.OK
    out = capsys.readouterr().out
    assert re.search(r"^total_tokens +9$", out, re.M) and re.search(r"^vocab_size +3$", out, re.M)
    assert main([*argv, str(tmp_path / "c.jsonl")]) == run.OK
    captured = capsys.readouterr()
    assert re.search(r"^total_tokens +1$", captured.out, re.M)
    assert "c.jsonl, line 2: need a JSON string" in captured.err and "left out 1 bad lines (1 shown)" in captured.err
    assert main([*argv, str(tmp_path / "c.jsonl"), "--on-error", "raise"]) == run.USAGE
    assert "c.jsonl, line 2" in capsys.readouterr().err


def test_trie_build_options(tmp_path, capsys):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"body": "a b a"}\n{"body": "a b"}\n')
    (tmp_path / "in" / "b.md").write_text("b a")
    argv = ["trie", "build", str(tmp_path / "in"), "--out", str(tmp_path / "t.trie"), "--tokenizer", str(tmp_path)]
    argv += ["--field", "body", "--text-suffix", ".md", "--memory-mb", "64", "--workers", "2", "--min-count", "1,2,1"]
    for eos in ("</s>", "2"):
        assert main([*argv, "--eos", eos, "--temp", str(tmp_path)]) == run.OK
        out = capsys.readouterr().out
        assert re.search(r"^total_tokens +10$", out, re.M)
        assert re.search(r"^nodes_per_level +\[3, 3, 3\]$", out, re.M), "b </s> occurs once"
    for flags, message in (
        (["--eos", "<eos>"], "--eos is '<eos>'"),
        (["--eos", "3"], "--eos is '3'"),
        (["--workers", "0"], "workers is 0"),
        (["--temp", str(tmp_path / "none")], "folder of spills is"),
    ):
        assert main([*argv, *flags]) == run.USAGE
        assert message in capsys.readouterr().err


def test_a_quantised_build_that_fails_leaves_the_older_file(tmp_path, capsys):
    np.save(tmp_path / "wide.npy", np.array([1, 2**24]))
    (tmp_path / "t.trie").write_bytes(b"older")
    argv = ["trie", "build", str(tmp_path / "wide.npy"), "--out", str(tmp_path / "t.trie"), "--quantised"]
    assert main(argv) == run.USAGE
    assert "vocab_size of a quantised trie is 16777217" in capsys.readouterr().err
    assert (tmp_path / "t.trie").read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.trie", "wide.npy"]


@pytest.mark.parametrize("action", ["build", "import", "export", "merge", "threshold", "quantise"])
@pytest.mark.parametrize("out", [".", "none/t.trie", "/dev/null"])
def test_what_cannot_become_the_file_is_refused_before_work(tmp_path, capsys, monkeypatch, action, out):
    monkeypatch.chdir(tmp_path)
    trie = NgramTrie.count([[1, 2, 3]])
    trie.save("a.trie")
    trie.export_dart("b.trie")
    np.save("a.npy", np.arange(5))
    argv = [action, {"build": "a.npy", "import": "b.trie"}.get(action, "a.trie"), "--out", out]
    assert main(["trie", *argv, *(["--min-count", "2"] if action == "threshold" else [])]) == run.USAGE
    assert f"file to write is '{out}', allowed: a file, or a new name" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "a.trie", "b.trie"]
    assert Path("/dev/null").is_char_device()


def test_a_damaged_tokenizer_is_an_error_of_usage(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "a.txt").write_text("a")
    argv = ["trie", "build", str(tmp_path / "a.txt"), "--out", str(tmp_path / "t.trie"), "--tokenizer", str(tmp_path)]
    assert main(argv) == run.USAGE
    assert "tokenizer.json cannot be read" in capsys.readouterr().err


def test_a_command_that_is_terminated_cleans_up(tmp_path, monkeypatch, capsys):
    np.save(tmp_path / "a.npy", np.arange(5))
    (tmp_path / "t.trie").write_bytes(b"older")
    monkeypatch.setattr(count_corpus, "_merge", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["trie", "build", str(tmp_path / "a.npy"), "--out", str(tmp_path / "t.trie")]) == run.INTERRUPTED
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "t.trie").read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "t.trie"]
