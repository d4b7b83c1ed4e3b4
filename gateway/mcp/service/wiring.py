"""Puts the bridge's guard together: pins and rules from Postgres, counts in Redis, the audit log.
Loaded only where servers are configured."""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import AsyncExitStack

from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from foundation.periodic import Periodic
from gateway.audit.log import Actor
from gateway.db import DATABASE_ERRORS
from gateway.ids import uuid7_text
from gateway.mcp.approvals import PostgresApprovals, count_waiting
from gateway.mcp.call_arguments import CallArguments
from gateway.mcp.calls import RedisCalls
from gateway.mcp.changed_offers import ChangedOffers
from gateway.mcp.known import CachedTrust, ChangeFeed
from gateway.mcp.metered import CallMeter
from gateway.mcp.records import AuditRecords
from gateway.telemetry.metrics import Telemetry
from gateway.tenancy.changes import EVERYTHING
from mcp_bridge.routing.catalog import Catalog
from mcp_bridge.server.list_watch import Watches
from mcp_bridge.trust.approvals import Approvals
from mcp_bridge.trust.call_permit import OnFinding
from mcp_bridge.trust.trust import Trust

log = logging.getLogger(__name__)

COUNT_INTERVAL_S = 30.0


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


async def open_changed_offers(stack: AsyncExitStack, redis: Redis, trust: Trust) -> ChangedOffers:
    """Open what keeps the changes that the guard sees."""
    changed = ChangedOffers(redis)
    changed.start()
    stack.push_async_callback(changed.close)
    trust.catalog.compared.append(changed.note)
    return changed


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


async def open_approvals_count(
    stack: AsyncExitStack, system_db: AsyncEngine, telemetry: Telemetry
) -> None:
    """Show in the metrics how many calls wait for a person."""

    async def count() -> None:
        telemetry.approvals_waiting(await count_waiting(system_db, time.time()))

    counting = Periodic(
        "approvals",
        COUNT_INTERVAL_S,
        count,
        log=log,
        failure="mcp: approvals that wait are not counted",
        expected=DATABASE_ERRORS,
    )
    counting.start()
    stack.push_async_callback(counting.close)


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
