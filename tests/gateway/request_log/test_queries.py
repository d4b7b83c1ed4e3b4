"""Pages ask for sums of a range beside the one before, requests by what they were, one whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.events import COMPONENTS
from billing.tables import AMOUNTS
from gateway.db import ROLE_SYSTEM, ROLE_TENANT, create_engine, tenant
from gateway.request_log import live_tail, search
from gateway.request_log.histograms import pack
from gateway.request_log.live_tail import LiveTail, TooManyWatchers
from gateway.request_log.rows import StageRow
from gateway.request_log.search import FoundPage, Search, find_request, find_requests
from gateway.request_log.summary import ALL, Filters, Group, Summary, summarize, window_of
from gateway.request_log.writer import RequestLog
from gateway.telemetry.latency_counts import TokenGaps
from tests.gateway.request_log.making import ORG, OTHER, new_row

NOON = datetime(2030, 5, 10, 12, tzinfo=UTC)
START = NOON - timedelta(hours=24)


@pytest.fixture
async def system_db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(postgres_url, role=ROLE_SYSTEM)
    yield made
    await made.dispose()


@pytest.fixture
async def tenant_db(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    made = create_engine(postgres_url, role=ROLE_TENANT)
    yield made
    await made.dispose()


async def note(db: AsyncEngine, *rows: Any) -> None:
    log = RequestLog(db, keep_days=30, on_dropped=lambda number: None)
    for row in rows:
        log.put(row)
    await log.flush()


async def bill(
    db: AsyncEngine, at: datetime, tags: Mapping[str, str] | None = None, **sums: int
) -> None:
    """Add to the ledger's sums of an hour and its day, and to those of tags."""
    names = [*COMPONENTS, *AMOUNTS, "num_requests"]
    own = {"org": ORG, "project": "proj_1", "key": "key_1", "model": "penny", "tier": "default"}
    own |= {name: str(sums.get(name, 0)) for name in names} | {"batch": "false"}
    tables = [("usage_hourly", "hour", {}), ("usage_daily", "day", {})]
    tables += [("usage_tags_daily", "day", {"tag": k, "value": v}) for k, v in (tags or {}).items()]
    async with db.begin() as conn:
        for table, unit, more in tables:
            row = own | more | {unit: at.replace(minute=0, hour=at.hour if unit == "hour" else 0)}
            columns, values = ", ".join(row), ", ".join(f"'{value}'" for value in row.values())
            await conn.execute(sa.text(f"INSERT INTO {table} ({columns}) VALUES ({values})"))


async def summary(
    db: AsyncEngine,
    *by: Group,
    start: datetime = START,
    end: datetime = NOON,
    filters: Filters = ALL,
    tag: str = "",
) -> Summary:
    async with tenant(db, ORG) as conn:
        window = window_of(start, end)
        return await summarize(conn, ORG, window, by=by, filters=filters, tag=tag)


async def found(db: AsyncEngine, after: str | None = None, **wanted: Any) -> FoundPage:
    asked = Search(**({"start": START - timedelta(days=9), "end": NOON} | wanted))
    async with tenant(db, ORG) as conn:
        return await find_requests(conn, ORG, asked, after=after)


def gaps(took_us: int, number: int) -> str:
    """Return the histogram of a request that has so many gaps between its tokens."""
    found = TokenGaps()
    for _ in range(number):
        found.add(took_us / 1e6, 1)
    assert found.counts is not None
    return pack(found.counts)


def at(hours: float) -> float:
    return (NOON - timedelta(hours=hours)).timestamp()


async def test_a_summary_has_all_hours_and_the_day_before(
    system_db: AsyncEngine, tenant_db: AsyncEngine
) -> None:
    await note(
        system_db,
        new_row(at=at(1), ttft_us=200_000, itl=gaps(20_000, 990), is_good=True, queue_us=2000),
        new_row(at=at(1), ttft_us=400_000, is_good=False, status=503, project="proj_2"),
        new_row(at=at(2), status=429, model="big", itl=gaps(90_000, 20)),
        new_row(at=at(25), cost_pico=7),
        new_row(at=at(1), org=OTHER),
        new_row(at=at(49)),
    )
    await bill(system_db, NOON - timedelta(hours=1), uncached_input=10, cache_read=30, output=5,
               uncached_input_pico=100, cache_read_pico=30, output_pico=50)  # fmt: skip
    await bill(system_db, NOON - timedelta(hours=30), output=1, output_pico=9)
    got = await summary(tenant_db, "project", "model")
    assert (got.now.num_requests, got.now.num_failed, got.now.num_limited) == (3, 1, 1)
    assert (got.now.goodput, got.now.error_rate) == (0.5, 1 / 3)
    assert (got.now.cost_pico, got.now.tokens, got.now.hit_rate) == (180, 45, 0.75)
    assert got.now.saved_pico == 30 * 100 // 10 - 30
    assert (got.before.num_requests, got.before.cost_pico) == (1, 9)
    assert got.now.ttft_ms.p50 == pytest.approx(200, rel=0.05)
    assert got.now.ttft_ms.p99 == pytest.approx(400, rel=0.05)
    assert got.now.itl_ms.p50 == pytest.approx(20, rel=0.05)
    assert got.now.itl_ms.p99 == pytest.approx(90, rel=0.05), "of gaps, not of requests"
    assert got.is_billed
    series = got.series()
    assert len(series) == 24 and series[0][0] == START
    assert [each.num_requests for _, each in series][-2:] == [1, 2]
    assert series[-1][1].cost_pico == 180 and series[-1][1].ttft_ms.p50 is not None
    names = {each.names: each for each in got.groups}
    assert set(names) == {("proj_1", "penny"), ("proj_2", "penny"), ("proj_1", "big")}
    assert got.groups[0].names == ("proj_1", "penny") and got.groups[0].now.cost_pico == 180
    assert names["proj_1", "penny"].before.cost_pico == 9


