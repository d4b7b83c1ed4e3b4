"""Rate a period of an org anew: a plan lists the changes by invoice line; applying it, which takes
the plan's digest, posts a reversal and a new transfer for each event whose cost differs.

    shown = await plan(db, span, book)                    # nothing is written
    await apply(db, span, book, shown.digest)             # exactly what was shown, or nothing

Final invoices stay as they are: the difference is on the next one as corrections.

The first step of applying stores the tariff, the digest and a cutoff in `reratings`. Each batch is
a transaction that goes on behind the last event of the one before; after a crash, applying again
continues. Events that were booked behind the cutoff, or rated or refunded since the plan, are left
out, because the plan did not show them. A lease that is not refunded yet changes nothing here: its
refund is rated later by the new prices. A plan does not show what the terms of a whole period
(allowances, tiers, commitments) make of it; the draft of the invoice does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.corrections.event_ratings import (
    MAX_BATCH,
    REFUNDED,
    Announce,
    RatedEvent,
    Rating,
    announce_to_nobody,
    hold_corrections,
    post_ratings,
    rate_event,
    select_rated_events,
    to_rated_event,
    to_rating,
)
from billing.corrections.tariffs import PriceSpan, Tariff, prices_at, tariff_of
from billing.errors import BadInvoicing, InvoicingConflict
from billing.events import Component, PriceSet
from billing.invoices.invoice import Invoice, invoices_of, to_invoice
from billing.invoices.lines.charges import MAX_LINES, take_cutoff
from billing.invoices.states import DRAFT
from billing.invoices.tables import invoices
from billing.money import Pico
from billing.pricing.entries import DEFAULT_LIST
from billing.pricing.price_book import Place, PriceBook
from billing.pricing.rating import price_of
from billing.tables import reratings

NO_CUTOFF = 2**63 - 1
YIELD_EVERY = 50
"""Rating yields to the event loop after so many events, or two to three milliseconds."""


class ReratingScope(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of an org that is rated anew, by its time of admission."""

    org_id: str
    start: datetime
    end: datetime
    model: str | None = None
    """None: all models."""
    price_list: str | None = None
    """The price list to rate by. None: that of each event's admission."""


