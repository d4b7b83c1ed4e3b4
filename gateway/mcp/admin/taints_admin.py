"""Shows who is tainted, and lifts it."""

from __future__ import annotations

import time

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.mcp.calls import Taint, taints_of
from gateway.tenancy.errors import NotFound


async def lifting(
    conn: AsyncConnection, redis: Redis, *, org_id: str, client: str, actor: Actor
) -> list[Taint]:
    """Record what `calls.lift` is about to lift. A failure in between leaves an audit entry too
    many, and nobody clean without one. Raises: NotFound."""
    found = await taints_of(redis, org_id=org_id, client=client, now_s=time.time())
    if not found:
        raise NotFound("client_id", f"nobody who uses {client} is tainted")
    servers = sorted({name for each in found for name in each.servers})
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="mcp.taint_lifted",
        target=client,
        before={"callers": len(found), "servers": servers},
    )
    return found
