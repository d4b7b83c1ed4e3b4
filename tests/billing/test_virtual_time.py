"""Usage on virtual time, by the seed: clocks that jump, events that come late, twice and in any
order, prices that change in mid-stream, month ends, leap days, and nights of 23 and 25 hours."""

from __future__ import annotations

import random
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_ledger
from tests.billing.ingestion.test_ingest import balances, rows
from tests.billing.samples import an_attempt, an_event

PICO_FROM = {
    date(2028, 1, 1): 100_000,
    date(2028, 2, 29): 300_000,
    date(2028, 3, 1): 200_000,
    date(2028, 3, 26): 700_000,
}
"""Prices of an output token; they change on a leap day, at a month's end and in a short night."""
MOMENTS = (
    datetime(2028, 2, 28, 23, 59, 59, tzinfo=UTC),
    datetime(2028, 2, 29, 23, 59, 58, tzinfo=UTC),
    datetime(2028, 3, 26, 0, 59, 58, tzinfo=UTC),
    datetime(2028, 10, 29, 0, 59, 58, tzinfo=UTC),
    datetime(2028, 12, 31, 23, 59, 58, tzinfo=UTC),
)
NUM_EVENTS = 120


def pico_of(moment: datetime) -> int:
    return next(pico for day, pico in reversed(PICO_FROM.items()) if day <= moment.date())


def lived(rng: random.Random, book: PriceBook) -> list[UsageEvent]:
    """Near a moment each, by a clock that may go back before the answer has ended."""
    events = []
    for _ in range(NUM_EVENTS):
        moment = rng.choice(MOMENTS) + timedelta(seconds=rng.choice((0, 1, 2, rng.uniform(-9, 9))))
        at = moment.timestamp()
        attempt = an_attempt(admitted_at=at, prices=book.at("timely", at), model="timely")
        event = an_event(attempt, Quantities(output=rng.randrange(1, 900)))
        events.append(event)
    return events


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_clocks_do_an_event_counts_when_it_was_admitted_at_its_price(
    db: AsyncEngine, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    (tmp_path / "book.toml").write_text(
        "".join(
            f'[[price]]\nmodel = "timely"\nvalid_from = {day}\noutput = {pico / 1_000_000}\n'
            for day, pico in PICO_FROM.items()
        )
    )
    events = lived(rng, PriceBook.load([tmp_path]))
    arrivals = events + rng.sample(events, NUM_EVENTS // 3)
    rng.shuffle(arrivals)
    while arrivals:
        batch = [arrivals.pop() for _ in range(min(len(arrivals), rng.randrange(1, 40)))]
        assert (await ingest(db, batch)).conflicts == ()
    hours: Counter[datetime] = Counter()
    owed: Counter[datetime] = Counter()
    for event in events:
        moment = datetime.fromtimestamp(event.attempt.admitted_at, UTC)
        hour = moment.replace(minute=0, second=0, microsecond=0)
        hours[hour] += event.quantities.output
        owed[hour] += event.quantities.output * pico_of(moment)
    found = await rows(
        db, "SELECT hour, sum(output), sum(output_pico) FROM usage_hourly GROUP BY 1"
    )
    assert {hour: (int(tokens), int(pico)) for hour, tokens, pico in found} == {
        hour: (hours[hour], owed[hour]) for hour in hours
    }
    assert (await balances(db))["receivable:org_a"] == (sum(owed.values()), 0)
    assert await check_ledger(db) == []
