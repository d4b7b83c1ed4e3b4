"""Keeps deliveries: one event on its way to one endpoint, until nobody asks for it any more. A
lease is a bounded time in which one gateway may try; it ends by itself, and what its holder says
afterwards is ignored. So an event is sent at least once, always under the same id. Order is not
kept: what fails holds up nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.audit.log import Actor, record
from gateway.ids import uuid7
from gateway.tenancy.errors import NotFound, ReadOnly
from gateway.webhooks.endpoints import disable_endpoint, get_endpoint
from gateway.webhooks.tables import deliveries
from gateway.wire.admin.webhook_events import PING, EndpointPing, WebhookEvent

LEASE_S = 60.0
"""Longer than an attempt can take, with what is written of it."""
FORGET_S = 30 * 86_400
LIFETIME_S = 24 * 3600.0
"""A delivery is given up this long after its event, or after somebody asked for it again."""
FIRST_DELAY_S = 5.0
GROWTH = 3.0
MAX_DELAY_S = 3 * 3600.0
SPREAD = 0.2
MAX_RETRY_AFTER_S = 3600.0
"""A receiver may put us off by this much at a time."""
MAX_EXPONENT = 16
SWEEP_BATCH = 1000
MAX_FAILURE_LENGTH = 200
PENDING, DELIVERED, DEAD = "pending", "delivered", "dead"
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
    endpoint_id: str
    event_id: str
    body: str
    attempts: int
    """The number of attempts, with this one."""
    url: str
    secret_sealed: bytes
    secret_id: str
    older_secret_sealed: bytes | None
    older_secret_id: str | None


COLUMNS = [deliveries.c[name] for name in DeliveryRecord.__struct_fields__]


def select_deliveries(org_id: str, endpoint_id: str, *, state: str | None = None) -> sa.Select[Any]:
    """Select deliveries to an endpoint of an org, for a page; None: in any state."""
    found = sa.select(*COLUMNS).where(deliveries.c.org_id == org_id)
    found = found.where(deliveries.c.endpoint_id == endpoint_id)
    return found if state is None else found.where(deliveries.c.state == state)


async def get_delivery(
    conn: AsyncConnection, *, org_id: str, endpoint_id: str, delivery_id: str
) -> DeliveryRecord:
    """Raises: NotFound."""
    found = select_deliveries(org_id, endpoint_id).where(deliveries.c.id == delivery_id)
    row = (await conn.execute(found)).one_or_none()
    if row is None:
        raise NotFound("delivery_id", f"no delivery {delivery_id!r}")
    return DeliveryRecord(**row._mapping)


def to_row(org_id: str, endpoint_id: str, event_id: str, event: WebhookEvent) -> dict[str, Any]:
    """Return the row of a new delivery."""
    return {
        "id": f"whd_{uuid7().hex}",
        "org_id": org_id,
        "endpoint_id": endpoint_id,
        "event_id": event_id,
        "event_type": event.type,
        "body": msgspec.json.encode(event).decode(),
    }


async def ping_endpoint(
    conn: AsyncConnection, *, org_id: str, endpoint_id: str, now: datetime, actor: Actor
) -> DeliveryRecord:
    """Send an endpoint a test event. Raises: NotFound, ReadOnly."""
    await _check_open(conn, org_id, endpoint_id)
    data = EndpointPing(organization_id=org_id, endpoint_id=endpoint_id)
    event = WebhookEvent(type=PING, timestamp=now, data=data)
    row = to_row(org_id, endpoint_id, f"ping_{uuid7().hex}", event)
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


def delay_s(attempts: int, retry_after: str | None, draw: Callable[[float, float], float]) -> float:
    """Return the seconds until the next attempt. `retry_after`: the header's text, if there was
    one; a date in it is ignored. `draw`: evenly between two numbers."""
    assert attempts > 0
    exponent = min(attempts - 1, MAX_EXPONENT)
    found = min(FIRST_DELAY_S * GROWTH**exponent, MAX_DELAY_S)
    found *= draw(1 - SPREAD, 1 + SPREAD)
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        found = max(found, min(float(retry_after[:9]), MAX_RETRY_AFTER_S))
    return found


# ---- for whoever sends: of all orgs


async def add_deliveries(conn: AsyncConnection, rows: Sequence[dict[str, Any]]) -> None:
    """Add deliveries; each event goes to an endpoint once."""
    if rows:
        added = insert(deliveries).values(expires_at=in_s(LIFETIME_S))
        once = added.on_conflict_do_nothing(constraint="webhook_deliveries_once")
        await conn.execute(once, rows)


async def lease(
    db: AsyncEngine,
    holder: str,
    *,
    limit: int,
    per_org: int,
    under_way: Collection[LeasedDelivery] = (),
    lease_s: float = LEASE_S,
) -> list[LeasedDelivery]:
    """Lease the next deliveries that are due: with those under way one of each endpoint, and
    `per_org` of each org."""
    wanted = {
        "holder": holder,
        "limit": limit,
        "per_org": per_org,
        "busy": [each.endpoint_id for each in under_way],
        "orgs": [each.org_id for each in under_way],
        "lease_s": lease_s,
    }
    async with db.begin() as conn:
        return [LeasedDelivery(**row._mapping) for row in await conn.execute(_LEASE, wanted)]


_LEASE = sa.text("""
    WITH heads AS (
        SELECT DISTINCT ON (d.endpoint_id) d.id, d.org_id, d.due_at
        FROM webhook_deliveries d JOIN webhook_endpoints e ON e.id = d.endpoint_id
        WHERE d.state = 'pending' AND d.due_at <= now() AND d.expires_at > now()
            AND (d.leased_until IS NULL OR d.leased_until <= now())
            AND e.disabled_at IS NULL AND e.archived_at IS NULL
            AND d.endpoint_id <> ALL(CAST(:busy AS text[]))
        ORDER BY d.endpoint_id, d.due_at, d.event_id
    ),
    ranked AS (
        SELECT id, due_at, row_number() OVER (PARTITION BY org_id ORDER BY due_at, id)
            + (SELECT count(*) FROM unnest(CAST(:orgs AS text[])) o WHERE o = org_id) AS place
        FROM heads
    ),
    locked AS (
        SELECT d.id FROM webhook_deliveries d
        WHERE d.id IN (
                SELECT id FROM ranked WHERE place <= :per_org ORDER BY due_at, id LIMIT :limit)
            AND d.state = 'pending' AND (d.leased_until IS NULL OR d.leased_until <= now())
        FOR UPDATE SKIP LOCKED
    )
    UPDATE webhook_deliveries d
    SET attempts = d.attempts + 1, leased_by = :holder,
        leased_until = now() + make_interval(secs => :lease_s)
    FROM locked, webhook_endpoints e
    WHERE d.id = locked.id AND e.id = d.endpoint_id
    RETURNING d.id, d.org_id, d.endpoint_id, d.event_id, d.body, d.attempts, e.url,
        e.secret_sealed, e.secret_id,
        CASE WHEN e.older_secret_expires_at > now() THEN e.older_secret_sealed END
            AS older_secret_sealed,
        CASE WHEN e.older_secret_expires_at > now() THEN e.older_secret_id END AS older_secret_id
