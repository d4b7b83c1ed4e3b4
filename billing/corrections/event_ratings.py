"""Ratings: what an event costs after all. The event stays as it was booked, its transfers stay too;
each rating is a row that nothing changes, and what it moves is posted in the same statement.

    reversed    the other way round; corrects a transfer of the event that stood until then
    repriced    what it costs by the rating; corrects the suspense transfer, if it waited in there

Knows no price book. An event's ratings are numbered; the last one holds, and of an event without
any what was booked. Who posts holds the books alone: nobody adds up, bills or books meanwhile, so a
cutoff of `posting_seq` has all of a rating before it or nothing.
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
from billing.corrections.credit_returns import RepricedEvent, carry_over, hold_line
from billing.events import COMPONENTS, Component, PriceSet, Quantities, Tags, Tier
from billing.ledger.accounts import CREDIT, DEBIT, POST_LEGS, change_rollups, transfers_of
from billing.ledger.spend_totals import hold_books
from billing.ledger.tags import TaggedEvent, add_tagged
from billing.money import Pico
from billing.pricing.rating import RatedUsage, price_of, rate_unkept
from billing.tables import AMOUNTS, EPOCH, amount_column

CORRECTION_LOCK = 0x7265707269636501
"""A transfer is corrected once: what corrects is one at a time."""
MAX_BATCH = 500
Announce = Callable[[Collection[str]], Awaitable[None]]
"""Told of the orgs whose ratings are about to be committed, while the corrections are held. Nothing
is rated where it raises."""
LAST = """
    LEFT JOIN LATERAL (
        SELECT * FROM event_ratings WHERE event_id = u.id ORDER BY number DESC LIMIT 1
    ) r ON true
"""
"""SQL: beside an event `u` the rating `r` that holds, if there is any."""
WAITS = """
    u.suspended AND NOT EXISTS (SELECT FROM transfers WHERE corrects = u.id || '.suspense')
"""
UNKEPT, REFUNDED = "outcome <> 'kept'", "refund_id IS NOT NULL"
"""SQL: of a lease, that what was written for it was not kept; that this was paid back by now."""


def select_rated_events(unkept: str) -> str:
    """SQL: events `u` as they are rated by now, and of each how many tokens were written for leases
    that are `unkept`, however it is rated."""
    return f"""
    SELECT u.id, u.org, u.project, u.key, u.model, u.tier, u.lane, u.price_list, u.kind,
        u.admitted_at, u.seq, (SELECT tags FROM event_tags WHERE event_id = u.id) AS tags,
        {", ".join(f"u.{name}" for name in COMPONENTS)},
        {", ".join(f"coalesce(r.{name}, u.{name}) AS {name}" for name in AMOUNTS)},
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
    """An event as its last rating has it."""

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
    """Of all components."""
    number: int
    """Of the rating that holds; 0: as it was booked."""
    rated_seq: int | None
    """When it was rated last, or a lease of it refunded."""
    waits: bool
    """In suspense: a part of it has no price."""
    unkept: Mapping[Component, int]
    """Tokens that were written to the cache and not kept."""
    is_superseded: bool = False
    """Its request was made once more: it costs nothing."""

    @property
    def amount_pico(self) -> Pico:
        return sum(self.amounts.values())

    @property
    def used(self) -> list[Component]:
        return [name for name in COMPONENTS if getattr(self.quantities, name)]

    @property
    def priced(self) -> list[Component]:
        """Components that need a price: those used and, where the cache was written, uncached
        input, as which tokens that were not kept are charged."""
        used = self.used
        wrote = any(name in used for name in WRITES.values())
        return [name for name in COMPONENTS if name in used or (wrote and name == "uncached_input")]


class Rating(msgspec.Struct, frozen=True, kw_only=True):
    """The next rating of an event."""

    of: RatedEvent
    prices: PriceSet
    """Of what is priced of it (`RatedEvent.priced`)."""
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
    same = ("id", "org", "project", "key", "model", "tier", "lane", "price_list", "kind", "tags")
    moved = ("admitted_at", "seq", "number", "rated_seq", "waits", "is_superseded")
    return RatedEvent(
        **{name: columns[name] for name in (*same, *moved)},
        quantities=Quantities(**{name: columns[name] for name in COMPONENTS}),
        prices=msgspec.convert(columns["prices"], PriceSet),
        amounts={name: int(columns[amount_column(name)]) for name in COMPONENTS},
        unkept={name: int(columns[f"unkept_{ttl}"]) for ttl, name in WRITES.items()},
    )


