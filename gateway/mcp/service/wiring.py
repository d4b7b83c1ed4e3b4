"""Puts the bridge's guard together: pins and rules from Postgres, counts in Redis, the audit log.
Loaded only where servers are configured."""

from __future__ import annotations

import secrets
import time
from contextlib import AsyncExitStack

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import Actor
from gateway.ids import uuid7_text
from gateway.mcp.approvals import PostgresApprovals
from gateway.mcp.call_arguments import CallArguments
from gateway.mcp.calls import RedisCalls
from gateway.mcp.known import CachedTrust, ChangeFeed
from gateway.mcp.metered import CallMeter
from gateway.mcp.records import AuditRecords
from gateway.tenancy.changes import EVERYTHING
from mcp_bridge.routing.catalog import Catalog
from mcp_bridge.server.list_watch import Watches
from mcp_bridge.trust.approvals import Approvals
from mcp_bridge.trust.call_permit import OnFinding
from mcp_bridge.trust.trust import Trust


async def open_records(
    stack: AsyncExitStack, db: AsyncEngine, on_finding: OnFinding
) -> AuditRecords:
    records = AuditRecords(db, on_finding)
    records.start()
    stack.push_async_callback(records.close)
    return records


async def open_feed(stack: AsyncExitStack, redis: Redis) -> ChangeFeed:
    feed = ChangeFeed(redis)
    await feed.start()
    stack.push_async_callback(feed.close)
    return feed


async def open_trust(
    stack: AsyncExitStack,
    db: AsyncEngine,
    feed: ChangeFeed,
    meter: CallMeter,
    records: AuditRecords,
    *,
    memory: RedisCalls,
    shown: CallArguments,
    on_finding: OnFinding,
) -> Trust:
    """Open the guard; it is closed with `stack`, after the bridge. `shown`: seals what who decides
    sees of a call."""
    known = CachedTrust(db, feed)
    trust = Trust(
        catalog=Catalog(known),
        rules=known,
        approvals=open_approvals(db, shown=shown),
        memory=memory,
        records=records,
        new_id=uuid7_text,
        meter=meter,
        on_finding=on_finding,
    )
    stack.push_async_callback(trust.close)
    return trust


def tell_of(feed: ChangeFeed, watches: Watches) -> None:
    """Tell clients that listen of approvals and rules that changed, after the caches forgot
    them."""

    def decided(org_id: str) -> None:
        watches.decided(None if org_id == EVERYTHING else org_id)

    feed.forgetting.append(decided)


def open_approvals(
    db: AsyncEngine, decider: Actor | None = None, shown: CallArguments | None = None
) -> Approvals:
    """Open the approvals. `decider`: in whose name they are answered."""
    return Approvals(
        PostgresApprovals(db, decider, shown),
        now_s=time.time,
        new_id=lambda: f"mcpapp_{uuid7_text()}",
        new_nonce=lambda: secrets.token_hex(16),
    )
