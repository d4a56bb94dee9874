"""Drafters of the product's own classes whose drafts are mostly right, with a confidence that shows it, more or less.

Everything but the drafted law is theirs: K/V of committed tokens, the forward over blocks, signals, scorers, cuts. The
law is made from a table of what the target puts behind a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from dflash_setup import config_for, random_network
from drafter_zoo import BLOCK_SIZE, random_dart_model

from workbench.drafters.dart import DartDrafter, DartSession, dart_taps
from workbench.drafters.dflash import DFlashDrafter, DFlashSession
from workbench.drafters.ngram import NgramDrafter
from workbench.models.target import Target
from workbench.search.prune import PruneConfig
from workbench.types import Commit, DraftRequest, DraftTree, Policy, Stopwatch

Text = tuple[int, ...]


def known(prompts: Iterable[Sequence[int]], outputs: Iterable[Sequence[int]]) -> dict[Text, int]:
    """The token that follows each beginning of an output, prompt included."""
    following = {}
    for prompt, output in zip(prompts, outputs, strict=True):
        for n, token in enumerate(output):
            following[(*prompt, *output[:n])] = token
    return following


class Guesses:
    """Right about the token behind a text with probability `accuracy`, decided by (seed, text); wrong by a neighbour.

    Args:
        following: text -> the target's token behind it; whatever follows other texts is not known and never needed.

    Attributes:
        states: hidden states that a session had when it first drafted behind a text; those of all other sessions must
            agree, however the text came to be committed.
    """

    def __init__(self, following: dict[Text, int], vocab_size: int, accuracy: float = 0.85, seed: int = 0) -> None:
        self.following, self.vocab_size, self.accuracy, self.seed = following, vocab_size, accuracy, seed
        self.states: dict[Text, torch.Tensor] = {}
        self._right: dict[Text, bool] = {}
        self._logits: dict[Text, torch.Tensor] = {}

    def draws(self, text: Text) -> np.random.Generator:
        """Random numbers that belong to a text."""
        return np.random.default_rng((self.seed, len(text), *text[-3:]))

    def is_right(self, text: Text) -> bool:
        """Whether the token behind this text is drafted."""
        if text not in self._right:
            self._right[text] = text in self.following and self.draws(text).random() < self.accuracy
        return self._right[text]

    def places(self, text: Text, count: int) -> list[tuple[Text, int]]:
        """The next `count` texts along the target's own, and its token behind each; behind the last known one zeros."""
        found = []
        for _ in range(count):
            token = self.following.get(text, 0)
            found.append((text, token))
            text = (*text, token)
        return found

    def run(self, text: Text, count: int) -> int:
        """How many of `count` drafts behind a text are right before the first that is not."""
        right = [self.is_right(place) for place, _ in self.places(text, count)]
        return right.index(False) if False in right else count

    def logits(self, text: Text, count: int) -> torch.Tensor:
        """[count, V] of a chain behind a text: noise, and above it each draft, mostly by more where it is right."""
        return torch.stack([self._row(place, token) for place, token in self.places(text, count)])

    def _row(self, place: Text, token: int) -> torch.Tensor:
        if place not in self._logits:
            right, draws = self.is_right(place), self.draws(place)
            row = draws.normal(size=self.vocab_size).astype(np.float32)
            drafted = token if right else (token + 1) % self.vocab_size
            row[drafted] = row.max() + (draws.uniform(0.5, 8) if right else draws.uniform(0.1, 3))
            self._logits[place] = torch.from_numpy(row)
        return self._logits[place]


class _Committed:
    """Tokens of every slot, as commits tell them."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._roots: dict[int, int] = {}

    def observe(self, commit: Commit) -> None:
        for slot, start, tokens, root in zip(
            commit.slots, commit.starts, commit.tokens, commit.next_tokens, strict=True
        ):
            text = self._texts.setdefault(slot, [])
            del text[start:]
            assert len(text) == start
            text += tokens.tolist()
            self._roots[slot] = root

    def text(self, slot: int) -> Text:
        """Committed tokens and the root."""
        return (*self._texts[slot], self._roots[slot])

    def check(self, requests: Sequence[DraftRequest]) -> None:
        """Commits must have told the tokens of these requests."""
        for request in requests:
            assert self.text(request.slot) == tuple(request.tokens.tolist())


class LikelyDFlash(DFlashDrafter):
    """DFlash with random weights, but for its logits."""

    def __init__(self, target: Target, guesses: Guesses, policy: Policy, block_size: int = BLOCK_SIZE) -> None:
        super().__init__(random_network(config_for(target, block_size)), target.embedding, target.lm_head, policy)
        self.guesses = guesses

    def session(self, slots: int, max_len: int) -> LikelyDFlashSession:
        return LikelyDFlashSession(self, slots, max_len)


class LikelyDFlashSession(DFlashSession):
    def __init__(self, drafter: LikelyDFlash, slots: int, max_len: int) -> None:
        super().__init__(drafter, slots, max_len)
        self._committed = _Committed()

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self._committed.observe(commit)

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        self._committed.check(requests)
        return super().propose(requests, timer)

    def draft(self, slots: Sequence[int], anchors: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, _ = super().draft(slots, anchors)
        guesses, texts = self._drafter.guesses, [self._committed.text(slot) for slot in slots]
        for states, text in zip(hidden, texts, strict=True):
            torch.testing.assert_close(states, guesses.states.setdefault(text, states), rtol=1e-3, atol=1e-3)
        return hidden, torch.stack([guesses.logits(text, hidden.shape[1]) for text in texts])


class LikelyDart(DartDrafter):
    """DART with random weights, but for its candidates: the target's token is the first, the second, or missing."""

    def __init__(self, target: Target, guesses: Guesses, policy: Policy, num_nodes: int = 24) -> None:
        super().__init__(
            random_dart_model(target), target.embedding, dart_taps(target.num_layers),
            prune=PruneConfig(num_nodes=num_nodes), policy=policy,
        )  # fmt: skip
        self.guesses = guesses

    def session(self, slots: int, max_len: int) -> LikelyDartSession:
        return LikelyDartSession(self, slots, max_len)


class LikelyDartSession(DartSession):
    def __init__(self, drafter: LikelyDart, slots: int, max_len: int) -> None:
        super().__init__(drafter, slots, max_len)
        self._committed = _Committed()

    def observe(self, commit: Commit) -> None:
        super().observe(commit)
        self._committed.observe(commit)

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        self._committed.check(requests)
        return super().propose(requests, timer)

    def _candidates(self, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        ids, probs = super()._candidates(slots)
        guesses = self._drafter.guesses
        for rows, slot in zip(ids, slots, strict=True):
            places = guesses.places(self._committed.text(slot), len(rows))
            for row, (place, token) in zip(rows, places, strict=True):
                others = guesses.draws(place).permutation(np.setdiff1d(np.arange(guesses.vocab_size), token))
                row[:] = others[: len(row)]
                if guesses.is_right(place):
                    row[int(guesses.draws(place).random() > 0.6 * guesses.accuracy)] = token
        return ids, probs


class ScatteredNgram(NgramDrafter):
    """N-gram trees with scores that have nothing to do with their order, so that a cut leaves gaps between nodes."""

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        trees = super().propose(requests, timer)
        return [replace(t, scores=self._scores(t, len(r.tokens))) for t, r in zip(trees, requests, strict=True)]

    def _scores(self, tree: DraftTree, length: int) -> np.ndarray:
        scores = np.random.default_rng((length, int(tree.tokens[0]))).random(len(tree.tokens), np.float32)
        scores[0] = 0.0
        return scores
