"""Leases deliveries to whoever sends them, and records what came of each attempt: of webhooks and
of e-mails, which differ in whom they are for. A lease is a bounded time in which one gateway may
try; it ends by itself, and what its holder says afterwards is ignored. So a delivery is attempted
at least once, and by one gateway at a time. Order is not kept: what fails holds up nothing."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.ids import uuid7
from gateway.wire.admin.webhook_events import WebhookEvent

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
JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""
Draw = Callable[[float, float], float]
"""Draws a number between two, for the spread of attempts."""
PENDING, DELIVERED, DEAD = "pending", "delivered", "dead"


class AttemptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of an attempt. `retry_in_s` None: there is no next one."""

    status: int | None
    """The status of HTTP or the reply code of SMTP; None: no answer came."""
    failure: str | None
    """None: it was taken."""
    retry_in_s: float | None = None
    gone: bool = False
    """The receiver wants nothing more, ever."""


class LeasedRow(Protocol):
    """A delivery with all that its holder needs to try it."""

    @property
    def id(self) -> str: ...
    @property
    def org_id(self) -> str: ...
    @property
    def receiver_id(self) -> str: ...


Delivery = TypeVar("Delivery", bound=LeasedRow)


async def _ignore(_conn: AsyncConnection, _delivery: Any) -> None:
    pass


class DeliveryQueue(msgspec.Struct, Generic[Delivery], frozen=True, kw_only=True):
    """A table of deliveries, of which a sender leases rows. Its texts are SQL in which `d` is a
    delivery and `r` its receiver's row."""

    table: sa.Table
    receivers: str
    """The table of the receivers."""
    receiver: str
    """The column of the deliveries that names one."""
    open: str
    """The condition under which a receiver is sent anything."""
    ready: str = "true"
    """The same, of the one delivery that is next; it may look at other rows."""
    columns: str
    """The columns of `leased`, beside the delivery's id, organization and receiver."""
    leased: type[Delivery]
    id_prefix: str
    on_gone: Callable[[AsyncConnection, Delivery], Awaitable[None]] = _ignore
    """Called in the transaction that records that a receiver wants nothing more."""

    @property
    def name(self) -> str:
        return self.table.name


def to_row(
    queue: DeliveryQueue[Any], org_id: str, receiver_id: str, event_id: str, event: WebhookEvent
) -> dict[str, Any]:
    """Return the row of a new delivery."""
    return {
        "id": f"{queue.id_prefix}{uuid7().hex}",
        "org_id": org_id,
        queue.receiver: receiver_id,
        "event_id": event_id,
        "event_type": event.type,
        "body": msgspec.json.encode(event).decode(),
    }


async def add_deliveries(
    conn: AsyncConnection, queue: DeliveryQueue[Any], rows: Sequence[dict[str, Any]]
) -> None:
    """Add deliveries; each event goes to a receiver once."""
    if rows:
        added = insert(queue.table).values(expires_at=in_s(LIFETIME_S))
        once = added.on_conflict_do_nothing(constraint=f"{queue.name}_once")
        await conn.execute(once, rows)


def delay_s(
    attempts: int,
    draw: Draw,
    *,
    retry_after: str | None = None,
    max_s: float = MAX_DELAY_S,
) -> float:
    """Return the seconds until the next attempt. `retry_after`: the header's text, if there was
    one; a date in it is ignored."""
    assert attempts > 0
    exponent = min(attempts - 1, MAX_EXPONENT)
    found = min(FIRST_DELAY_S * GROWTH**exponent, max_s)
    found *= draw(1 - SPREAD, 1 + SPREAD)
    if retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        found = max(found, min(float(retry_after[:9]), MAX_RETRY_AFTER_S))
    return found


async def lease(
    db: AsyncEngine,
    queue: DeliveryQueue[Delivery],
    holder: str,
    *,
    limit: int,
    per_org: int,
    under_way: Collection[Delivery] = (),
    lease_s: float = LEASE_S,
) -> list[Delivery]:
    """Lease the next deliveries that are due: with those under way one of each receiver, and
    `per_org` of each org. `db`: of a role that sees every org's rows."""
    wanted = {
        "holder": holder,
        "limit": limit,
        "per_org": per_org,
        "busy": [each.receiver_id for each in under_way],
        "orgs": [each.org_id for each in under_way],
        "lease_s": lease_s,
    }
    statement = sa.text(
        _LEASE.format(
            table=queue.name,
            receivers=queue.receivers,
            receiver=queue.receiver,
            open=queue.open,
            ready=queue.ready,
            columns=queue.columns,
        )
    )
    async with db.begin() as conn:
        return [queue.leased(**row._mapping) for row in await conn.execute(statement, wanted)]


