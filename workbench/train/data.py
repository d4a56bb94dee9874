"""Training text as flat arrays, best-fit packing into rows, and the order in which rows are visited.

A sample is a prompt and the target's own response. Shards are `.npz` files with `tokens`, `offsets`, `prompt_len`,
`sampled`, `looped` and `source` (one entry a sample but the first). Knows neither models nor masks.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PER_SAMPLE = {"prompt_len": np.int32, "sampled": np.bool_, "looped": np.bool_, "source": np.int16}


@dataclass(frozen=True)
class Corpus:
    """n samples, one after another.

    Attributes:
        tokens: [T] int32, prompt ids then response ids of every sample.
        offsets: [n+1] int64, sample i is `tokens[offsets[i]:offsets[i+1]]`.
        prompt_len: [n] int32, ids of the prompt at the start of the sample.
        sampled: [n] bool, False for greedy responses.
        looped: [n] bool, the response was cut where it began to repeat itself.
        source: [n] int16, number of the prompt set.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_len: np.ndarray
    sampled: np.ndarray
    looped: np.ndarray
    source: np.ndarray

    def __post_init__(self) -> None:
        lengths = np.diff(self.offsets)
        if len(self.offsets) < 1 or self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or (lengths < 1).any():
            raise ValueError(f"offsets must rise from 0 to {len(self.tokens)}, the number of tokens")
        for name in _PER_SAMPLE:
            if len(getattr(self, name)) != len(lengths):
                raise ValueError(f"{name} has {len(getattr(self, name))} entries; needed: {len(lengths)}")
        if (self.prompt_len > lengths).any() or (self.prompt_len < 0).any():
            raise ValueError("prompt_len must lie between 0 and the length of its sample")

    @property
    def num_samples(self) -> int:
        """n."""
        return len(self.prompt_len)

    @property
    def lengths(self) -> np.ndarray:
        """[n] int64, tokens of every sample."""
        return np.diff(self.offsets)

    def sample(self, index: int) -> np.ndarray:
        """Token ids of one sample, prompt and response."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def responses(self) -> Iterable[np.ndarray]:
        """Token ids of every response."""
        for i in range(self.num_samples):
            yield self.tokens[self.offsets[i] + self.prompt_len[i] : self.offsets[i + 1]]

    def select(self, samples: np.ndarray) -> Corpus:
        """The corpus of these samples: indices [k], or a bool mask [n]."""
        index = np.flatnonzero(samples) if samples.dtype == np.bool_ else samples
        lengths = self.lengths[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Position of every kept token in the old array: its sample's old start plus its place in the sample.
        places = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths)
        return Corpus(self.tokens[places], offsets, *(getattr(self, name)[index] for name in _PER_SAMPLE))

    @classmethod
    def from_responses(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], sampled: bool = False) -> Corpus:
        """A corpus of (prompt ids, response ids)."""
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        flat = [np.asarray([*prompt, *response], np.int32) for prompt, response in pairs]
        n = len(pairs)
        return cls(
            np.concatenate(flat) if flat else np.zeros(0, np.int32),
            np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int64),
            np.array([len(prompt) for prompt, _ in pairs], np.int32),
            np.full(n, sampled),
            np.zeros(n, np.bool_),
            np.zeros(n, np.int16),
        )


def load_shards(paths: Sequence[str | Path]) -> Corpus:
    """Reads shards, in the order given.

    Raises:
        ValueError: no path, an unreadable file, a missing array or arrays that contradict each other.
    """
    if not paths:
        raise ValueError("paths is empty; name at least one .npz shard")
    return concatenate([_load_shard(Path(path)) for path in paths])


def _load_shard(path: Path) -> Corpus:
    needed = ("tokens", "offsets", *_PER_SAMPLE)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in needed if name in file}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no readable .npz shard: {error}") from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    samples = (arrays[name].astype(kind) for name, kind in _PER_SAMPLE.items())
    try:
        return Corpus(arrays["tokens"].astype(np.int32), arrays["offsets"].astype(np.int64), *samples)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def concatenate(corpora: Sequence[Corpus]) -> Corpus:
    """The samples of all corpora, one corpus after another."""
    ends = np.cumsum([0, *(len(c.tokens) for c in corpora)])
    offsets = [c.offsets[1:] + end for c, end in zip(corpora, ends[:-1], strict=True)]
    return Corpus(
        np.concatenate([c.tokens for c in corpora]),
        np.concatenate([np.zeros(1, np.int64), *offsets]),
        *(np.concatenate([getattr(c, name) for c in corpora]) for name in _PER_SAMPLE),
    )


def token_counts(corpus: Corpus, vocab_size: int, sampled_weight: float = 1.0) -> np.ndarray:
    """[V] float64, how often each id occurs in responses; sampled responses count `sampled_weight`."""
    place = np.arange(len(corpus.tokens)) - np.repeat(corpus.offsets[:-1], corpus.lengths)
    weight = np.repeat(np.where(corpus.sampled, sampled_weight, 1.0), corpus.lengths)
    weight[place < np.repeat(corpus.prompt_len, corpus.lengths)] = 0.0
    return np.bincount(corpus.tokens, weights=weight, minlength=vocab_size)


def frequent_ids(counts: np.ndarray, size: int) -> np.ndarray:
    """[size] int64 ascending: the ids that occur most often, lower ids first among equals.

    Raises:
        ValueError: `size` outside 1..V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"draft vocabulary of {size} outside 1..{len(counts)}")
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int64)


