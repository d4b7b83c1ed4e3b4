"""Reports: whole UTC buckets, groups, filters and pages, to the token and to the pico-USD."""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import ReportQueryError
from billing.events import Price, Quantities, UsageEvent
from billing.ingestion.ingest import ingest
from billing.reconciliation.checks import check_ledger
from billing.reports.usage import (
    CostRow,
    OpenRows,
    UsageRow,
    costs,
    nothing_used,
    usage_completions,
)
from gateway.db import create_engine, tenant
from tests.billing.samples import NOON, PRICES, an_attempt, an_event

OWNED = """
    INSERT INTO api_keys (id, org_id, project_id, user_id, service_account_id, name, key_hash,
        pepper_id, prefix, last_four, scopes)
    VALUES
        ('key_a', 'org_a', 'proj_a', 'user_1', NULL, 'a', 'h1', 'p', 'sk', 'aaaa', '{inference}'),
        ('key_b', 'org_a', 'proj_b', NULL, 'sa_1', 'b', 'h2', 'p', 'sk', 'bbbb', '{inference}')
"""
DAY, HOUR, MINUTE = 86400, 3600, 60
MIDNIGHT = int(NOON) - 12 * HOUR
USED = Quantities(uncached_input=100, cache_read=16, output=20)


def at(moment: float, quantities: Quantities = USED, **fields: Any) -> UsageEvent:
    return an_event(an_attempt(admitted_at=moment, **fields), quantities)


@pytest.fixture
async def used(db: AsyncEngine) -> OpenRows:
    """Three days: yesterday's last instant, noon of two projects, tomorrow's first instant."""
    cold = Quantities(cache_write_5m=5, cache_write_1h=3, output=1)
    prices = PRICES | {"cache_write_1h": Price("p1h", 7)}
    events = [
        at(MIDNIGHT - 0.001),
        at(NOON),
        at(NOON + 59.9, project="proj_b", key="key_b", lane="batch"),
        at(NOON + 60, model="other", quantities=cold, prices=prices),
        at(NOON + HOUR),
        at(MIDNIGHT + DAY),
        at(NOON, org="org_b"),
        an_event(kind="waste"),
        an_event(quantities=Quantities(), finish="recovered"),
    ]
    await ingest(db, events)
    return partial(tenant, db)


def shape(page: Any) -> list[tuple[int, int]]:
    """(start, requests) by bucket of an ungrouped report."""
    return [(b.start_time, sum(r.num_model_requests for r in b.results)) for b in page.buckets]


async def test_days_are_utc_and_empty_ones_are_there(used: OpenRows) -> None:
    page = await usage_completions(
        used, org="org_a", start_time=MIDNIGHT - 2 * DAY + 5, end_time=MIDNIGHT + DAY + 1
    )
    assert shape(page) == [
        (MIDNIGHT - 2 * DAY, 0),
        (MIDNIGHT - DAY, 1),
        (MIDNIGHT, 4),
        (MIDNIGHT + DAY, 1),
    ]
    assert page.next_page is None
    assert all(bucket.end_time == bucket.start_time + DAY for bucket in page.buckets)
    assert page.buckets[0].results == []
    assert page.buckets[2].results == [
        UsageRow(
            num_model_requests=4,
            quantities=Quantities(
                uncached_input=300, cache_read=48, cache_write_5m=5, cache_write_1h=3, output=61
            ),
        )
    ]


async def test_hours_and_minutes(used: OpenRows) -> None:
    noon = int(NOON)
    hours = await usage_completions(
        used, org="org_a", start_time=noon, end_time=noon + 2 * HOUR, bucket_width="1h"
    )
    assert shape(hours) == [(noon, 3), (noon + HOUR, 1)]
    minutes = await usage_completions(
        used, org="org_a", start_time=noon + 30, end_time=noon + 121, bucket_width="1m"
    )
    assert shape(minutes) == [(noon, 2), (noon + 60, 1), (noon + 120, 0)]
    batch = await usage_completions(
        used, org="org_a", start_time=noon, end_time=noon + 60, bucket_width="1m",
        group_by=["batch"],
    )  # fmt: skip
    assert [(row.batch, row.quantities) for row in batch.buckets[0].results] == [
        (False, USED),
        (True, USED),
    ]