async def test_a_long_range_is_summed_up_by_days(
    system_db: AsyncEngine, tenant_db: AsyncEngine
) -> None:
    await note(system_db, *(new_row(at=at(24 * day), cost_pico=5) for day in range(1, 6)))
    got = await summary(tenant_db, start=NOON - timedelta(days=7))
    assert got.window.unit == "day" and len(got.series()) == 8
    assert got.now.num_requests == 5 and got.now.cost_pico == 0
    by_lane = await summary(tenant_db, "lane", start=NOON - timedelta(days=7))
    assert not by_lane.is_billed and by_lane.now.cost_pico == 25
    assert [each.names for each in by_lane.groups] == [("interactive",)]


async def test_a_summary_is_of_what_is_asked(
    system_db: AsyncEngine, tenant_db: AsyncEngine
) -> None:
    await note(system_db, new_row(at=at(1)), new_row(at=at(1), key="key_2", lane="batch"))
    for name in ("key", "project", "model", "lane"):
        value = getattr(new_row(), name)
        got = await summary(tenant_db, "key", filters=Filters(**{name: value}))
        assert got.now.num_requests == (1 if name in ("key", "lane") else 2), name
    nobody = await summary(tenant_db, "key", filters=Filters(key="key_3"))
    assert nobody.now.num_requests == 0 and nobody.groups == []
    assert nobody.now.ttft_ms.p50 is None and nobody.now.hit_rate is None


async def test_a_tag_is_summed_up_by_its_values(
    system_db: AsyncEngine, tenant_db: AsyncEngine
) -> None:
    for hours, value, pico in ((1, "search", 30), (25, "chat", 50)):
        when = NOON - timedelta(hours=hours)
        await bill(system_db, when, {"feature": value, "team": "x"}, output=5, output_pico=pico)
    got = await summary(tenant_db, "tag", tag="feature")
    assert [(each.names, each.now.cost_pico) for each in got.groups] == [
        (("chat",), 50),
        (("search",), 30),
    ]
    assert got.now.output_tokens == 10 and got.window.unit == "day"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, "abcdefg"),
        ({"project": "proj_2"}, "b"),
        ({"key": "key_2"}, "c"),
        ({"model": "big"}, "d"),
        ({"lane": "batch"}, "d"),
        ({"outcome": "bad"}, "efg"),
        ({"outcome": "failed"}, "e"),
        ({"outcome": "limited"}, "f"),
        ({"outcome": "refused"}, "g"),
        ({"outcome": "ok"}, "abcd"),
        ({"outcome": "missed"}, "b"),
        ({"outcome": "bad", "key": "key_2"}, ""),
        ({"batch": "batch_1"}, "df"),
        ({"batch": "batch_1", "key": "key_1", "outcome": "ok"}, "d"),
        ({"batch": "batch_1", "key": "key_2"}, ""),
        ({"tag": ("team", "search")}, "a"),
        ({"tag": ("team", "")}, ""),
        ({"status": 503}, "e"),
        ({"error_code": "overloaded"}, "e"),
        ({"error_code": "overloaded", "outcome": "limited"}, ""),
        ({"error_code": "overloaded", "batch": "batch_1"}, ""),
        ({"least_pico": 50}, "c"),
        ({"least_ms": 9_000}, "d"),
        ({"least_ttft_ms": 300}, "a"),
        ({"start": NOON - timedelta(hours=3.5)}, "abc"),
        ({"end": NOON - timedelta(hours=3.5)}, "defg"),
    ],
)
async def test_requests_are_found_by_what_they_were(
    system_db: AsyncEngine, tenant_db: AsyncEngine, wanted: dict[str, Any], expected: str
) -> None:
    rows = {
        "a": {"ttft_us": 300_000, "tags": {"team": "search", "feature": "x"}},
        "b": {"project": "proj_2", "is_good": False},
        "c": {"key": "key_2", "cost_pico": 50},
        "d": {"model": "big", "lane": "batch", "duration_us": 9_000_000, "batch": "batch_1"},
        "e": {"status": 503, "error_code": "overloaded"},
        "f": {"status": 429, "batch": "batch_1"},
        "g": {"status": 400},
    }
    made = {
        name: new_row(at=at(number), **fields)
        for number, (name, fields) in enumerate(rows.items(), start=1)
    }
    await note(system_db, *made.values(), new_row(at=at(1), org=OTHER))
    page = await found(tenant_db, **wanted)
    names = {row.id: name for name, row in made.items()}
    assert "".join(names[each.id] for each in page.rows) == expected
    assert page.after is None and page.looked_until is None


