"""The trie option: where it may come from, and tries that belong to another vocabulary."""

from types import SimpleNamespace

import pytest

from workbench.drafters.ngram import build_ngram
from workbench.drafters.trie_option import resolve_trie
from workbench.search.trie import NgramTrie, vocabulary_fingerprint

VOCABULARY = {"a": 0, "b": 1, "c": 2}


class FakeTokenizer:
    def get_vocab(self):
        return VOCABULARY


def target(vocab_size=3, tokenizer=None, name="toy"):
    return SimpleNamespace(vocab_size=vocab_size, tokenizer=tokenizer, name=name)


def counted(fingerprint=""):
    return NgramTrie.count([[0, 1, 2, 1]], fingerprint=fingerprint)


def test_a_trie_a_file_the_default_and_none(tmp_path):
    file = tmp_path / "ngram.trie"
    assert resolve_trie("default", target(), file) is None
    trie = counted()
    trie.save(file)
    assert resolve_trie(trie, target(), file) is trie
    for option in ("default", file, str(file)):
        assert resolve_trie(option, target(), file).info()["num_nodes"] == trie.num_nodes
    assert resolve_trie(None, target(), file) is None


def test_a_damaged_shipped_trie_is_refused(tmp_path):
    file = tmp_path / "ngram.trie"
    counted().save(file)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        resolve_trie("default", target(), file)


def test_a_trie_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ids below 3, the target has 2"):
        resolve_trie(counted(), target(vocab_size=2), tmp_path / "x")
    own = vocabulary_fingerprint(VOCABULARY)
    tokenizer = FakeTokenizer()
    assert resolve_trie(counted(own), target(tokenizer=tokenizer), tmp_path / "x") is not None
    with pytest.raises(ValueError, match="counted with tokenizer 0123"):
        resolve_trie(counted("0123" * 16), target(tokenizer=tokenizer), tmp_path / "x")


def test_ngram_drafter_needs_a_trie():
    with pytest.raises(ValueError, match="none is shipped for target 'toy'"):
        build_ngram(target())