class LineChange(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The change of one invoice line."""

    invoice: str
    """The number of the final invoice with this line; empty if it is not invoiced yet."""
    project: str
    model: str
    tier: str
    component: str
    price_before: str
    price_after: str
    quantity: int
    num_events: int
    before_pico: Pico
    after_pico: Pico

    @property
    def difference_pico(self) -> Pico:
        return self.after_pico - self.before_pico


class RatingDifference(msgspec.Struct, frozen=True, kw_only=True):
    span: ReratingScope
    digest: str
    """The SHA-256 of the scope and of the new prices and amount of each event that changes."""
    lines: list[LineChange]
    num_events: int
    """The number of events that change."""

    @property
    def difference_pico(self) -> Pico:
        return sum(line.difference_pico for line in self.lines)


class ReratingPlan(RatingDifference, frozen=True, kw_only=True):
    tariff: Tariff
    num_unpriced: int
    """The number of events that stay as they are, because a component has no price."""


class Rerating(RatingDifference, frozen=True, kw_only=True):
    """A re-rating whose application has begun."""

    id: str
    num_applied: int
    created_at: datetime
    applied_at: datetime | None


Note = Callable[[AsyncConnection, Rerating], Awaitable[None]]
"""Records a re-rating in the transaction that begins it."""


# ---- plan


async def plan(
    db: AsyncEngine, span: ReratingScope, book: PriceBook, *, max_events: int | None = None
) -> ReratingPlan:
    """Return what a re-rating would change.

    Raises: BadInvoicing of an invalid scope, or one with more than `max_events`; InvoicingConflict
    when more lines change than an invoice can have.
    """
    return await _plan(db, span, book, NO_CUTOFF, max_events)


async def _plan(
    db: AsyncEngine, span: ReratingScope, book: PriceBook, cutoff: int, max_events: int | None
) -> ReratingPlan:
    if span.start >= span.end:
        raise BadInvoicing("ends_at", "must be later than 'starts_at'")
    if span.price_list not in (None, DEFAULT_LIST, *book.lists.names):
        raise BadInvoicing("price_list", "the price book has no such list")
    bounds = (span.start.timestamp(), span.end.timestamp())
    async with db.connect() as conn:
        if max_events is not None and await _has_more(conn, span, cutoff, max_events):
            raise BadInvoicing(
                "starts_at", f"more than {max_events} events: choose a shorter period"
            )
        places = await _places(conn, span)
        finals = await _finals(conn, span.org_id)
    tariff = tariff_of(book, places, *bounds, price_list=span.price_list)
    diff, digest = _Diff(finals), hashlib.sha256()
    digest.update(msgspec.json.encode(span))
    num_unpriced = 0
    async for rows in _pages(db, span, cutoff):
        async for rating, is_unpriced in _rated(rows, tariff):
            num_unpriced += is_unpriced
            if rating is not None:
                diff.add(rating)
                digest.update(_digested(rating))
    return ReratingPlan(
        span=span,
        tariff=tariff,
        lines=await asyncio.to_thread(diff.lines),
        num_events=diff.num_events,
        num_unpriced=num_unpriced,
        digest=digest.hexdigest(),
    )


def _digested(rating: Rating) -> bytes:
    amount = str(rating.amount_pico)  # it may exceed 64 bits
    return msgspec.json.encode([rating.of.id, rating.of.number, rating.prices, amount])


async def _rated(
    rows: Sequence[sa.Row[Any]], tariff: Tariff
) -> AsyncIterator[tuple[Rating | None, bool]]:
    """Yield for each event its new rating, if its cost differs, and whether it has no price."""
    fares = tariff.by_place()
    for number, row in enumerate(rows, 1):
        yield _rate(to_rated_event(row), fares)
        if number % YIELD_EVERY == 0:
            await asyncio.sleep(0)


def _rate(
    event: RatedEvent, fares: Mapping[Place, tuple[PriceSpan, ...]]
) -> tuple[Rating | None, bool]:
    spans = fares.get((event.price_list, event.model, event.tier), ())
    prices = prices_at(spans, event.admitted_at.timestamp()) if spans else {}
    rated = rate_event(event, prices)
    if rated.unpriced:
        return None, True
    rating = to_rating(event, rated, prices)
    return None if rating.changes_nothing else rating, False


class _Diff:
    """Adds up changes by invoice line."""

    def __init__(self, finals: Sequence[Invoice]) -> None:
        self._finals = finals
        self._sums: dict[tuple[str, ...], list[int]] = {}
        self.num_events = 0

    def add(self, rating: Rating) -> None:
        """Raises: InvoicingConflict."""
        event = rating.of
        self.num_events += 1
        size, number = event.quantities.input_total, self._invoice_of(event)
        for component in event.used:
            before, after = event.amounts[component], rating.amounts[component]
            prices = (
                _price_id(component, event.prices, size),
                _price_id(component, rating.prices, size),
            )
            if before == after and prices[0] == prices[1]:
                continue
            place = (number, event.project, event.model, event.tier, component, *prices)
            sums = self._sums.setdefault(place, [0, 0, 0, 0])
            for position, count in enumerate(
                (getattr(event.quantities, component), 1, before, after)
            ):
                sums[position] += count
        if len(self._sums) > MAX_LINES:
            raise InvoicingConflict("lines", f"an invoice has at most {MAX_LINES} lines")

    def _invoice_of(self, event: RatedEvent) -> str:
        for each in self._finals:
            in_time = event.seq < each.cutoff and event.admitted_at < each.period_end
            if in_time and (event.admitted_at >= each.period_start or event.seq >= each.since):
                return each.number or ""
        return ""

    def lines(self) -> list[LineChange]:
        names = LineChange.__struct_fields__
        return sorted(
            msgspec.convert(dict(zip(names, (*place, *sums), strict=True)), LineChange)
            for place, sums in self._sums.items()
        )


def _price_id(component: Component, prices: PriceSet, total_input: int) -> str:
    price = price_of(component, prices)
    return "" if price is None else price.of(total_input).price_id


_IN_SPAN = """
    u.org = :org AND u.kind = 'usage' AND u.admitted_at >= :start AND u.admitted_at < :end
        AND u.seq < :cutoff AND (CAST(:model AS text) IS NULL OR u.model = :model)
"""
_HAS_MORE = sa.text(f"""
    SELECT count(*) > :most FROM (
        SELECT FROM usage_events u WHERE {_IN_SPAN} LIMIT CAST(:most AS bigint) + 1) s
""")
_PLACES = sa.text(f"""
    SELECT DISTINCT price_list, model, tier FROM usage_events u WHERE {_IN_SPAN}
""")
_PAGE = sa.text(f"""
    {select_rated_events(REFUNDED)}
    WHERE {_IN_SPAN} AND (u.admitted_at, u.id) > (:seen_at, :seen_id)
    ORDER BY u.admitted_at, u.id LIMIT :limit
""")


def _named(span: ReratingScope, cutoff: int) -> dict[str, Any]:
    bounds = {"start": span.start, "end": span.end, "cutoff": cutoff}
    return {"org": span.org_id, "model": span.model, **bounds}


async def _has_more(conn: AsyncConnection, span: ReratingScope, cutoff: int, most: int) -> bool:
    return bool(await conn.scalar(_HAS_MORE, _named(span, cutoff) | {"most": most}))


async def _places(conn: AsyncConnection, span: ReratingScope) -> list[Place]:
    rows = await conn.execute(_PLACES, _named(span, NO_CUTOFF))
    return [(row.price_list, row.model, row.tier) for row in rows]


async def _finals(conn: AsyncConnection, org_id: str) -> list[Invoice]:
    final = invoices_of(org_id).where(invoices.c.state != DRAFT)
    return [to_invoice(row) for row in await conn.execute(final.order_by(invoices.c.period_start))]


async def _page(
    conn: AsyncConnection, span: ReratingScope, cutoff: int, seen_at: datetime, seen_id: str
) -> Sequence[sa.Row[Any]]:
    """Return the next rows for `to_rated_event`, behind the last one seen."""
    named = _named(span, cutoff) | {"seen_at": seen_at, "seen_id": seen_id, "limit": MAX_BATCH}
    return (await conn.execute(_PAGE, named)).all()


async def _pages(
    db: AsyncEngine, span: ReratingScope, cutoff: int
) -> AsyncIterator[Sequence[sa.Row[Any]]]:
    seen_at, seen_id = span.start, ""
    while True:
        async with db.connect() as conn:
            rows = await _page(conn, span, cutoff, seen_at, seen_id)
        if rows:
            yield rows
        if len(rows) < MAX_BATCH:
            return
        seen_at, seen_id = rows[-1].admitted_at, rows[-1].id


# ---- apply


async def apply(
    db: AsyncEngine,
    span: ReratingScope,
    book: PriceBook,
    digest: str,
    *,
    note: Note | None = None,
    announce: Announce = announce_to_nobody,
    max_batches: int | None = None,
    max_events: int | None = None,
) -> Rerating:
    """Begin or continue the re-rating with a digest, for at most `max_batches`; idempotent.

    Raises: BadInvoicing; InvoicingConflict when the plan has changed since it was shown, or another
    re-rating of the org has begun and not ended.
    """
    found = await find(db, span.org_id, digest)
    if found is None:
        found = await _begin(db, span, book, digest, note, max_events)
    batches = 0
    while found.applied_at is None and (max_batches is None or batches < max_batches):
        found = await _step(db, found.id, announce)
        batches += 1
    return found


def reratings_of(org_id: str) -> sa.Select[Any]:
    return sa.select(reratings).where(reratings.c.org_id == org_id)


async def find(db: AsyncEngine, org_id: str, digest: str) -> Rerating | None:
    async with db.connect() as conn:
        query = reratings_of(org_id).where(reratings.c.digest == digest)
        row = (await conn.execute(query)).one_or_none()
    return None if row is None else to_rerating(row)


def to_rerating(row: sa.Row[Any]) -> Rerating:
    return Rerating(
        id=row.id,
        span=ReratingScope(
            org_id=row.org_id,
            start=row.starts_at.astimezone(UTC),
            end=row.ends_at.astimezone(UTC),
            model=row.model,
            price_list=row.price_list,
        ),
        digest=row.digest,
        lines=msgspec.convert(row.lines, list[LineChange]),
        num_events=row.num_events,
        num_applied=row.num_applied,
        created_at=row.created_at.astimezone(UTC),
        applied_at=row.applied_at,
    )


async def _begin(
    db: AsyncEngine,
    span: ReratingScope,
    book: PriceBook,
    digest: str,
    note: Note | None,
    max_events: int | None,
) -> Rerating:
    async with db.begin() as conn:
        cutoff = await take_cutoff(conn)
    shown = await _plan(db, span, book, cutoff, max_events)
    if shown.digest != digest:
        raise InvoicingConflict("digest", "the preview has changed: request it again")
    row = {
        "id": f"rerating_{span.org_id}_{digest[:32]}",
        "org_id": span.org_id,
        "starts_at": span.start,
        "ends_at": span.end,
        "model": span.model,
        "price_list": span.price_list,
        "digest": digest,
        "tariff": msgspec.to_builtins(shown.tariff),
        "lines": msgspec.to_builtins(shown.lines),
        "cutoff": cutoff,
        "num_events": shown.num_events,
    }
    async with db.begin() as conn:
        begun = insert(reratings).values(row).on_conflict_do_nothing().returning(reratings)
        made = (await conn.execute(begun)).one_or_none()
        if made is not None:
            if note is not None:
                await note(conn, to_rerating(made))
            return to_rerating(made)
    found = await find(db, span.org_id, digest)
    if found is None:
        raise InvoicingConflict("org_id", "another re-rating of the org has not ended")
    return found


async def _step(db: AsyncEngine, rerating_id: str, announce: Announce) -> Rerating:
    """Apply a batch, and complete the re-rating with the last one."""
    own = reratings.c
    async with db.begin() as conn:
        held = sa.select(reratings).where(own.id == rerating_id).with_for_update()
        row = (await conn.execute(held)).one()
        if row.applied_at is not None:
            return to_rerating(row)
        await hold_corrections(conn)
        span = to_rerating(row).span
        events = await _page(conn, span, row.cutoff, row.seen_at or span.start, row.seen_id)
        tariff = msgspec.convert(row.tariff, Tariff)
        as_shown = [it for it in events if it.rated_seq is None or it.rated_seq < row.cutoff]
        ratings = [rating async for rating, _ in _rated(as_shown, tariff) if rating is not None]
        await post_ratings(conn, ratings, reverses=True, rerating_id=row.id, announce=announce)
        values: dict[str, Any] = {"num_applied": row.num_applied + len(ratings)}
        if events:
            values |= {"seen_at": events[-1].admitted_at, "seen_id": events[-1].id}
        if len(events) < MAX_BATCH:
            values["applied_at"] = sa.func.now()
        changed = sa.update(reratings).where(own.id == row.id).values(values)
        return to_rerating((await conn.execute(changed.returning(reratings))).one())
