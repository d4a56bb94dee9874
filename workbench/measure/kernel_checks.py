"""Checks of a kernel report, from its rows alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.measure.records import Check

Row = Mapping[str, Any]


def kernel_checks(
    attention: Sequence[Row],
    splits: Sequence[Row],
    decision: Sequence[Row],
    goal_floor_share: float = 0.0,
    suffix: str = "",
) -> dict[str, Check]:
    """Whether every kernel is right, and what the tiles are worth where most requests are verified together.

    Args:
        attention, splits, decision: rows of `attention_rows`, `split_rows` and `decision_rows`.
        goal_floor_share: least share of the floor; 0 makes it informative only.
        suffix: appended to the names, to tell runs of different settings apart.

    Returns:
        kernel_errors: kernels whose error exceeds the tolerance of its row, goal 0.
        worst_attention_error: over all tiles, informative.
        attention_floor_share_n<N>: of the last tile, chains of the main head shape, N the most requests measured.
        <tile>_over_rows128_n<N>, packed_over_peer_n<N>: how much faster than the control arm's tile, and than the
            fastest library function whose result is right; informative, only where both were measured.
    """
    rows = [row for row in (*attention, *splits, *decision) if row["role"] == "kernel" and row["ok"] is not None]
    wrong = sum(not row["ok"] for row in rows)
    errors = [row["error"] for row in (*attention, *splits) if row["role"] == "kernel"]
    checks = {
        f"kernel_errors{suffix}": Check(wrong, 0, "=="),
        f"worst_attention_error{suffix}": Check(_largest(errors), None, "<="),
    }
    cell = main_cell(attention)
    times = {row["what"]: row["us"] for row in cell if row["us"] is not None and row["ok"]}
    tiles = [row for row in cell if row["role"] == "kernel"]
    if not tiles:
        return checks
    end = f"_n{tiles[0]['requests']}{suffix}"
    share = tiles[-1]["share"] if tiles[-1]["ok"] else None
    checks[f"attention_floor_share{end}"] = Check(share, goal_floor_share if goal_floor_share > 0 else None)
    for name in ("rows16", "packed"):
        if name in times and "rows128" in times:
            checks[f"{name}_over_rows128{end}"] = Check(times["rows128"] / times[name], None)
    peers = [times[row["what"]] for row in cell if row["role"] == "peer" and row["what"] in times]
    if peers and "packed" in times:
        checks[f"packed_over_peer{end}"] = Check(min(peers) / times["packed"], None)
    return checks


def main_cell(attention: Sequence[Row]) -> list[Row]:
    """Rows of the first shape's chains with the most requests; of several contexts the first one."""
    chains = [row for row in attention if row["shape"] == attention[0]["shape"] and row["kind"] == "chain"]
    most = max((row["requests"] for row in chains), default=0)
    first = next((row["cell"] for row in chains if row["requests"] == most), None)
    return [row for row in chains if row["cell"] == first]


def _largest(values: Sequence[float]) -> float:
    """The largest value; NaN if one is, since `max` may pass over it."""
    return float("nan") if any(value != value for value in values) else max(values, default=float("nan"))
