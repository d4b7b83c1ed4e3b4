"""Top-ups that a balance has requested, and their outcome.

    requested -> granted | failed | expired
    expired -> granted     a late payment counts, unless the balance has requested again since

Nothing here moves money: whoever grants a top-up creates the credit in the same transaction. Rows
whose state is not dispatched yet are the outbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.money import Pico
from billing.tables import new_id_sql, read_struct, top_ups

TopUpState = Literal["requested", "granted", "failed", "expired"]
STATES: tuple[TopUpState, ...] = get_args(TopUpState)
GRANTABLE: tuple[TopUpState, ...] = ("requested", "expired")
LIFETIME = timedelta(days=3)
"""A requested top-up expires after so long."""
DAY = timedelta(days=1)


class TopUp(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    amount_pico: Pico
    left_pico: Pico
    """The balance when it was requested."""
    state: TopUpState
    requested_at: datetime
    expires_at: datetime
    ended_at: datetime | None
    credit_id: str | None
    """The credit of a granted top-up."""
    failure: str | None


COLUMNS = [top_ups.c[name] for name in TopUp.__struct_fields__]


def to_top_up(row: sa.Row[Any]) -> TopUp:
    return read_struct(TopUp, row)


def top_ups_of(org_id: str) -> sa.Select[Any]:
    return sa.select(*COLUMNS).where(top_ups.c.org_id == org_id)


async def find_top_up(
    conn: AsyncConnection, org_id: str, top_up_id: str, *, lock: bool = False
) -> TopUp | None:
    found = top_ups_of(org_id).where(top_ups.c.id == top_up_id)
    row = (await conn.execute(found.with_for_update() if lock else found)).one_or_none()
    return None if row is None else to_top_up(row)


async def ask_for_top_up(
    conn: AsyncConnection, org_id: str, *, amount_pico: Pico, left_pico: Pico, max_per_day: int
) -> str | None:
    """Request a top-up and return its id, or the id of one that is open, so that nobody pays twice.
    None: there were `max_per_day` in the last 24 hours. The caller has locked the org's line."""
    own = top_ups.c
    is_open = sa.and_(own.org_id == org_id, own.state == "requested")
    newest = sa.select(own.id).where(is_open).order_by(own.id.desc()).limit(1)
    if (waiting := await conn.scalar(newest)) is not None:
        return str(waiting)
    since = sa.func.clock_timestamp() - DAY
    recent = sa.select(sa.func.count()).where(own.org_id == org_id, own.requested_at > since)
    if (await conn.scalar(recent) or 0) >= max_per_day:
        return None
    added = insert(top_ups).values(
        id=sa.text(new_id_sql("topup_")),
        org_id=org_id,
        amount_pico=amount_pico,
        left_pico=left_pico,
        expires_at=sa.func.clock_timestamp() + LIFETIME,
    )
    made: str | None = await conn.scalar(added.returning(own.id))
    return made


async def successor_of(conn: AsyncConnection, top_up: TopUp) -> str | None:
    """Return the id of the newest later top-up that did not fail; at most that one is granted. The
    caller has locked the org's line."""
    own = top_ups.c
    later = sa.select(own.id).where(own.org_id == top_up.org_id, own.id > top_up.id)
    newest = later.where(own.state != "failed").order_by(own.id.desc()).limit(1)
    found: str | None = await conn.scalar(newest)
    return found


async def end_top_up(
    conn: AsyncConnection,
    top_up_id: str,
    state: TopUpState,
    *,
    credit_id: str | None = None,
    failure: str | None = None,
) -> TopUp:
    """Set the final state of a top-up. The caller has locked its row and checked its state."""
    ended = sa.update(top_ups).where(top_ups.c.id == top_up_id)
    ended = ended.values(state=state, ended_at=sa.func.now(), credit_id=credit_id, failure=failure)
    return to_top_up((await conn.execute(ended.returning(*COLUMNS))).one())


async def expire_top_ups(conn: AsyncConnection) -> None:
    """Expire requested top-ups whose time is over."""
    own = top_ups.c
    late = sa.select(own.id).where(own.state == "requested", own.expires_at < sa.func.now())
    expired = sa.update(top_ups).where(own.id.in_(late.with_for_update(skip_locked=True)))
    await conn.execute(expired.values(state="expired", ended_at=own.expires_at))


# ---- the outbox


async def undispatched(conn: AsyncConnection, limit: int) -> list[TopUp]:
    """Return and lock the oldest top-ups whose state is not dispatched."""
    waiting = sa.select(*COLUMNS).where(top_ups.c.told.is_distinct_from(top_ups.c.state))
    locked = waiting.order_by(top_ups.c.id).limit(limit).with_for_update(skip_locked=True)
    return [to_top_up(row) for row in await conn.execute(locked)]


async def mark_dispatched(conn: AsyncConnection, ids: Sequence[str]) -> None:
    done = sa.update(top_ups).where(top_ups.c.id.in_(ids))
    await conn.execute(done.values(told=top_ups.c.state))
