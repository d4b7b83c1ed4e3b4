"""Reads the calls of MCP servers out of the audit log, newest first, with names beside ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.tables import entries
from gateway.auth.tables import oauth_clients
from gateway.tenancy.member_tables import users
from gateway.tenancy.tables import api_keys, projects

CallKind = Literal["called", "denied", "read", "sampled"]
KINDS: tuple[CallKind, ...] = get_args(CallKind)
COLUMNS = (
    *(entries.c.sequence, entries.c.id, entries.c.occurred_at, entries.c.action, entries.c.target),
    *(entries.c.project_id, entries.c.actor_id, entries.c.on_behalf_of, entries.c.after),
)


class LoggedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a server, or one that was refused. `about`: what the log says of it."""

    sequence: int
    occurred_at: datetime
    kind: str
    server: str
    client_id: str
    subject_id: str | None
    project_id: str | None
    about: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the tool, the model that answered a server, or the name of what was read."""
        found = self.about.get("tool") or self.about.get("name") or self.about.get("model")
        return str(found or "")

    @property
    def outcome(self) -> str:
        """Return how it ended; of one that was refused, why."""
        return str(self.about.get("outcome") or self.about.get("reason") or "")


async def read_calls(
    conn: AsyncConnection,
    org_id: str,
    *,
    start: datetime,
    end: datetime,
    kinds: Iterable[CallKind] = KINDS,
    server: str = "",
    client_id: str = "",
    before: int | None = None,
    limit: int,
) -> tuple[list[LoggedCall], bool]:
    """Return a page, newest first, and whether there are older ones. `before`: the sequence of the
    last one of the page before."""
    where = [entries.c.org_id == org_id, entries.c.occurred_at.between(start, end)]
    if server:
        where.append(entries.c.target == server)
    if client_id:
        where.append(entries.c.actor_id == client_id)
    if before is not None:
        where.append(entries.c.sequence < before)
    # One walk down an index for each kind: the log of an organization may hold anything else.
    parts = [
        sa.select(*COLUMNS)
        .where(*where, entries.c.action == f"mcp.{kind}")
        .order_by(entries.c.sequence.desc())
        .limit(limit + 1)
        .subquery()
        for kind in kinds
    ]
    found = sa.union_all(*(sa.select(part) for part in parts)).subquery()
    newest = sa.select(found).order_by(found.c.sequence.desc()).limit(limit + 1)
    rows = (await conn.execute(newest)).all()
    return [to_call(row) for row in rows[:limit]], len(rows) > limit


def to_call(row: Any) -> LoggedCall:
    return LoggedCall(
        sequence=row.sequence,
        occurred_at=row.occurred_at,
        kind=row.action.removeprefix("mcp."),
        server=row.target,
        client_id=row.actor_id,
        subject_id=row.on_behalf_of,
        project_id=row.project_id,
        about=msgspec.json.decode(row.after) if row.after else {},
    )


async def names_of(conn: AsyncConnection, org_id: str, ids: Iterable[str | None]) -> dict[str, str]:
    """Return the names of projects, keys, OAuth clients and people, by id, of those that are
    there."""
    wanted = {each for each in ids if each}
    if not wanted:
        return {}
    places = (
        (projects, projects.c.name),
        (api_keys, api_keys.c.name),
        (oauth_clients, oauth_clients.c.name),
        (users, users.c.email),
    )
    named = sa.union_all(
        *(
            sa.select(table.c.id, name.label("name")).where(
                table.c.id.in_(wanted), sa.or_(table.c.org_id == org_id, table.c.org_id.is_(None))
            )
            for table, name in places
        )
    )
    return {row.id: row.name for row in await conn.execute(named)}
