"""Usage and costs: what the official SDK's admin client asks for, and what it reads."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from openai import OpenAI
from openai.types.admin.organization.usage_completions_response import (
    DataResultOrganizationUsageCompletionsResult,
)
from openai.types.admin.organization.usage_costs_response import DataResultOrganizationCostsResult

from gateway.request_errors import BadField
from gateway.wire.organization.usage import (
    NOT_SOLD,
    Bucket,
    CostsQuery,
    CostsResult,
    Page,
    UsageQuery,
    UsageResult,
    encode_page,
    parse_query,
    to_amount,
)


class Wire:
    """The SDK's admin client; what it asked, and what it is told."""

    def __init__(self, page: Page) -> None:
        self.requests: list[httpx2.Request] = []
        self.page = page
        self.client = OpenAI(
            api_key="k",
            admin_api_key="sk-tg-admin-x",
            base_url="http://x/v1",
            http_client=httpx2.Client(transport=httpx2.MockTransport(self.respond)),
            _strict_response_validation=True,
        )
        self.usage = self.client.admin.organization.usage

    def respond(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        headers = {"content-type": "application/json"}
        return httpx2.Response(200, content=encode_page(self.page), headers=headers)

    @property
    def query(self) -> str:
        query: bytes = self.requests[-1].url.query
        return query.decode()


EMPTY = Page(data=[], has_more=False, next_page=None)


def test_what_the_sdk_asks_of_usage() -> None:
    wire = Wire(EMPTY)
    wire.usage.completions(
        start_time=100,
        end_time=200,
        bucket_width="1h",
        group_by=["project_id", "model"],
        project_ids=["proj_1", "proj_2"],
        user_ids=["u"],
        api_key_ids=["key_1"],
        models=["penny"],
        batch=False,
        limit=30,
        page="p2",
    )
    assert wire.requests[0].url.path == "/v1/organization/usage/completions"
    assert parse_query(wire.query, UsageQuery) == UsageQuery(
        start_time=100,
        end_time=200,
        bucket_width="1h",
        group_by=["project_id", "model"],
        project_ids=["proj_1", "proj_2"],
        user_ids=["u"],
        api_key_ids=["key_1"],
        models=["penny"],
        batch=False,
        limit=30,
        page="p2",
    )


def test_what_the_sdk_asks_of_costs() -> None:
    wire = Wire(EMPTY)
    wire.usage.costs(
        start_time=1, group_by=["line_item", "api_key_id"], line_items=["penny, output"]
    )
    assert wire.requests[0].url.path == "/v1/organization/costs"
    assert parse_query(wire.query, CostsQuery) == CostsQuery(
        start_time=1, group_by=["line_item", "api_key_id"], line_items=["penny, output"]
    )


SOLD = ("completions", "embeddings", "costs")


def test_every_usage_that_the_sdk_asks_for_has_a_query() -> None:
    wire = Wire(EMPTY)
    asked = {
        name for name in dir(wire.usage) if not name.startswith(("_", "with_")) and name not in SOLD
    }
    assert asked == NOT_SOLD.keys()
    for name, kind in NOT_SOLD.items():
        groups = ["project_id"]
        answer = getattr(wire.usage, name)(start_time=5, bucket_width="1h", group_by=groups)
        assert wire.requests[-1].url.path == f"/v1/organization/usage/{name}"
        assert parse_query(wire.query, kind).start_time == 5
        assert answer.data == []


def test_lists_may_be_written_without_brackets() -> None:
    query = parse_query("start_time=1&group_by=model&group_by=batch", UsageQuery)
    assert query.group_by == ["model", "batch"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=soon", "start_time"),
        ("start_time=-1", "start_time"),
        ("start_time=1&start_time=2", "start_time"),
        ("start_time[]=1", "start_time[]"),
        ("start_time=1&bucket_width=1w", "bucket_width"),
        ("start_time=1&limit=many", "limit"),
        ("start_time=1&group_by[]=colour", "group_by[0]"),
        ("start_time=1&batch=perhaps", "batch"),
        ("start_time=1&colour=red", "colour"),
        ("start_time=1&line_items=x", "line_items"),
        ("start_time=1&" + "&".join(f"models[]=m{i}" for i in range(101)), "models"),
        ("start_time=1&" * 501, None),
        ("start_time=%ff", "start_time"),
        ("start_time=1&models[]=a&models[]=%80b", "models"),
        ("start_time=1&page=\udcff", "page"),
        ("start_time=1&project_ids=%00", "project_ids"),
        ("start_time=1&%ff=1", "?"),
        ("start_time=1&limit=" + "9" * 30, "limit"),
        ("start_time=1&limit=", "limit"),
        ("start_time=1&end_time=-1", "end_time"),
    ],
)
def test_what_is_refused_is_named(query: str, param: str | None) -> None:
    with pytest.raises(BadField) as caught:
        parse_query(query, UsageQuery)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("query", "param"), [("bucket_width=1h", "bucket_width"), ("models[]=m", "models")]
)
def test_costs_are_by_day(query: str, param: str) -> None:
    with pytest.raises(BadField) as caught:
        parse_query(f"start_time=1&{query}", CostsQuery)
    assert caught.value.param == param


