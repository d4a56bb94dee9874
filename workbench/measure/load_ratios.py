"""Ratios of load test cells to those of a control method, over many cells, and the checks of a record.

A ratio is only stated where the outputs of both sides passed the losslessness check. Knows rows, runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.measure.records import Check
from workbench.measure.statistics import bootstrap_interval, geometric_mean

#: Fields of a cell that are put in ratios to the control's, and how the ratios are called.
RATIOS = {
    "output_tokens_per_s": "throughput_ratio",
    "latency_mean_s": "latency_mean_ratio",
    "latency_p95_s": "latency_p95_ratio",
    "latency_p99_s": "latency_p99_ratio",
}
#: Scope of the summary over all cells.
ALL_CELLS = "all"


def add_ratios(rows: Sequence[Mapping[str, Any]], control: str) -> list[dict[str, Any]]:
    """Rows with the fields of `RATIOS`: value over that of the control in the same set at the same concurrency.

    A ratio is None where either side failed the losslessness check or has no such cell.
    """
    controls = {(row["prompt_set"], row["concurrency"]): row for row in rows if row["method"] == control}
    done = []
    for row in rows:
        other = controls.get((row["prompt_set"], row["concurrency"]))
        valid = other is not None and row["lossless"] and other["lossless"]
        done.append({**row, **{name: row[f] / other[f] if valid else None for f, name in RATIOS.items()}})
    return done


def summary_rows(
    rows: Sequence[Mapping[str, Any]], control: str, level: float = 0.95, seed: int = 0
) -> list[dict[str, Any]]:
    """Geometric means of the ratios of cells: over all of them, and by concurrency and prompt set if there are several.

    Args:
        rows: of `add_ratios`.
        control: left out, its ratios are one.
        level, seed: of the bootstrap over cells; see `bootstrap_interval`.

    Returns:
        Fields: method, scope ("all", "c=8", a prompt set), cells, throughput_ratio with bounds throughput_low and
        throughput_high (None for one cell), and the latency ratios (below 1 is faster). All are None when a cell of
        the scope has no ratio.
    """
    scopes: dict[str, dict[str, Any]] = {ALL_CELLS: {}}
    for field, text in (("concurrency", "c={}"), ("prompt_set", "{}")):
        values = dict.fromkeys(row[field] for row in rows)
        if len(values) > 1:
            scopes |= {text.format(value): {field: value} for value in values}
    summary = []
    for method in dict.fromkeys(row["method"] for row in rows):
        for scope, wanted in scopes.items() if method != control else ():
            cells = [row for row in rows if {**wanted, "method": method}.items() <= row_key(row).items()]
            ratios = {name: [row[name] for row in cells] for name in RATIOS.values()}
            means = {name: None if None in values else geometric_mean(values) for name, values in ratios.items()}
            speed = ratios["throughput_ratio"]
            low, high = (None, None) if None in speed else bootstrap_interval(speed, level, seed=seed)
            line = {"method": method, "scope": scope, "cells": len(cells)}
            summary.append({**line, **means, "throughput_low": low, "throughput_high": high})
    return summary


def row_key(row: Mapping[str, Any]) -> dict[str, Any]:
    """What tells cells apart."""
    return {name: row[name] for name in ("prompt_set", "method", "concurrency")}


def load_checks(
    rows: Sequence[Mapping[str, Any]],
    summary: Sequence[Mapping[str, Any]],
    goals: Mapping[str, float] | None = None,
    sampled: bool = False,
    suffix: str = "",
) -> dict[str, Check]:
    """Checks of a load test: losslessness of every cell, then each method's throughput over the control, all cells.

    Args:
        rows, summary: of `add_ratios` and `summary_rows`.
        goals: method -> least ratio; no entry, or 0, makes a check informative only.
        sampled: whether any request was sampled, for the name of the first check.
        suffix: appended to the names, to tell runs of different settings apart.
    """
    lossless = all(row["lossless"] is True for row in rows)
    checks = {f"lossless_load_{'sampled' if sampled else 'greedy'}{suffix}": Check(lossless, True, "==")}
    for row in summary:
        if row["scope"] == ALL_CELLS:
            goal = (goals or {}).get(row["method"], 0)
            checks[f"{row['method']}_throughput{suffix}"] = Check(row["throughput_ratio"], goal if goal > 0 else None)
    return checks
