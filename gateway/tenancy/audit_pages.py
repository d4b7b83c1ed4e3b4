"""Pages of the audit log, the newest entry first, filtered as OpenAI's SDK filters.

A page begins behind an entry (`after`: what is older) or ends before one (`before`: what is newer);
entries are numbered, so that is where it stands, whatever the filters are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.chain import AuditEntry
from gateway.audit.errors import UnknownAuditEntry
from gateway.audit.tables import entries, heads
from gateway.tenancy.errors import NotFound
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import projects

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class AuditFilter(Protocol):
    """Selects the entries of a page, as the wire's query does; moments are in Unix seconds."""

    after: str | None
    before: str | None
    limit: int
    actor_emails: list[str]
    actor_ids: list[str]
    event_types: list[str]
    project_ids: list[str]
    resource_ids: list[str]
    tenant_only: bool
    effective_after: int | None
    effective_from: int | None
    effective_before: int | None
    effective_until: int | None


class AuditEvent(AuditEntry, frozen=True, kw_only=True):
    """An entry of the log with the names that stand beside its ids."""

    hash: bytes
    project_name: str | None
    emails: Mapping[str, str]
    """The address of each actor that the entry names, by user id."""


async def list_entries(
    conn: AsyncConnection, org_id: str, query: AuditFilter
) -> tuple[list[AuditEvent], bool]:
    """The page, and whether there is more in the direction it was asked for.

    Raises: UnknownAuditEntry (after, before).
    """
    if query.tenant_only:
        return [], False
    listed = sa.select(entries).where(entries.c.org_id == org_id, *_conditions(org_id, query))
    for cursor, name in ((query.after, "after"), (query.before, "before")):
        if cursor is not None:
            stands = await _sequence_of(conn, org_id, cursor, name)
            older = entries.c.sequence < stands
            listed = listed.where(older if name == "after" else entries.c.sequence > stands)
    backwards = query.before is not None and query.after is None
    order = entries.c.sequence.asc() if backwards else entries.c.sequence.desc()
    rows = list(await conn.execute(listed.order_by(order).limit(query.limit + 1)))
    page = rows[: query.limit]
    if backwards:
        page.reverse()
    return await _named(conn, org_id, page), len(rows) > query.limit


async def _sequence_of(conn: AsyncConnection, org_id: str, entry_id: str, param: str) -> int:
    found = sa.select(entries.c.sequence)
    found = found.where(entries.c.org_id == org_id, entries.c.id == entry_id)
    sequence = await conn.scalar(found)
    if sequence is None:
        raise UnknownAuditEntry(param)
    return int(sequence)


def _conditions(org_id: str, query: AuditFilter) -> Iterator[sa.ColumnElement[bool]]:
    if query.event_types:
        yield entries.c.action.in_(query.event_types)
    if query.resource_ids:
        yield entries.c.target.in_(query.resource_ids)
    if query.project_ids:
        yield entries.c.project_id.in_(query.project_ids)
    if query.actor_ids:
        yield _acted(query.actor_ids)
    if query.actor_emails:
        wanted = [email.lower() for email in query.actor_emails]
        named = sa.select(users.c.id).where(users.c.org_id == org_id)
        yield _acted(named.where(sa.func.lower(users.c.email).in_(wanted)))
    # `effective_at` is whole seconds, rounded down.
    moment = entries.c.occurred_at
    if query.effective_after is not None:
        yield moment >= _second(query.effective_after + 1)
    if query.effective_from is not None:
        yield moment >= _second(query.effective_from)
    if query.effective_before is not None:
        yield moment < _second(query.effective_before)
    if query.effective_until is not None:
        yield moment < _second(query.effective_until + 1)


def _acted(whoever: Iterable[str] | sa.Select[Any]) -> sa.ColumnElement[bool]:
    found: Any = whoever
    return sa.or_(entries.c.actor_id.in_(found), entries.c.on_behalf_of.in_(found))


def _second(unix_time: int) -> datetime:
    """The end of the calendar stands for all that is behind it."""
    try:
        return EPOCH + timedelta(seconds=unix_time)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


async def _named(conn: AsyncConnection, org_id: str, rows: list[Any]) -> list[AuditEvent]:
    """Return the entries with the emails and project names as they are now."""
    actors = {row.actor_id for row in rows} | {row.on_behalf_of for row in rows}
    people = sa.select(users.c.id, users.c.email).where(users.c.org_id == org_id)
    found = await conn.execute(people.where(users.c.id.in_(actors - {None})))
    emails = {each.id: each.email for each in found}
    wanted = {row.project_id for row in rows} - {None}
    titles = sa.select(projects.c.id, projects.c.name).where(projects.c.org_id == org_id)
    names = {
        each.id: each.name for each in await conn.execute(titles.where(projects.c.id.in_(wanted)))
    }
    return [
        AuditEvent(**row._mapping, project_name=names.get(row.project_id or ""), emails=emails)
        for row in rows
    ]


async def get_entry(conn: AsyncConnection, org_id: str, entry_id: str) -> AuditEvent:
    """Raises: NotFound."""
    found = sa.select(entries).where(entries.c.org_id == org_id, entries.c.id == entry_id)
    named = await _named(conn, org_id, list(await conn.execute(found)))
    if not named:
        raise NotFound("audit_log", f"no entry {entry_id!r}")
    return named[0]


async def last_sequence(conn: AsyncConnection, org_id: str) -> int:
    """Return how many entries an organization's log has; 0: none."""
    found = await conn.scalar(sa.select(heads.c.sequence).where(heads.c.org_id == org_id))
    return int(found or 0)
