"""State of one request while it occupies a slot."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from workbench.decode.sampling import SamplingConfig, prompt_stream
from workbench.decode.stopping import StopRules
from workbench.types import DraftRequest, GenerateResult, RoundStats

#: Tokens decoded again before new ones.
_SEAM = 6


@dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Attributes:
        prompt_ids: prompt token ids, at least one.
        sampling: how to decode it.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    @cached_property
    def stream(self) -> int:
        """See `prompt_stream`."""
        return prompt_stream(self.prompt_ids)

    def __post_init__(self) -> None:
        ids = np.asarray(self.prompt_ids)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"prompt_ids={self.prompt_ids!r:.80} must be one row of whole numbers")
        object.__setattr__(self, "prompt_ids", tuple(ids.tolist()))


@dataclass
class LiveRequest:
    """A request in a slot: tokens so far and what is known about them.

    Attributes:
        tokens: [capacity] int64 buffer; the first `num_tokens` are prompt and output, the last of them the root.
        prefilled: prompt tokens whose target KV is final.
        whole_tokens, whole_text: output tokens that end with a whole character, and their text.
    """

    index: int
    slot: int
    request: Request
    rules: StopRules
    tokens: np.ndarray
    num_tokens: int
    prefilled: int = 0
    sent_chars: int = 0
    whole_tokens: int = 0
    whole_text: str = ""
    prefill_s: float = 0.0
    entered: float = field(default_factory=time.perf_counter)
    rounds: list[RoundStats] = field(default_factory=list)
    finish_reason: str = ""

    @classmethod
    def enter(cls, index: int, slot: int, request: Request, rules: StopRules) -> LiveRequest:
        """Puts a request into a slot."""
        prompt = np.asarray(request.prompt_ids, np.int64)
        tokens = np.zeros(len(prompt) + rules.max_tokens, np.int64)
        tokens[: len(prompt)] = prompt
        return cls(index, slot, request, rules, tokens, len(prompt))

    @property
    def prompt_len(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def output(self) -> list[int]:
        """Output token ids so far."""
        return self.tokens[self.prompt_len : self.num_tokens].tolist()

    @property
    def committed(self) -> int:
        """C: tokens whose target KV is final once prefill is done; also the position of the root."""
        return self.num_tokens - 1

    def draft_request(self, max_nodes: int) -> DraftRequest:
        """What the drafter may propose: nothing past the last token that can still be emitted."""
        remaining = self.rules.max_tokens - (self.num_tokens - self.prompt_len)
        depth = remaining - 1  # the bonus token takes one place
        return DraftRequest(
            slot=self.slot,
            tokens=self.tokens[: self.num_tokens],
            max_nodes=max_nodes if depth > 0 else 0,
            max_depth=depth,
            temperature=self.request.sampling.temperature,
        )

    def extend(self, new_tokens: list[int]) -> list[int]:
        """Appends tokens, cut at the first stop, and returns those that were kept; sets `finish_reason` at a stop."""
        before = self.num_tokens - self.prompt_len
        output = self.output + new_tokens
        found = self.rules.find(output, before)
        keep = len(output) if found is None else found[0]
        kept = output[before:keep]
        self.tokens[self.num_tokens : self.num_tokens + len(kept)] = kept
        self.num_tokens += len(kept)
        if found is not None:
            self.finish_reason = found[1]
        return kept

    def new_text(self) -> str:
        """Text that became final since the last call."""
        text = self._text()
        text = self.rules.cut_text(text) if self.finish_reason else self.rules.safe_text(text)
        delta = text[self.sent_chars :]
        self.sent_chars = max(self.sent_chars, len(text))
        return delta

    def _text(self) -> str:
        """Text of the output so far; only what is new is decoded, with a few tokens before it.

        The tokens before it decide about blanks at the seam, and a seam inside a character is never taken.
        """
        output = self.output
        start = max(0, self.whole_tokens - _SEAM)
        before = self.rules.decode(output[start : self.whole_tokens])
        text = self.whole_text + self.rules.decode(output[start:])[len(before) :]
        if not text.endswith("\ufffd"):
            self.whole_tokens, self.whole_text = len(output), text
        return text

    def result(self) -> GenerateResult:
        """The finished output."""
        return GenerateResult(
            token_ids=self.output,
            text=self.rules.cut_text(self.rules.decode(self.output)),
            finish_reason=self.finish_reason,
            prompt_len=self.prompt_len,
            rounds=self.rounds,
            prefill_s=self.prefill_s,
            total_s=time.perf_counter() - self.entered,
        )