def rate_event(event: RatedEvent, prices: PriceSet) -> RatedUsage:
    """Rate an event by `prices`, leaving out what was not kept or not asked for after all."""
    rated = rate_unkept(event.quantities, prices, event.unkept)
    if not event.is_superseded:
        return rated
    lines = tuple(msgspec.structs.replace(line, amount_pico=0) for line in rated.lines)
    return msgspec.structs.replace(rated, lines=lines, amount_pico=0)


def to_rating(event: RatedEvent, rated: RatedUsage, prices: PriceSet) -> Rating:
    """`rated`: all that was used, by `prices`."""
    chosen = {name: price_of(name, prices) for name in event.priced}
    return Rating(
        of=event,
        prices={name: price for name, price in chosen.items() if price is not None},
        amounts={name: rated.amount_of(name) for name in COMPONENTS},
    )


async def announce_to_nobody(_org_ids: Collection[str]) -> None:
    """Do nothing: no caller counts what is spent."""


async def hold_corrections(conn: AsyncConnection) -> None:
    """Until the transaction ends, nobody else corrects or books anything. First of all in it."""
    await conn.execute(sa.select(sa.func.pg_advisory_xact_lock(CORRECTION_LOCK)))
    await hold_books(conn)


_AFTER = tuple(f"{name}_after" for name in AMOUNTS)
_TOTAL, _TOTAL_AFTER = " + ".join(AMOUNTS), " + ".join(_AFTER)
_POST = sa.text(f"""
    WITH incoming AS (
        SELECT * FROM json_to_recordset(CAST(:batch AS json)) AS i(event_id text, number integer,
            prices jsonb, waits boolean, {", ".join(f"{name} numeric" for name in AMOUNTS)})
    ),
    rated AS (
        SELECT u.id, u.org, u.project, u.key, u.model, u.tier, u.lane, u.kind, u.admitted_at,
            i.number, i.prices, i.waits,
            {", ".join(f"coalesce(b.{name}, u.{name}) AS {name}" for name in AMOUNTS)},
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
        SELECT id || '.repriced.' || number, id, {DEBIT}, {CREDIT}, {_TOTAL_AFTER}
                - CASE WHEN CAST(:reverses AS boolean) THEN 0 ELSE {_TOTAL} END,
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
    """At most MAX_BATCH, each the next one of its event. The caller holds the corrections
    (`hold_corrections`). `reverses`: what stands is taken back first; else what is there stays, and
    only what is missing is added."""
    assert len(ratings) <= MAX_BATCH
    if not ratings:
        return
    lines = [await hold_line(conn, org) for org in sorted({it.of.org for it in ratings})]
    batch = msgspec.json.encode([_row(each) for each in ratings]).decode()
    named = {"batch": batch, "reverses": reverses, "rerating_id": rerating_id}
    legs = (await conn.execute(_POST, named)).all()
    for line in lines:
        if line is not None and reverses:
            own = [it for it in ratings if it.of.org == line.org_id and it.of.kind == "usage"]
            await carry_over(conn, line, _repaid(own, legs))
    tagged = [_tagged(each) for each in ratings if each.of.tags and each.of.kind == "usage"]
    grown = await add_tagged(conn, tagged, corrects=True)
    await raise_for_spend(conn, _spends(ratings), grown)
    await announce({each.of.org for each in ratings if each.of.kind == "usage"})


def _row(rating: Rating) -> dict[str, Any]:
    """Money is text: it may exceed 64 bits."""
    return {
        "event_id": rating.of.id,
        "number": rating.of.number + 1,
        "prices": rating.prices,
        "waits": rating.of.waits,
        **{amount_column(name): str(amount) for name, amount in rating.amounts.items()},
    }


def _repaid(ratings: Iterable[Rating], legs: Sequence[sa.Row[Any]]) -> list[RepricedEvent]:
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
    """Return what a rating adds to the sums of its tags: no requests and tokens, only money, be it
    less than nothing."""
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