async def test_pages_follow_each_other_without_gaps(
    system_db: AsyncEngine, tenant_db: AsyncEngine
) -> None:
    made = [new_row(at=at(1 + number // 3)) for number in range(120)]
    await note(system_db, *made)
    seen, after = [], None
    while True:
        page = await found(tenant_db, after)
        seen += [each.id for each in page.rows]
        if page.after is None:
            break
        assert len(page.rows) == search.PAGE_ROWS
        after = page.after
    wanted = sorted(made, key=lambda row: (row.at_ms, row.id), reverse=True)
    assert seen == [row.id for row in wanted]


async def test_what_few_have_in_common_is_looked_for_in_bounds(
    system_db: AsyncEngine, tenant_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MAX_SCANNED", 60)
    made = [new_row(at=at(1 + number)) for number in range(100)]
    dear = new_row(at=at(200), cost_pico=10**12)
    await note(system_db, *made, dear)
    page = await found(tenant_db, least_pico=10**12)
    assert page.rows == [] and page.after is not None
    assert page.looked_until == NOON - timedelta(hours=60)
    page = await found(tenant_db, page.after, least_pico=10**12)
    assert [each.id for each in page.rows] == [dear.id] and page.after is None


async def test_one_request_is_found_by_its_id_alone(
    system_db: AsyncEngine, tenant_db: AsyncEngine
) -> None:
    row = new_row(
        stages=[StageRow("queue", 1, 2, "x")],
        cache_cause="changed",
        cache_position=268,
        tags={"team": "search"},
    )
    other = new_row(org=OTHER)
    await note(system_db, row, other)
    async with tenant(tenant_db, ORG) as conn:
        one = await find_request(conn, ORG, f"req_{row.id}")
        assert one is not None and one.stages == [["queue", 1, 2, "x", ""]]
        assert (one.cache_cause, one.cache_position) == ("changed", 268)
        assert (one.batch, one.tags) == (None, {"team": "search"})
        assert one.at.timestamp() * 1000 == row.at_ms
        for strange in (other.id, "req_", "x" * 32, "0" * 32, f"req_{'9' * 32}", "req_\0"):
            assert await find_request(conn, ORG, strange) is None


async def test_who_watches_is_told_what_comes_once_and_of_their_org_alone(
    system_db: AsyncEngine,
) -> None:
    tail = LiveTail(system_db, interval_s=0.01)
    assert not tail.is_following
    async with tail.watching(ORG) as one, tail.watching(ORG) as two, tail.watching(OTHER) as other:
        first, foreign = new_row(), new_row(org=OTHER)
        await note(system_db, first, foreign)
        for watcher, wanted in ((one, first), (two, first), (other, foreign)):
            async with asyncio.timeout(30):
                assert [each.id for each in await watcher.read()] == [wanted.id]
        second = new_row()
        await note(system_db, second)
        async with asyncio.timeout(30):
            assert [each.id for each in await one.read()] == [second.id]
        assert tail.is_following
    assert not tail.is_following


async def test_one_org_does_not_take_the_places_of_all(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_tail, "MAX_WATCHERS_OF_ORG", 2)
    tail = LiveTail(system_db)
    async with tail.watching(ORG), tail.watching(ORG):
        with pytest.raises(TooManyWatchers):
            async with tail.watching(ORG):
                pass
        async with tail.watching(OTHER):
            pass


async def test_a_busy_org_leaves_others_their_rows(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_tail, "MAX_OF_ORG", 3)
    quiet = new_row(org=OTHER)
    await note(system_db, quiet)
    await note(system_db, *(new_row() for _ in range(10)))
    tail = LiveTail(system_db, interval_s=0.01)
    async with tail.watching(ORG) as busy, tail.watching(OTHER) as other:
        async with asyncio.timeout(30):
            assert [each.id for each in await other.read()] == [quiet.id]
            assert len(await busy.read()) == 3


async def test_who_does_not_read_keeps_the_newest(
    system_db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_tail, "MAX_WATCHERS", 1)
    tail = LiveTail(system_db, interval_s=0.01)
    async with tail.watching(ORG) as watcher:
        with pytest.raises(TooManyWatchers):
            async with tail.watching(ORG):
                pass
        made = [new_row(at=at(0) + number / 100) for number in range(live_tail.MAX_UNREAD + 20)]
        await note(system_db, *made)
    async with tail.watching(ORG) as watcher:
        async with asyncio.timeout(30):
            while not watcher.num_skipped:
                await asyncio.sleep(0.01)
            read = await watcher.read()
    assert len(read) == live_tail.MAX_UNREAD and watcher.num_skipped == 20
