"""Finds what was changed in a range of time, for charts: starts of another release, settings that
came into force, plans, models, servers, rules.

They are entries of the audit log: who may read that sees them. What belongs to the installation
stands in the log of the operator's organization, and so on its charts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa

from billing.queries import Query
from billing.tables import AnyRow
from gateway.audit.tables import entries
from gateway.console.hidden import visible

MAX_CHANGES = 12
"""The newest of a range; the others are counted."""
MAX_SHOWN = 4
"""Lines of one change of the settings file."""
MAX_CHARS = 160
NEEDS = "admin:audit"
NAMES: Mapping[str, str] = {
    "release.started": "release {} started",
    "settings.reloaded": "settings reloaded",
    "prices.loaded": "prices loaded",
    "organization.updated": "organization changed",
    "rate_limit.updated": "limits changed",
    "mcp.rules_replaced": "tool rules changed",
    **{
        f"{kind}.{what}": f"{noun} {{}} {verb}"
        for kind, noun in (
            ("model", "model"),
            ("mcp_server", "server"),
            ("price_book", "price book"),
            ("deadlines", "deadline"),
            ("plan", "plan"),
        )
        for what, verb in (
            ("created", "added"),
            ("updated", "changed"),
            ("removed", "removed"),
            ("archived", "archived"),
        )
    },
}
"""The actions that are shown, and their words around the target."""
SETTINGS = "settings.reloaded"
"""The action whose entry has the lines that changed."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: what a hairline is called. `id`: of its entry in the audit log."""

    at: datetime
    name: str
    id: str


class Changes(msgspec.Struct, frozen=True):
    """The newest first. `num_more`: older ones that are left out."""

    shown: Sequence[Change]
    num_more: int


def changes_query(org: str, start: datetime, end: datetime) -> Query[Changes]:
    """Return the query of the newest changes of a range. Its connection sees the org's log."""
    e = entries.c
    found = (
        sa.select(
            e.occurred_at,
            e.id,
            e.action,
            e.target,
            sa.case((e.action == SETTINGS, e.after)).label("after"),
            sa.func.count().over().label("number"),
        )
        .where(e.org_id == org, e.action.in_(NAMES))
        .where(e.occurred_at >= start, e.occurred_at < end)
        .order_by(e.sequence.desc())
        .limit(MAX_CHANGES)
    )
    return Query(found, _read)


def _read(rows: Sequence[AnyRow]) -> Changes:
    shown = [
        Change(at=row.occurred_at.astimezone(UTC), id=row.id, name=_name_of(row)) for row in rows
    ]
    return Changes(shown, rows[0].number - len(rows) if rows else 0)


def _name_of(row: AnyRow) -> str:
    name = NAMES[row.action].format(row.target)
    if row.after is not None:
        lines = msgspec.json.decode(row.after).get("changes") or ()
        told = "; ".join(map(str, lines[:MAX_SHOWN]))
        more = len(lines) - MAX_SHOWN
        name += f": {told}" if told else ""
        name += f"; {more} more" if more > 0 else ""
    return visible(name[:MAX_CHARS] + ("…" if len(name) > MAX_CHARS else ""))