_LEASE = """
    WITH heads AS (
        SELECT DISTINCT ON (d.{receiver}) d.id, d.org_id, d.{receiver}, d.due_at
        FROM {table} d JOIN {receivers} r ON r.id = d.{receiver}
        WHERE d.state = 'pending' AND d.due_at <= now() AND d.expires_at > now()
            AND (d.leased_until IS NULL OR d.leased_until <= now()) AND {open}
            AND d.{receiver} <> ALL(CAST(:busy AS text[]))
        ORDER BY d.{receiver}, d.due_at, d.event_id
    ),
    ranked AS (
        SELECT d.id, d.due_at, row_number() OVER (PARTITION BY d.org_id ORDER BY d.due_at, d.id)
            + (SELECT count(*) FROM unnest(CAST(:orgs AS text[])) o WHERE o = d.org_id) AS place
        FROM heads d WHERE {ready}
    ),
    locked AS (
        SELECT d.id FROM {table} d
        WHERE d.id IN (
                SELECT id FROM ranked WHERE place <= :per_org ORDER BY due_at, id LIMIT :limit)
            AND d.state = 'pending' AND (d.leased_until IS NULL OR d.leased_until <= now())
        FOR UPDATE SKIP LOCKED
    )
    UPDATE {table} d
    SET attempts = d.attempts + 1, leased_by = :holder,
        leased_until = now() + make_interval(secs => :lease_s)
    FROM locked, {receivers} r
    WHERE d.id = locked.id AND r.id = d.{receiver}
    RETURNING d.id, d.org_id, d.{receiver} AS receiver_id, {columns}
"""


def next_due(queue: DeliveryQueue[Any]) -> str:
    """Return SQL: the moment at which the next delivery of a queue may be tried, or NULL."""
    return f"""
        SELECT min(greatest(d.due_at, d.leased_until))
        FROM {queue.name} d JOIN {queue.receivers} r ON r.id = d.{queue.receiver}
        WHERE d.state = '{PENDING}' AND d.expires_at > now() AND {queue.open}
    """


async def end_attempt(
    db: AsyncEngine,
    queue: DeliveryQueue[Delivery],
    holder: str,
    delivery: Delivery,
    attempted: AttemptOutcome,
) -> str | None:
    """Record an attempt and return the delivery's state; None: the lease was lost meanwhile, and
    somebody else decides."""
    own = queue.table.c
    retry_in_s = attempted.retry_in_s
    ended = DELIVERED if attempted.failure is None else DEAD
    next_at = own.due_at if retry_in_s is None else in_s(retry_in_s)
    retried = sa.false() if retry_in_s is None else next_at < own.expires_at
    state = sa.case((retried, PENDING), else_=ended)
    held = sa.and_(own.id == delivery.id, own.leased_by == holder)
    written = sa.update(queue.table).where(held, own.state == PENDING)
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
        found: str | None = await conn.scalar(written.returning(own.state))
        if found is not None and attempted.gone:
            await queue.on_gone(conn, delivery)
    return found


_EXPIRE = """
    UPDATE {table}
    SET state = 'dead', ended_at = now(), leased_by = NULL, leased_until = NULL,
        failure = coalesce(failure, 'not sent in time')
    WHERE state = 'pending' AND expires_at <= now()
        AND (leased_until IS NULL OR leased_until <= now())
"""
_FORGET = f"""
    DELETE FROM {{table}} WHERE id IN (
        SELECT id FROM {{table}}
        WHERE created_at < now() - interval '{FORGET_S} seconds' AND state <> 'pending'
        LIMIT {SWEEP_BATCH} FOR UPDATE SKIP LOCKED)
"""


async def sweep(db: AsyncEngine, queue: DeliveryQueue[Any]) -> int:
    """Give up what nobody could send for too long, as of a disabled endpoint, and return how many;
    delete what ended long ago."""
    expire, forget = (sa.text(each.format(table=queue.name)) for each in (_EXPIRE, _FORGET))
    async with db.begin() as conn:
        expired = (await conn.execute(expire)).rowcount
    deleted = SWEEP_BATCH
    while deleted == SWEEP_BATCH:
        async with db.begin() as conn:
            deleted = (await conn.execute(forget)).rowcount
    return expired


def in_s(seconds: float) -> sa.ColumnElement[datetime]:
    return sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds)
