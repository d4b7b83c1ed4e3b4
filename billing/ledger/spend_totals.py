"""Sum up spending, as the books have it up to a watermark: counters of spending begin with it.

Knows no cap and no Redis. Whoever books usage holds `BOOKING` shared until its commit, and notes
behind it when that was (`ingested_at`); who adds up holds it alone and reads the same clock first.
So what was booked before the watermark is in the sums, and nothing else, whatever runs at the same
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import TOKENS
from billing.money import Pico
from billing.tables import AMOUNTS, usage_daily, usage_events, usage_hourly

BOOKING = 0x626F6F6B696E6701
SHARED = sa.select(sa.func.pg_advisory_xact_lock_shared(BOOKING))
ALONE = sa.select(sa.func.pg_advisory_xact_lock(BOOKING))


class SpendAccount(msgspec.Struct, frozen=True, kw_only=True):
    """An org, or one project or key of it, over whole hours from `start` to `end`."""

    project: str | None = None
    key: str | None = None
    start: datetime | None = None
    end: datetime | None = None


class SpendTotals(msgspec.Struct, frozen=True):
    watermark: float
    """Unix seconds, by Postgres' clock."""
    amounts_pico: list[Pico]


class BookedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the books. Moments are Unix seconds."""

    request_id: str
    org: str
    project: str
    key: str
    admitted_at: float
    occurred_at: float
    ingested_at: float
    amount_pico: Pico


async def hold_booking(conn: AsyncConnection) -> None:
    """Until the transaction ends, nobody adds up what it books."""
    await conn.execute(SHARED)


async def hold_books(conn: AsyncConnection) -> None:
    """Until the transaction ends, nobody books; what was booked before is seen from now on."""
    await conn.execute(ALONE)


async def read_spend(db: AsyncEngine, org: str, accounts: Sequence[SpendAccount]) -> SpendTotals:
    """Raises: what SQLAlchemy raises where Postgres is away."""
    own, amounts = usage_hourly.c, []
    total = sum((own[name] for name in AMOUNTS), sa.literal(0))
    async with db.begin() as conn:
        await hold_books(conn)
        watermark = (await conn.execute(sa.select(sa.func.clock_timestamp()))).scalar_one()
        for account in accounts:
            found = sa.select(sa.func.coalesce(sa.func.sum(total), 0)).where(own.org == org)
            if account.project is not None:
                found = found.where(own.project == account.project)
            if account.key is not None:
                found = found.where(own.key == account.key)
            if account.start is not None:
                found = found.where(own.hour >= account.start)
            if account.end is not None:
                found = found.where(own.hour < account.end)
            amounts.append(int((await conn.execute(found)).scalar_one()))
    return SpendTotals(watermark.timestamp(), amounts)


async def spent_by_org(conn: AsyncConnection, org: str) -> Pico:
    """Return what all usage of an org costs after all: net of what was reversed, rated anew or
    refunded. The books do not have what still runs."""
    own = usage_daily.c
    total = sum((own[name] for name in AMOUNTS), sa.literal(0))
    found = sa.select(sa.func.coalesce(sa.func.sum(total), 0)).where(own.org == org)
    return int((await conn.execute(found)).scalar_one())


class SpentByKey(msgspec.Struct, frozen=True, kw_only=True):
    """UTC; weeks begin on Monday."""

    day: Pico
    week: Pico
    month: Pico
    total: Pico


async def spent_by_key(conn: AsyncConnection, org: str, key: str, now: datetime) -> SpentByKey:
    """As the books have it, which what runs is not in yet."""
    own = usage_daily.c
    total = sum((own[name] for name in AMOUNTS), sa.literal(0))
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    starts = {
        "day": midnight,
        "week": midnight - timedelta(days=midnight.weekday()),
        "month": midnight.replace(day=1),
    }
    sums = [
        sa.func.sum(total).filter(own.day >= start).label(name) for name, start in starts.items()
    ]
    found = sa.select(*sums, sa.func.sum(total).label("total"))
    row = (await conn.execute(found.where(own.org == org, own.key == key))).one()
    return SpentByKey(**{name: int(amount or 0) for name, amount in row._mapping.items()})


async def batch_tokens(
    db: AsyncEngine,
    org: str,
    *,
    project: str | None = None,
    key: str | None = None,
    model: str | None = None,
    since: datetime,
) -> list[tuple[float, int]]:
    """Return spend by hour (Unix seconds), in order. Raises: as `read_spend`."""
    own = usage_hourly.c
    tokens = sa.func.sum(sum((own[name] for name in TOKENS), sa.literal(0)))
    found = sa.select(own.hour, tokens).where(own.org == org, own.batch, own.hour >= since)
    for column, value in ((own.project, project), (own.key, key), (own.model, model)):
        if value is not None:
            found = found.where(column == value)
    async with db.connect() as conn:
        rows = await conn.execute(found.group_by(own.hour).order_by(own.hour))
        return [(hour.timestamp(), int(count)) for hour, count in rows]


async def read_booked(db: AsyncEngine, ids: Sequence[str]) -> list[BookedRequest]:
    """Return those of these events that tenants are billed for. Raises: as `read_spend`."""
    own = usage_events.c
    amount = sum((own[name] for name in AMOUNTS), sa.literal(0))
    columns = (own.request_id, own.org, own.project, own.key)
    moments = (own.admitted_at, own.occurred_at, own.ingested_at)
    found = sa.select(*columns, *moments, amount.label("amount"))
    found = found.where(own.id.in_(list(ids)), own.kind == "usage")
    async with db.connect() as conn:
        rows = (await conn.execute(found)).all()
    return [
        BookedRequest(
            request_id=row.request_id,
            org=row.org,
            project=row.project,
            key=row.key,
            admitted_at=row.admitted_at.astimezone(UTC).timestamp(),
            occurred_at=row.occurred_at.astimezone(UTC).timestamp(),
            ingested_at=row.ingested_at.astimezone(UTC).timestamp(),
            amount_pico=int(row.amount),
        )
        for row in rows
    ]