@pytest.mark.parametrize(
    ("width", "table"),
    [("1d", "usage_daily"), ("1h", "usage_hourly"), ("1m", "usage_events_org_admitted_at")],
)
async def test_a_report_reads_a_rollup_or_an_index_and_never_all_events(
    db: AsyncEngine, width: Any, table: str
) -> None:
    asked: list[tuple[str, Any]] = []

    def listen(_conn: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    sa.event.listen(db.sync_engine, "before_cursor_execute", listen)
    await usage_completions(
        partial(tenant, db),
        org="org_a",
        start_time=MIDNIGHT,
        bucket_width=width,
        group_by=["model", "api_key_id"],
    )
    statement, parameters = next(each for each in asked if "usage_" in each[0])
    async with db.connect() as conn:
        raw = (await conn.get_raw_connection()).driver_connection
        assert raw is not None
        await raw.execute("SET enable_seqscan = off")  # of a table without rows it is the cheapest
        rows = await raw.fetch(f"EXPLAIN {statement}", *parameters)
        await raw.execute("RESET enable_seqscan")
    plan = "\n".join(row[0] for row in rows)
    assert "Index" in plan and f" {table}" in plan and "Seq Scan on usage" not in plan, plan
    assert width == "1m" or "usage_events" not in plan, plan


async def test_groups_and_filters(used: OpenRows) -> None:
    async def results(**query: Any) -> list[UsageRow]:
        page = await usage_completions(
            used, org="org_a", start_time=MIDNIGHT, end_time=MIDNIGHT + DAY, **query
        )
        return page.buckets[0].results

    every = await results(
        group_by=["project_id", "user_id", "api_key_id", "model", "batch", "service_tier",
                  "api_source", "model"],
    )  # fmt: skip
    assert [
        (r.project_id, r.api_key_id, r.model, r.batch, r.service_tier, r.num_model_requests)
        for r in every
    ] == [
        ("proj_a", "key_a", "other", False, "default", 1),
        ("proj_a", "key_a", "penny", False, "default", 2),
        ("proj_b", "key_b", "penny", True, "default", 1),
    ]
    assert [r.num_model_requests for r in await results(project_ids=["proj_b", "none"])] == [1]
    assert [r.num_model_requests for r in await results(api_key_ids=["key_a"])] == [3]
    assert [r.num_model_requests for r in await results(models=["penny"])] == [3]
    assert [r.num_model_requests for r in await results(batch=False)] == [3]
    assert [r.num_model_requests for r in await results(batch=True)] == [1]
    assert await results(user_ids=["somebody"]) == []
    assert await results(models=["none"]) == []


async def test_a_users_usage_is_that_of_their_keys(used: OpenRows, db: AsyncEngine) -> None:
    async with db.begin() as conn:
        await conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        await conn.execute(sa.text(OWNED))
    query: dict[str, Any] = {
        "org": "org_a", "start_time": MIDNIGHT, "end_time": MIDNIGHT + DAY,
    }  # fmt: skip

    async def counts(**more: Any) -> list[tuple[str | None, str | None, int]]:
        page = await usage_completions(used, **query, **more)
        rows = page.buckets[0].results
        return [(row.user_id, row.service_account_id, row.num_model_requests) for row in rows]

    both = ["user_id", "service_account_id"]
    assert await counts(group_by=both) == [("user_1", None, 3), (None, "sa_1", 1)]
    assert await counts(user_ids=["user_1"]) == [(None, None, 3)]
    assert await counts(service_account_ids=["sa_1"]) == [(None, None, 1)]
    assert await counts(user_ids=["user_2"]) == []
    by_user = await costs(used, **query, group_by=["user_id"])
    assert [row.user_id for row in by_user.buckets[0].results] == ["user_1", None]
    minute = await usage_completions(
        used, org="org_a", start_time=int(NOON), bucket_width="1m", group_by=["user_id"], limit=1
    )
    assert [row.user_id for row in minute.buckets[0].results] == ["user_1", None]


async def embedded_and_said(db: AsyncEngine) -> None:
    """In one hour, by one key, of one model: two embeddings, three of everything else."""
    embedded = Quantities(embedding_input=9)
    queued = Quantities(embedding_input=4, batch_queue=1)
    events = [at(NOON), at(NOON), at(NOON, queued)]
    for quantities in (USED, embedded):
        tagged = msgspec.structs.replace(an_attempt(), tags={"team": "a"})
        events.append(an_event(tagged, quantities))
    await ingest(db, events)


async def numbers(db: AsyncEngine, **query: Any) -> list[tuple[int, int, int]]:
    """(requests, prompt, embedded) of all other usage, then of embeddings."""
    noon, found = int(NOON), []
    for embeddings in (False, True):
        page = await usage_completions(
            partial(tenant, db), org="org_a", start_time=noon, end_time=noon + 1,
            embeddings=embeddings, **query,
        )  # fmt: skip
        for row in page.buckets[0].results:
            used = row.quantities
            found.append((row.num_model_requests, used.prompt_total, used.embedding_input))
    return found


@pytest.mark.parametrize("width", ["1d", "1h", "1m"])
async def test_a_request_is_counted_in_one_report(db: AsyncEngine, width: Any) -> None:
    await embedded_and_said(db)
    counts = await numbers(db, bucket_width=width)
    assert [each[0] for each in counts] == [3, 2]
    assert (counts[0][1], counts[1][2]) == (3 * 116, 13)


async def test_a_tags_embeddings_are_counted_by_themselves(db: AsyncEngine) -> None:
    await embedded_and_said(db)
    by_team = await numbers(db, group_by=["tag:team"])
    assert sorted(each[0] for each in by_team) == [1, 1, 1, 2]


async def test_what_stood_before_embeddings_were_counted_is_counted_anew(db: AsyncEngine) -> None:
    await embedded_and_said(db)
    migration = import_module("migrations.versions.0055_counted_embeddings")
    async with db.begin() as conn:
        for table in migration.TABLES:
            await conn.execute(sa.text(f"UPDATE {table} SET num_embeddings = 0"))
    assert len(await check_ledger(db)) == 2  # the hour, and its day's tags
    async with db.begin() as conn:
        for statement in migration.BACKFILL:
            await conn.execute(sa.text(statement))
    assert await check_ledger(db) == []


async def test_what_is_batch_in_the_default_tier_is_served_as_that(used: OpenRows) -> None:
    query: dict[str, Any] = {
        "org": "org_a", "start_time": MIDNIGHT, "end_time": MIDNIGHT + DAY,
    }  # fmt: skip
    page = await usage_completions(used, **query, group_by=["served_as"])
    rows = page.buckets[0].results
    assert [(row.served_as, row.num_model_requests) for row in rows] == [
        ("batch", 1), ("default", 3),
    ]  # fmt: skip
    page = await usage_completions(used, **query, served_as=["batch", "flex"])
    assert [row.num_model_requests for row in page.buckets[0].results] == [1]
    items = await costs(used, **query, group_by=["model", "served_as", "component"])
    assert [
        (row.model, row.served_as, row.component, row.quantity)
        for row in items.buckets[0].results
        if row.served_as == "batch"
    ] == [
        ("penny", "batch", "cache_read", 16),
        ("penny", "batch", "output", 20),
        ("penny", "batch", "uncached_input", 100),
    ]


async def test_pages_join_without_a_gap(used: OpenRows) -> None:
    query: dict[str, Any] = {
        "org": "org_a", "start_time": MIDNIGHT - 3 * DAY, "end_time": MIDNIGHT + 3 * DAY,
    }  # fmt: skip
    whole = await usage_completions(used, **query)
    joined, page = [], None
    for _ in range(3):
        part = await usage_completions(used, **query, limit=2, page=page)
        joined += part.buckets
        page = part.next_page
    assert page is None and joined == whole.buckets


async def test_the_end_is_now_when_none_is_given(db: AsyncEngine) -> None:
    now = int(time.time())
    rows = partial(tenant, db)
    page = await usage_completions(rows, org="o", start_time=now - 90, bucket_width="1m")
    assert len(page.buckets) in (2, 3) and page.next_page is None
    assert page.buckets[-1].start_time <= time.time() < page.buckets[-1].end_time + 1
    future = await costs(rows, org="o", start_time=now + 5 * DAY)
    assert (future.buckets, future.next_page) == ([], None)


async def test_costs_are_exact(used: OpenRows) -> None:
    query: dict[str, Any] = {
        "org": "org_a", "start_time": MIDNIGHT, "end_time": MIDNIGHT + DAY,
    }  # fmt: skip
    other = 3 * 7 + 1 * 400_000
    total = await costs(used, **query)
    assert total.buckets[0].results == [CostRow(amount_pico=3 * 18_160_000 + other)]
    lines = await costs(used, **query, group_by=["line_item"])
    assert [(r.line_item, r.quantity, r.amount_pico) for r in lines.buckets[0].results] == [
        ("other, cache_write_1h_tokens", 3, 21),
        ("other, cache_write_5m_tokens", 5, 0),
        ("other, output_tokens", 1, 400_000),
        ("penny, cached_input_tokens", 48, 480_000),
        ("penny, input_tokens", 300, 30_000_000),
        ("penny, output_tokens", 60, 24_000_000),
    ]
    grouped = await costs(used, **query, group_by=["project_id", "api_key_id", "user_id"])
    assert grouped.buckets[0].results == [
        CostRow(amount_pico=2 * 18_160_000 + other, project_id="proj_a", api_key_id="key_a"),
        CostRow(amount_pico=18_160_000, project_id="proj_b", api_key_id="key_b"),
    ]
    some = await costs(
        used, **query, project_ids=["proj_b"], api_key_ids=["key_b"],
        line_items=["penny, output_tokens"],
    )  # fmt: skip
    assert some.buckets[0].results == [CostRow(amount_pico=8_000_000)]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"bucket_width": "2d"}, "bucket_width"),
        ({"limit": 32}, "limit"),
        ({"limit": 0}, "limit"),
        ({"bucket_width": "1h", "limit": 169}, "limit"),
        ({"bucket_width": "1m", "limit": 1441}, "limit"),
        ({"start_time": -1}, "start_time"),
        ({"start_time": 10**15}, "start_time"),
        ({"end_time": MIDNIGHT}, "end_time"),
        ({"end_time": 10**15}, "end_time"),
        ({"group_by": ["line_item"]}, "group_by"),
        ({"page": "page_"}, "page"),
        ({"page": "nonsense"}, "page"),
        ({"page": f"page_{MIDNIGHT + 1}"}, "page"),
        ({"page": f"page_{MIDNIGHT - DAY}"}, "page"),
        ({"page": "page_" + "9" * 5000}, "page"),
    ],
)
async def test_what_cannot_be_reported_is_refused_by_name(
    query: dict[str, Any], param: str
) -> None:
    nowhere = partial(tenant, create_engine("postgresql+asyncpg:///refused_before_it_connects"))
    arguments = {"start_time": MIDNIGHT, "end_time": MIDNIGHT + 5 * DAY} | query
    with pytest.raises(ReportQueryError) as refused:
        await usage_completions(nowhere, org="o", **arguments)
    assert refused.value.param == param


async def test_costs_have_ranges_of_their_own(db: AsyncEngine) -> None:
    end = MIDNIGHT + 400 * DAY
    rows = partial(tenant, db)
    most = await costs(rows, org="o", start_time=MIDNIGHT, end_time=end, limit=180)
    assert len(most.buckets) == 180 and most.next_page == f"page_{MIDNIGHT + 180 * DAY}"
    for query, param in [
        ({"limit": 181}, "limit"), ({"bucket_width": "1h"}, "bucket_width"),
        ({"group_by": ["colour"]}, "group_by"),
    ]:  # fmt: skip
        with pytest.raises(ReportQueryError) as refused:
            await costs(rows, org="o", start_time=MIDNIGHT, **query)  # type: ignore[arg-type]
        assert refused.value.param == param


async def test_of_what_nobody_sells_there_are_whole_empty_pages() -> None:
    page = await nothing_used(start_time=MIDNIGHT, end_time=MIDNIGHT + 2 * DAY, limit=1)
    assert shape(page) == [(MIDNIGHT, 0)] and page.next_page == f"page_{MIDNIGHT + DAY}"
