"""Ratings: corrections of what an event costs. The event and its transfers never change; a rating
is an immutable row, and its transfers are posted in the same statement.

    reversed    swaps the sides of a transfer of the event that was valid until then
    repriced    the cost by the new rating; corrects the suspense transfer, if there is one

An event's ratings are numbered, and the last one is valid; without one it costs what was booked.
Posting locks the books, so that a cutoff of `posting_seq` has a rating completely before it or not
at all. Knows no price book.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.alerts.alerts import Spend, raise_for_spend
from billing.cache_contracts import WRITES
from billing.corrections.credit_returns import RepricedEvent, move_payments
from billing.credits.balance_watch import hold_line
from billing.events import COMPONENTS, Component, PriceSet, Quantities, Tags, Tier
from billing.ledger.accounts import CREDIT, DEBIT, POST_LEGS, change_rollups, transfers_of
from billing.ledger.spend_totals import hold_books
from billing.ledger.tags import TaggedEvent, add_tagged
from billing.money import Pico
from billing.pricing.rating import RatedUsage, price_of, rate_unkept
from billing.tables import (
    AMOUNTS,
    EPOCH,
    TOTAL_PICO,
    amount_column,
    columns_of,
    rated_amounts,
    read_quantities,
    read_struct,
)

CORRECTION_LOCK = 0x7265707269636501
"""An advisory lock that runs corrections one at a time: a transfer is corrected once."""
MAX_BATCH = 500
Announce = Callable[[Collection[str]], Awaitable[None]]
"""Called with the orgs whose ratings are about to be committed; if it raises nothing is rated."""
LAST = """
    LEFT JOIN LATERAL (
        SELECT * FROM event_ratings WHERE event_id = u.id ORDER BY number DESC LIMIT 1
    ) r ON true
"""
"""SQL: joins an event `u` with its last rating `r`, if it has one."""
WAITS = """
    u.suspended AND NOT EXISTS (SELECT FROM transfers WHERE corrects = u.id || '.suspense')
"""
"""SQL: true if an event `u` is in suspense."""
UNKEPT, REFUNDED = "outcome <> 'kept'", "refund_id IS NOT NULL"
"""SQL: true of cache leases that were not kept, and of those that were refunded."""


def select_rated_events(unkept: str) -> str:
    """Return SQL that selects events `u` with their last rating, and the tokens that were written
    for cache leases of which `unkept` is true."""
    return f"""
    SELECT u.id, u.org, u.project, u.key, u.model, u.tier, u.lane, u.price_list, u.kind,
        u.admitted_at, u.seq, (SELECT tags FROM event_tags WHERE event_id = u.id) AS tags,
        {columns_of("u", COMPONENTS)}, {rated_amounts("r", "u")},
        coalesce(r.prices, p.prices) AS prices, coalesce(r.number, 0) AS number,
        greatest(r.seq, refund_seq) AS rated_seq, {WAITS} AS waits,
        least(coalesce(unkept_5m, 0), u.cache_write_5m) AS unkept_5m,
        least(coalesce(unkept_1h, 0), u.cache_write_1h) AS unkept_1h,
        EXISTS (SELECT FROM superseded_requests WHERE request_id = u.request_id) AS is_superseded
    FROM usage_events u JOIN price_sets p ON p.id = u.price_set {LAST} LEFT JOIN LATERAL (
        SELECT sum(num_tokens) FILTER (WHERE ttl = '5m') AS unkept_5m,
            sum(num_tokens) FILTER (WHERE ttl = '1h') AS unkept_1h,
            max(refund_seq) AS refund_seq
        FROM cache_leases
        WHERE u.cache_write_5m + u.cache_write_1h > 0 AND event_id = u.id AND {unkept}
    ) k ON true
    """


class RatedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event with its last rating."""

    id: str
    org: str
    project: str
    key: str
    model: str
    tier: Tier
    lane: str
    price_list: str
    kind: str
    tags: Tags | None
    admitted_at: datetime
    seq: int
    quantities: Quantities
    prices: PriceSet
    amounts: Mapping[Component, Pico]
    """The amount of every component."""
    number: int
    """The number of the last rating; 0: there is none."""
    rated_seq: int | None
    """The `posting_seq` of its last rating or refund."""
    waits: bool
    """True if it is in suspense, because a component has no price."""
    unkept: Mapping[Component, int]
    """Tokens that were written to the cache and not kept."""
    is_superseded: bool = False
    """True if its request was repeated, so that it costs nothing."""

    @property
    def amount_pico(self) -> Pico:
        return sum(self.amounts.values())

    @property
    def used(self) -> list[Component]:
        return [name for name in COMPONENTS if getattr(self.quantities, name)]

    @property
    def priced(self) -> list[Component]:
        """The components that need a price: the used ones and, with cache writes, uncached input,
        which is the price of tokens that were not kept."""
        used = self.used
        wrote = any(name in used for name in WRITES.values())
        return [name for name in COMPONENTS if name in used or (wrote and name == "uncached_input")]


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """The next rating of an event."""

    of: RatedEvent
    prices: PriceSet
    """The prices of `RatedEvent.priced`."""
    amounts: Mapping[Component, Pico]

    @property
    def amount_pico(self) -> Pico:
        return sum(self.amounts.values())

    @property
    def changes_nothing(self) -> bool:
        return not self.of.waits and self.amounts == self.of.amounts