def pack_best_fit(lengths: np.ndarray, row_len: int) -> list[list[int]]:
    """Packs samples into rows: longest first, each into the fullest row that still has room.

    Args:
        lengths: [n] tokens of every sample.
        row_len: tokens of a row.

    Returns:
        Per row the indices of its samples.

    Raises:
        ValueError: a sample longer than a row.
    """
    if len(lengths) and lengths.max() > row_len:
        raise ValueError(f"a sample has {lengths.max()} tokens; rows have {row_len}")
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(row_len + 1)]  # free tokens -> rows
    rooms = 0  # bit r: some row has r free tokens
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            rows[row].append(index)
        else:
            room, row = row_len, len(rows)
            rows.append([index])
        with_room[room - length].append(row)
        rooms |= 1 << (room - length)
    return rows


def row_table(corpus: Corpus, rows: Sequence[Sequence[int]], row_len: int) -> np.ndarray:
    """[rows, row_len] int32: index into `corpus.tokens` of every place, -1 behind the last sample."""
    table = np.full((len(rows), row_len), -1, np.int32)
    for row, samples in enumerate(rows):
        end = 0
        for sample in samples:
            start, stop = corpus.offsets[sample], corpus.offsets[sample + 1]
            table[row, end : end + stop - start] = np.arange(start, stop)
            end += stop - start
    return table


class RowOrder:
    """Which rows step `s` visits: a fixed number from each group, every group reshuffled at each of its epochs.

    A function of the step alone, so a resumed run sees what an uninterrupted one would have seen.

    Args:
        groups: per group its row numbers; empty groups are allowed if their share is 0.
        shares: per group the rows it gives to each batch.
        seed: of the shuffles.

    Raises:
        ValueError: a share below 0, or above 0 for an empty group.
    """

    def __init__(self, groups: Sequence[np.ndarray], shares: Sequence[int], seed: int = 0) -> None:
        for group, share in zip(groups, shares, strict=True):
            if share < 0 or (share and not len(group)):
                raise ValueError(f"a group of {len(group)} rows cannot give {share} rows a step")
        if sum(shares) < 1:
            raise ValueError(f"shares={list(shares)} must give at least one row a step")
        self._groups, self._shares, self._seed = groups, shares, seed
        self._shuffled: dict[tuple[int, int], np.ndarray] = {}

    @property
    def identity(self) -> str:
        """Text that differs when the order does."""
        return f"groups {[len(g) for g in self._groups]} shares {list(self._shares)} seed {self._seed}"

    def rows(self, step: int) -> np.ndarray:
        """[sum of shares] int64, row numbers of a step."""
        picks = []
        for number, (group, share) in enumerate(zip(self._groups, self._shares, strict=True)):
            places = np.arange(step * share, (step + 1) * share)
            picks += [self._epoch(number, place // len(group))[place % len(group)] for place in places]
        return np.array(picks, np.int64)

    def _epoch(self, number: int, epoch: int) -> np.ndarray:
        key = (number, epoch)
        if key not in self._shuffled:
            # Two epochs of a group are alive where a batch straddles them; older ones never return.
            self._shuffled = {k: v for k, v in self._shuffled.items() if k[0] != number or k[1] == epoch - 1}
            generator = np.random.default_rng([self._seed, number, epoch])
            self._shuffled[key] = generator.permutation(self._groups[number])
        return self._shuffled[key]
