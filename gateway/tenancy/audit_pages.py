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
from gateway.tenancy.projects import with_project_names
from gateway.tenancy.tables import api_keys

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
    key_name: str | None
    """The name that the API key has now by which it was done; None: none was used."""


async def list_entries(
    conn: AsyncConnection, org_id: str, query: AuditFilter
) -> tuple[list[AuditEvent], bool]:
    """The page, and whether there is more in the direction it was asked for.

    Raises: UnknownAuditEntry (after, before).
    """
    if query.tenant_only:
        return [], False
    listed = select_entries(org_id).where(*_conditions(org_id, query))
    if query.after is not None:
        listed = listed.where(entries.c.sequence < _sequence_of(org_id, query.after))
    if query.before is not None:
        listed = listed.where(entries.c.sequence > _sequence_of(org_id, query.before))
    backwards = query.before is not None and query.after is None
    order = entries.c.sequence.asc() if backwards else entries.c.sequence.desc()
    rows = list(await conn.execute(listed.order_by(order).limit(query.limit + 1)))
    if not rows:
        await _require(conn, org_id, after=query.after, before=query.before)
    page = [to_event(row) for row in rows[: query.limit]]
    return page[::-1] if backwards else page, len(rows) > query.limit


def _sequence_of(org_id: str, entry_id: str) -> sa.ScalarSelect[int]:
    """Select where an entry stands; null: there is none."""
    own = entries.alias("cursor").c
    found = sa.select(own.sequence).where(own.org_id == org_id, own.id == entry_id)
    return found.scalar_subquery()


async def _require(conn: AsyncConnection, org_id: str, **cursors: str | None) -> None:
    """Raises: UnknownAuditEntry, if one of the entries behind which to list is not there."""
    wanted = {name: entry_id for name, entry_id in cursors.items() if entry_id is not None}
    own = entries.c
    found = sa.select(own.id).where(own.org_id == org_id, own.id.in_(wanted.values()))
    there = set(await conn.scalars(found)) if wanted else set()
    for name, entry_id in wanted.items():
        if entry_id not in there:
            raise UnknownAuditEntry(name)


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


def select_entries(org_id: str) -> sa.Select[Any]:
    """Select entries with the names of project and key and the actors' addresses as they are
    now."""
    own = users.c
    email = sa.select(own.email).where(own.org_id == org_id)
    of_actor = email.where(own.id == entries.c.actor_id).scalar_subquery()
    of_person = email.where(own.id == entries.c.on_behalf_of).scalar_subquery()
    key = sa.select(api_keys.c.name).where(api_keys.c.org_id == org_id)
    of_key = key.where(api_keys.c.id == entries.c.actor_id).scalar_subquery()
    labels = of_actor.label("of_actor"), of_person.label("of_person"), of_key.label("key_name")
    listed = sa.select(entries, *labels)
    named = with_project_names(listed, entries.c.project_id, org_id)
    return named.where(entries.c.org_id == org_id)


def to_event(row: sa.Row[Any]) -> AuditEvent:
    values = dict(row._mapping)
    addresses = (row.actor_id, values.pop("of_actor")), (row.on_behalf_of, values.pop("of_person"))
    emails = {user_id: email for user_id, email in addresses if email is not None}
    return AuditEvent(**values, emails=emails)


async def get_entry(conn: AsyncConnection, org_id: str, entry_id: str) -> AuditEvent:
    """Raises: NotFound."""
    row = (await conn.execute(select_entries(org_id).where(entries.c.id == entry_id))).one_or_none()
    if row is None:
        raise NotFound("audit_log", f"no entry {entry_id!r}")
    return to_event(row)


async def last_sequence(conn: AsyncConnection, org_id: str) -> int:
    """Return how many entries an organization's log has; 0: none."""
    found = await conn.scalar(sa.select(heads.c.sequence).where(heads.c.org_id == org_id))
    return int(found or 0)
