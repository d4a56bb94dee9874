"""What an n-gram trie knows: n-grams by length, and how well it predicts text that it was not counted from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.search.trie import NgramTrie
from workbench.search.trie_reader import TrieReader

_CHUNK = 1 << 20


def level_rows(trie: NgramTrie) -> list[dict[str, Any]]:
    """One row for every length of n-grams, read in chunks.

    Fields: length, ngrams (distinct ones), occurrences (of those that are stored), mean_count, singletons (share of the
    n-grams that occur once), ten_or_more (share of those that occur ten times or more).

    Raises:
        ValueError: the trie lies in no file, or the file is damaged.
    """
    if trie.path is None:
        raise ValueError("the trie lies in no file, allowed: one that was opened")
    rows = []
    with TrieReader.open(trie.path, allow_quantised=True) as reader:
        first = 0
        for length, size in enumerate(trie.header.level_sizes, start=1):
            occurrences = singletons = many = 0
            for low in range(first, first + size, _CHUNK):
                counts = reader.counts(low, min(low + _CHUNK, first + size))
                occurrences += int(counts.sum())
                singletons += int((counts == 1).sum())
                many += int((counts >= 10).sum())
            rows.append(
                {
                    "length": length,
                    "ngrams": size,
                    "occurrences": occurrences,
                    "mean_count": occurrences / max(1, size),
                    "singletons": singletons / max(1, size),
                    "ten_or_more": many / max(1, size),
                }
            )
            first += size
    return rows


def backoff_rows(
    trie: NgramTrie, documents: Sequence[np.ndarray], limit: int = 200_000, epsilon: float = 1e-10
) -> list[dict[str, Any]]:
    """How long the contexts are that predict the tokens of a text, one row for every matched length, longest first.

    The last row ("all") pools them. Fields: matched, positions, share, mean_p, mean_ln_p (mean of ln(p + epsilon), as
    the search adds it up).

    Args:
        trie: judged by its predictions.
        documents: [T] ids each; their first tokens have no context and are left out.
        limit: at most this many positions, evenly spread.
        epsilon: as in `PruneConfig`.

    Raises:
        ValueError: no document has two tokens.
    """
    contexts, tokens = positions_of(documents, trie.order - 1, limit)
    probs, lengths = trie.probabilities(contexts, tokens[:, None])
    probs, lengths = probs[:, 0].astype(np.float64), lengths[:, 0]
    groups = [(str(m), lengths == m) for m in range(trie.order - 1, -1, -1)]
    groups.append(("all", np.ones(tokens.size, bool)))
    return [
        {
            "matched": name,
            "positions": int(chosen.sum()),
            "share": float(chosen.mean()),
            "mean_p": float(probs[chosen].mean()) if chosen.any() else None,
            "mean_ln_p": float(np.log(probs[chosen] + epsilon).mean()) if chosen.any() else None,
        }
        for name, chosen in groups
    ]


def positions_of(documents: Sequence[np.ndarray], length: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Places of a text with what stands before them.

    Args:
        documents: [T] ids each.
        length: tokens of a context; it never reaches into the document before.
        limit: most places, evenly spread over all but the first of every document.

    Returns:
        Contexts [P, length] int64, right-aligned, -1 where a document has not yet so many tokens, and tokens [P] int64.

    Raises:
        ValueError: no document has two tokens, or `limit` is below 1.
    """
    if limit < 1:
        raise ValueError(f"limit is {limit}, allowed 1 or more")
    sizes = np.array([ids.size for ids in documents], np.int64)
    if not (sizes > 1).any():
        raise ValueError(f"documents hold {sizes.tolist()!r:.60} tokens, allowed: one with two or more")
    text = np.concatenate(documents).astype(np.int64)
    offsets = np.arange(text.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = np.flatnonzero(offsets > 0)
    if places.size > limit:
        places = places[np.linspace(0, places.size - 1, limit).astype(np.int64)]
    back = np.arange(length, 0, -1)
    contexts = np.where(offsets[places, None] >= back, text[np.maximum(places[:, None] - back, 0)], -1)
    return contexts, text[places]
