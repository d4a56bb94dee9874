"""The `trie` option that several drafters share."""

from __future__ import annotations

from pathlib import Path

from workbench.models.target import Target
from workbench.search.trie import NgramTrie, vocabulary_fingerprint

#: File name of a trie beside the weights of a drafter.
TRIE = "ngram.trie"


def resolve_trie(trie: NgramTrie | str | Path | None, target: Target, default: Path) -> NgramTrie | None:
    """The trie meant by an option, checked against the target.

    Args:
        trie: a trie or its file; "default" for the file `default` if it exists, else none; None for none.
        target: whose ids it must count.
        default: see above.

    Raises:
        ValueError: the file is no trie, or it counts ids of another vocabulary.
    """
    if trie == "default":
        trie = default if default.is_file() else None
    if isinstance(trie, str | Path) and not Path(trie).is_file():
        raise ValueError(f"trie={str(trie)!r} is no file")
    if isinstance(trie, str | Path):
        trie = NgramTrie.open(trie, verify=Path(trie) == default)  # the shipped file is small enough to read once
    if trie is None:
        return None
    if trie.vocab_size > target.vocab_size:
        raise ValueError(f"the trie counts ids below {trie.vocab_size}, the target has {target.vocab_size}")
    if trie.fingerprint and target.tokenizer is not None:
        expected = vocabulary_fingerprint(target.tokenizer.get_vocab())
        if trie.fingerprint != expected:
            raise ValueError(
                f"the trie was counted with tokenizer {trie.fingerprint[:12]}..., the target has {expected[:12]}..."
            )
    return trie
