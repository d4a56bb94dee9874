"""DART sessions whose slots hold beginnings of known texts, and device rounds that continue them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from dart_setup import CONFIG, HIDDEN, VOCAB, random_model
from torch import nn

from workbench.batch import NUM_TAIL, AcceptedRows, Batch, Candidates, DeviceRows
from workbench.drafters.dart import DartDrafter, DartSession
from workbench.drafters.dart_config import DartConfig
from workbench.drafters.dart_device import DartDeviceSession
from workbench.types import Commit

SLOTS, MAX_LEN = 8, 24


class NoTimer:
    """Times nothing."""

    def stage(self, name: str):
        return nullcontext()


class Story:
    """A long text with the taps of its tokens."""

    def __init__(self, seed: int, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (length + 1,), generator=generator).numpy()
        self.taps = torch.randn(length, 3 * HIDDEN, generator=generator)

    def commit(self, slot: int, start: int, stop: int) -> Commit:
        return Commit([slot], [start], [self.tokens[start:stop]], [int(self.tokens[stop])], self.taps[start:stop])


STORIES = [Story(seed) for seed in range(8)]


def drafter(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, config: DartConfig = CONFIG, **options
) -> DartDrafter:
    table = nn.Embedding(VOCAB, HIDDEN)
    with torch.no_grad():
        table.weight.copy_(torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)))
    table.requires_grad_(False)
    return DartDrafter(random_model(config=config).to(device, dtype), table.to(device), (2, 4, 5), **options)


def prefilled(maker: DartDrafter, lengths: dict[int, int], slots: int = SLOTS, max_len: int = MAX_LEN) -> DartSession:
    """A session whose slots hold the beginnings of their stories."""
    session = maker.session(slots, max_len)
    for slot, length in lengths.items():
        session.observe(STORIES[slot].commit(slot, 0, length))
    return session


def batch(
    lengths: dict[int, int],
    bucket: int,
    device: torch.device | str = "cpu",
    limits: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
) -> Batch:
    """The slots named in `lengths`, in that order, and padding; by default each has room for its root."""
    pad = [0] * (bucket - len(lengths))
    tails = np.full((bucket, NUM_TAIL), -1)
    for tail, (slot, length) in zip(tails, lengths.items(), strict=False):
        newest = STORIES[slot].tokens[: length + 1][-NUM_TAIL:]
        tail[NUM_TAIL - len(newest) :] = newest
    columns = {
        "slots": [*lengths, *pad],
        "context_len": [*lengths.values(), *pad],
        "anchors": [*(int(STORIES[s].tokens[n]) for s, n in lengths.items()), *pad],
        "limits": [*(limits or (1 for _ in lengths)), *pad],
        "depths": [*(depths or (0 for _ in lengths)), *pad],
        "num_live": [len(lengths)],
        "budget": [bucket],
    }
    on_device = {name: torch.tensor(column, device=device) for name, column in columns.items()}
    return Batch(**on_device, max_context=MAX_LEN, tails=torch.from_numpy(tails).to(device))


def assert_candidates(got: Candidates, session: DartSession, slots: Sequence[int], **close) -> None:
    """The device's candidates are the host's."""
    ids, probs = session._candidates(slots)
    torch.testing.assert_close(got.ids[: len(slots)].cpu(), torch.from_numpy(ids))
    torch.testing.assert_close(got.probs[: len(slots)].cpu(), torch.from_numpy(probs), **close)


class Round:
    """Packed rows of trees and an accepted path in each, with rubbish wherever nothing is promised.

    Args:
        lengths: committed tokens of every live slot.
        sizes: rows of each tree.
        paths: accepted rows of each, the root first, ascending.
        num_rows, bucket: rows and requests, sentinels counted.
    """

    def __init__(
        self,
        lengths: dict[int, int],
        sizes: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        bucket: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.paths, self.old = [list(p) for p in paths], dict(lengths)
        starts = np.concatenate([[0], np.cumsum(sizes), [sum(sizes)] * (bucket - len(sizes))]).astype(np.int64)
        place, next_tokens = np.full(num_rows, -1), np.full(num_rows, 1 << 40)
        positions, slot_of_row = np.full(num_rows, 0), np.full(num_rows, 0)
        last, taps = np.zeros(bucket, np.int64), torch.full((num_rows, 3 * HIDDEN), torch.nan)
        for r, (slot, length) in enumerate(lengths.items()):
            rows = slice(starts[r], starts[r] + sizes[r])
            positions[rows], slot_of_row[rows] = 1 << 40, slot
            chosen = starts[r] + np.array(paths[r])
            steps = np.arange(len(chosen))
            place[chosen], positions[chosen] = steps, length + steps
            next_tokens[chosen] = STORIES[slot].tokens[length + 1 + steps]
            taps[chosen] = STORIES[slot].taps[length + steps]
            last[r] = chosen[-1]
        accepted = np.array([*(len(p) - 1 for p in paths), *[0] * (bucket - len(paths))])
        self.taps = taps.to(device)
        now = batch(lengths, bucket, device)
        on_device = [torch.from_numpy(a).to(device) for a in (positions, slot_of_row, starts)]
        self.rows = DeviceRows(
            tokens=torch.zeros_like(on_device[0]),
            positions=on_device[0],
            slot_of_row=on_device[1],
            kv_row=torch.zeros_like(on_device[0]),
            ancestors=None,
            slots=now.slots,
            starts=on_device[2],
            context_len=now.context_len,
            max_rows=max(sizes),
            max_context=MAX_LEN,
        )
        self.accepted = AcceptedRows(
            *(torch.from_numpy(a).to(device) for a in (place, next_tokens, last, accepted)), torch.zeros_like(now.slots)
        )

    def on_device(self, device: DartDeviceSession) -> None:
        device.commit(self.rows, self.accepted, self.taps)
        self.advance(device)

    def advance(self, device: DartDeviceSession) -> None:
        device.advance(list(self.old), [len(p) for p in self.paths])

    def on_host(self, session: DartSession) -> None:
        for (slot, length), path in zip(self.old.items(), self.paths, strict=True):
            session.observe(STORIES[slot].commit(slot, length, length + len(path)))

    @property
    def lengths(self) -> dict[int, int]:
        return {slot: n + len(p) for (slot, n), p in zip(self.old.items(), self.paths, strict=True)}
