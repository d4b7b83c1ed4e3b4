"""Keeps deliveries of webhooks: one event on its way to one endpoint, until nobody asks for it any
more. An event is sent at least once, always under the same id."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.tenancy.errors import NotFound, ReadOnly
from gateway.webhooks.endpoints import disable_endpoint, get_endpoint
from gateway.webhooks.queue import LIFETIME_S, PENDING, DeliveryQueue, in_s, to_row
from gateway.webhooks.tables import deliveries
from gateway.wire.admin.webhook_events import PING, EndpointPing, WebhookEvent

SENDER = Actor(kind="system", id="webhooks")
"""The actor that disables an endpoint whose receiver answers 410 (Gone)."""


class DeliveryRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    endpoint_id: str
    event_id: str
    """The header `webhook-id`: what a receiver tells repeated ones by."""
    event_type: str
    state: str
    attempts: int
    due_at: datetime
    expires_at: datetime
    """Given up then."""
    status: int | None
    """The HTTP status of the last attempt; None: no answer came."""
    failure: str | None
    created_at: datetime
    ended_at: datetime | None


class LeasedDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery with all that its holder needs to try it."""

    id: str
    org_id: str
    receiver_id: str
    """The endpoint's id."""
    event_id: str
    body: str
    attempts: int
    """The number of attempts, with this one."""
    url: str
    secret_sealed: bytes
    secret_id: str
    older_secret_sealed: bytes | None
    older_secret_id: str | None


async def _disable(conn: AsyncConnection, delivery: LeasedDelivery) -> None:
    await disable_endpoint(
        conn, org_id=delivery.org_id, endpoint_id=delivery.receiver_id, actor=SENDER
    )


QUEUE = DeliveryQueue(
    table=deliveries,
    receivers="webhook_endpoints",
    receiver="endpoint_id",
    open="r.disabled_at IS NULL AND r.archived_at IS NULL",
    columns="""d.event_id, d.body, d.attempts, r.url, r.secret_sealed, r.secret_id,
        CASE WHEN r.older_secret_expires_at > now() THEN r.older_secret_sealed END
            AS older_secret_sealed,
        CASE WHEN r.older_secret_expires_at > now() THEN r.older_secret_id END AS older_secret_id
    """,
    leased=LeasedDelivery,
    id_prefix="whd_",
    on_gone=_disable,
)

COLUMNS = [deliveries.c[name] for name in DeliveryRecord.__struct_fields__]


def select_deliveries(org_id: str, endpoint_id: str, *, state: str | None = None) -> sa.Select[Any]:
    """Select deliveries to an endpoint of an org, for a page; None: in any state."""
    found = sa.select(*COLUMNS).where(deliveries.c.org_id == org_id)
    found = found.where(deliveries.c.endpoint_id == endpoint_id)
    return found if state is None else found.where(deliveries.c.state == state)


async def count_deliveries(conn: AsyncConnection, *, org_id: str) -> dict[tuple[str, str], int]:
    """Count deliveries of an org by endpoint and state."""
    counted = sa.select(deliveries.c.endpoint_id, deliveries.c.state, sa.func.count())
    counted = counted.where(deliveries.c.org_id == org_id)
    counted = counted.group_by(deliveries.c.endpoint_id, deliveries.c.state)
    return {(row[0], row[1]): int(row[2]) for row in await conn.execute(counted)}


async def get_delivery(
    conn: AsyncConnection, *, org_id: str, endpoint_id: str, delivery_id: str
) -> DeliveryRecord:
    """Raises: NotFound."""
    found = select_deliveries(org_id, endpoint_id).where(deliveries.c.id == delivery_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("delivery_id", f"no delivery {delivery_id!r}")
    return DeliveryRecord(**row._mapping)


async def ping_endpoint(
    conn: AsyncConnection, *, org_id: str, endpoint_id: str, now: datetime, actor: Actor
) -> DeliveryRecord:
    """Send an endpoint a test event. Raises: NotFound, ReadOnly."""
    await _check_open(conn, org_id, endpoint_id)
    data = EndpointPing(organization_id=org_id, endpoint_id=endpoint_id)
    event = WebhookEvent(type=PING, timestamp=now, data=data)
    row = to_row(QUEUE, org_id, endpoint_id, f"ping_{uuid7().hex}", event)
    added = sa.insert(deliveries).values(**row, expires_at=in_s(LIFETIME_S)).returning(*COLUMNS)
    made = DeliveryRecord(**(await conn.execute(added)).one()._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="webhook_endpoint.pinged",
        target=endpoint_id,
        after={"delivery_id": made.id},
    )
    return made


async def redeliver(
    conn: AsyncConnection, *, org_id: str, endpoint_id: str, delivery_id: str, actor: Actor
) -> DeliveryRecord:
    """Try a delivery now, and for another day, whatever became of it, under the same event id.
    Raises: NotFound, ReadOnly."""
    await _check_open(conn, org_id, endpoint_id)
    mine = sa.and_(
        deliveries.c.id == delivery_id,
        deliveries.c.org_id == org_id,
        deliveries.c.endpoint_id == endpoint_id,
    )
    again = sa.update(deliveries).where(mine)
    again = again.values(
        state=PENDING,
        attempts=0,
        due_at=sa.func.now(),
        expires_at=in_s(LIFETIME_S),
        leased_by=None,
        leased_until=None,
        ended_at=None,
    )
    row = (await conn.execute(again.returning(*COLUMNS))).one_or_none()
    if row is None:
        raise NotFound("delivery_id", f"no delivery {delivery_id!r}")
    made = DeliveryRecord(**row._mapping)
    await record(
        conn,
        org_id=org_id,
        actor=actor,
        action="webhook_delivery.redelivered",
        target=delivery_id,
        after={"endpoint_id": endpoint_id, "event_id": made.event_id},
    )
    return made


async def _check_open(conn: AsyncConnection, org_id: str, endpoint_id: str) -> None:
    """Raises: NotFound, ReadOnly."""
    endpoint = await get_endpoint(conn, org_id=org_id, endpoint_id=endpoint_id)
    if endpoint.archived_at is not None:
        raise ReadOnly("endpoint_id", "an archived endpoint is sent nothing")
    if endpoint.disabled_at is not None:
        raise ReadOnly("endpoint_id", "a disabled endpoint is sent nothing")
