"""Reading and checking the `.trie` files that DART publishes; the format is described in `published_trie.py`."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from workbench.search import _published_jit as jit
from workbench.search.trie_format import MAX_NODES, MAX_ORDER, MAX_VOCAB, MIN_ORDER
from workbench.search.trie_stream import Spill, SpillFolder

_HEADER = struct.Struct("<QQ")
_ROOT = struct.Struct("<iQiQ")
_READ_WORDS = 1 << 20

_ERRORS = {
    jit.ROOT_TOKEN: ("token", "0 for the root"),
    jit.ROOT_PARENT: ("parent_id", "0 for the root"),
    jit.PARENT: ("parent_id", "below the node's own number"),
    jit.DEPTH: ("depth", "up to the order, {order}"),
    jit.TOKEN: ("token", "0..{max_token}"),
    jit.FREQUENCY: ("freq", "1 or more (lower ones come from thresholding in the published builder)"),
    jit.NUM_CHILDREN: ("n_children", "what is left of the {edges} nodes that have a parent"),
    jit.CHILD_TOKEN: ("child_token", "0..{max_token}"),
    jit.CHILD_ID: ("child_id", "over the node's own number, up to {edges}"),
    jit.LISTED_TWICE: ("child_id", "a node that is no other's child"),
    jit.NOT_LISTED: ("parent_id", "the node that lists it as child, with the same token"),
}


def published_info(path: str | Path) -> dict[str, object] | None:
    """What the header of a published file says, for tables; None for another kind of file."""
    try:
        found = PublishedFile(Path(path), MAX_VOCAB, False)
    except ValueError:
        return None
    return {
        "format": "as DART publishes it",
        "order": found.order,
        "num_nodes": found.num_nodes - 1,
        "root_frequency": found.root_frequency,
        "bytes": 36 * found.num_nodes + 4,
        "path": str(path),
    }


class PublishedFile:
    """A published file that is read once from front to end.

    Attributes:
        order: longest n-gram.
        num_nodes: nodes, the root included.
        root_frequency: frequency of the root as it stands there.
        depth: [num_nodes] uint8, tokens of each node's n-gram, after `split_levels`.
        largest_token: of all nodes, 0 without any, after `split_levels`.

    Raises:
        ValueError: the header or the size of the file is wrong.
    """

    def __init__(self, path: Path, vocab_size: int, raise_low: bool) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER.size + _ROOT.size)
        if len(head) < _HEADER.size + _ROOT.size:
            raise self._error(
                f"file size is {size}, allowed at least {_HEADER.size + _ROOT.size}: truncated or foreign"
            )
        self.order, self.num_nodes = _HEADER.unpack_from(head)
        self.root_frequency = _ROOT.unpack_from(head, _HEADER.size)[2]
        if not MIN_ORDER <= self.order <= MAX_ORDER:
            raise self._error(
                f"order is {self.order}, allowed {MIN_ORDER}..{MAX_ORDER}: foreign file, or no such order"
            )
        if not 1 <= self.num_nodes <= MAX_NODES + 1:
            raise self._error(f"node_count is {self.num_nodes}, allowed 1..{MAX_NODES + 1}")
        if size != 36 * self.num_nodes + 4:
            raise self._error(
                f"file size is {size}, allowed 36 * node_count + 4 = {36 * self.num_nodes + 4}: "
                f"{'truncated' if size < 36 * self.num_nodes + 4 else 'bytes were appended'}, or a foreign file"
            )
        self._limits = np.array([self.num_nodes, self.order, vocab_size, 1, raise_low], np.int64)
        self.depth = np.zeros(0, np.uint8)
        self.largest_token = 0

    def split_levels(self, spills: SpillFolder, memory: int, bar: tqdm) -> list[Spill]:
        """Reads and checks everything.

        Returns:
            For every level 1..order the rows of its nodes, in the order of their numbers: parent, token, frequency and,
            but for the last level, number of children and rank; uint32.

        Raises:
            ValueError: a field is out of range, or parents and children contradict each other.
        """
        levels = [spills.new("<u4") for _ in range(self.order)]
        widths = [self.row_width(level + 1) for level in range(self.order)]
        sums = np.zeros(2, np.uint64)
        for rows in self._passes(sums, 0, np.zeros((0, 2), np.int64), bar):
            for level, (spill, width) in enumerate(zip(levels, widths, strict=True), 1):
                part = rows[rows[:, 5] == level]
                part[:, 4] = spill.size // width + np.arange(len(part))
                spill.append(part[:, :width])
        if sums[0] != sums[1]:
            self._find_contradiction(memory, bar)
        return levels

    def row_width(self, level: int) -> int:
        """Entries of a row of `level`."""
        return 5 if level < self.order else 3

    def _find_contradiction(self, memory: int, bar: tqdm) -> None:
        """Raises the error that names the first node that its parent does not list as it is."""
        size = max(1, min(self.num_nodes, (memory - self.num_nodes) // 32))
        for low in range(0, self.num_nodes, size):
            for _ in self._passes(np.zeros(2, np.uint64), low, np.zeros((size, 2), np.int64), bar):
                pass
        raise self._error("the lists of children and the parents of nodes contradict each other")

    def _passes(self, sums: np.ndarray, window_low: int, window: np.ndarray, bar: tqdm) -> Iterator[np.ndarray]:
        """Rows of the nodes, a buffer at a time; see `_published_jit.read_records`."""
        buffer = np.empty(_READ_WORDS, np.uint32)
        rows = np.empty((_READ_WORDS // jit.NODE_WORDS + 1, 6), np.uint32)
        state = np.zeros(jit.NUM_STATE, np.int64)
        self.depth = np.zeros(self.num_nodes, np.uint8)
        kept = 0
        with self.path.open("rb") as file:
            bar.update(file.seek(_HEADER.size))
            while read := file.readinto(memoryview(buffer)[kept:].cast("B")):
                bar.update(read)
                words = buffer[: kept + read // 4]
                used, filled, error = jit.read_records(
                    words, state, sums, self.depth, self._limits, rows, window_low, window
                )
                if error != jit.FINE:
                    raise self._field_error(error, state)
                yield rows[:filled]
                kept = len(words) - used
                if kept and state[jit.NODE] == self.num_nodes and not state[jit.LEFT]:
                    raise self._error(f"{4 * kept} bytes or more follow the last node, allowed 0")
                buffer[:kept] = words[used:].copy()
        if state[jit.NODE] != self.num_nodes or state[jit.LEFT]:
            raise self._error(f"the file ends in or behind node {state[jit.NODE] - 1} of {self.num_nodes}: truncated")
        self.largest_token = int(state[jit.LARGEST_TOKEN])

    def _field_error(self, error: int, state: np.ndarray) -> ValueError:
        field, allowed = _ERRORS[error]
        of_child = error in (jit.CHILD_TOKEN, jit.CHILD_ID, jit.LISTED_TWICE)
        limits = {"order": self.order, "max_token": int(self._limits[2]) - 1, "edges": self.num_nodes - 1}
        value = int(state[jit.VALUE])
        signed = error in (jit.TOKEN, jit.CHILD_TOKEN, jit.FREQUENCY, jit.ROOT_TOKEN)
        shown = value if signed else value % 2**64
        return self._error(f"node {state[jit.NODE] - of_child}: {field} is {shown}, allowed {allowed.format(**limits)}")

    def _error(self, text: str) -> ValueError:
        return ValueError(f"published trie {self.path}: {text}")
