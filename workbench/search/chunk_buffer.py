"""Cutting a stream of token sequences into chunks of bounded size for counting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from workbench.search.ngram_count import TokenChunk, check_ids


class ChunkBuffer:
    """Collects sequences until `capacity` tokens are there; cuts long ones so that no n-gram is lost or doubled."""

    def __init__(self, capacity: int, order: int) -> None:
        self._capacity = capacity
        self._ahead = order - 1
        # A piece of a cut sequence is followed by the tokens that complete its last n-grams.
        self._tokens = np.empty(capacity + self._ahead, np.int32)
        self._clear()

    def __len__(self) -> int:
        return self._used

    def add(self, tokens: np.ndarray, bounds: np.ndarray, vocab_size: int | None, where: str) -> Iterator[TokenChunk]:
        """Takes all sequences in and yields a chunk whenever the buffer is full; use it before going on.

        Raises:
            ValueError: an id is outside [0, vocab_size); names `where`.
        """
        sequence, begin = 0, int(bounds[0])
        while sequence < bounds.size - 1:
            space = self._capacity - self._used
            if space <= 0:
                yield self.take()
                continue
            whole = int(np.searchsorted(bounds, begin + space, side="right")) - 1
            if whole > sequence:
                sizes = np.diff(np.concatenate([[begin], bounds[sequence + 1 : whole + 1]]))
                sequence, end, next_begin = whole, int(bounds[whole]), int(bounds[whole])
            else:
                next_begin = begin + space
                end = min(int(bounds[sequence + 1]), next_begin + self._ahead)
                sizes = np.array([end - begin])
            piece = tokens[begin:end]
            check_ids(piece, vocab_size, where)
            self._tokens[self._used : self._used + piece.size] = piece
            self._used += piece.size
            self._sizes.append(sizes)
            self._tails.append(end - next_begin)
            begin = next_begin

    def take(self) -> TokenChunk:
        """What is there, as a view; the buffer is empty afterwards."""
        counted = [sizes.copy() for sizes in self._sizes]
        for sizes, tail in zip(counted, self._tails, strict=True):
            if tail:
                sizes[-1] -= tail
        nothing = np.zeros(0, np.int64)
        bounds = np.concatenate([[0], np.cumsum(np.concatenate([nothing, *self._sizes]))]).astype(np.int64)
        chunk = TokenChunk(self._tokens[: self._used], bounds, np.concatenate([nothing, *counted]))
        self._clear()
        return chunk

    def _clear(self) -> None:
        self._used = 0
        self._sizes: list[np.ndarray] = []
        self._tails: list[int] = []
