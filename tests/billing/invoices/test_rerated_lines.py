"""A re-rating changes what it is shown to change: each line of a draft, and of a final invoice the
corrections on the next one, to the pico."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from itertools import count

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.corrections.rerating import LineChange as ShownLine
from billing.corrections.rerating import ReratingScope, apply, plan
from billing.events import Band, Price, PriceSet, Quantities, UsageEvent
from billing.invoices.closing import close, recount
from billing.invoices.invoice import InvoiceLine
from billing.pricing.price_book import PriceBook, PriceEntry
from tests.billing.invoices.billed import (
    ACCOUNT_MADE,
    NOVEMBER,
    OCTOBER,
    assert_books_agree,
    at,
    book,
    close_and_finalize,
    lines,
    open_account,
)
from tests.billing.samples import an_attempt, an_event
from tests.budget import examples

CHANGES = at(2026, 10, 10)
"""The price, in the book by which all of it is rated anew."""
LARGE = 100
_orgs = count()
Place = tuple[str, ...]
Sums = dict[bool, Counter[Place]]
NOTHING: Sums = {True: Counter(), False: Counter()}
pico = st.integers(1, 3)
moments = st.integers(0, 60).map(lambda days: ACCOUNT_MADE + timedelta(days=days, hours=7))


def prices(name: str, uncached: int, output: int) -> PriceSet:
    """A large request's output costs one more; what is read from the cache has no price."""
    band = Band(LARGE, f"{name}:out:large", output + 1)
    return {
        "uncached_input": Price(f"{name}:in", uncached),
        "output": Price(f"{name}:out", output, (band,)),
    }


def entry(start: datetime, end: datetime | None, found: PriceSet) -> PriceEntry:
    return PriceEntry(model="penny", valid_from=start, valid_to=end, prices=found, where="here")


def used(moment: datetime, project: str, size: int, output: int, by: PriceSet) -> UsageEvent:
    attempt = an_attempt(admitted_at=moment.timestamp(), project=project, prices=by)
    return an_event(attempt, Quantities(uncached_input=size, output=output))


events = st.lists(
    st.builds(
        used,
        moments,
        st.sampled_from(["a", "b"]),
        st.sampled_from([0, LARGE - 1, LARGE]),
        st.integers(0, 3),
        st.tuples(pico, pico).map(lambda each: prices(f"old:{each}", *each)),
    ),
    max_size=5,
)


def counted(found: Iterable[InvoiceLine]) -> Sums:
    """Quantities, requests and amounts of lines; corrections apart from the others."""
    sums: Sums = {True: Counter(), False: Counter()}
    for it in found:
        place = (it.project, it.model, it.tier, it.component, it.price_id)
        add(sums[it.kind == "correction"], place, it.quantity, it.num_requests, it.exact_pico)
    return sums


def shown_as_counted(found: Iterable[ShownLine]) -> Sums:
    """Sum up what is taken back at one price, and charged at another."""
    sums: Sums = {True: Counter(), False: Counter()}
    for it in found:
        for sign, price_id, amount in (
            (-1, it.price_before, it.before_pico),
            (1, it.price_after, it.after_pico),
        ):
            place = (it.project, it.model, it.tier, it.component, price_id)
            counts = (sign * it.quantity, sign * it.num_events, sign * amount)
            add(sums[it.invoice != ""], place, *counts)
    return sums


def add(sums: Counter[Place], place: Place, *counts: int) -> None:
    for name, number in zip(("quantity", "requests", "pico"), counts, strict=True):
        sums[*place, name] += number


def less(after: Sums, before: Sums) -> dict[tuple[bool, Place], int]:
    places = {(side, place) for sums in (after, before) for side in sums for place in sums[side]}
    changes = {(side, place): after[side][place] - before[side][place] for side, place in places}
    return {place: change for place, change in changes.items() if change}


@settings(
    max_examples=examples(6),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(in_time=events, late=events, early=st.tuples(pico, pico), later=st.tuples(pico, pico))
async def test_each_line_changes_as_it_was_shown(
    db: AsyncEngine,
    in_time: list[UsageEvent],
    late: list[UsageEvent],
    early: tuple[int, int],
    later: tuple[int, int],
) -> None:
    """September is final before what is late comes; October is a draft."""
    org = f"org_{next(_orgs)}"
    await open_account(db, org)
    await book(db, *(of(org, each) for each in in_time))
    await close_and_finalize(db, OCTOBER, org)
    await book(db, *(of(org, each) for each in late))
    draft = await close(db, org_id=org, now=NOVEMBER)
    assert draft is not None
    before = counted(await lines(db, draft))
    priced_by = PriceBook(
        [
            entry(ACCOUNT_MADE, CHANGES, prices("early", *early)),
            entry(CHANGES, None, prices("later", *later)),
        ]
    )
    span = ReratingScope(org_id=org, start=ACCOUNT_MADE, end=NOVEMBER)
    shown = await plan(db, span, priced_by)
    await apply(db, span, priced_by, shown.digest)
    recounted = await recount(db, org_id=org, invoice_id=draft.id)
    after = counted(await lines(db, recounted))
    assert less(after, before) == less(shown_as_counted(shown.lines), NOTHING)
    assert recounted.exact_pico - draft.exact_pico == shown.difference_pico
    await assert_books_agree(db)


def of(org: str, event: UsageEvent) -> UsageEvent:
    attempt = msgspec.structs.replace(event.attempt, org=org)
    return msgspec.structs.replace(event, attempt=attempt)
