"""All of administration shares at its door conditions, problem details and pages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import sqlalchemy as sa
from litestar import Litestar, Request, Response, get, put
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.app.create import refuse
from gateway.http_errors.table import to_http_error
from gateway.request_errors import BadField
from gateway.routes.asgi.response_headers import ResponseHeaders
from gateway.routes.shared.conditional import answer, etag_of, if_match
from gateway.routes.shared.pages import PageQuery, keyset, to_listing
from gateway.routes.shared.problem import speaks_problems
from gateway.tenancy.errors import (
    ChangeNotAnnounced,
    InvalidField,
    NameTaken,
    NotFound,
    TenancyError,
)
from gateway.tenancy.pages import MAX_LIMIT
from gateway.wire.organization.usage import parse_query


class Thing(msgspec.Struct):
    name: str


NOW = Thing("now")
TAG = etag_of(msgspec.json.encode(NOW))


@get("/v1/admin/thing")
async def show(request: Request[Any, Any, Any]) -> Response[bytes]:
    return answer(request, NOW)


@put("/v1/admin/thing")
async def change(request: Request[Any, Any, Any]) -> Response[bytes]:
    if_match(request).check(NOW)
    return answer(request, Thing("changed"), status=202, headers={"location": "/x"})


@get("/v1/organization/thing")
async def missing() -> None:
    raise NotFound("thing", "no thing 'x'")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    app = Litestar(
        [show, change, missing],
        exception_handlers={Exception: refuse},
        openapi_config=None,
        logging_config=None,
    )
    app.asgi_handler = ResponseHeaders(app.asgi_handler)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as found:
        yield found


async def test_a_thing_has_a_tag_and_who_knows_it_gets_no_body(http: httpx.AsyncClient) -> None:
    shown = await http.get("/v1/admin/thing")
    assert shown.json() == {"name": "now"} and shown.headers["etag"] == TAG
    for known in (TAG, f"W/{TAG}", f'"other", {TAG}', "*"):
        same = await http.get("/v1/admin/thing", headers={"if-none-match": known})
        assert (same.status_code, same.content) == (304, b"") and same.headers["etag"] == TAG
    other = await http.get("/v1/admin/thing", headers={"if-none-match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize("header", [TAG, "*", f'"other", {TAG}', None])
async def test_who_has_seen_it_may_change_it(http: httpx.AsyncClient, header: str | None) -> None:
    headers = {} if header is None else {"if-match": header}
    changed = await http.put("/v1/admin/thing", headers=headers)
    assert changed.status_code == 202 and changed.headers["location"] == "/x"
    assert changed.headers["etag"] == etag_of(changed.content)


@pytest.mark.parametrize("header", ['"other"', f"W/{TAG}", '""'])
async def test_who_has_not_seen_it_may_not(http: httpx.AsyncClient, header: str) -> None:
    refused = await http.put("/v1/admin/thing", headers={"if-match": header})
    assert refused.status_code == 412 and refused.json()["code"] == "precondition_failed"
    assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("header", ["other", '"a" b', '"' + "x" * 5000 + '"'])
async def test_what_is_no_tag_is_refused(http: httpx.AsyncClient, header: str) -> None:
    refused = await http.put("/v1/admin/thing", headers={"if-match": header})
    assert refused.status_code == 400 and refused.json()["param"] == "If-Match"


async def test_our_own_routes_speak_problem_details(http: httpx.AsyncClient) -> None:
    refused = await http.put("/v1/admin/thing", headers={"if-match": '"other"'})
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json() == {
        "type": "urn:tollgate:problem:precondition_failed",
        "title": "Precondition Failed",
        "status": 412,
        "detail": "It has been changed since: read it again, and send its new ETag in 'If-Match'.",
        "instance": f"urn:tollgate:request:{refused.headers['x-request-id']}",
        "code": "precondition_failed",
        "param": "If-Match",
    }
    malformed = (await http.put("/v1/admin/thing", headers={"if-match": "x"})).json()
    assert malformed["type"] == "about:blank" and "code" not in malformed
    unknown = await http.get("/v1/admin/nothing")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_url")
    wrong = await http.delete("/v1/admin/thing")
    assert wrong.status_code == 405 and wrong.json()["title"] == "Method Not Allowed"


async def test_openais_routes_speak_openais_shape(http: httpx.AsyncClient) -> None:
    refused = await http.get("/v1/organization/thing")
    assert refused.headers["content-type"] == "application/json"
    assert refused.json()["error"] == {
        "message": "No thing 'x'.",
        "type": "invalid_request_error",
        "param": "thing",
        "code": "not_found",
    }


def test_the_prefix_is_a_folder() -> None:
    found = [speaks_problems(path) for path in ("/v1/admin", "/v1/admin/x", "/v1/adminx", "/x")]
    assert found == [True, True, False, False]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidField("name", "must be short"), 400, None),
        (NotFound("org", "no organization"), 404, "not_found"),
        (NameTaken("name", "there is one"), 409, "name_taken"),
        (ChangeNotAnnounced("redis", "saved"), 503, "service_unavailable"),
        (TenancyError("x", "of no kind"), 500, None),
    ],
)
def test_what_tenancy_refuses_has_a_face(
    error: TenancyError, status: int, code: str | None
) -> None:
    http_error = to_http_error(error)
    assert (http_error.status, http_error.body.code) == (status, code)
    if isinstance(error, InvalidField):
        assert http_error.body.message == "Invalid value for 'name': must be short."
        assert http_error.body.param == "name"


async def pages(db: AsyncEngine, query: str) -> list[list[str]]:
    """All pages, as a client walks them."""
    rows = sa.values(sa.column("id", sa.Text), name="rows").data([(f"a{n}",) for n in range(7)])
    found: list[list[str]] = []
    after = ""
    for _ in range(20):
        page = parse_query(query + after, PageQuery)
        async with db.connect() as conn:
            things = list(await conn.execute(keyset(sa.select(rows), rows.c.id, page)))
        listing = to_listing(things, page)
        found.append([each.id for each in listing.data])
        assert (listing.first_id, listing.last_id) == (found[-1][0], found[-1][-1])
        if not listing.has_more:
            return found
        after = f"&after={listing.last_id}"
    raise AssertionError("it has no end")


async def test_pages_are_walked_both_ways(db: AsyncEngine) -> None:
    forwards = [["a0", "a1", "a2"], ["a3", "a4", "a5"], ["a6"]]
    assert await pages(db, "limit=3") == forwards
    assert await pages(db, "limit=7") == [[f"a{n}" for n in range(7)]]
    backwards = await pages(db, "limit=3&order=desc")
    assert backwards == [["a6", "a5", "a4"], ["a3", "a2", "a1"], ["a0"]]


def test_an_empty_page_names_nobody() -> None:
    listing = to_listing([], PageQuery())
    assert (listing.first_id, listing.last_id, listing.has_more) == (None, None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (f"limit={MAX_LIMIT + 1}", "limit"),
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=", "after"),
        ("after=a&after=b", "after"),
        ("page=2", "page"),
    ],
)
def test_a_bad_page_is_refused_by_name(query: str, param: str) -> None:
    with pytest.raises(BadField) as refused:
        parse_query(query, PageQuery)
    assert refused.value.param == param
