"""Tables of a record: styled for a notebook, plain text for a terminal. Only scalar columns are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

Row = Mapping[str, Any]


def styled(rows: Sequence[Row], columns: Sequence[str] | None = None, caption: str = "") -> Styler:
    """Rows as a notebook table.

    Args:
        rows: of a record; list and dict fields are left out.
        columns: which fields, in which order; default all scalar ones.
        caption: text above the table.

    Raises:
        ValueError: a column that no row has.
    """
    names = scalar_columns(rows)
    if columns is not None:
        missing = [name for name in columns if name not in names]
        if missing:
            raise ValueError(f"columns={missing} are in no row; allowed: {', '.join(names)}")
        names = list(columns)
    table = pd.DataFrame([{name: cell_text(row.get(name)) for name in names} for row in rows], columns=names)
    return table.style.hide(axis="index").set_caption(caption)


def checks_rows(checks: Mapping[str, Row]) -> list[dict[str, Any]]:
    """The checks of a record (`Check.to_dict` each) as table rows."""
    verdicts = {True: "yes", False: "NO", None: "-"}
    return [
        {
            "check": name,
            "value": check["value"],
            "goal": "-" if check["goal"] is None else f"{check.get('compare', '>=')} {cell_text(check['goal'])}",
            "met": verdicts[check["ok"]],
        }
        for name, check in checks.items()
    ]


def text_table(rows: Sequence[Row], max_width: int = 120) -> str:
    """Rows as aligned plain text; scalar columns in order, as many as fit into `max_width` characters."""
    lines: list[list[str]] = []
    width = 0
    for name in scalar_columns(rows):
        column = [name, *(cell_text(row.get(name)) for row in rows)]
        wide = max(len(text) for text in column)
        if lines and width + wide > max_width:
            break
        width += wide + 2
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        lines.append([text.rjust(wide) if numeric else text.ljust(wide) for text in column])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*lines, strict=True))


def text_tables(rows: Sequence[Row], max_rows: int = 12) -> str:
    """Rows of a record as plain text; where a field `table` or `kind` tells several tables apart, each by itself.

    Args:
        rows: of a record.
        max_rows: of each of several tables; a single table is never cut.
    """
    field = next((name for name in ("table", "kind") if rows and name in rows[0]), None)
    if field is None:
        return text_table(rows)
    parts = []
    for name in dict.fromkeys(row[field] for row in rows):
        members = [{k: v for k, v in row.items() if k != field} for row in rows if row[field] == name]
        more = f"\n({len(members) - max_rows} more rows in the record)" if len(members) > max_rows else ""
        parts.append(f"{name}:\n{text_table(members[:max_rows])}{more}")
    return "\n\n".join(parts)


def scalar_columns(rows: Sequence[Row]) -> list[str]:
    """Names of the fields that hold no list or dict in any row, in order of first appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [name for name in names if not any(isinstance(row.get(name), list | tuple | Mapping) for row in rows)]


def cell_text(value: Any) -> str:
    """A value for a person: three or four digits of a float, yes and no, a dash for what is missing."""
    if value is None or value != value:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 and value else f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)
