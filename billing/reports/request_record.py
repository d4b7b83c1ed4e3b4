"""Read one request from the books: its attempts, at their current prices, and their transfers.

There is no index of request ids, which would slow down every insert: the id has the time at which
it was made, and events are indexed by time.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import UNSET
from sqlalchemy.dialects.postgresql import ARRAY, JSON
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.events import Attempt, DisputedUsage, PriceSet, UsageEvent
from billing.ledger.accounts import account_of
from billing.money import Pico
from billing.queries import Query, ask_all
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
    """Find a request in the books, in one statement. `made_at`: the Unix seconds in the id. `conn`:
    of a role that sees the ledger."""
    found = _found(org, request_id, made_at)
    events, moved, paid = await ask_all(
        conn, _events_query(found), _transfers_query(found), _paid_query(found)
    )
    if not events:
        return None
    account, charged = account_of(org), 0
    for each in moved:
        charged += each.amount_pico * ((each.debit == account) - (each.credit == account))
    return RequestRecord(events, moved, paid, charged)


def _found(org: str, request_id: str, made_at: float) -> sa.CTE:
    """Select the events of a request: of the first window if that has one admission, else of the
    second, which is not read otherwise."""
    own = priced_events.c
    first, second = (
        sa.select(priced_events).where(
            own.org == org,
            own.request_id == request_id,
            own.admitted_at >= to_moment(made_at + before_s),
            own.admitted_at < to_moment(made_at + after_s),
        )
        for before_s, after_s in WINDOWS_S
    )
    near = first.cte("near")
    is_all = sa.select(sa.func.count(near.c.admitted_at.distinct()) == 1).scalar_subquery()
    return sa.union_all(sa.select(near).where(is_all), second.where(sa.not_(is_all))).cte("found")


def _events_query(found: sa.CTE) -> Query[list[UsageEvent]]:
    rated, disputed = event_ratings.c, disputed_usage.c
    prices = sa.select(rated.prices).where(rated.event_id == found.c.id)
    claimed = sa.func.json_build_array(
        disputed.upstream, disputed.input_tokens, disputed.output_tokens, type_=JSON
    )
    listed = sa.select(
        found,
        # Those of the last rating; null: there is none.
        prices.order_by(rated.number.desc()).limit(1).scalar_subquery().label("prices_by_now"),
        _of_event(event_tags.c.tags, event_tags, found).label("tags"),
        _of_event(claimed, disputed_usage, found).label("disputed"),
    )
    return Query(listed.order_by(found.c.id), lambda rows: [_to_event(row) for row in rows])


def _of_event(
    column: sa.ColumnElement[Any], table: sa.Table, found: sa.CTE
) -> sa.ScalarSelect[Any]:
    return sa.select(column).where(table.c.event_id == found.c.id).scalar_subquery()


def _is_found(column: sa.ColumnElement[str], found: sa.CTE) -> sa.ColumnElement[bool]:
    """Select by ids in an array: indexes are used on both sides of an OR."""
    ids = sa.func.array(sa.select(found.c.id).scalar_subquery(), type_=ARRAY(sa.Text))
    return column == sa.any_(ids)


def _transfers_query(found: sa.CTE) -> Query[list[TransferRecord]]:
    own = transfers.c
    # The only ones in that index.
    others = sa.and_(_is_found(own.event_id, found), own.event_id != own.id)
    listed = sa.select(*(own[name] for name in TransferRecord.__struct_fields__))
    listed = listed.where(sa.or_(_is_found(own.id, found), others))
    listed = listed.order_by(own.posted_at, own.id)
    return Query(listed, lambda rows: [read_struct(TransferRecord, row) for row in rows])


def _paid_query(found: sa.CTE) -> Query[list[CreditPayment]]:
    own = credit_burns.c
    total = sa.func.sum(own.amount_pico)
    listed = (
        sa.select(own.event_id, own.grant_id.label("credit_id"), total.label("amount_pico"))
        .where(_is_found(own.event_id, found))
        .group_by(own.event_id, own.grant_id)
        .having(total != 0)
        .order_by(own.event_id, own.grant_id)
    )
    return Query(listed, lambda rows: [read_struct(CreditPayment, row) for row in rows])


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
