"""Where an output ends: stop ids, stop strings, token limit, context limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.decode.sampling import SamplingConfig


@dataclass(frozen=True)
class StopRules:
    """Stop conditions of one request.

    Attributes:
        stop_ids: ids that end the output and are kept as its last token.
        stop_strings: the output is cut after the first token that completes one; the text is cut before it.
        max_tokens: most tokens, the smaller of max_new_tokens and the room the context limit leaves.
        limit_reason: "length" or "context", whichever of the two is the smaller.
        decode: token ids to text, used for stop strings only.
    """

    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    max_tokens: int
    limit_reason: str
    decode: Callable[[Sequence[int]], str]

    def find(self, output: list[int], new_from: int) -> tuple[int, str] | None:
        """First stop in `output`, of which the tokens before `new_from` are known to hold none.

        Returns:
            (number of tokens to keep, finish reason), or None to go on. A stop id or string wins over the limit when
            both fall on the same token.
        """
        for n in range(new_from + 1, min(len(output), self.max_tokens) + 1):
            if output[n - 1] in self.stop_ids or self._ends_string(output, n):
                return n, "stop"
        return (self.max_tokens, self.limit_reason) if len(output) >= self.max_tokens else None

    def _ends_string(self, output: list[int], n: int) -> bool:
        if not self.stop_strings:
            return False
        text = self.decode(output[:n])
        return any(s in text for s in self.stop_strings)

    def cut_text(self, text: str) -> str:
        """`text` up to the earliest stop string."""
        found = [text.find(s) for s in self.stop_strings if s in text]
        return text[: min(found)] if found else text

    def safe_text(self, text: str) -> str:
        """The part of a growing text that no later stop string or unfinished character can change."""
        text = text.rstrip("\ufffd")
        hold = max((len(s) for s in self.stop_strings), default=1) - 1
        return text[: max(0, len(text) - hold)]


def stop_rules(
    config: SamplingConfig,
    default_ids: Sequence[int],
    room: int,
    decode: Callable[[Sequence[int]], str],
) -> StopRules:
    """Rules of a request that has `room` tokens left to the context limit."""
    ids = default_ids if config.stop_ids is None else config.stop_ids
    return StopRules(
        stop_ids=frozenset(ids),
        stop_strings=tuple(config.stop_strings),
        max_tokens=min(config.max_new_tokens, room),
        limit_reason="length" if config.max_new_tokens <= room else "context",
        decode=decode,
    )
