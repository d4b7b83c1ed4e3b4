"""Prints rows: as a table that fits the terminal, as one JSON object a line, or as CSV.

A table gives way where it is too wide: first ids are shortened to an ending that no other row's id
has, then columns are left out that say so of themselves, then texts are cut. A number is never cut.
Off a terminal nothing gives way, so that `grep` and `awk` see everything. Names are other people's:
what is no printable character is made visible, and nothing in them is read as markup.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from gateway.console.tables import harmless

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

GAP = 2
ABSENT = "-"
LEAST_TEXT = 8
SHORT_ID = 6
"""The fewest characters that are left of an id."""
STYLES = {
    "ready": "green",
    "ok": "green",
    "serving": "green",
    "paid": "green",
    "degraded": "yellow",
    "warning": "yellow",
    "draft": "yellow",
    "draining": "yellow",
    "drained": "yellow",
    "unready": "red",
    "fails": "red",
    "past_due": "red",
    "unreachable": "red",
    "unauthorised": "red",
    "failing": "red",
    "error": "red",
    "critical": "red",
}
"""The colours of words that tell a state, on a terminal."""
Kind = Literal["text", "id", "number", "time"]
"""A time is in JSON as the API has it, in CSV as ISO 8601."""
Row = Mapping[str, Any]
_encoder = msgspec.json.Encoder(decimal_format="number")


class Column(msgspec.Struct, frozen=True):
    """A column. `show` makes text of a row; by default of the row's value under `key`."""

    title: str
    key: str
    kind: Kind = "text"
    gives_way: bool = False
    """It is left out where the terminal is narrow."""
    show: Callable[[Row], str] | None = None

    def text(self, row: Row) -> str:
        return self.show(row) if self.show is not None else to_text(row.get(self.key))


class Output(msgspec.Struct, frozen=True):
    form: Literal["table", "json", "csv"] = "table"
    wide: bool = False


