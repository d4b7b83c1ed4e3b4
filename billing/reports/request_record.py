"""Read one request from the books: its attempts, at their current prices, and their transfers.

There is no index of request ids, which would slow down every insert: the id has the time at which
it was made, and events are indexed by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.events import Attempt, DisputedUsage, PriceSet, UsageEvent
from billing.ledger.accounts import account_of
from billing.money import Pico
from billing.tables import (
    credit_burns,
    disputed_usage,
    event_ratings,
    event_tags,
    priced_events,
    read_quantities,
    read_struct,
    to_moment,
    transfers,
)

WINDOWS_S = ((-1.0, 60.0), (-3600.0, 7200.0))
"""The time around an id's in which its events are searched. The first window nearly always has
them; the second allows for a clock that jumped and a prompt that was slow to arrive. The attempts
of a request have one admission, except those of a tool loop: with several, the second window is
searched as well."""


_last = event_ratings.alias()
_PRICES_BY_NOW = (
    sa.select(_last.c.prices)
    .where(_last.c.event_id == priced_events.c.id)
    .order_by(_last.c.number.desc())
    .limit(1)
    .scalar_subquery()
    .label("prices_by_now")
)
"""The prices of an event's last rating, or null."""
_DISPUTED = (
    sa.select(
        sa.func.json_build_array(
            disputed_usage.c.upstream,
            disputed_usage.c.input_tokens,
            disputed_usage.c.output_tokens,
        )
    )
    .where(disputed_usage.c.event_id == priced_events.c.id)
    .scalar_subquery()
    .label("disputed")
)
_TAGS = (
    sa.select(event_tags.c.tags)
    .where(event_tags.c.event_id == priced_events.c.id)
    .scalar_subquery()
    .label("tags")
)


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
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
    """The amount that a credit has paid of an event."""

    event_id: str
    credit_id: str
    amount_pico: Pico


class RequestRecord(msgspec.Struct, frozen=True):
    events: list[UsageEvent]
    transfers: list[TransferRecord]
    paid: list[CreditPayment]
    charged_pico: Pico
    """The sum of the transfers that charge the org."""


async def find_record(
    conn: AsyncConnection, org: str, request_id: str, made_at: float
) -> RequestRecord | None:
    """Find a request in the books. `made_at`: the Unix seconds in the id. `conn`: of a role that
    sees the ledger."""
    own = priced_events.c
    for before_s, after_s in WINDOWS_S:
        found = sa.select(priced_events, _PRICES_BY_NOW, _TAGS, _DISPUTED).where(
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
    moved = [read_struct(TransferRecord, row) for row in rows]
    account, charged = account_of(org), 0
    for each in moved:
        charged += each.amount_pico * ((each.debit == account) - (each.credit == account))
    return RequestRecord([*events], moved, await _paid(conn, events), charged)


async def _paid(conn: AsyncConnection, events: Sequence[UsageEvent]) -> list[CreditPayment]:
    own = credit_burns.c
    total = sa.func.sum(own.amount_pico)
    query = (
        sa.select(own.event_id, own.grant_id.label("credit_id"), total.label("amount_pico"))
        .where(own.event_id.in_([each.id for each in events]))
        .group_by(own.event_id, own.grant_id)
        .having(total != 0)
        .order_by(own.event_id, own.grant_id)
    )
    return [read_struct(CreditPayment, row) for row in await conn.execute(query)]


def _to_event(row: sa.Row[Any]) -> UsageEvent:
    attempt = read_struct(
        Attempt,
        row,
        prices=msgspec.convert(row.prices_by_now or row.prices, PriceSet),
        admitted_at=row.admitted_at.timestamp(),
        tags=row.tags or UNSET,
    )
    return read_struct(
        UsageEvent,
        row,
        attempt=attempt,
        quantities=read_quantities(row),
        occurred_at=row.occurred_at.timestamp(),
        disputed=DisputedUsage(*row.disputed) if row.disputed else UNSET,
    )
