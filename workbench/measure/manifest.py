"""What a load test asks for: a fixed list of requests with a digest, so that two systems provably saw the same work.

A file holds one request a line as JSON with sorted keys and no spaces; the digest is the sha256 of those bytes, which
`sha256sum` prints too. Fields that came later (`_LATER`) are written only where they differ from their defaults, so
that digests of older manifests stay. Runs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from workbench.decode.engine import prompt_ids
from workbench.decode.live import Request
from workbench.decode.sampling import SamplingConfig
from workbench.models.target import Target
from workbench.prompts import load_prompts

#: Name of the manifest that holds all prompt sets.
MIXED = "mixed"

_LATER = ("top_k", "top_p", "accept_rule")


@dataclass(frozen=True)
class ManifestEntry:
    """One request.

    Attributes:
        id: of the prompt; entries that repeat a prompt share it.
        prompt_ids: prompt token ids, at least one, none negative.
        max_new_tokens: most output tokens.
        temperature: 0 for greedy.
        seed: key of its sampling.
        repetition: how often the manifest had asked for this prompt before.
        top_k, top_p, accept_rule: of its sampling, see `SamplingConfig`.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    repetition: int = 0
    top_k: int = 0
    top_p: float = 1.0
    accept_rule: str = "match"

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id={self.id!r} must be text that is not empty")
        object.__setattr__(self, "prompt_ids", _checked_ids(self.prompt_ids))
        _require_whole("repetition", self.repetition)
        if self.repetition < 0:
            raise ValueError(f"repetition={self.repetition} must be at least 0")
        checked = self.sampling
        # 0 and 0.0 have one digest.
        kinds = {"max_new_tokens": int, "temperature": float, "seed": int, "top_k": int, "top_p": float}
        for name, kind in kinds.items():
            object.__setattr__(self, name, kind(getattr(checked, name)))
        object.__setattr__(self, "repetition", int(self.repetition))

    @property
    def sampling(self) -> SamplingConfig:
        """How the request is decoded."""
        names = ("max_new_tokens", "temperature", "seed", *_LATER)
        return SamplingConfig(**{name: getattr(self, name) for name in names})

    @property
    def request(self) -> Request:
        """The request as an engine takes it."""
        return Request(self.prompt_ids, self.sampling)

    @property
    def fixed_output(self) -> bool:
        """True if all methods emit the same tokens: greedy, or each token drawn by its seed and position alone."""
        return self.sampling.greedy or self.accept_rule == "match"


