"""Events into a real Postgres: once each, whatever comes twice, at once, or broken."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import tables
from billing.events import Quantities
from billing.ingestion import ingest as ingestion
from billing.ingestion.ingest import ingest
from billing.pricing.price_book import PriceBook
from billing.reconciliation.checks import check_ledger
from billing.spool.format import Checkpoint, OpenAttempt
from billing.tables import EPOCH, to_microseconds, to_moment
from tests.billing.samples import NOON, PRICES, an_attempt, an_event


async def rows(db: AsyncEngine, query: str) -> list[Any]:
    async with db.connect() as connection:
        return list((await connection.execute(sa.text(query))).all())


async def balances(db: AsyncEngine) -> dict[str, tuple[int, int]]:
    found = await rows(db, "SELECT account, debits_pico, credits_pico FROM balances")
    return {account: (int(debits), int(credits)) for account, debits, credits in found}


async def test_an_event_becomes_a_transfer_balances_and_an_hour(db: AsyncEngine) -> None:
    event = an_event()
    result = await ingest(db, [event])
    amount = 100 * 100_000 + 16 * 10_000 + 20 * 400_000
    assert (result.inserted, result.duplicates, result.conflicts) == (1, 0, ())
    assert await balances(db) == {"receivable:org_a": (amount, 0), "revenue:penny": (0, amount)}
    [transfer] = await rows(db, "SELECT * FROM transfers")
    assert (transfer.id, transfer.kind, transfer.amount_pico) == (event.id, "usage", amount)
    [hour] = await rows(db, "SELECT * FROM usage_hourly")
    assert (hour.org, hour.num_requests, hour.uncached_input, hour.output_pico, hour.batch) == (
        "org_a", 1, 100, 8_000_000, False,
    )  # fmt: skip
    assert await rows(db, "SELECT kind FROM accounts ORDER BY kind") == [
        ("receivable",), ("revenue",),
    ]  # fmt: skip
    assert await check_ledger(db) == []


async def test_moments_are_kept_to_the_microsecond(db: AsyncEngine) -> None:
    moments = [NOON + fraction for fraction in (0.1234564, 0.1234566, 0.9999999, 0.0000004)]
    assert [EPOCH + timedelta(microseconds=to_microseconds(it)) for it in (*moments, -1.5)] == [
        to_moment(it) for it in (*moments, -1.5)
    ]
    events = [an_event(an_attempt(admitted_at=each)) for each in moments]
    await ingest(db, events)
    found = await rows(db, "SELECT id, admitted_at, occurred_at FROM usage_events")
    assert {it.id: (it.admitted_at, it.occurred_at) for it in found} == {
        it.id: (to_moment(it.attempt.admitted_at), to_moment(it.occurred_at)) for it in events
    }


async def test_nothing_is_booked_for_nothing(db: AsyncEngine) -> None:
    assert (await ingest(db, [])).inserted == 0
    voided = an_event(quantities=Quantities(), finish="recovered")
    assert (await ingest(db, [voided])).inserted == 1
    assert await balances(db) == {}
    assert await rows(db, "SELECT * FROM usage_hourly") == []
    assert await check_ledger(db) == []


async def test_duplicates_within_and_across_batches_count_once(db: AsyncEngine) -> None:
    one, two, three = an_event(), an_event(), an_event()
    first = await ingest(db, [one, two, one])
    again = await ingest(db, [two, three, one])
    assert (first.inserted, first.duplicates, first.conflicts) == (2, 1, ())
    assert (again.inserted, again.duplicates, again.conflicts) == (1, 2, ())
    [total] = await rows(db, "SELECT num_requests, output FROM usage_hourly")
    assert total == (3, 60)
    assert await check_ledger(db) == []


async def test_the_same_id_with_other_content_is_an_alarm(
    db: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    event = an_event()
    other = msgspec.structs.replace(event, quantities=Quantities(output=1_000_000))
    later = msgspec.structs.replace(event, occurred_at=event.occurred_at + 1)
    within = await ingest(db, [event, other])
    across = await ingest(db, [later, other, an_event()])
    assert within.conflicts == (event.id,)
    assert (across.inserted, across.conflicts) == (1, (event.id, event.id))
    assert "other content" in caplog.text and event.id in caplog.text
    kept = await rows(db, "SELECT event_id, event FROM usage_conflicts")
    assert len(kept) == 2 and {row.event_id for row in kept} == {event.id}
    assert {row.event["quantities"].get("output") for row in kept} == {20, 1_000_000}
    assert (await balances(db))["revenue:penny"][1] == 2 * 18_160_000
    assert await check_ledger(db) == []


async def test_the_same_batch_on_many_connections_at_once(db: AsyncEngine) -> None:
    events = [an_event(an_attempt(org=f"org_{n % 7}", model=f"m{n % 3}")) for n in range(200)]
    orders = [events, events[::-1], events[100:] + events[:100], events[::2] + events[1::2]]
    results = await asyncio.gather(*(ingest(db, batch) for batch in orders))
    assert sum(result.inserted for result in results) == 200
    assert sum(result.duplicates for result in results) == 600
    assert await check_ledger(db) == []
    total = sum(debits for debits, _ in (await balances(db)).values())
    assert total == 200 * 18_160_000


async def test_batches_that_share_accounts_do_not_block_each_other_for_good(
    db: AsyncEngine,
) -> None:
    """Balances are locked in one order: no deadlock, however the batches list their accounts."""
    batches = [
        [an_event(an_attempt(org=f"org_{(n * step) % 11}", model=f"m{n % 5}")) for n in range(60)]
        for step in range(1, 9)
    ]
    results = await asyncio.gather(*(ingest(db, batch) for batch in batches))
    assert sum(result.inserted for result in results) == 480
    assert await check_ledger(db) == []


async def test_what_all_batches_change_is_changed_last(db: AsyncEngine) -> None:
    """A batch that waits for a balance has its events and transfers written already."""
    await ingest(db, [an_event()])
    async with db.execution_options(isolation_level="AUTOCOMMIT").connect() as conn:
        await conn.execute(sa.text("VACUUM FULL transfers"))  # no room that another test left
    size = "SELECT pg_relation_size('transfers')"
    [(before,)] = await rows(db, size)
    async with db.begin() as holder:
        await holder.execute(sa.text("SELECT FROM balances FOR UPDATE"))
        waiting = asyncio.create_task(ingest(db, [an_event() for _ in range(300)]))
        async with asyncio.timeout(30):
            while not await rows(db, "SELECT pid FROM pg_locks WHERE NOT granted"):
                await asyncio.sleep(0.01)
        [(after,)] = await rows(db, size)
        assert after > before + 300 * 150
    assert (await waiting).inserted == 300
    assert await check_ledger(db) == []


async def test_waste_is_paid_by_the_house_and_is_nobodys_usage(db: AsyncEngine) -> None:
    await ingest(db, [an_event(kind="waste")])
    assert await balances(db) == {
        "house:waste": (18_160_000, 0),
        "house:production": (0, 18_160_000),
    }
    assert await rows(db, "SELECT * FROM usage_hourly") == []
    assert await check_ledger(db) == []


async def test_what_has_no_price_waits_in_suspense_and_blocks_nothing(db: AsyncEngine) -> None:
    only_output = {"output": PRICES["output"]}
    half = an_event(an_attempt(prices=only_output))
    none = an_event(an_attempt(prices={}, model="new"))
    await ingest(db, [half, none, an_event()])
    assert await balances(db) == {
        "receivable:org_a": (8_000_000 + 18_160_000, 0),
        "revenue:penny": (0, 8_000_000 + 18_160_000),
        "suspense": (0, 0),
    }
    suspended = await rows(db, "SELECT event_id FROM transfers WHERE kind = 'suspense'")
    assert {row.event_id for row in suspended} == {half.id, none.id}
    assert await check_ledger(db) == []


async def test_a_price_that_changes_in_mid_stream_is_that_of_the_admission(
    db: AsyncEngine, tmp_path: Path
) -> None:
    (tmp_path / "book.toml").write_text(
        '[[price]]\nmodel = "m"\nvalid_from = 2026-11-01\noutput = 1\n'
        '[[price]]\nmodel = "m"\nvalid_from = "2026-11-19T12:00:01Z"\noutput = 3\n'
    )
    book = PriceBook.load([tmp_path])
    for second, pico in ((0.999, 1_000_000), (1.0, 3_000_000)):
        admitted_at = NOON + second
        attempt = an_attempt(model="m", prices=book.at("m", admitted_at), admitted_at=admitted_at)
        # As a crash leaves it: the prices are those of OPEN, whatever the book says by now.
        checkpoint = Checkpoint(attempt.id, Quantities(output=7), False, admitted_at + 60)
        event = OpenAttempt(attempt, checkpoint).recovered()
        await ingest(db, [event])
        [found] = await rows(db, f"SELECT output_pico FROM usage_events WHERE id = '{event.id}'")
        assert found.output_pico == 7 * pico
    assert await check_ledger(db) == []


async def test_a_batch_is_all_or_nothing(db: AsyncEngine) -> None:
    huge = an_event(quantities=Quantities(output=2**63))
    nameless = an_event(an_attempt(model="lone surrogate \ud800"))
    with pytest.raises(ValueError):
        await ingest(db, [an_event(), nameless])
    with pytest.raises(DBAPIError):
        await ingest(db, [an_event(), huge])
    with pytest.raises(ValueError):
        await ingest(db, [an_event(), an_event(an_attempt(admitted_at=float("nan")))])
    assert await rows(db, "SELECT * FROM usage_events") == []


async def test_what_was_not_written_is_not_known_as_a_duplicate(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim on an id and what is booked for it are one: who fails behind it, books it later."""
    there, event = an_event(), an_event()
    await ingest(db, [there])

    async def fails(*_: object) -> None:
        raise ConnectionError("gone before the commit")

    with monkeypatch.context() as patch:
        patch.setattr(ingestion, "_keep_conflicts", fails)
        with pytest.raises(ConnectionError):
            await ingest(db, [there, event])
    assert (await ingest(db, [there, event])).inserted == 1
    assert (await ingest(db, [there, event])).duplicates == 2
    assert (await balances(db))["receivable:org_a"] == (2 * 18_160_000, 0)
    [hour] = await rows(db, "SELECT num_requests FROM usage_hourly")
    assert hour.num_requests == 2


