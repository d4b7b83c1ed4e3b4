"""Usage by tag is counted day by day, bounded, and the same whatever is booked when and how often;
it has its reports and its budgets."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.alerts.alerts import THRESHOLDS, raise_for_cap
from billing.corrections.rerating import ReratingScope, apply, plan
from billing.errors import ReportQueryError
from billing.events import Price, Quantities, UsageEvent
from billing.ingestion.ingest import digest, ingest
from billing.ingestion.settle_late import reprice_suspense
from billing.ledger import tags as usage_tags
from billing.ledger.tags import OTHER, to_tag
from billing.pricing.price_book import PriceBook, PriceEntry
from billing.reconciliation.checks import check_ledger, check_spend
from billing.reports.request_record import find_record
from billing.reports.usage import CostRow, UsageRow, costs, usage_completions
from billing.tables import to_moment
from tests.billing.alerts.test_alerts import DAY_S, archive, cap, raised
from tests.billing.invoices.billed import priced
from tests.billing.samples import NOON, an_attempt, an_event
from tests.budget import examples

SEARCH = {"team": "search", "feature": "chat"}
DAY = int(NOON) // DAY_S * DAY_S
_orgs = count()


def uses(output: int, tags: dict[str, str] | None, at: float = NOON, **fields: Any) -> UsageEvent:
    attempt = an_attempt(**{"prices": {"output": Price("one", 1)}, "admitted_at": at, **fields})
    if tags:
        attempt = msgspec.structs.replace(attempt, tags=tags)
    return an_event(attempt, Quantities(output=output))


async def used(db: AsyncEngine, *group_by: str, org: str = "org_a", **asked: Any) -> list[UsageRow]:
    page = await usage_completions(
        rows_of(db), org=org, start_time=DAY, end_time=DAY + DAY_S, group_by=group_by, **asked
    )
    return [row for bucket in page.buckets for row in bucket.results]


def rows_of(db: AsyncEngine) -> Any:
    @asynccontextmanager
    async def open_rows(_: str) -> Any:
        async with db.connect() as conn:
            yield conn

    return open_rows


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("team=search", ("team", "search")),
        ("a.b-c_1=A:/@+-._1", ("a.b-c_1", "A:/@+-._1")),
        (f"{'k' * 32}={'v' * 64}", ("k" * 32, "v" * 64)),
        *((bad, None) for bad in ("team", "team=", "=x", "Team=x", "1a=x", "a=b=c", "a= b")),
        *((bad, None) for bad in (f"{'k' * 33}=v", f"k={'v' * 65}", "a=(other)", "a=b\n", "")),
    ],
)
def test_a_tag_is_a_key_and_a_value_of_few_characters(text: str, found: Any) -> None:
    assert to_tag(text) == found


def test_an_event_without_tags_is_what_it_was_before_there_were_any() -> None:
    """Its digest is compared with what stands, whichever version booked it."""
    plain = uses(1, None)
    assert b"tags" not in msgspec.msgpack.encode(plain)
    assert digest(plain) != digest(uses(1, SEARCH))


async def test_days_are_grouped_by_the_values_of_a_tag(db: AsyncEngine) -> None:
    events = [
        uses(3, SEARCH),
        uses(4, {"team": "ads"}),
        uses(5, SEARCH, model="m2"),
        uses(7, None),
        uses(11, {"feature": "chat"}),
        uses(100, SEARCH, NOON + DAY_S),
        uses(100, SEARCH, org="org_b"),
    ]
    for _ in range(2):
        await ingest(db, events)
    found = {
        row.tag: (row.num_model_requests, row.quantities.output)
        for row in await used(db, "tag:team")
    }
    assert found == {"search": (2, 8), "ads": (1, 4), None: (2, 18)}
    both = {
        (row.tag, row.model): row.quantities.output for row in await used(db, "model", "tag:team")
    }
    assert both[("search", "m2")] == 5 and (None, "m2") not in both, "all of it has the tag"
    page = await costs(
        rows_of(db), org="org_a", start_time=DAY, end_time=DAY + DAY_S, group_by=["tag:team"]
    )
    (bucket,) = page.buckets
    amounts: list[CostRow] = bucket.results
    assert {row.tag: row.amount_pico for row in amounts} == {"search": 8, "ads": 4, None: 18}
    for wrong, asked in (
        (["tag:a", "tag:b"], {}),
        (["tag:a"], {"bucket_width": "1h"}),
        (["tag"], {}),
    ):
        with pytest.raises(ReportQueryError):
            await used(db, *wrong, **asked)
    assert await check_ledger(db) == []


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    batches=st.lists(
        st.lists(
            st.dictionaries(
                st.sampled_from(["a", "b", "c", "d"]), st.sampled_from("vwxyz"), max_size=3
            ),
            max_size=6,
        ),
        max_size=4,
    )
)
async def test_of_too_many_tags_the_rest_is_one(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, batches: list[list[dict[str, str]]]
) -> None:
    org, sent = f"org_{next(_orgs)}", Counter[tuple[str, str]]()
    most = 4
    monkeypatch.setattr(usage_tags, "MAX_A_DAY", most)
    for tags in batches:
        await ingest(db, [uses(1, each, org=org) for each in tags])
        sent.update(item for each in tags for item in each.items())
    async with db.connect() as conn:
        rows = await conn.execute(
            sa.text(
                "SELECT tag, value, sum(output), sum(output_pico), sum(num_requests)"
                " FROM usage_tags_daily WHERE org = :org GROUP BY tag, value"
            ),
            {"org": org},
        )
        found = {(row.tag, row.value): tuple(map(int, row[2:])) for row in rows}
    named = {tag for tag in found if tag[1] != OTHER}
    assert len(named) == min(most, len(sent))
    for tag in named:
        assert found[tag] == (sent[tag],) * 3
    assert sum(each[0] for each in found.values()) == sum(sent.values())
    for key in {key for key, _ in named}:
        of_key = sum(each[0] for (tag, _), each in found.items() if tag == key)
        assert of_key == sum(number for (tag, _), number in sent.items() if tag == key)
    assert await check_ledger(db) == []


async def test_what_is_priced_late_is_priced_by_its_tags_too(
    db: AsyncEngine, tmp_path: Path
) -> None:
    late: Any = {"model": "new", "prices": {}}
    await ingest(db, [uses(3, SEARCH, **late), uses(4, SEARCH, **late), uses(5, None)])
    assert {row.tag: row.quantities.output for row in await used(db, "tag:team")} == {
        "search": 7,
        None: 5,
    }
    budget = await cap(db, 7_000_000, tag="team=search")
    (tmp_path / "book.toml").write_text(
        '[[price]]\nmodel = "new"\nvalid_from = 2026-11-01\noutput = 1\n'
    )
    assert await reprice_suspense(db, PriceBook.load([tmp_path])) == 2
    page = await costs(
        rows_of(db), org="org_a", start_time=DAY, end_time=DAY + DAY_S, group_by=["tag:team"]
    )
    amounts: list[CostRow] = page.buckets[0].results
    assert {row.tag: row.amount_pico for row in amounts} == {"search": 7_000_000, None: 5}
    told = [each[3:] for each in await raised(db) if each[0] == budget]
    assert told == [(threshold, 7_000_000) for threshold in THRESHOLDS]
    assert await check_ledger(db) == []


async def test_a_budget_of_a_tag_is_told_of_as_any_other_is(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ingest(db, [uses(30, SEARCH), uses(1000, {"team": "ads"}), uses(1000, None)])
    budget = await cap(db, 100, tag="team=search")
    async with db.begin() as conn:
        await raise_for_cap(conn, budget, None)
    assert await raised(db) == [], "nothing of today"
    for amount in (15, 4, 1):
        await ingest(db, [uses(amount, SEARCH)])
    assert await raised(db) == [(budget, "tag", "2026-11-19", 50, 50)]
    total = await cap(db, 50, tag="feature=chat", period="total")
    async with db.begin() as conn:
        await raise_for_cap(conn, total, None)
    assert [each[3] for each in await raised(db) if each[0] == total] == [50, 80, 100]
    monkeypatch.setattr(usage_tags, "MAX_A_DAY", 1)
    late = await cap(db, 100, tag="team=new")
    await ingest(db, [uses(50, {"team": "new"}), uses(9, {"team": "another"})])
    assert [each[3:] for each in await raised(db) if each[0] == late] == [(50, 50)]
    found = {row.tag: row.quantities.output for row in await used(db, "tag:team")}
    assert (found["new"], found[OTHER]) == (50, 9), "what has a budget is counted by its name"


async def test_a_request_is_found_with_its_tags(db: AsyncEngine) -> None:
    event = uses(3, SEARCH)
    await ingest(db, [event])
    async with db.connect() as conn:
        found = await find_record(conn, "org_a", event.attempt.request_id, NOON)
    assert found is not None
    assert found.events[0].attempt.tags == SEARCH


EARLY, LATER = NOON, NOON + 1800
"""Two moments of a day; a re-rating may make the one dearer and the other cheaper."""
teams = st.sampled_from(["search", "ads", "more", "rest"])
steps = st.one_of(
    st.tuples(st.just("use"), teams, st.sampled_from([EARLY, LATER, EARLY - DAY_S])),
    st.tuples(st.just("cap"), teams, st.sampled_from(["day", "month", "total"])),
    st.tuples(st.just("archive"), st.none(), st.none()),
    st.tuples(st.just("rate"), st.integers(1, 9), st.integers(1, 9)),
)


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(taken=st.lists(steps, min_size=4, max_size=12))
@example(  # nothing for the org, and something for each tag
    taken=[("cap", "search", "day"), ("use", "search", EARLY), ("use", "ads", LATER)]
    + [("rate", 7, 3)]
)
@example(  # a budget that was given up, whose tag is counted with the others from then on
    taken=[("cap", "search", "total"), ("use", "search", EARLY - DAY_S), ("archive", None, None)]
    + [("use", "ads", EARLY), ("use", "more", EARLY), ("use", "search", EARLY), ("rate", 7, 3)]
)
@example(  # a budget of what was counted with the others
    taken=[("use", "ads", EARLY), ("use", "more", EARLY), ("use", "rest", EARLY)]
    + [("cap", "rest", "day"), ("cap", "ads", "day"), ("rate", 7, 3), ("use", "rest", EARLY)]
)
async def test_a_tag_has_spent_what_its_days_say(
    db: AsyncEngine, monkeypatch: pytest.MonkeyPatch, taken: list[tuple[str, Any, Any]]
) -> None:
    org = f"org_{next(_orgs)}"
    monkeypatch.setattr(usage_tags, "MAX_A_DAY", 2)
    caps: dict[tuple[str, str], str] = {}
    for step, one, other in taken:
        match step:
            case "use":
                await ingest(db, [uses(10, {"team": one}, other, org=org, prices=priced(5))])
            case "cap" if (one, other) not in caps:
                caps[one, other] = await cap(db, 100, org=org, tag=f"team={one}", period=other)
            case "archive" if caps:
                await archive(db, caps.popitem()[1])
            case "rate":
                await rate_anew(db, org, one, other)
        assert await check_spend(db) == []
    assert await check_ledger(db) == []


async def rate_anew(db: AsyncEngine, org: str, early: int, later: int) -> None:
    """Rate what came early at one price and what came later at another."""
    entries = [
        PriceEntry(model="penny", valid_from=start, valid_to=end, prices=priced(pico), where="here")
        for start, end, pico in (
            (to_moment(0), to_moment(LATER), early),
            (to_moment(LATER), None, later),
        )
    ]
    book = PriceBook(entries)
    span = ReratingScope(org_id=org, start=to_moment(NOON - 2 * DAY_S), end=to_moment(NOON + DAY_S))
    await apply(db, span, book, (await plan(db, span, book)).digest)


async def test_a_tag_that_has_spent_something_else_is_named(db: AsyncEngine) -> None:
    await cap(db, 100, tag="team=search")
    await ingest(db, [uses(3, SEARCH)])
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE spend_to_date SET spent_pico = 4"))
    assert await check_spend(db) == [
        "org_a/tag/team=search/day/2026-11-19: what it is said to have spent differs from its usage"
    ]


async def test_a_budget_hears_of_what_is_rated_anew_for_its_tag_alone(db: AsyncEngine) -> None:
    budget = await cap(db, 60, tag="team=search")
    for team, moment in (("search", EARLY), ("ads", LATER)):
        await ingest(db, [uses(10, {"team": team}, moment, prices=priced(5))])
    await rate_anew(db, "org_a", 7, 3)
    told = [each[3:] for each in await raised(db) if each[0] == budget]
    assert told == [(50, 50), (80, 50), (100, 70)]
