"""Keeps an org's rules for tool calls as one document, of which one version holds at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.mcp.tables import rules as table
from gateway.tenancy.errors import InvalidField
from mcp_bridge.errors import PolicyRefused
from mcp_bridge.trust.call_records import Rules
from mcp_bridge.trust.policy import ToolRule

MAX_BYTES = 200 * 1024


async def read_rules(conn: AsyncConnection, *, org_id: str) -> Rules:
    """Return the rules; without any, everything that was approved may be called."""
    body = await conn.scalar(sa.select(table.c.body).where(table.c.org_id == org_id))
    return Rules.stored([] if body is None else msgspec.json.decode(body, type=list[ToolRule]))


async def replace_rules(
    conn: AsyncConnection,
    *,
    org_id: str,
    rules: Iterable[ToolRule],
    actor: Actor,
    check: Callable[[Rules], None] = lambda _: None,
) -> Rules:
    """Replace all rules. `check`: gets those that stand, under their lock. Raises: InvalidField."""
    wanted = list(rules)
    try:
        found = Rules.of(wanted)
    except PolicyRefused as error:
        raise InvalidField(f"rules.{error.rule}.{error.field}", error.message) from None
    body = msgspec.json.encode(wanted).decode()
    if len(body) > MAX_BYTES:
        raise InvalidField("rules", f"more than {MAX_BYTES} bytes")
    none = insert(table).values(org_id=org_id, body="[]")
    await conn.execute(none.on_conflict_do_nothing(index_elements=["org_id"]))
    own = table.c.org_id == org_id
    await conn.execute(sa.select(table.c.org_id).where(own).with_for_update())
    before = await read_rules(conn, org_id=org_id)
    check(before)
    changed = {"body": body, "updated_at": sa.func.now()}
    await conn.execute(sa.update(table).where(own).values(**changed))
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="mcp.rules_replaced",
        target=org_id,
        before={"version": before.version},
        after={"version": found.version, "rules": wanted},
    )
    return found