async def test_money_does_not_end_where_a_bigint_does(db: AsyncEngine) -> None:
    events = [an_event(quantities=Quantities(output=2**45)) for _ in range(20)]
    await ingest(db, events)
    assert (await balances(db))["revenue:penny"][1] == 20 * 2**45 * 400_000 > 2**63
    assert await check_ledger(db) == []


async def test_what_was_booked_cannot_change(db: AsyncEngine) -> None:
    event = an_event()
    await ingest(db, [event, msgspec.structs.replace(event, estimated=True)])
    for table, column in (
        ("usage_events", "org"),
        ("transfers", "event_id"),
        ("usage_conflicts", "event_id"),
    ):
        for change in (
            f"UPDATE {table} SET {column} = 'x'",
            f"DELETE FROM {table}",
            f"TRUNCATE {table} CASCADE",
        ):
            with pytest.raises(DBAPIError, match="is immutable; post a correction"):
                async with db.begin() as connection:
                    await connection.execute(sa.text(change))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("UPDATE balances SET debits_pico = debits_pico + 1 WHERE account LIKE 'rec%'", "all deb"),
        ("UPDATE balances SET debits_pico = 0, credits_pico = 0", "sum of its entries"),
        ("UPDATE usage_hourly SET output = output + 1", "hour's tokens"),
        ("DELETE FROM usage_hourly", "hour's tokens"),
        ("UPDATE usage_hourly SET output_pico = output_pico + 1", "hour's money"),
        ("UPDATE usage_charges SET output_requests = 2", "hour's charges"),
        ("UPDATE usage_daily SET output = output + 1", "day differs from its hours"),
        (
            "ALTER TABLE transfers DISABLE TRIGGER USER;UPDATE transfers SET amount_pico = 1",
            "event's amounts",
        ),
        (
            "ALTER TABLE transfers DISABLE TRIGGER USER;UPDATE transfers SET credit = 'nobody'",
            "names an event or an account that is not there",
        ),
    ],
)
async def test_the_check_finds_damage(db: AsyncEngine, damage: str, complaint: str) -> None:
    await ingest(db, [an_event(), an_event(kind="waste")])
    assert await check_ledger(db) == []
    async with db.begin() as connection:
        for statement in damage.split(";"):
            await connection.execute(sa.text(statement))
    assert any(complaint in problem for problem in await check_ledger(db))


async def test_the_tables_of_the_code_are_those_of_the_migration(db: AsyncEngine) -> None:
    dialect = postgresql.dialect()

    def columns(connection: sa.Connection, table: str) -> dict[str, tuple[str, bool]]:
        return {
            column["name"]: (column["type"].compile(dialect), column["nullable"])
            for column in sa.inspect(connection).get_columns(table)
        }

    async with db.connect() as connection:
        for table in tables.metadata.sorted_tables:
            declared = {c.name: (c.type.compile(dialect), c.nullable) for c in table.columns}
            assert declared == await connection.run_sync(columns, table.name), table.name
