"""From what has happened to deliveries that wait: each alert, and each state that an invoice has
entered, once, to each endpoint that asked.

Above: `sender`. Below: `billing.alerts` and `billing.invoices.transitions`, whose rows are the
outbox, and `deliveries`. A row is marked in the transaction that writes its deliveries, under its
lock: no crash loses it, and two gateways at once take different ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import alerts
from billing.invoices import transitions
from gateway.webhooks.deliveries import add_deliveries, to_row
from gateway.webhooks.tables import endpoints
from gateway.wire.webhook_events import Event, invoice_event, to_event

BATCH = 100


class Happened(msgspec.Struct, frozen=True):
    org_id: str
    id: str
    event: Event


async def fan_out(db: AsyncEngine) -> int:
    """Dispatch the oldest of both kinds; returns how many. `db`: of a role that sees every org's
    rows."""
    async with db.begin() as conn:
        raised = await alerts.undispatched(conn, BATCH)
        entered = await transitions.undispatched(conn, BATCH)
        found = [Happened(each.org_id, each.id, to_event(each)) for each in raised]
        found += [Happened(each.org_id, each.id, invoice_event(each)) for each in entered]
        if not found:
            return 0
        await _deliver(conn, found)
        await alerts.mark_dispatched(conn, [each.id for each in raised])
        await transitions.mark_dispatched(conn, [each.id for each in entered])
    return len(found)


async def _deliver(conn: AsyncConnection, found: Sequence[Happened]) -> None:
    columns = (endpoints.c.org_id, endpoints.c.id, endpoints.c.event_types)
    listening = sa.select(*columns).where(
        endpoints.c.org_id.in_({each.org_id for each in found}),
        endpoints.c.archived_at.is_(None),
        endpoints.c.disabled_at.is_(None),
    )
    asked = list(await conn.execute(listening))
    rows = [
        to_row(each.org_id, endpoint.id, each.id, each.event)
        for each in found
        for endpoint in asked
        if endpoint.org_id == each.org_id and each.event.type in endpoint.event_types
    ]
    await add_deliveries(conn, rows)
