"""A chain drafter of known worth, and made-up traces, for the tests of traces, predictors and replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workbench.budget.trace import Trace, TracePrompt, prompt_digest
from workbench.models.target import Target
from workbench.types import Commit, DraftRequest, DraftTree, Policy, Signals, Stopwatch, chain_tree, root_tree


class FuzzyChain:
    """Drafts known greedy texts up to a random place; its logits show, more or less, how far it is right.

    Drafter and session in one, since it keeps no state.
    """

    name = "fuzzy"
    taps: tuple[int, ...] = ()

    def __init__(self, target: Target, policy: Policy, texts: Sequence[Sequence[int]], width: int = 16) -> None:
        self.policy, self.max_nodes = policy, width - 1
        self._texts = [list(text) for text in texts]
        self._vocab, self._hidden = target.vocab_size, target.hidden_size

    def session(self, slots: int, max_len: int) -> FuzzyChain:
        return self

    def observe(self, commit: Commit) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest], timer: Stopwatch) -> list[DraftTree]:
        drafting = [r for r in requests if r.max_nodes > 0]
        if not drafting:
            return [root_tree(int(r.tokens[-1])) for r in requests]
        made = [self._signals(r) for r in drafting]
        logits = torch.stack([logits for logits, _ in made])
        hidden = torch.stack([hidden for _, hidden in made])
        tokens = logits.argmax(-1)
        scores = np.zeros(tuple(tokens.shape), np.float32)
        if self.policy.scorer is not None:
            with timer.stage("allocate"):
                scores = self.policy.scorer(Signals(drafting, tokens, hidden, logits))
        trees = {
            r.slot: chain_tree(int(r.tokens[-1]), chain[: min(r.max_nodes, r.max_depth)].tolist(), row[: r.max_depth])
            for r, chain, row in zip(drafting, tokens, scores, strict=True)
        }
        return [trees.get(r.slot) or root_tree(int(r.tokens[-1])) for r in requests]

    def _signals(self, request: DraftRequest) -> tuple[torch.Tensor, torch.Tensor]:
        n, text = self.max_nodes, request.tokens.tolist()
        draw = np.random.default_rng((len(text), text[-1]))
        known = next((t for t in self._texts if t[: len(text)] == text), text)
        truth = (known[len(text) :] + [0] * n)[:n]
        right = min(int(draw.geometric(0.2)) - 1, n)
        logits = draw.normal(size=(n, self._vocab))
        for j in range(n):
            if j >= right:
                logits[j, truth[j]] = -9.0  # wrong for certain
            logits[j, truth[j]] += (9.0 + right / 3) * (j < right)
        hidden = draw.normal(size=(n, self._hidden))
        hidden[:, 0] = right
        return torch.from_numpy(logits).float(), torch.from_numpy(hidden).float()


def made_trace(num_rounds: int = 20, num_requests: int = 5, num_prompts: int = 12, seed: int = 0, **fields) -> Trace:
    """Accepted lengths drawn from geometric laws whose chances the scores "predictor" tell, with 40 features."""
    draw = np.random.default_rng(seed)
    size, n = num_rounds * num_requests, 15
    chance = draw.uniform(0.3, 0.98, size)
    reach = (chance[:, None] ** np.arange(1, n + 1)).astype(np.float32)
    accepted = (draw.uniform(size=(size, 1)) < reach).sum(1)
    limit = np.where(draw.uniform(size=size) < 0.1, draw.integers(1, n, size), n)
    features = draw.normal(size=(size, 40))
    features[:, :n] += 3 * reach
    columns = {
        "step": np.repeat(np.arange(num_rounds), num_requests).astype(np.int32),
        "prompt": draw.integers(0, num_prompts, size).astype(np.int32),
        "position": draw.integers(0, 300, size).astype(np.int32),
        "limit": limit.astype(np.int16),
        "accepted": np.minimum(accepted, limit).astype(np.int16),
        "gap": (chance + draw.normal(scale=0.1, size=size)).astype(np.float32),
        "prompts": tuple(
            TracePrompt(prompt_digest([seed, i // 2]), "even" if i % 2 == 0 else "odd", float(i % 2), i == 3)
            for i in range(num_prompts)
        ),
        "scores": {"predictor": reach, "random": np.sort(draw.random((size, n), np.float32))[:, ::-1].copy()},
        "features": features.astype(np.float16),
    }
    return Trace(**(columns | fields))
