"""Describes a table once, for the page, for its CSV and for the chart that is drawn from it.

    table = Table(
        "Spend by project",
        rows,
        TableColumn("Project", "name", link=lambda row: f"/console/projects/{row.id}"),
        TableColumn("Tokens", "tokens", kind="count"),
        TableColumn("Spend", "spend_pico", kind="usd"),
    )

A row is anything; `value` is the name of its attribute, or a function of it. In a template
`ui.table(table)` shows it. `?format=csv` answers with the same rows and columns, exact: money in
USD to the last place, times in UTC.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from billing.money import format_usd

Kind = Literal[
    "text",
    "code",
    "figure",
    "id",
    "count",
    "usd",
    "percent",
    "ms",
    "bytes",
    "time",
    "moment",
    "clock",
    "bar",
    "tag",
]
"""How a value is shown. `figure`: a text that is one, such as an amount of any currency; `time`:
how long ago; `moment`: absolute; `clock`: the time of day; `bar`: 0 to 1, of a limit; `tag`: a
word, or a pair of it and one of TONES."""
FIGURES = ("figure", "count", "usd", "percent", "ms", "bytes")
"""They stand on the right."""
TONES = ("ok", "wait", "err", "plain")
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A cell that begins so is computed by spreadsheets (OWASP, CSV injection)."""


class TableColumn(msgspec.Struct, frozen=True):
    title: str
    value: str | Callable[[Any], Any] = ""
    kind: Kind = "text"
    link: Callable[[Any], str | None] | None = None
    """Returns where the cell leads."""
    series: str = ""
    """The colour of the column in a chart: uncached, cached, written, output, or p50, p99, bad."""
    hint: str = ""
    """Its explanation, on hover."""
    in_csv: bool = True
    in_page: bool = True
    detail: Callable[[Any], str | None] | None = None
    """Returns what stands dimmed behind the value."""

    def of(self, row: Any) -> Any:
        if isinstance(self.value, str):
            return row[self.value] if isinstance(row, dict) else getattr(row, self.value)
        return self.value(row)

    @property
    def is_figure(self) -> bool:
        return self.kind in FIGURES

    @property
    def css(self) -> str:
        """Return the class of its cells: figures stand right, what is short keeps its line."""
        return "num" if self.is_figure else "" if self.kind == "text" else "keep"


class Table:
    """Some rows and their columns. `caption`: its name, for who does not see it."""

    def __init__(self, caption: str, rows: Sequence[Any], *columns: TableColumn | None) -> None:
        self.caption = caption
        self.rows = rows
        self.columns = [each for each in columns if each is not None]

    @property
    def shown(self) -> list[TableColumn]:
        """Return the columns that a page shows."""
        return [each for each in self.columns if each.in_page]

    def to_csv(self) -> bytes:
        """Return it as RFC 4180 has it, in UTF-8 with the mark by which spreadsheets know."""
        columns = [each for each in self.columns if each.in_csv]
        lines = [[each.title for each in columns]]
        lines += [[plain(each.of(row), each.kind) for each in columns] for row in self.rows]
        return to_csv(lines)


def to_csv(lines: Iterable[Sequence[str]]) -> bytes:
    written = io.StringIO()
    csv.writer(written).writerows([harmless(cell) for cell in line] for line in lines)
    return b"\xef\xbb\xbf" + written.getvalue().encode("utf-8", "replace")


def harmless(cell: str) -> str:
    """Return a cell that no spreadsheet computes: a text that looks like a formula gets a quote in
    front; a negative number stays one."""
    if cell.startswith(FORMULA) and not is_number(cell):
        return f"'{cell}"
    return cell


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def plain(value: Any, kind: Kind) -> str:
    """Return a value exactly, for CSV."""
    if value is None:
        return ""
    if kind == "usd":
        return format_usd(value)
    if kind == "tag" and isinstance(value, tuple):
        return str(value[0])
    if kind in ("time", "moment", "clock"):
        when = value if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)
        return when.astimezone(UTC).isoformat()
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(map(str, value))
    return str(value)


def raw(value: Any) -> str:
    """Return a value as a chart reads it: a number, or nothing."""
    if isinstance(value, datetime):
        return f"{value.timestamp():.0f}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return repr(value)
