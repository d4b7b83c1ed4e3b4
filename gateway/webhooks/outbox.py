"""From alerts that stand to deliveries that wait: each alert once, to each endpoint that asked.

Above: `sender`. Below: `billing.alerts`, whose rows are the outbox, and `deliveries`. An alert is
marked in the transaction that writes its deliveries, under its lock: no crash loses it, and two
gateways at once take different ones.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts import mark_dispatched, undispatched
from gateway.webhooks.deliveries import add_deliveries, to_row
from gateway.webhooks.tables import endpoints
from gateway.wire.webhook_events import event_type, to_event

BATCH = 100


async def fan_out(db: AsyncEngine) -> int:
    """Dispatch the oldest alerts; returns how many. `db`: of a role that sees every org's rows."""
    async with db.begin() as conn:
        found = await undispatched(conn, BATCH)
        if not found:
            return 0
        columns = (endpoints.c.org_id, endpoints.c.id, endpoints.c.event_types)
        listening = sa.select(*columns).where(
            endpoints.c.org_id.in_({each.org_id for each in found}),
            endpoints.c.archived_at.is_(None),
            endpoints.c.disabled_at.is_(None),
        )
        asked = list(await conn.execute(listening))
        rows = [
            to_row(alert.org_id, endpoint.id, alert.id, to_event(alert))
            for alert in found
            for endpoint in asked
            if endpoint.org_id == alert.org_id and event_type(alert) in endpoint.event_types
        ]
        await add_deliveries(conn, rows)
        await mark_dispatched(conn, [each.id for each in found])
    return len(found)
