"""Stores what an org approved of its MCP servers, to the byte. The caller announces the change
(`gateway.mcp.known.announce`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.credential_forms import CREDENTIAL
from gateway.mcp.tables import pins
from gateway.tenancy.errors import InvalidField, NotFound
from mcp_bridge.pinning import ApprovedPins, Change, Key, Kind, Pin

MAX_PINS = 50_000
"""One org may have at most this many approved things."""
MAX_RECORDED = 500
"""Names in one entry of the audit log."""


async def read_pins(conn: AsyncConnection, *, org_id: str, server: str) -> ApprovedPins:
    found = await read_pins_of(conn, org_id=org_id, servers=[server])
    return found.get(server, ApprovedPins({}))


async def read_pins_of(
    conn: AsyncConnection, *, org_id: str, servers: Sequence[str]
) -> dict[str, ApprovedPins]:
    """Return what is approved of each of some servers; one of which nothing is, is left out."""
    found: defaultdict[str, dict[Key, Pin]] = defaultdict(dict)
    asked = sa.select(pins).where(pins.c.org_id == org_id, pins.c.server.in_(servers))
    for row in await conn.execute(asked):
        pin = Pin(row.kind, row.name, row.digest, bytes(row.body))
        found[row.server][pin.key] = pin
    return {server: ApprovedPins(each) for server, each in found.items()}


def select_pins(org_id: str, server: str) -> sa.Select[Any]:
    """Select what is approved of a server, without its bytes."""
    columns = (pins.c.kind, pins.c.name, pins.c.digest, pins.c.approved_at)
    return sa.select(*columns).where(pins.c.org_id == org_id, pins.c.server == server)


async def find_pin(
    conn: AsyncConnection, *, org_id: str, server: str, kind: Kind, name: str
) -> Pin | None:
    """Return one thing as it was approved; None: it is not."""
    own = (pins.c.org_id == org_id, pins.c.server == server)
    asked = sa.select(pins).where(*own, pins.c.kind == kind, pins.c.name == name)
    row = (await conn.execute(asked)).one_or_none()
    return None if row is None else Pin(row.kind, row.name, row.digest, bytes(row.body))


async def count_pins(conn: AsyncConnection, *, org_id: str) -> dict[str, int]:
    """Return how much is approved, by server."""
    counted = sa.select(pins.c.server, sa.func.count()).where(pins.c.org_id == org_id)
    found = await conn.execute(counted.group_by(pins.c.server))
    return {row.server: int(row[1]) for row in found}


async def approve_changes(
    conn: AsyncConnection, *, org_id: str, server: str, pin_changes: Iterable[Change], actor: Actor
) -> int:
    """Approve changes as they were shown; return how many. Raises: InvalidField, for more than an
    org may have."""
    wanted = list(pin_changes)
    for change in wanted:
        if change.was is not None:
            await conn.execute(sa.delete(pins).where(*_is(org_id, server, change.was)))
        if change.now is not None:
            row: dict[str, Any] = {
                "kind": change.now.kind,
                "name": change.now.name,
                "digest": change.now.digest,
                "body": change.now.body,
            }
            added = insert(pins).values(org_id=org_id, server=server, **row)
            keys = ["org_id", "server", "kind", "name"]
            await conn.execute(added.on_conflict_do_update(index_elements=keys, set_=row))
    count = sa.select(sa.func.count()).where(pins.c.org_id == org_id)
    if (await conn.scalar(count) or 0) > MAX_PINS:
        raise InvalidField("changes", f"an organization has at most {MAX_PINS} approved things")
    for start in range(0, len(wanted), MAX_RECORDED):
        part = wanted[start : start + MAX_RECORDED]
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="mcp.approved",
            target=server,
            before={"pins": [_said(one.was) for one in part if one.was]},
            after={"pins": [_said(one.now) for one in part if one.now]},
        )
    return len(wanted)


async def revoke_pins(
    conn: AsyncConnection, *, org_id: str, server: str, keys: Collection[Key] | None, actor: Actor
) -> int:
    """Revoke these approvals, or, with None, all of them, among them how the server is reached: it
    is not dialled any more. Return how many there were. Raises: NotFound, if there was none."""
    where = [pins.c.org_id == org_id, pins.c.server == server]
    if keys is not None:
        where.append(sa.tuple_(pins.c.kind, pins.c.name).in_(list(keys)))
    gone = await conn.execute(sa.delete(pins).where(*where).returning(*pins.c))
    found = [Pin(row.kind, row.name, row.digest, bytes(row.body)) for row in gone]
    if not found:
        what = "nothing" if keys is None else "nothing of that name"
        raise NotFound("server" if keys is None else "tool", f"{what} is approved of {server!r}")
    for start in range(0, len(found), MAX_RECORDED):
        await record(
            conn,
            org_id=org_id,
            actor=actor,
            action="mcp.revoked",
            target=server,
            before={"pins": [_said(pin) for pin in found[start : start + MAX_RECORDED]]},
        )
    return len(found)


def _is(org_id: str, server: str, pin: Pin) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        pins.c.org_id == org_id,
        pins.c.server == server,
        pins.c.kind == pin.kind,
        pins.c.name == pin.name,
    )


def _said(pin: Pin) -> list[str]:
    name = "(masked)" if CREDENTIAL.search(pin.name) else pin.name
    return [pin.kind, name, pin.digest]