""")


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an attempt. `retry_in_s` None: there is no next one."""

    status: int | None
    failure: str | None
    """None: it was taken."""
    retry_in_s: float | None = None
    gone: bool = False
    """The receiver wants nothing more, ever: its endpoint is disabled."""


async def end_attempt(
    db: AsyncEngine, holder: str, delivery: LeasedDelivery, attempted: AttemptOutcome
) -> str | None:
    """Record an attempt and return the delivery's state; None: the lease was lost meanwhile, and
    somebody else decides."""
    retry_in_s = attempted.retry_in_s
    ended = DELIVERED if attempted.failure is None else DEAD
    next_at = deliveries.c.due_at if retry_in_s is None else in_s(retry_in_s)
    retried = sa.false() if retry_in_s is None else next_at < deliveries.c.expires_at
    state = sa.case((retried, PENDING), else_=ended)
    held = sa.and_(deliveries.c.id == delivery.id, deliveries.c.leased_by == holder)
    written = sa.update(deliveries).where(held, deliveries.c.state == PENDING)
    written = written.values(
        state=state,
        due_at=next_at,
        status=attempted.status,
        failure=None if attempted.failure is None else attempted.failure[:MAX_FAILURE_LENGTH],
        leased_by=None,
        leased_until=None,
        ended_at=sa.case((retried, sa.null()), else_=sa.func.now()),
    )
    async with db.begin() as conn:
        found: str | None = await conn.scalar(written.returning(deliveries.c.state))
        if found is not None and attempted.gone:
            await disable_endpoint(
                conn, org_id=delivery.org_id, endpoint_id=delivery.endpoint_id, actor=SENDER
            )
    return found


_EXPIRE = sa.text("""
    UPDATE webhook_deliveries
    SET state = 'dead', ended_at = now(), leased_by = NULL, leased_until = NULL,
        failure = coalesce(failure, 'not sent in time')
    WHERE state = 'pending' AND expires_at <= now()
        AND (leased_until IS NULL OR leased_until <= now())
""")
_FORGET = sa.text(f"""
    DELETE FROM webhook_deliveries WHERE id IN (
        SELECT id FROM webhook_deliveries
        WHERE created_at < now() - interval '{FORGET_S} seconds' AND state <> 'pending'
        LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
""")


async def sweep(db: AsyncEngine) -> int:
    """Give up what nobody could send for too long, as of a disabled endpoint, and return how many;
    delete what ended long ago."""
    async with db.begin() as conn:
        expired = (await conn.execute(_EXPIRE)).rowcount
    deleted = SWEEP_BATCH
    while deleted == SWEEP_BATCH:
        async with db.begin() as conn:
            deleted = (await conn.execute(_FORGET)).rowcount
    return expired


def in_s(seconds: float) -> sa.ColumnElement[datetime]:
    return sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds)
