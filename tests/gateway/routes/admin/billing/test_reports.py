"""The bill in both vendors' shapes, over HTTP: the same sums, each read as its clients read it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from billing.events import Price, Quantities
from billing.ingestion.ingest import ingest
from tests.billing.samples import NOON, PRICES, an_attempt, an_event
from tests.gateway.routes.admin.conftest import World
from tests.shared_application import on_one_loop

MIDNIGHT = int(NOON) - 12 * 3600
MESSAGES = "/v1/organizations/usage_report/messages"
COSTS = "/v1/organizations/cost_report"
WINDOW = "starting_at=2026-11-19T00:00:00Z&ending_at=2026-11-20T00:00:00Z"
USED = Quantities(uncached_input=100, cache_read=16, cache_write_5m=5, cache_write_1h=3, output=20)


@on_one_loop()
async def used(world: World, org_id: str) -> World:
    prices = PRICES | {"cache_write_1h": Price("penny:cache_write_1h:1", 7)}
    attempts = [
        an_attempt(org=org_id, prices=prices),
        an_attempt(org=org_id, prices=prices, lane="batch", project="proj_b"),
    ]
    await ingest(world.db, [an_event(each, USED) for each in attempts])
    return world


async def get(world: World, path: str, **headers: str) -> Any:
    answer = await world.http.get(path, headers=headers or {"x-api-key": world.admin_key})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_tokens_as_anthropic_counts_them(used: World) -> None:
    page = await get(used, f"{MESSAGES}?{WINDOW}&group_by[]=workspace_id&group_by[]=service_tier")
    [bucket] = page["data"]
    assert (page["has_more"], page["next_page"]) == (False, None)
    assert bucket["starting_at"] == "2026-11-19T00:00:00Z"
    assert bucket["ending_at"] == "2026-11-20T00:00:00Z"
    tiers = [(row["workspace_id"], row["service_tier"]) for row in bucket["results"]]
    assert tiers == [("proj_a", "standard"), ("proj_b", "batch")]
    assert bucket["results"][0] == {
        "uncached_input_tokens": 100,
        "cache_creation": {"ephemeral_1h_input_tokens": 3, "ephemeral_5m_input_tokens": 5},
        "cache_read_input_tokens": 16,
        "output_tokens": 20,
        "server_tool_use": {"web_search_requests": 0},
        "api_key_id": None,
        "workspace_id": "proj_a",
        "model": None,
        "service_tier": "standard",
        "account_id": None,
        "service_account_id": None,
        "context_window": None,
        "inference_geo": None,
    }
    batch = await get(used, f"{MESSAGES}?{WINDOW}&service_tiers[]=batch")
    assert [row["output_tokens"] for row in batch["data"][0]["results"]] == [20]


async def test_money_in_cents_is_the_money_in_dollars(used: World) -> None:
    total = await get(used, f"{COSTS}?{WINDOW}")
    items = await get(used, f"{COSTS}?{WINDOW}&group_by[]=description")
    theirs = await used.sdk.admin.organization.usage.costs(
        start_time=MIDNIGHT, end_time=MIDNIGHT + 1
    )
    [cost] = total["data"][0]["results"]
    assert cost == {
        "amount": "0.0036320042",
        "currency": "USD",
        **dict.fromkeys(
            ("workspace_id", "description", "cost_type", "token_type", "model", "service_tier",
             "context_window", "inference_geo")
        ),
    }  # fmt: skip
    [dollars] = theirs.data[0].results
    assert float(Decimal(cost["amount"]) / 100) == dollars.amount.value  # type: ignore[union-attr]
    rows = items["data"][0]["results"]
    assert sum(Decimal(row["amount"]) for row in rows) == Decimal(cost["amount"])
    assert {(row["description"], row["token_type"], row["service_tier"]) for row in rows} >= {
        ("penny, output_tokens", "output_tokens", "standard"),
        ("penny, output_tokens, batch", "output_tokens", "batch"),
        (
            "penny, cache_write_1h_tokens",
            "cache_creation.ephemeral_1h_input_tokens",
            "standard",
        ),
    }


REFUSED = {
    "": "starting_at",
    "starting_at=2026-11-19": "starting_at",
    "starting_at=1969-01-01T00:00:00Z": "starting_at",
    f"{WINDOW}&group_by[]=speed": "group_by",
    "starting_at=2026-11-19T00:00:00Z&ending_at=2026-11-18T00:00:00Z": "ending_at",
    f"{WINDOW}&limit=32": "limit",
}


async def test_what_is_refused_is_named_in_their_words(world: World) -> None:
    for query, named in REFUSED.items():
        for path in (MESSAGES, COSTS):
            answer = await world.http.get(f"{path}?{query}", headers={"x-api-key": world.admin_key})
            error = answer.json()
            assert (answer.status_code, error["type"]) == (400, "error")
            assert error["error"]["type"] == "invalid_request_error"
            assert named in error["error"]["message"]
            assert error["request_id"] == answer.headers["x-request-id"]


async def test_a_refused_moment_says_what_one_is(world: World) -> None:
    for query, said in (
        ("starting_at=0001-01-01T00:00:00Z", "between 1970 and 9999"),
        (
            "starting_at=2026-11-19T00:00:00Z&ending_at=2026-11-18T00:00:00Z",
            "must be after the start,",
        ),
    ):
        answer = await world.http.get(f"{COSTS}?{query}", headers={"x-api-key": world.admin_key})
        message = answer.json()["error"]["message"]
        assert said in message and "start_time" not in message and "Unix" not in message


async def test_who_may_not_read_the_bill_is_told_so_in_their_shape(world: World) -> None:
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "wrong"}, 401, "authentication_error"),
        ({"x-api-key": world.api_key}, 403, "permission_error"),
    ):
        answer = await world.http.get(f"{COSTS}?{WINDOW}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)


async def test_embeddings_are_a_report_of_their_own(used: World, org_id: str) -> None:
    await ingest(
        used.db, [an_event(an_attempt(org=org_id, model="vec"), Quantities(embedding_input=9))]
    )
    usage, window = used.sdk.admin.organization.usage, (MIDNIGHT, MIDNIGHT + 1)
    made = await usage.embeddings(start_time=window[0], end_time=window[1], group_by=["model"])
    rest = await usage.completions(start_time=window[0], end_time=window[1], group_by=["model"])
    [row] = made.data[0].results
    assert (row.input_tokens, row.num_model_requests, row.model) == (9, 1, "vec")  # type: ignore[union-attr]
    assert [each.model for each in rest.data[0].results] == ["penny"]  # type: ignore[union-attr]


async def test_what_nobody_sells_was_not_used(world: World) -> None:
    page = await world.sdk.admin.organization.usage.moderations(
        start_time=MIDNIGHT, end_time=MIDNIGHT + 3 * 86_400, limit=2
    )
    assert (len(page.data), page.has_more) == (2, True)
    assert all(bucket.results == [] for bucket in page.data)
