"""Read what the books have of one request: its attempts, at the prices that hold by now, and what
was moved for them.

There is no index of request ids, which every event would pay for: an id says when it was made, and
the events of a moment have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
import sqlalchemy as sa
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.events import COMPONENTS, Attempt, PriceSet, Quantities, UsageEvent
from billing.ledger.accounts import account_of
from billing.money import Pico
from billing.tables import (
    credit_burns,
    event_ratings,
    event_tags,
    priced_events,
    to_moment,
    transfers,
)

WINDOWS_S = ((-1.0, 60.0), (-3600.0, 7200.0))
"""Around an id's moment, where its admission is looked for: nearly always at once; then so far off
as a clock may have jumped and a prompt may have waited to be read. All attempts of a request are of
one admission, but of a loop of tools, whose rounds and calls follow each other: where there are
several it is looked so far off, too."""


_last = event_ratings.alias()
_PRICES_BY_NOW = (
    sa.select(_last.c.prices)
    .where(_last.c.event_id == priced_events.c.id)
    .order_by(_last.c.number.desc())
    .limit(1)
    .scalar_subquery()
    .label("prices_by_now")
)
"""Of an event that was rated anew, or out of suspense."""
_TAGS = (
    sa.select(event_tags.c.tags)
    .where(event_tags.c.event_id == priced_events.c.id)
    .scalar_subquery()
    .label("tags")
)


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer."""

    id: str
    event_id: str
    debit: str
    credit: str
    amount_pico: Pico
    kind: str
    phase: str
    corrects: str | None
    posted_at: datetime


class CreditPayment(msgspec.Struct, frozen=True, kw_only=True):
    """The amount that a credit has paid of an event by now."""

    event_id: str
    credit_id: str
    amount_pico: Pico


class RequestRecord(msgspec.Struct, frozen=True):
    events: list[UsageEvent]
    transfers: list[TransferRecord]
    paid: list[CreditPayment]
    charged_pico: Pico
    """To the org, by what was posted."""


async def find_record(
    conn: AsyncConnection, org: str, request_id: str, made_at: float
) -> RequestRecord | None:
    """`made_at`: Unix seconds, as the id says. `conn` sees the ledger."""
    own = priced_events.c
    for before_s, after_s in WINDOWS_S:
        found = sa.select(priced_events, _PRICES_BY_NOW, _TAGS).where(
            own.org == org,
            own.request_id == request_id,
            own.admitted_at >= to_moment(made_at + before_s),
            own.admitted_at < to_moment(made_at + after_s),
        )
        rows = (await conn.execute(found.order_by(own.id))).all()
        if len({row.admitted_at for row in rows}) > 1 and after_s < WINDOWS_S[-1][1]:
            continue
        if rows:
            events = [_to_event(row) for row in rows]
            return await _with_transfers(conn, org, events)
    return None


async def _with_transfers(
    conn: AsyncConnection, org: str, events: Sequence[UsageEvent]
) -> RequestRecord:
    columns = [transfers.c[name] for name in TransferRecord.__struct_fields__]
    own, ids = transfers.c, [each.id for each in events]
    others = sa.and_(own.event_id.in_(ids), own.event_id != own.id)  # the only ones in that index
    found = sa.select(*columns).where(sa.or_(own.id.in_(ids), others))
    rows = await conn.execute(found.order_by(transfers.c.posted_at, transfers.c.id))
    moved = [
        TransferRecord(**{**row._mapping, "amount_pico": int(row.amount_pico)}) for row in rows
    ]
    account, charged = account_of(org), 0
    for each in moved:
        charged += each.amount_pico * ((each.debit == account) - (each.credit == account))
    return RequestRecord([*events], moved, await _paid(conn, events), charged)


async def _paid(conn: AsyncConnection, events: Sequence[UsageEvent]) -> list[CreditPayment]:
    own = credit_burns.c
    total = sa.func.sum(own.amount_pico)
    query = (
        sa.select(own.event_id, own.grant_id, total.label("amount"))
        .where(own.event_id.in_([each.id for each in events]))
        .group_by(own.event_id, own.grant_id)
        .having(total != 0)
        .order_by(own.event_id, own.grant_id)
    )
    return [
        CreditPayment(event_id=row.event_id, credit_id=row.grant_id, amount_pico=int(row.amount))
        for row in await conn.execute(query)
    ]


def _to_event(row: sa.Row[tuple[object, ...]]) -> UsageEvent:
    same = ("id", "request_id", "org", "project", "key", "model", "lane", "tier")
    values = row._mapping
    return UsageEvent(
        attempt=Attempt(
            **{name: values[name] for name in same},
            prices=msgspec.convert(values["prices_by_now"] or values["prices"], PriceSet),
            admitted_at=values["admitted_at"].timestamp(),
            tags=values["tags"] or UNSET,
        ),
        quantities=Quantities(**{name: values[name] for name in COMPONENTS}),
        occurred_at=values["occurred_at"].timestamp(),
        kind=values["kind"],
        estimated=values["estimated"],
        finish=values["finish"],
    )
