"""Options of the search benchmarks, the tries they run on, and the record and tables they end in."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from figures import Figures, Subject, check_lines, table_lines

from workbench.measure.generated_trie import write_generated_trie
from workbench.measure.records import make_record, run_folder, save_record, write_json
from workbench.measure.search_bench import search_checks, source_tokens, walk_text
from workbench.measure.search_cases import search_cases
from workbench.search.trie import NgramTrie

#: Every this many-th file of the source is not counted; cases are drawn from it.
HELD_OUT = 31
LEVELS, WIDTH = 7, 25
RECORD_NAME = "bench_search"


def megabytes(text: str) -> float:
    """A size that can be generated, so that a wrong one ends the run before anything is measured."""
    value = float(text)
    if not 0.01 <= value <= 2**20:
        raise argparse.ArgumentTypeError(f"{text} is out of range, allowed 0.01..{2**20}")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    """The size of things, and where the record goes."""
    group = parser.getgroup("search benchmarks")
    group.addoption("--trie-mb", type=megabytes, default=1024.0, help="size of the generated tries in 2^20 bytes")
    group.addoption("--source-tokens", type=int, default=6_200_000, help="tokens of Python source that are counted")
    group.addoption("--search-cases", type=int, default=400, help="searches in a round")
    group.addoption("--record", default="", help=".json file or folder of the record; a new run folder when empty")


REPORT = pytest.StashKey[Figures]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    """Collects rows; `pytest_terminal_summary` makes a record and tables of them."""
    return request.config.stash.setdefault(REPORT, Figures())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Writes the record and shows it; what is left of a run that failed would pass for a whole one."""
    found = config.stash.get(REPORT, None)
    if found is None or not found.rows:
        return
    if exitstatus != pytest.ExitCode.OK:
        terminalreporter.write_line("no record: not everything was measured")
        return
    options = config.option
    params = {
        "trie_mb": options.trie_mb,
        "source_tokens": options.source_tokens,
        "search_cases": options.search_cases,
        "levels": LEVELS,
        "width": WIDTH,
    }
    record = make_record(RECORD_NAME, params, found.rows, search_checks(found.rows), "cpu")
    if options.record.endswith(".json"):
        path = Path(options.record).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(record, path)
    else:
        path = save_record(record, run_folder(options.record, RECORD_NAME))
    for line in [*table_lines(found.rows), *check_lines(record["checks"]), f"record: {path}"]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Holds the trie files; gone in the end (pytest's own temporary folders would stay)."""
    with tempfile.TemporaryDirectory(prefix="bench-search-") as name:
        yield Path(name)


@pytest.fixture(scope="session")
def source(request: pytest.FixtureRequest) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Counted files, text of the files between them, size of the vocabulary."""
    options = request.config.option
    wanted = options.source_tokens * HELD_OUT // (HELD_OUT - 1)
    sequences, vocab_size = source_tokens(wanted)
    counted = [ids for number, ids in enumerate(sequences) if number % HELD_OUT != 2]
    return counted, np.concatenate(sequences[2::HELD_OUT]), vocab_size


@pytest.fixture(scope="session", params=["source exact", "source quantised", "generated exact", "generated quantised"])
def subject(request: pytest.FixtureRequest, folder: Path) -> Iterator[Subject]:
    """Each trie in turn, as a file; the one before is deleted."""
    name, counts = request.param.split()
    path, options = folder / f"{name}-{counts}.trie", request.config.option
    if name == "source":
        sequences, text, vocab_size = request.getfixturevalue("source")
        trie = NgramTrie.count(sequences, vocab_size=vocab_size)
        (trie.quantise() if counts == "quantised" else trie).save(path)
        trie = NgramTrie.open(path)
    else:
        write_generated_trie(path, options.trie_mb, quantised=counts == "quantised")
        trie = NgramTrie.open(path)
        text = walk_text(trie, 50 * options.search_cases)
    queries = search_cases(trie, text, 10 * options.search_cases, levels=1, width=WIDTH, seed=1)
    yield Subject(
        name,
        trie,
        search_cases(trie, text, options.search_cases, LEVELS, WIDTH),
        queries.contexts,
        queries.ids[:, 0].astype(np.int32),
        cold=name == "generated",
    )
    path.unlink()