@dataclass(frozen=True)
class Manifest:
    """Requests in the order in which clients take them, at least one."""

    entries: tuple[ManifestEntry, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(self.entries))
        if not self.entries:
            raise ValueError("entries is empty; a manifest needs at least one request")

    @classmethod
    def build(
        cls,
        prompts: Mapping[str, Sequence[int]],
        num_requests: int,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        top_k: int = 0,
        top_p: float = 1.0,
        accept_rule: str = "match",
    ) -> Manifest:
        """Cycles through distinct prompts in their order until there are enough requests.

        Args:
            prompts: id -> token ids.
            num_requests: requests in all.
            max_new_tokens, temperature, top_k, top_p, accept_rule: the same for every request.
            seed: request i samples with seed + i, so that repetitions of a prompt are independent.

        Raises:
            ValueError: no prompts, or a value out of range.
        """
        _require_whole("num_requests", num_requests)
        if not prompts or num_requests < 1:
            raise ValueError(f"{len(prompts)} prompts, num_requests={num_requests}: need at least one of each")
        ids = list(prompts)
        rest = (top_k, top_p, accept_rule)
        entries = []
        for i in range(num_requests):
            repetition, which = divmod(i, len(ids))
            tokens = tuple(prompts[ids[which]])
            entries.append(ManifestEntry(ids[which], tokens, max_new_tokens, temperature, seed + i, repetition, *rest))
        return cls(tuple(entries))

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Reads a file that `save` wrote.

        Raises:
            ValueError: no requests in it, or a line that is none; the message names file and line.
        """
        entries = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                entries.append(_entry(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
        if not entries:
            raise ValueError(f"{path}: no requests in it")
        return cls(tuple(entries))

    def save(self, path: str | Path) -> Path:
        """Writes the requests as JSON lines and returns the path."""
        file = Path(path)
        file.write_bytes(self._bytes)
        return file

    @cached_property
    def _bytes(self) -> bytes:
        lines = (json.dumps(_written(entry), sort_keys=True, separators=(",", ":")) + "\n" for entry in self.entries)
        return "".join(lines).encode()

    @cached_property
    def digest(self) -> str:
        """sha256 of the saved form, 64 hexadecimal digits."""
        return hashlib.sha256(self._bytes).hexdigest()

    @property
    def num_prompts(self) -> int:
        """Distinct prompts."""
        return len({entry.prompt_ids for entry in self.entries})

    def greedy_prompts(self, max_new_tokens: int) -> Manifest:
        """Each distinct prompt once, decoded greedily up to `max_new_tokens` tokens (or its own cap, if smaller)."""
        first = {entry.prompt_ids: entry for entry in reversed(self.entries)}
        entries = [
            replace(entry, max_new_tokens=min(entry.max_new_tokens, max_new_tokens), temperature=0.0, **_defaults())
            for entry in self.entries
            if first[entry.prompt_ids] is entry
        ]
        return Manifest(tuple(entries))

    @property
    def greedy(self) -> bool:
        """True if every request is decoded greedily."""
        return all(entry.sampling.greedy for entry in self.entries)

    @property
    def fixed_outputs(self) -> bool:
        """True if the outputs of all methods can be compared token by token."""
        return all(entry.fixed_output for entry in self.entries)

    @property
    def max_len(self) -> int:
        """Most tokens (prompt and output) that any request may reach."""
        return max(len(entry.prompt_ids) + entry.max_new_tokens for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[ManifestEntry]:
        return iter(self.entries)


def load_manifests(
    target: Target,
    prompt_sets: Sequence[str],
    num_requests: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    num_prompts: int | None = None,
    mixed: bool = False,
    top_k: int = 0,
    top_p: float = 1.0,
    accept_rule: str = "match",
) -> dict[str, Manifest]:
    """Manifests of prompt sets by name.

    Args:
        target: its chat template and tokenizer make the token ids.
        prompt_sets: names or files, see `load_prompts`.
        num_requests: requests of each manifest.
        max_new_tokens, temperature, seed, top_k, top_p, accept_rule: see `Manifest.build`.
        num_prompts: most distinct prompts of each set, from its start; None for all.
        mixed: one manifest named `MIXED` instead, which takes from the sets in turn.

    Raises:
        ValueError: no set, one named twice, or see `load_prompts`.
    """
    if not prompt_sets or len(set(prompt_sets)) < len(prompt_sets):
        raise ValueError(f"prompt_sets={list(prompt_sets)}: need at least one, each once")
    sets = {
        name: {f"{name}/{p.id}": prompt_ids(target, p.messages()) for p in load_prompts(name, limit=num_prompts)}
        for name in prompt_sets
    }
    if mixed:
        turns = zip_longest(*(prompts.items() for prompts in sets.values()))
        sets = {MIXED: dict(pair for turn in turns for pair in turn if pair is not None)}
    common = (num_requests, max_new_tokens, temperature, seed, top_k, top_p, accept_rule)
    return {name: Manifest.build(prompts, *common) for name, prompts in sets.items()}


def _defaults() -> dict[str, Any]:
    return {field.name: field.default for field in fields(ManifestEntry) if field.name in _LATER}


def _written(entry: ManifestEntry) -> dict[str, Any]:
    later = _defaults()
    return {name: value for name, value in asdict(entry).items() if name not in later or value != later[name]}


def _entry(fields_given: Any) -> ManifestEntry:
    names = [field.name for field in fields(ManifestEntry) if field.name not in _LATER]
    if not isinstance(fields_given, dict) or set(fields_given) - set(_LATER) != set(names):
        found = sorted(fields_given) if isinstance(fields_given, dict) else type(fields_given).__name__
        raise ValueError(f"a request has the fields {', '.join(names)} and may have {', '.join(_LATER)}; found {found}")
    return ManifestEntry(**fields_given)


def _checked_ids(ids: Any) -> tuple[int, ...]:
    if isinstance(ids, str) or not hasattr(ids, "__iter__"):
        raise ValueError(f"prompt_ids={ids!r:.80} must be a list of token ids")
    values = tuple(ids)
    for value in values:
        _require_whole("prompt_ids", value)
    if not values or min(values) < 0:
        raise ValueError(f"prompt_ids={values!r:.80} must hold at least one id, none below 0")
    return tuple(int(value) for value in values)


def _require_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} holds {value!r:.80}; allowed: whole numbers")
