"""Keeps what an upstream claimed and nobody was billed for, and tells it once a day and model."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import undispatched
from billing.alerts.disputed_usage import select_disputed
from billing.events import DisputedUsage, Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.reports.request_record import find_record
from gateway.wire.admin.webhook_events import to_event
from tests.billing.alerts.test_alerts import DAY_S
from tests.billing.samples import NOON, an_attempt, an_event

BILLED = Quantities(uncached_input=100, output=20)
MOST = 2**63 - 1


def disputed(input_tokens: int, output_tokens: int = 0, **of: object) -> UsageEvent:
    claimed = DisputedUsage("big/0", input_tokens, output_tokens)
    attempt = an_attempt(**{"model": "big", **of})  # type: ignore[arg-type]
    return an_event(attempt, BILLED, disputed=claimed)


async def test_a_dispute_is_kept_with_its_event_and_shown_in_its_record(db: AsyncEngine) -> None:
    event, honest = disputed(10**12, 7), an_event(an_attempt(model="big"), BILLED)
    await ingest(db, [event, honest])
    await ingest(db, [event])
    async with db.connect() as conn:
        (kept,) = (await conn.execute(select_disputed("org_a"))).all()
        record = await find_record(conn, "org_a", "req_1", NOON)
    assert (kept.event_id, kept.request_id, kept.upstream) == (event.id, "req_1", "big/0")
    assert (kept.billed_tokens, kept.input_tokens, kept.output_tokens) == (120, 10**12, 7)
    assert record is not None
    assert {each.id: each.disputed for each in record.events} == {
        event.id: event.disputed,
        honest.id: honest.disputed,
    }
    amounts = record.charged_pico
    assert amounts == 2 * (100 * 100_000 + 20 * 400_000), "nothing of it is charged"


async def test_an_alert_is_raised_once_a_day_and_model(db: AsyncEngine) -> None:
    events = [disputed(5), disputed(10**12), disputed(3, admitted_at=NOON + DAY_S)]
    await ingest(db, [*events, disputed(1, model="other"), disputed(MOST, MOST, org="org_b")])
    await ingest(db, [disputed(2 * 10**12)])
    async with db.connect() as conn:
        query = sa.text("SELECT * FROM alerts ORDER BY org_id, scope_id, period_start")
        rows = (await conn.execute(query)).all()
    told = [(row.org_id, row.scope, row.scope_id, int(row.ceiling), int(row.used)) for row in rows]
    assert told == [
        ("org_a", "model", "big", 120, 120 + 10**12),
        ("org_a", "model", "big", 120, 123),
        ("org_a", "model", "other", 120, 121),
        ("org_b", "model", "big", 120, 120 + 2 * MOST),
    ]
    assert {row.measure for row in rows} == {"disputed_usage"}


async def test_its_webhook_counts_tokens(db: AsyncEngine) -> None:
    await ingest(db, [disputed(5)])
    async with db.connect() as conn:
        (alert,) = await undispatched(conn, 10)
    event = to_event(alert)
    assert event.type == "usage.disputed"
    data = event.data
    assert (data.used.value, data.used.unit) == ("125", "tokens")  # type: ignore[union-attr]