def to_rated_event(row: sa.Row[Any]) -> RatedEvent:
    """Read a row of `select_rated_events`."""
    columns = row._mapping
    return read_struct(
        RatedEvent,
        row,
        quantities=read_quantities(row),
        prices=msgspec.convert(columns["prices"], PriceSet),
        amounts={name: int(columns[amount_column(name)]) for name in COMPONENTS},
        unkept={name: int(columns[f"unkept_{ttl}"]) for ttl, name in WRITES.items()},
    )


def rate_event(event: RatedEvent, prices: PriceSet) -> RatedUsage:
    """Rate an event by `prices`, with tokens that were not kept as uncached; a superseded request
    costs nothing."""
    rated = rate_unkept(event.quantities, prices, event.unkept)
    if not event.is_superseded:
        return rated
    lines = tuple(msgspec.structs.replace(line, amount_pico=0) for line in rated.lines)
    return msgspec.structs.replace(rated, lines=lines, amount_pico=0)


def to_rating(event: RatedEvent, rated: RatedUsage, prices: PriceSet) -> Rating:
    """Make the rating of an event. `rated`: everything that it used, by `prices`."""
    chosen = {name: price_of(name, prices) for name in event.priced}
    return Rating(
        of=event,
        prices={name: price for name, price in chosen.items() if price is not None},
        amounts={name: rated.amount_of(name) for name in COMPONENTS},
    )


async def announce_to_nobody(_org_ids: Collection[str]) -> None:
    """Do nothing."""


async def hold_corrections(conn: AsyncConnection) -> None:
    """Lock corrections and the books, as the first locks of the transaction."""
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(CORRECTION_LOCK)))
    await hold_books(conn)


_AFTER = tuple(f"{name}_after" for name in AMOUNTS)
_POST = sa.text(f"""
    WITH incoming AS (
        SELECT * FROM json_to_recordset(CAST(:batch AS json)) AS i(event_id text, number integer,
            prices jsonb, waits boolean, {", ".join(f"{name} numeric" for name in AMOUNTS)})
    ),
    rated AS (
        SELECT u.id, u.org, u.project, u.key, u.model, u.tier, u.lane, u.kind, u.admitted_at,
            i.number, i.prices, i.waits, {rated_amounts("b", "u")},
            {", ".join(f"i.{name} AS {name}_after" for name in AMOUNTS)}
        FROM incoming i JOIN usage_events u ON u.id = i.event_id
            LEFT JOIN event_ratings b ON b.event_id = i.event_id AND b.number = i.number - 1
    ),
    kept AS (
        INSERT INTO event_ratings (event_id, number, org_id, rerating_id, prices, admitted_at,
            {", ".join(AMOUNTS)})
        SELECT id, number, org, CAST(:rerating_id AS text), prices, admitted_at,
            {", ".join(_AFTER)}
        FROM rated ORDER BY id
    ),
    standing AS (
        SELECT t.* FROM incoming i JOIN transfers t ON {transfers_of("i.event_id")}
        WHERE CAST(:reverses AS boolean) AND t.kind IN ('usage', 'waste', 'repriced')
            AND NOT EXISTS (SELECT FROM transfers c WHERE c.corrects = t.id)
    ),
    legs AS (
        SELECT id || '.reversed' AS id, event_id, credit AS debit, debit AS credit, amount_pico,
            'reversed' AS kind, id AS corrects, admitted_at
        FROM standing
        UNION ALL
        SELECT id || '.repriced.' || number, id, {DEBIT}, {CREDIT}, {" + ".join(_AFTER)}
                - CASE WHEN CAST(:reverses AS boolean) THEN 0 ELSE {TOTAL_PICO} END,
            'repriced', CASE WHEN waits THEN id || '.suspense' END, admitted_at
        FROM rated
    ),
    {POST_LEGS},
    {change_rollups("rated", {name: f"{name}_after - {name}" for name in AMOUNTS})}
    SELECT id, event_id, corrects, amount_pico FROM legs
""")


