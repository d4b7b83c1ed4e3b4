"""Sum up booked spending up to a watermark, from which the limiter's counters go on.

A transaction that books usage takes the advisory lock `BOOKING` shared, then reads the clock
(`ingested_at`); one that adds up takes it exclusively, then reads the same clock. So the sums have
exactly the usage that was booked before the watermark. Knows no cap and no Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.events import INPUTS, OUTPUTS, TOKENS
from billing.money import Pico
from billing.queries import Query, ask
from billing.spool.spool import Spool
from billing.tables import AnyRow, read_struct, total_pico, usage_daily, usage_events, usage_hourly

EVER_USED_TIMEOUT_S = 2.0
BOOKING = 0x626F6F6B696E6701
SHARED = sa.select(sa.func.pg_advisory_xact_lock_shared(BOOKING))
ALONE = sa.select(sa.func.pg_advisory_xact_lock(BOOKING))


class SpendAccount(msgspec.Struct, frozen=True, kw_only=True):
    """An org, or one of its projects or keys, over whole hours from `start` to `end`."""

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
    """Take the shared lock for a transaction that books usage."""
    await conn.execute(SHARED)


async def hold_books(conn: AsyncConnection) -> None:
    """Take the exclusive lock: until the transaction ends nobody books, and it sees all that was
    booked before."""
    await conn.execute(ALONE)


async def read_spend(db: AsyncEngine, org: str, accounts: Sequence[SpendAccount]) -> SpendTotals:
    """Add up the spending of several accounts. Raises: SQLAlchemyError when Postgres is away."""
    own, amounts = usage_hourly.c, []
    async with db.begin() as conn:
        await hold_books(conn)
        watermark = (await conn.execute(sa.select(sa.func.clock_timestamp()))).scalar_one()
        for account in accounts:
            found = sa.select(sa.func.sum(total_pico(own))).where(own.org == org)
            if account.project is not None:
                found = found.where(own.project == account.project)
            if account.key is not None:
                found = found.where(own.key == account.key)
            if account.start is not None:
                found = found.where(own.hour >= account.start)
            if account.end is not None:
                found = found.where(own.hour < account.end)
            amounts.append(int(await conn.scalar(found) or 0))
    return SpendTotals(watermark.timestamp(), amounts)


async def ever_used(db: AsyncEngine, spool: Spool) -> bool:
    """Tell whether any usage was ever recorded here, for a limiter whose Redis is empty. `db`: of a
    role that sees every org's rows. The time is limited, since requests wait for it.

    Raises: TimeoutError; SQLAlchemyError when Postgres is away. Callers then assume that some was.
    """
    if spool.backlog:
        return True
    async with asyncio.timeout(EVER_USED_TIMEOUT_S), db.connect() as conn:
        return bool(await conn.scalar(sa.select(sa.exists().select_from(usage_events))))


async def spent_by_org(conn: AsyncConnection, org: str) -> Pico:
    """Return the booked cost of all usage of an org, net of corrections."""
    own = usage_daily.c
    found = sa.select(sa.func.sum(total_pico(own))).where(own.org == org)
    return int(await conn.scalar(found) or 0)


class SpentByKey(msgspec.Struct, frozen=True, kw_only=True):
    """Spending of a key so far, in UTC; weeks begin on Monday."""

    day: Pico
    week: Pico
    month: Pico
    total: Pico


async def spent_by_key(conn: AsyncConnection, org: str, key: str, now: datetime) -> SpentByKey:
    """Return the booked spending of a key; running requests are not in it."""
    found = await spent_by_keys(conn, org, [key], now)
    return found.get(key, SpentByKey(day=0, week=0, month=0, total=0))


async def spent_by_keys(
    conn: AsyncConnection, org: str, keys: Sequence[str], now: datetime
) -> dict[str, SpentByKey]:
    """Return the booked spending of some keys; one that has spent nothing is left out."""
    return await ask(conn, spent_query(org, keys, now))


def spent_query(org: str, keys: Sequence[str], now: datetime) -> Query[dict[str, SpentByKey]]:
    """Return the query of `spent_by_keys`."""
    own = usage_daily.c
    total = total_pico(own)
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    starts = {
        "day": midnight,
        "week": midnight - timedelta(days=midnight.weekday()),
        "month": midnight.replace(day=1),
    }
    sums = [
        sa.func.sum(total).filter(own.day >= start).label(name) for name, start in starts.items()
    ]
    found = sa.select(own.key, *sums, sa.func.sum(total).label("total"))
    found = found.where(own.org == org, own.key.in_(keys)).group_by(own.key)
    return Query(found, lambda rows: {row.key: _to_spent(row) for row in rows})


class RecentSpend(msgspec.Struct, frozen=True, kw_only=True):
    """The booked spending of an org in some whole days and today, by which a rate is made."""

    amount_pico: Pico
    since: datetime | None
    """The first day of them with any; None: nothing was spent."""


def recent_query(org: str, days: int, now: datetime) -> Query[RecentSpend]:
    """Return the query of what was spent today (UTC) and in so many days before."""
    own = usage_daily.c
    midnight = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    sums = (sa.func.sum(total_pico(own)).label("amount"), sa.func.min(own.day).label("since"))
    found = sa.select(*sums).where(own.org == org, own.day >= midnight - timedelta(days=days))
    return Query(
        found, lambda rows: RecentSpend(amount_pico=int(rows[0].amount or 0), since=rows[0].since)
    )


def _to_spent(row: AnyRow) -> SpentByKey:
    names = SpentByKey.__struct_fields__
    return SpentByKey(**{name: int(row._mapping[name] or 0) for name in names})


COUNTED: dict[str, tuple[str, ...]] = {
    "tokens": TOKENS,
    "input_tokens": INPUTS,
    "output_tokens": OUTPUTS,
    "requests": ("num_requests",),
}
"""The columns that hold what limits count."""


async def used_by_hour(
    db: AsyncEngine,
    org: str,
    counts: str,
    *,
    project: str | None = None,
    key: str | None = None,
    model: str | None = None,
    since: datetime,
    in_batches: bool,
) -> list[tuple[float, int]]:
    """Return what was used by hour (Unix seconds), in order. `counts`: one of COUNTED.
    `in_batches`: nothing else. Raises: as `read_spend`."""
    own = usage_hourly.c
    units = sa.func.sum(sum((own[name] for name in COUNTED[counts]), sa.literal(0)))
    found = sa.select(own.hour, units).where(own.org == org, own.hour >= since)
    if in_batches:
        found = found.where(own.batch)
    for column, value in ((own.project, project), (own.key, key), (own.model, model)):
        if value is not None:
            found = found.where(column == value)
    async with db.connect() as conn:
        rows = await conn.execute(found.group_by(own.hour).order_by(own.hour))
        return [(hour.timestamp(), int(count)) for hour, count in rows]


async def read_booked(db: AsyncEngine, ids: Sequence[str]) -> list[BookedRequest]:
    """Return the booked events of these ids, without waste. Raises: as `read_spend`."""
    own = usage_events.c
    columns = (own.request_id, own.org, own.project, own.key)
    moments = (own.admitted_at, own.occurred_at, own.ingested_at)
    found = sa.select(*columns, *moments, total_pico(own).label("amount_pico"))
    found = found.where(own.id.in_(list(ids)), own.kind == "usage")
    async with db.connect() as conn:
        rows = (await conn.execute(found)).all()
    names = [moment.name for moment in moments]
    return [
        read_struct(BookedRequest, row, **{name: row._mapping[name].timestamp() for name in names})
        for row in rows
    ]
