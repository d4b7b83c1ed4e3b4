"""Once a day and host, whoever looks, and again if nobody lived to end it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ingestion.ingest import ingest
from billing.reconciliation import daily
from billing.reconciliation.agreement import Agreement
from billing.reconciliation.daily import DailyAgreement
from tests.billing.ingestion.test_ingest import rows
from tests.billing.samples import an_event


async def test_one_of_a_host_looks_and_says_what_differs_first(
    db: AsyncEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    event = an_event()
    await ingest(db, [event])
    async with db.begin() as connection:
        await connection.execute(sa.text("UPDATE balances SET debits_pico = debits_pico + 1"))
        await connection.execute(sa.text("UPDATE usage_hourly SET output = output + 1"))
    here, there = (
        DailyAgreement(db, tmp_path, lambda: [], host=host) for host in ("here", "there")
    )
    found = await asyncio.gather(*(here.look() for _ in range(3)), there.look())
    assert sum(each is not None for each in found[:3]) == 1 and found[3] is not None
    assert f"event {event.id}" in caplog.text
    kept = await rows(db, "SELECT host, problems, ended_at FROM reconciliations ORDER BY host")
    assert [row.host for row in kept] == ["here", "there"]
    assert all(row.ended_at is not None and row.problems == found[3].problems for row in kept)


async def test_a_day_that_nobody_ended_is_taken_over(db: AsyncEngine, tmp_path: Path) -> None:
    own = DailyAgreement(db, tmp_path, lambda: [], host="here")
    assert await own.look() == Agreement()
    begun = "UPDATE reconciliations SET ended_at = NULL, started_at = now() - interval '{} s'"
    for age_s, again in ((daily.TAKE_OVER_AFTER_S - 60, None), (7201, Agreement())):
        async with db.begin() as connection:
            await connection.execute(sa.text(begun.format(age_s)))
        assert await own.look() == again


async def test_it_looks_by_itself_and_outlives_what_goes_wrong(
    db: AsyncEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(daily, "LOOK_INTERVAL_S", 0.02)

    def unreadable() -> list[object]:
        raise ValueError("no record of usage")

    job = DailyAgreement(db, tmp_path, unreadable, host="here")  # type: ignore[arg-type]
    job.start()
    async with asyncio.timeout(30):
        while "no record of usage" not in caplog.text:
            await asyncio.sleep(0.02)
    await job.stop()
    (row,) = await rows(db, "SELECT ended_at FROM reconciliations")
    assert row.ended_at is None