async def post_ratings(
    conn: AsyncConnection,
    ratings: Sequence[Rating],
    *,
    reverses: bool,
    rerating_id: str | None = None,
    announce: Announce = announce_to_nobody,
) -> None:
    """Post at most MAX_BATCH ratings, each the next one of its event. The caller holds the locks of
    `hold_corrections`. `reverses`: the event's transfers are reversed, and the whole amount is
    posted; otherwise only the difference is posted."""
    assert len(ratings) <= MAX_BATCH
    if not ratings:
        return
    versions = {org: await hold_line(conn, org) for org in sorted({it.of.org for it in ratings})}
    batch = msgspec.json.encode([_row(each) for each in ratings]).decode()
    named = {"batch": batch, "reverses": reverses, "rerating_id": rerating_id}
    legs = (await conn.execute(_POST, named)).all()
    for org, version in versions.items():
        if version is not None and reverses:
            own = [it for it in ratings if it.of.org == org and it.of.kind == "usage"]
            await move_payments(conn, org, version, _repriced(own, legs))
    tagged = [_tagged(each) for each in ratings if each.of.tags and each.of.kind == "usage"]
    grown = await add_tagged(conn, tagged, corrects=True)
    await raise_for_spend(conn, _spends(ratings), grown)
    await announce({each.of.org for each in ratings if each.of.kind == "usage"})


def _row(rating: Rating) -> dict[str, Any]:
    """Return a rating as JSON. Money is text: it may exceed 64 bits."""
    return {
        "event_id": rating.of.id,
        "number": rating.of.number + 1,
        "prices": rating.prices,
        "waits": rating.of.waits,
        **{amount_column(name): str(amount) for name, amount in rating.amounts.items()},
    }


def _repriced(ratings: Iterable[Rating], legs: Sequence[sa.Row[Any]]) -> list[RepricedEvent]:
    reversals: dict[str, dict[str, str]] = {}
    following: dict[str, str] = {}
    for leg in legs:
        if leg.id.endswith(".reversed"):
            reversals.setdefault(leg.event_id, {})[leg.corrects] = leg.id
        else:
            following[leg.event_id] = leg.id
    return [
        RepricedEvent(
            event_id=each.of.id,
            model=each.of.model,
            admitted_at=each.of.admitted_at,
            before_pico=each.of.amount_pico,
            reversals=reversals.get(each.of.id, {}),
            transfer_id=following[each.of.id],
            amounts={str(name): amount for name, amount in each.amounts.items() if amount},
        )
        for each in ratings
    ]


def _tagged(rating: Rating) -> TaggedEvent:
    """Return what a rating adds to the sums of its tags: a difference of money alone."""
    it = rating.of
    return TaggedEvent(
        org=it.org,
        day=(it.admitted_at - EPOCH).days,
        group=(it.project, it.key, it.model, it.tier, it.lane == "batch"),
        tags=it.tags or {},
        amounts={str(name): amount - it.amounts[name] for name, amount in rating.amounts.items()},
    )


def _spends(ratings: Iterable[Rating]) -> list[Spend]:
    sums: dict[tuple[str, str, str, str, int], Pico] = {}
    for each in ratings:
        it = each.of
        if it.kind == "usage":
            place = (it.org, it.project, it.key, it.model, (it.admitted_at - EPOCH).days)
            sums[place] = sums.get(place, 0) + each.amount_pico - it.amount_pico
    return [Spend(*place, amount) for place, amount in sums.items() if amount]
