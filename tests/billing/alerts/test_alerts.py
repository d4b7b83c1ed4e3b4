"""Alerts of what was spent: each threshold of each cap once in its period, in the transaction that
books what crosses it; by whoever books it, however often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import THRESHOLDS, raise_for_cap, select_alerts, to_alerts
from billing.events import Price, Quantities, UsageEvent
from billing.ingestion import ingest as ingesting
from billing.ingestion.ingest import ingest
from billing.ingestion.settle_late import reprice_suspense
from billing.ingestion.shipper import Alarms, ship_batch
from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from tests.billing.ingestion.test_ingest import rows
from tests.billing.samples import NOON, an_attempt, an_event
from tests.budget import examples

DAY_S = 86_400
Period = Literal["day", "month", "total"]
Raised = tuple[str, str, str, int, int]
"""Cap, scope, start of its period, threshold, what was used."""
_ids = count()


async def cap(
    db: AsyncEngine,
    amount: int,
    *,
    org: str = "org_a",
    period: Period = "day",
    project: str | None = None,
    key: str | None = None,
    model: str | None = None,
    tag: str | None = None,
    hard: bool = False,
    by_operator: bool = False,
) -> str:
    """Without its org, which no test here needs."""
    cap_id = f"cap_{next(_ids)}"
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(
            sa.text("""
                INSERT INTO spend_caps
                    (id, org_id, project_id, key_id, model, tag, period, amount_pico, hard,
                    by_operator)
                VALUES (:id, :org, :project, :key, :model, :tag, :period, :amount, :hard,
                    :operator)
            """),
            {
                "id": cap_id,
                "org": org,
                "project": project,
                "key": key,
                "model": model,
                "tag": tag,
                "period": period,
                "amount": amount,
                "hard": hard,
                "operator": by_operator,
            },
        )
    return cap_id


async def archive(db: AsyncEngine, cap_id: str) -> None:
    async with db.begin() as conn:
        archived = sa.text("UPDATE spend_caps SET archived_at = now() WHERE id = :id")
        await conn.execute(archived, {"id": cap_id})


def spends(
    amount: int, at: float = NOON, *, org: str = "org_a", project: str = "proj_a", key: str = "k"
) -> UsageEvent:
    attempt = an_attempt(
        org=org, project=project, key=key, prices={"output": Price("one", 1)}, admitted_at=at
    )
    return an_event(attempt, Quantities(output=amount))


async def raised(db: AsyncEngine, org: str = "org_a") -> list[Raised]:
    """In the order in which they were."""
    async with db.connect() as conn:
        found = await conn.execute(select_alerts(org).order_by(sa.text("id")))
        return [
            (it.cap_id, it.scope, it.period_start.strftime("%Y-%m-%d"), it.threshold, it.used)
            for it in to_alerts(found)
        ]


async def test_each_threshold_is_said_once_as_it_is_reached(db: AsyncEngine) -> None:
    day = await cap(db, 100)
    for amount in (49, 1, 1, 28, 0, 1, 19, 1, 500):
        await ingest(db, [spends(amount)])
    when = "2026-11-19"
    assert await raised(db) == [
        (day, "org", when, 50, 50), (day, "org", when, 80, 80), (day, "org", when, 100, 100),
    ]  # fmt: skip


async def test_one_jump_says_all_of_them_and_each_cap_speaks_for_itself(db: AsyncEngine) -> None:
    caps = {
        "org": await cap(db, 100, period="month"),
        "project": await cap(db, 60, period="total", project="proj_a"),
        "key": await cap(db, 1000, key="k"),
    }
    lower = await cap(db, 40, key="k", hard=True)
    others = [await cap(db, 1, project="proj_b"), await cap(db, 1, org="org_b")]
    await ingest(db, [spends(70), spends(30), spends(0)])
    found = await raised(db)
    assert [each[3] for each in found if each[0] == caps["org"]] == [50, 80, 100]
    assert {each[2] for each in found if each[0] == caps["org"]} == {"2026-11-01"}
    assert {each[2] for each in found if each[0] == caps["project"]} == {"1970-01-01"}
    assert len([each for each in found if each[0] == caps["project"]]) == 3
    assert len([each for each in found if each[0] == lower]) == 3
    assert not [each for each in found if each[0] in (caps["key"], *others)]
    assert await raised(db, "org_b") == []


async def test_a_models_cap_is_over_all_that_use_it(db: AsyncEngine) -> None:
    await ingest(db, [spends(45, project="proj_b")])  # read from the books, once
    penny = await cap(db, 100, model="penny", period="month")
    other = await cap(db, 1, model="other")
    await ingest(db, [spends(4), spends(1, key="another")])
    assert await raised(db) == [(penny, "model", "2026-11-01", 50, 50)]
    async with db.begin() as conn:
        await raise_for_cap(conn, penny, datetime.fromtimestamp(NOON, UTC))
        await raise_for_cap(conn, other, datetime.fromtimestamp(NOON, UTC))
    assert len(await raised(db)) == 1


async def test_a_period_is_that_of_the_admission_and_the_next_begins_at_nothing(
    db: AsyncEngine,
) -> None:
    day = await cap(db, 100)
    midnight = datetime(2026, 11, 20, tzinfo=UTC).timestamp()
    late = spends(50, midnight - 0.001)
    await ingest(db, [spends(60, midnight), spends(20, midnight + DAY_S - 1)])
    await ingest(db, [late])
    assert await raised(db) == [
        (day, "org", "2026-11-20", 50, 80), (day, "org", "2026-11-20", 80, 80),
        (day, "org", "2026-11-19", 50, 50),
    ]  # fmt: skip


async def test_what_was_spent_before_there_was_a_cap_and_beside_one_counts(
    db: AsyncEngine,
) -> None:
    await ingest(db, [spends(45), spends(1000, NOON - 40 * DAY_S)])
    first = await cap(db, 100, period="month")
    await ingest(db, [spends(5)])
    await archive(db, first)
    await ingest(db, [spends(40)])
    second = await cap(db, 100, period="month")
    whole = await cap(db, 2000, period="total")
    await ingest(db, [spends(1)])
    found = await raised(db)
    assert {each[0] for each in found if each[3] == 50} == {first, second, whole}
    assert sorted(each[4] for each in found) == [50, 91, 91, 1091]


async def test_a_cap_that_changes_says_nothing_twice_in_a_period(db: AsyncEngine) -> None:
    day = await cap(db, 100)
    await ingest(db, [spends(55)])
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE spend_caps SET amount_pico = 110"))
    await ingest(db, [spends(33)])
    assert [each[3] for each in await raised(db)] == [50, 80]
    async with db.connect() as conn:
        found = to_alerts(await conn.execute(select_alerts("org_a").order_by(sa.text("id"))))
    assert [each.ceiling for each in found] == [100, 110] and found[0].cap_id == day


async def test_a_cap_of_nothing_is_reached_by_the_first_pico(db: AsyncEngine) -> None:
    await cap(db, 0)
    await ingest(db, [spends(0), an_event(spends(9).attempt, kind="waste")])
    assert await raised(db) == [], "what the house pays is nobody's"
    await ingest(db, [spends(1)])
    assert [each[3] for each in await raised(db)] == [50, 80, 100]


async def test_the_same_segment_shipped_twice_and_by_two_at_once_says_nothing_twice(
    db: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the cursor moved: the next start ships all of it again."""
    await cap(db, 100)
    await cap(db, 1000, period="total", key="k")
    monkeypatch.setattr("billing.ingestion.shipper.MAX_BATCH", 3)
    events = [spends(30) for _ in range(9)]
    spool = await Spool.open(tmp_path / "spool")
    await asyncio.gather(*map(spool.close, events))

    async def lost(batch: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(spool, "commit", lost)
    for _ in range(3):
        with pytest.raises(OSError, match="killed"):
            await ship_batch(db, spool, Alarms())
    monkeypatch.undo()
    while spool.backlog:
        await asyncio.gather(ship_batch(db, spool, Alarms()), ingest(db, events[::-1]))
    await spool.shutdown()
    found = await raised(db)
    assert sorted(each[3] for each in found) == [50, 80, 100]
    [spent, *_] = await rows(
        db, "SELECT spent_pico FROM spend_to_date WHERE scope = 'key' AND period = 'total'"
    )
    assert spent.spent_pico == 270


async def test_of_two_who_book_at_once_neither_misses_what_both_cross(db: AsyncEngine) -> None:
    """Each by itself stays below; no event follows that would tell."""
    for turn in range(8):
        org = f"org_{turn}"
        await cap(db, 100, org=org, period="total")
        batches = [[spends(20, org=org, key=f"k{n}", project=f"p{n}")] for n in range(5)]
        await asyncio.gather(*(ingest(db, batch) for batch in batches))
        found = await raised(db, org)
        assert [each[3] for each in found] == [50, 80, 100], org
        assert found[-1][4] == 100


async def test_a_booking_that_fails_raises_nothing(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cap(db, 100)

    async def fail(*_: object) -> None:
        await real(*_)  # type: ignore[arg-type]
        raise OSError("killed before the commit")

    real = ingesting.raise_for_spend
    monkeypatch.setattr(ingesting, "raise_for_spend", fail)
    with pytest.raises(OSError, match="killed"):
        await ingest(db, [spends(90)])
    assert await raised(db) == [] and await rows(db, "SELECT 1 FROM usage_events") == []
    monkeypatch.undo()
    await ingest(db, [spends(90)])
    assert [each[3] for each in await raised(db)] == [50, 80]


async def test_what_gets_its_price_later_counts_then(db: AsyncEngine, tmp_path: Path) -> None:
    day = await cap(db, 4_000_000)
    later = an_event(an_attempt(model="new", prices={}), Quantities(output=2))
    half = spends(2_100_000)
    await ingest(db, [later, half])
    assert [each[3] for each in await raised(db)] == [50]
    (tmp_path / "book.toml").write_text(
        '[[price]]\nmodel = "new"\nvalid_from = 2026-11-01\noutput = 1\n'
    )
    assert await reprice_suspense(db, PriceBook.load([tmp_path])) == 1
    found = await raised(db)
    assert found[1:] == [
        (day, "org", "2026-11-19", 80, 4_100_000), (day, "org", "2026-11-19", 100, 4_100_000),
    ]  # fmt: skip


Booked = tuple[int, int, str, str]
"""Amount, hours after the start, project, key."""
booked = st.tuples(
    st.integers(0, 60), st.integers(0, 24 * 40), st.sampled_from("pq"), st.sampled_from("kl")
)
wanted_caps = st.tuples(
    st.sampled_from(["org", "project", "key"]),
    st.sampled_from(["day", "month", "total"]),
    st.integers(1, 300),
)
START = datetime(2026, 11, 19, 12, tzinfo=UTC)


def begins(period: str, moment: datetime) -> datetime:
    if period == "total":
        return datetime(1970, 1, 1, tzinfo=UTC)
    day = moment.replace(hour=0, minute=0, second=0, microsecond=0)
    return day.replace(day=1) if period == "month" else day


def expected(caps: dict[str, Any], batches: Sequence[Sequence[Booked]]) -> set[tuple[Any, ...]]:
    """By running through all that was booked."""
    found = set()
    for cap_id, (scope, period, amount) in caps.items():
        spent: dict[datetime, int] = {}
        for pico, hours, project, key in (each for batch in batches for each in batch):
            if scope == "org" or (project if scope == "project" else key) == scope[0]:
                start = begins(period, START + timedelta(hours=hours))
                spent[start] = spent.get(start, 0) + pico
        for start, total in spent.items():
            for threshold in THRESHOLDS:
                if total and total * 100 >= amount * threshold:
                    found.add((cap_id, start.strftime("%Y-%m-%d"), threshold))
    return found


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.lists(booked, max_size=5), min_size=1, max_size=6),
    st.lists(wanted_caps, min_size=1, max_size=4, unique_by=lambda each: each[:2]),
    st.integers(0, 5),
)
async def test_alerts_are_what_running_through_all_of_it_gives(
    db: AsyncEngine, batches: list[list[Booked]], wanted: list[Any], capped_after: int
) -> None:
    """This holds whatever was booked before the caps came, and however often."""
    org = f"org_{next(_ids)}"
    caps: dict[str, Any] = {}
    for number, batch in enumerate([*batches, []]):
        if number == min(capped_after, len(batches) - 1):
            for scope, period, amount in wanted:
                owner = {} if scope == "org" else {scope: f"{org}_{scope[0]}"}
                made = await cap(db, amount, org=org, period=period, **owner)  # type: ignore[arg-type]
                caps[made] = (scope, period, amount)
        events = [
            spends(
                pico,
                (START + timedelta(hours=hours)).timestamp(),
                org=org,
                project=f"{org}_{project}",
                key=f"{org}_{key}",
            )
            for pico, hours, project, key in batch
        ]
        await asyncio.gather(ingest(db, events), ingest(db, events[::-1]))
    found = await raised(db, org)
    said = [(each[0], each[2], each[3]) for each in found]
    assert len(said) == len(set(said))
    # What was booked before there was a cap is told of once its scope spends again.
    touched = expected(caps, batches)
    assert set(said) <= touched
    after = batches[min(capped_after, len(batches) - 1) :]
    for cap_id, (scope, period, _) in caps.items():
        for pico, hours, project, key in (each for batch in after for each in batch):
            mine = scope == "org" or (project if scope == "project" else key) == scope[0]
            start = begins(period, START + timedelta(hours=hours)).strftime("%Y-%m-%d")
            if pico and mine:
                here = {each for each in touched if each[:2] == (cap_id, start)}
                assert here <= set(said), (cap_id, start)
