"""What the search benchmarks run on and what they found, as rows and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.measure.search_cases import SearchCases
from workbench.search.trie import NgramTrie


@dataclass
class Figures:
    """What the benchmarks found, in the order they ran."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, table: str, **row: Any) -> None:
        """Keeps one row."""
        self.rows.append({"table": table, **row})


@dataclass(frozen=True)
class Subject:
    """A trie and what it is asked.

    Attributes:
        name: "source" or "generated".
        trie: opened from a file.
        cases: searches.
        contexts, tokens: [Q, order - 1] int64 and [Q, C] int32 queries.
        cold: whether the caches are flushed before every round.
    """

    name: str
    trie: NgramTrie
    cases: SearchCases
    contexts: np.ndarray
    tokens: np.ndarray
    cold: bool

    @property
    def head(self) -> dict[str, Any]:
        """Columns that all of its rows begin with."""
        counts = "quantised" if self.trie.header.quantised else "exact"
        return {"trie": self.name, "counts": counts, "in_cache": not self.cold}


def table_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Rows as text, one table for each kind."""
    for table in dict.fromkeys(row["table"] for row in rows):
        some = [{key: value for key, value in row.items() if key != "table"} for row in rows if row["table"] == table]
        some = _by_variant(some) if table == "layout" else some
        lines = [list(some[0]), *([_text(row[key]) for key in some[0]] for row in some)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        yield f"\n{table}"
        for line in lines:
            yield "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))


def _by_variant(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all variants of a look-up, nanoseconds a query in a column each."""
    keys, variants = ("in_cache", "touch", "children"), list(dict.fromkeys(row["variant"] for row in rows))
    found: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        place = tuple(row[key] for key in keys)
        found.setdefault(place, dict(zip(keys, place, strict=True)) | dict.fromkeys(variants, ""))
        found[place][row["variant"]] = round(row["ns"])
    return sorted(found.values(), key=lambda row: (not row["in_cache"], row["touch"], row["children"]))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_lines(checks: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "\nchecks"
    words = {True: "met", False: "NOT met", None: ""}
    for name, check in checks.items():
        goal = "" if check["goal"] is None else f"goal {check['compare']} {check['goal']}"
        yield f"{name:26} {_text(check['value']):>10}  {goal:14} {words[check['ok']]}"
