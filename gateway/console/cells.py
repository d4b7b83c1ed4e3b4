"""Writes the cells of a table's rows as HTML. A page has a thousand of them: here, not in a
template, where each takes several times as long.

All that a row holds is escaped; what is exact stands in a title.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, tzinfo
from typing import Any

from markupsafe import Markup, escape

from gateway.console import formats
from gateway.console.tables import Table, TableColumn, raw

COPY_ICON = Markup(
    '<svg viewBox="0 0 16 16" width="14" height="14" fill="none" stroke="currentColor"'
    ' stroke-width="1.4" aria-hidden="true">'
    '<rect x="5.5" y="5.5" width="8" height="8" rx="1.5"/>'
    '<path d="M10.5 3.5v-.5a1 1 0 0 0-1-1h-6.5a1 1 0 0 0-1 1v6.5a1 1 0 0 0 1 1h.5"/>'
    "</svg>"
)
LONG_CHARS = 28
"""A longer text may break anywhere."""
NEAR = 0.8
"""A bar is amber from this part of its limit on."""


class CellWriter:
    """Writes for a viewer. `now`: what moments are told by. `zone`: theirs."""

    def __init__(self, now: datetime, zone: tzinfo) -> None:
        self._now, self._zone = now, zone
        self._by_kind: dict[str, Callable[[Any], str]] = {
            "usd": lambda value: titled(formats.exact_usd(value), formats.usd(value)),
            "count": lambda value: titled(f"{value:,}", formats.count(value)),
            "percent": formats.percent,
            "ms": formats.ms,
            "bytes": formats.size,
            "time": lambda value: formats.time_tag(value, self._now, self._zone),
            "moment": lambda value: formats.moment(value, self._zone),
            "clock": lambda value: formats.clock_tag(value, self._zone),
            "id": copied_id,
            "code": lambda value: f"<code>{escape(value)}</code>",
            "bar": lambda value: (
                f'{bar(value)} <span class="dim">{formats.percent(value, 0)}</span>'
            ),
            "tag": lambda value: tag(value) if isinstance(value, str) else tag(*value),
        }

    def row(self, table: Table, row: Any, is_drawn: bool = False) -> Markup:
        """Return a row's cells. `is_drawn`: a chart is drawn of them, which reads `data-v`."""
        cells = []
        for column in table.shown:
            value = column.of(row)
            kind = f' class="{column.css}"' if column.css else ""
            label = f' data-label="{escape(column.title)}"'
            data = f' data-v="{raw(value)}"' if is_drawn else ""
            cells.append(f"<td{kind}{label}{data}>{self._cell(column, row, value)}</td>")
        return Markup("".join(cells))

    def _cell(self, column: TableColumn, row: Any, value: Any) -> str:
        to = column.link(row) if column.link is not None else None
        detail = column.detail(row) if column.detail is not None else None
        if value is None:
            shown = "" if detail else f'<span class="dim none">{formats.NOTHING}</span>'
        elif to and column.kind == "id":
            shown = short(value)
        elif (write := self._by_kind.get(column.kind)) is not None:
            shown = write(value)
        elif isinstance(value, str) and len(value) > LONG_CHARS:
            shown = Markup('<span class="long">{}</span>').format(value)
        else:
            shown = escape(value)
        if to:
            shown = f'<a href="{escape(to)}">{shown}</a>'
        return f'{shown} <span class="dim">{escape(detail)}</span>' if detail else shown


def titled(exact: str, shown: str) -> str:
    """Return a figure; neither text has anything to escape."""
    return f'<span title="{exact}">{shown}</span>'


def tag(word: str, tone: str = "plain") -> Markup:
    return Markup('<span class="tag {}">{}</span>').format(tone, word)


def short(text: str) -> Markup:
    """Show an id: shortened in the middle, whole on hover."""
    return Markup('<span class="id" title="{}">{}</span>').format(text, formats.short_id(text))


def copied_id(text: str) -> Markup:
    """Show an id, with a button that copies all of it."""
    if not text:
        return Markup(formats.NOTHING)
    return Markup(
        '{}<button type="button" class="copy" data-copy="{}" aria-label="Copy {}">{}</button>'
    ).format(short(text), text, text, COPY_ICON)


def bar(part: float | None, held: float = 0, label: str = "", full: bool = False) -> Markup:
    """Show `part` of a limit, 0 to 1, and what is `held` besides: green, amber from 80 %, red at
    100 %."""
    if part is None:
        return Markup('<span class="dim">no limit</span>')
    whole = part + held
    tone = " over" if whole >= 1 else " near" if whole >= NEAR else ""
    used, more = (round(min(each * 100, 100), 1) for each in (part, held))
    rest = Markup('<rect class="held" x="{}" width="{}" height="6"/>').format(used, more)
    return Markup(
        '<svg class="bar{}{}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img"'
        ' aria-label="{}"><rect width="{}" height="6"/>{}</svg>'
    ).format(
        tone,
        " full" if full else "",
        label or formats.percent(whole, 0),
        used,
        rest if held else "",
    )