def with_output(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json, --csv and --wide; the command gets `output`."""

    @wraps(command)
    def invoke(*args: Any, as_json: bool, as_csv: bool, wide: bool, **own: Any) -> Any:
        if as_json and as_csv:
            raise click.UsageError("give either --json or --csv")
        form: Any = "json" if as_json else "csv" if as_csv else "table"
        return command(*args, output=Output(form, wide), **own)

    for option in (
        click.option("--wide", is_flag=True, help="Show whole ids and all columns."),
        click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line."),
    ):
        option(invoke)
    return invoke


def show(
    rows: Sequence[Row], columns: Sequence[Column], output: Output, *, empty: str = "Nothing."
) -> None:
    """Print rows. JSON: the rows as they are. `empty`: what a person reads where there are none."""
    if output.form == "json":
        for row in rows:
            click.echo(_encoder.encode(row).decode())
    elif output.form == "csv":
        click.echo(to_csv(rows, columns), nl=False)
    elif not rows:
        click.echo(empty)
    else:
        console = open_console()
        fits = console.is_terminal and not output.wide
        table, left_out = lay_out(rows, columns, console.width if fits else None)
        print_table(table, console)
        if left_out:
            click.echo(f"Left out: {', '.join(left_out)} (--wide shows all)", err=True)


def open_console() -> Console:
    """Return rich's view of standard output: colours on a terminal alone, and never if NO_COLOR is
    set."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


class TableLayout(msgspec.Struct, frozen=True):
    """A table as it is printed: each column's title, kind, width in cells, and its texts."""

    columns: list[tuple[str, Kind, int, list[str]]]

    def lines(self) -> list[str]:
        """Return the head and the rows as plain text."""
        rows = zip(*([title, *texts] for title, _, _, texts in self.columns), strict=True)
        shapes = [(kind, width) for _, kind, width, _ in self.columns]
        return [
            (" " * GAP)
            .join(_padded(text, *shape) for text, shape in zip(row, shapes, strict=True))
            .rstrip()
            for row in rows
        ]


def lay_out(
    rows: Sequence[Row], columns: Sequence[Column], width: int | None
) -> tuple[TableLayout, list[str]]:
    """Fit rows into `width` cells (None: any), as far as that can be; also return the titles of
    columns that were left out."""
    from rich.cells import cell_len

    texts = {each.title: [printable(each.text(row)) for row in rows] for each in columns}
    kept = list(columns)

    def width_of(column: Column) -> int:
        return max(cell_len(column.title), *(cell_len(each) for each in texts[column.title]))

    def excess() -> int:
        if width is None:
            return 0
        return sum(width_of(each) + GAP for each in kept) - GAP - width

    if excess() > 0:
        for column in columns:
            if column.kind == "id":
                texts[column.title] = shorten_ids(texts[column.title])
    left_out: list[str] = []
    for column in reversed(columns):
        if excess() > 0 and column.gives_way:
            kept.remove(column)
            left_out.insert(0, column.title)
    widths = {each.title: width_of(each) for each in kept}
    over = excess()
    while over > 0:
        widest = max(
            (each for each in kept if each.kind == "text" and widths[each.title] > LEAST_TEXT),
            key=lambda it: widths[it.title],
            default=None,
        )
        if widest is None:
            break
        widths[widest.title] -= 1
        over -= 1
    cut = [
        (each.title, each.kind, widths[each.title], _cut(texts[each.title], widths[each.title]))
        for each in kept
    ]
    return TableLayout(cut), left_out


def _cut(texts: Sequence[str], width: int) -> list[str]:
    from rich.cells import cell_len, set_cell_size

    return [
        each if cell_len(each) <= width else set_cell_size(each, width - 1).rstrip() + "…"
        for each in texts
    ]


def shorten_ids(ids: Sequence[str]) -> list[str]:
    """Shorten ids such as `key_0192...` to prefix and ending, the ending so long that those of
    different ids differ."""
    distinct = set(ids)
    length = SHORT_ID
    longest = max(map(len, distinct), default=0)
    while length < longest and len({each[-length:] for each in distinct}) < len(distinct):
        length += 1
    return [_shortened(each, length) for each in ids]


def _shortened(text: str, length: int) -> str:
    prefix, mark, rest = text.rpartition("_")
    short = f"{prefix}{mark}…{text[-length:]}"
    return short if mark and len(rest) > length and len(short) < len(text) else text


def print_table(table: TableLayout, console: Console) -> None:
    for line in styled_lines(table):
        console.print(line)


def styled_lines(table: TableLayout) -> list[Text]:
    """Return the head and the rows, with the colours of states."""
    from rich.text import Text

    head = [_padded(title, kind, width) for title, kind, width, _ in table.columns]
    lines = [Text((" " * GAP).join(head).rstrip(), style="bold")]
    for number in range(len(table.columns[0][3])):
        line = Text()
        for position, (_, kind, width, texts) in enumerate(table.columns):
            text = texts[number]
            if position:
                line.append(" " * GAP)
            line.append(_padded(text, kind, width), style=STYLES.get(text, ""))
        line.rstrip()
        lines.append(line)
    return lines


def _padded(text: str, kind: Kind, width: int) -> str:
    from rich.cells import cell_len

    blanks = " " * (width - cell_len(text))
    return blanks + text if kind == "number" else text + blanks


def to_csv(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return RFC 4180 lines under a head of the columns' keys; nothing is shortened, what is not
    there is empty, and no spreadsheet computes a name that somebody chose."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([each.key for each in columns])
    for row in rows:
        texts = (_exact(each, row) for each in columns)
        writer.writerow(["" if text == ABSENT else harmless(text) for text in texts])
    return file.getvalue()


def _exact(column: Column, row: Row) -> str:
    """Return all that a row has of a column; what a row lacks, the column makes of it."""
    value = row.get(column.key)
    if column.kind == "time" and isinstance(value, (int, float)):
        value = datetime.fromtimestamp(value, UTC)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    is_amount = column.kind == "number" and isinstance(value, (int, float, Decimal, str))
    return to_text(value) if is_amount else column.text(row)


def printable(text: str) -> str:
    """Return a text on one line that a terminal shows as it is: a name may hold what moves the
    cursor."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else " " if each in "\n\t" else f"\\u{ord(each):04x}"
        for each in text
    )


def to_text(value: object) -> str:
    """Show a value of JSON in a cell."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:d}"
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(to_text, value)) or ABSENT
    return str(value)


def to_money(amount: str | Decimal | None) -> str:
    """Show an amount with two places at least and six at most. What is less, but something, is
    shown as such; --json and --csv have every digit."""
    if amount is None:
        return ABSENT
    exact = Decimal(amount)
    shown = exact.quantize(Decimal("0.000001"))
    if exact and not shown:
        return "<0.000001" if exact > 0 else ">-0.000001"
    whole, _, places = f"{shown:f}".partition(".")
    return f"{whole}.{places.rstrip('0').ljust(2, '0')}"