def test_what_the_sdk_reads_of_usage() -> None:
    result = UsageResult(
        input_tokens=30,
        output_tokens=7,
        num_model_requests=2,
        input_uncached_tokens=10,
        input_cached_tokens=16,
        input_cache_write_tokens=4,
        model="penny",
    )
    bucket = Bucket(start_time=0, end_time=3600, results=[result])
    page = Page(data=[bucket], has_more=True, next_page="p2")
    answer = Wire(page).usage.completions(start_time=0)
    assert (answer.has_more, answer.next_page) == (True, "p2")
    assert (answer.data[0].start_time, answer.data[0].end_time) == (0, 3600)
    [read] = answer.data[0].results
    assert isinstance(read, DataResultOrganizationUsageCompletionsResult)
    assert (read.input_tokens, read.output_tokens, read.num_model_requests) == (30, 7, 2)
    assert (read.input_uncached_tokens, read.input_cached_tokens) == (10, 16)
    assert (read.input_cache_write_tokens, read.model, read.project_id) == (4, "penny", None)


@pytest.mark.parametrize("amount_pico", [0, 1, 123, 150_000, 10**12, 9_007_199_254_740_993, -5])
def test_what_the_sdk_reads_of_costs_is_exact(amount_pico: int) -> None:
    result = CostsResult(
        amount=to_amount(amount_pico),
        line_item="penny, output",
        quantity=3,
        quantity_unit="tokens",
    )
    bucket = Bucket(start_time=0, end_time=86_400, results=[result])
    page = Page(data=[bucket], has_more=False, next_page=None)
    answer = Wire(page).usage.costs(start_time=0)
    assert (answer.has_more, answer.next_page) == (False, None)
    [read] = answer.data[0].results
    assert isinstance(read, DataResultOrganizationCostsResult)
    assert read.amount is not None and read.amount.currency == "usd"
    value: Any = read.amount.value
    assert value == amount_pico / 10**12  # the float nearest to the exact amount
    assert (read.line_item, read.quantity, read.quantity_unit) == ("penny, output", 3, "tokens")


def test_who_groups_by_what_is_not_there_is_told_what_is() -> None:
    for kind, has in ((UsageQuery, "service_tier"), (CostsQuery, "line_item")):
        with pytest.raises(BadField) as refused:
            parse_query("start_time=1&group_by[]=nope", kind)
        assert refused.value.param == "group_by[0]"
        assert "expected one of project_id, user_id," in str(refused.value)
        assert has in str(refused.value) and "or tag:KEY." in str(refused.value)
