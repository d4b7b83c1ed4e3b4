"""The cache report counts every request once, whatever is too much, and whoever is away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.cache_report import reading as cache_reading
from gateway.cache_report import report as cache_report
from gateway.cache_report import rows as cache_rows
from gateway.cache_report.reading import read_cache_report
from gateway.cache_report.report import CacheReport
from gateway.cache_report.rows import MAX_BREAKS, MAX_PREFIXES, ReportCounts, costliest
from gateway.db import create_engine, tenant
from gateway.fleet.replica import MessagePlace
from gateway.generation_events import CacheCause, CacheOutcome, MeteredUsage
from gateway.inference.cache_notes import CacheNote
from gateway.wire.usage.cache_report import CacheRow
from tests.billing.samples import an_attempt

HOUR = 1_795_370_400.0
COUNTS = sa.text("""
    SELECT sum(num_requests)::bigint, sum(input_tokens)::bigint, sum(cached_tokens)::bigint,
        sum(num_intact + num_first + num_changed + num_evicted + num_restarted + num_other_replica
            + num_not_kept + num_unmarked + num_too_short + num_unknown)::bigint
    FROM cache_report
""")


def a_note(
    *,
    key: str = "key_a",
    cause: CacheCause | None = "changed",
    position: int = 40,
    prefix: str = "aa",
    org: str = "org_a",
    at: float = HOUR,
    tokens: int = 100,
    cached: int = 32,
    request_id: str = "req_1",
    **others: Any,
) -> CacheNote:
    attempt = an_attempt(f"{key}{position}", key=key, org=org, admitted_at=at)
    attempt = msgspec.structs.replace(attempt, request_id=request_id)
    outcome = None
    if cause is not None:
        outcome = CacheOutcome(cause=cause, position=position, prefix=prefix)
    usage = MeteredUsage(uncached_input=tokens - cached, cache_read=cached)
    return CacheNote(attempt=attempt, usage=usage, outcome=outcome, **others)


async def counts(db: AsyncEngine) -> Sequence[int]:
    async with db.connect() as conn:
        return [*(await conn.execute(COUNTS)).one()]


async def column(db: AsyncEngine, what: str) -> list[Any]:
    async with db.connect() as conn:
        return list(await conn.scalars(sa.text(f"SELECT {what} FROM cache_report ORDER BY 1")))


async def test_what_several_workers_counted_adds_up(db: AsyncEngine) -> None:
    workers = [CacheReport(db), CacheReport(db)]
    for number in range(30):
        for report in workers:
            report.note(a_note(position=number % 3, cause="intact" if number % 2 else "evicted"))
        if number % 10 == 9:
            for report in workers:
                await report.flush()
    assert await counts(db) == [60, 6000, 1920, 60]
    [breaks] = await column(db, "breaks")
    assert sorted(each["requests"] for each in breaks) == [10, 10, 10]
    assert {each["uncached_tokens"] for each in breaks} == {680}


async def test_a_request_costs_no_statement_and_a_flush_two_of_500_rows(db: AsyncEngine) -> None:
    told: list[str] = []

    def heard(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        told.append(statement.split()[0])

    report = CacheReport(db)
    await report.flush()  # what is old is looked for once an hour
    sa.event.listen(db.sync_engine, "before_cursor_execute", heard)
    for number in range(1500):
        report.note(a_note(key=f"key_{number % 501}"))
    assert told == []
    await report.flush()
    assert told == ["SELECT", "INSERT"] * 2
    await report.flush()
    assert len(told) == 4, "nothing to write"
    assert (await counts(db))[0] == 1500


async def test_a_row_keeps_the_costliest_breaks_and_the_latest(db: AsyncEngine) -> None:
    report = CacheReport(db)
    for number in range(40):
        report.note(a_note(position=number, tokens=1000 - number))
        if number % 4 == 0:
            await report.flush()
    await report.flush()
    [breaks] = await column(db, "breaks")
    kept = {each["position"] for each in breaks}
    assert kept == {0, 1, 2, 3, 4, 5, 38, 39} and len(kept) == MAX_BREAKS
    assert await column(db, "num_changed") == [40]


async def test_what_are_too_many_prefixes_is_counted_as_other(db: AsyncEngine) -> None:
    """In one flush, and in all of an hour."""
    report = CacheReport(db)
    for number in range(2 * MAX_PREFIXES):
        report.note(a_note(prefix=f"{number:04}"))
        if number % 50 == 0:
            await report.flush()
    report.note(a_note(prefix="0000"))
    report.note(a_note(prefix="9999", at=HOUR + 3600))
    await report.flush()
    kinds = await column(db, "prefix_kind")
    assert (kinds.count("digest"), kinds.count("other")) == (MAX_PREFIXES + 1, 1)
    assert await counts(db) == [2 * MAX_PREFIXES + 2, 13_000, 4160, 2 * MAX_PREFIXES + 2]


async def test_memory_is_bounded_and_nothing_is_dropped(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_report, "MAX_ROWS", 10)
    monkeypatch.setattr(cache_rows, "MAX_BATCH", 7)
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    report = CacheReport(nowhere)
    for number in range(100):
        report.note(a_note(key=f"key_{number % 50}", prefix=f"{number}"))
        if number % 30 == 29:
            await report.flush()
    assert len(report._rows) <= 2 * 10 + 1
    await nowhere.dispose()
    report._db = db
    await report.flush()
    await report.flush()
    assert await counts(db) == [100, 10_000, 3200, 100]


async def test_a_flush_that_is_cut_off_repeats_what_was_not_written(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_rows, "MAX_BATCH", 2)
    report, written = CacheReport(db), 0

    async def once(*args: Any) -> Any:
        nonlocal written
        written += 1
        if written == 2:
            raise ConnectionResetError
        return await cache_rows.write(*args)

    monkeypatch.setattr(cache_report, "write", once)
    for number in range(5):
        report.note(a_note(prefix=f"{number}"))
    await report.flush()
    assert (await counts(db))[0] == 2
    report.note(a_note(prefix="4"))
    await report.flush()
    assert await counts(db) == [6, 600, 192, 6]


async def test_old_hours_are_forgotten(db: AsyncEngine) -> None:
    now = time.time()
    report = CacheReport(db, wall_clock=lambda: now)
    report.note(a_note(at=now - 36 * 86_400))
    report.note(a_note(at=now - 34 * 86_400))
    await report.flush()
    assert (await counts(db))[0] == 1
    report.note(a_note(at=now - 36 * 86_400))
    await report.flush()
    assert (await counts(db))[0] == 2, "it looks for them once an hour"
    now += 3601
    await report.flush()
    assert (await counts(db))[0] == 1


async def test_a_prefix_that_goes_elsewhere_is_told_so(db: AsyncEngine) -> None:
    """The upstream says nothing but how much it had cached."""
    report = CacheReport(db)
    for replica, cached in (("east", 0), ("east", 0), ("west", 0), ("east", 64), ("west", 0)):
        report.note(a_note(cause=None, cache_key="agent", replica=replica, cached=cached))
    await report.flush()
    assert await column(db, "num_other_replica") == [2]
    assert await column(db, "num_unknown") == [3]


async def test_a_cache_key_is_a_label_as_far_as_it_can_be_shown(db: AsyncEngine) -> None:
    report = CacheReport(db)
    for key in ("team one", "", "two\nlines", "nul\0", "\ud800", "x" * 129):
        report.note(a_note(cache_key=key))
    report.note(a_note(cause=None))
    await report.flush()
    assert await column(db, "prefix_kind") == ["cache_key", "digest", "short"]
    assert await column(db, "num_requests") == [1, 1, 5]


async def test_embeddings_take_no_part(db: AsyncEngine) -> None:
    report = CacheReport(db)
    attempt = an_attempt("a")
    report.note(CacheNote(attempt=attempt, usage=MeteredUsage(embedding_input=7)))
    await report.flush()
    assert await column(db, "1") == []


async def test_an_example_is_the_latest_with_the_message_that_is_known(db: AsyncEngine) -> None:
    """In one flush, over several, and of several groups."""

    async def locate(_: int) -> MessagePlace | None:
        return MessagePlace("messages[1]", 1, "user")

    async def read() -> tuple[str, float, str | None]:
        page = await read_cache_report(
            partial(tenant, db), org_id="org_a", start_time=int(HOUR), end_time=int(HOUR) + 3600
        )
        [[row]] = page.rows.values()
        [found] = row.breaks
        assert (found.message_index, found.role) == (1, "user")
        return found.request_id, found.at, found.message

    now = 100.0
    report = CacheReport(db, wall_clock=lambda: now)
    for name, place in (("req_1", locate), ("req_2", None)):
        report.note(a_note(request_id=name, locate=place))
        now += 1.0
    await report.flush()
    assert await read() == ("req_2", 101.0, "messages[1]")
    report.note(a_note(request_id="req_3"))
    await report.flush()
    assert await read() == ("req_3", 102.0, "messages[1]")
    now += 1.0
    report.note(a_note(request_id="req_4", prefix="bb"))
    await report.flush()
    assert await read() == ("req_4", 103.0, "messages[1]")


async def test_only_so_many_breaks_are_located(db: AsyncEngine) -> None:
    report, asked = CacheReport(db), 0

    async def locate(position: int) -> MessagePlace | None:
        nonlocal asked
        asked += 1
        if position == 1:
            raise RuntimeError("the text of a prompt")
        return MessagePlace("input", 0, "user")

    for position in range(50):
        report.note(a_note(position=position, tokens=1000 - position, locate=locate))
    await report.flush()
    assert asked == cache_report.MAX_LOCATING
    [breaks] = await column(db, "breaks")
    found = {each["position"]: each.get("role") for each in breaks}
    assert found[0] == "user" and found[1] is None


async def test_a_bucket_tells_so_many_groups_apart_and_adds_up_the_rest(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with most to gain are told apart, hour by hour."""
    monkeypatch.setattr(cache_reading, "MAX_RESULTS", 3)
    report = CacheReport(db)
    for number in range(8):
        for hour in (0, 1):
            at = HOUR + 3600 * hour
            report.note(a_note(prefix=f"{number}", tokens=100 + number, at=at, position=number))
    await report.flush()

    async def read(**asked: Any) -> list[list[CacheRow]]:
        open_rows = partial(tenant, db)
        start = int(HOUR)
        options = {"start_time": start, "end_time": start + 7200, "bucket_width": "1h"} | asked
        page = await read_cache_report(open_rows, org_id="org_a", **options)
        return [[*page.rows.get(start, ())] for start in page.window.starts]

    for rows in await read(group_by=["prefix"]):
        assert [each.names and each.names["prefix"] for each in rows] == ["7", "6", "5", None]
        assert [each.num_requests for each in rows] == [1, 1, 1, 5]
        assert sum(each.input_tokens for each in rows) == 828
        assert [[one.position for one in each.breaks] for each in rows] == [[7], [6], [5], []]
    [[whole]] = await read(start_time=int(HOUR) // 86_400 * 86_400, bucket_width="1d", limit=1)
    assert (whole.num_requests, whole.causes["changed"], len(whole.breaks)) == (16, 16, MAX_BREAKS)
    assert [each.requests for each in whole.breaks] == [2] * MAX_BREAKS
    assert await read(prefixes=["5"], models=["penny"], project_ids=["proj_b"]) == [[], []]
    assert [len(rows) for rows in await read(prefixes=["5", "6"], group_by=["model"])] == [1, 1]


async def test_a_walk_by_pages_has_every_bucket_once(db: AsyncEngine) -> None:
    report = CacheReport(db)
    for hour in range(5):
        for _ in range(hour + 1):
            report.note(a_note(at=HOUR + 3600 * hour))
    await report.flush()
    found: list[int] = []
    page: str | None = None
    while True:
        read = await read_cache_report(
            partial(tenant, db),
            org_id="org_a",
            start_time=int(HOUR),
            end_time=int(HOUR) + 5 * 3600,
            bucket_width="1h",
            limit=2,
            page=page,
        )
        found += [row.num_requests for start in read.window.starts for row in read.rows[start]]
        page = read.window.next_page
        if page is None:
            break
    assert found == [1, 2, 3, 4, 5]


breaking = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(0, 1000),
        st.sampled_from(("changed", "evicted")),
        st.booleans(),
    ),
    max_size=80,
)


@given(breaking)
def test_counted_rows_add_up_in_any_order(found: list[tuple[int, int, CacheCause, bool]]) -> None:
    """Whole, and in two parts that are added: the same counts, and breaks within their bound."""
    whole, parts = ReportCounts(), (ReportCounts(), ReportCounts())
    for at, (position, uncached, cause, which) in enumerate(found):
        for each in (whole, parts[which]):
            each.num_requests += 1
            each.causes[cause] = each.causes.get(cause, 0) + 1
            each.broke(cause, position, uncached, at=float(at), request_id=f"req_{at}")
    before = parts[1].num_requests, dict(parts[1].causes), str(parts[1].breaks)
    parts[0].add(parts[1])
    assert (parts[1].num_requests, parts[1].causes, str(parts[1].breaks)) == before
    assert (parts[0].num_requests, parts[0].causes) == (whole.num_requests, whole.causes)
    for each in (whole, parts[0]):
        assert len(each.breaks) <= 2 * MAX_BREAKS
        kept = costliest(each.breaks)
        assert len(kept) == min(MAX_BREAKS, len(each.breaks))
        dearest = max((one.uncached_tokens for one in each.breaks.values()), default=0)
        assert not kept or max(one.uncached_tokens for one in kept.values()) == dearest
