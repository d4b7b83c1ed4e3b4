"""Problem details say what is wrong in one of a closed set of texts: nothing that a caller wrote,
in a path, a query or a body, comes back in `title` or `detail`; `param` names where it stood.

Every place of every route of our own administration is filled with a text nobody else would write,
found in the route table and the bodies of `changing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
from litestar.routes import HTTPRoute

from gateway.routes.shared.access import SCOPE
from tests.budget import NIGHTLY
from tests.gateway.routes.admin.changing import ADMIN, BY_ITS_SERVER, RECIPES, Maker
from tests.gateway.routes.admin.conftest import World

ECHOES = ("zebraquux", "walruskelp")
"""Two, so that a text with half of one in it is found by being another."""
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
AT_LEAST = 200
"""Refusals looked at, so that the walk cannot come to nothing."""

Request = tuple[str, str, Any]
"""Method, path and query, body."""


def handlers(world: World) -> Iterator[tuple[str, str]]:
    for route in world.app.routes:
        if isinstance(route, HTTPRoute) and route.path_format.startswith(ADMIN):
            for handler in route.route_handlers:
                if handler.opt.get(SCOPE) is not None:
                    methods = {str(each) for each in handler.http_methods} - {"HEAD", "OPTIONS"}
                    yield from ((method, route.path_format) for method in methods)


def spoilt(body: Any, echo: str) -> Iterator[Any]:
    """The body with `echo` at one place after the other, and where there is no place for it. By day
    as a text and as an object, at night in all forms."""
    forms: list[Any] = [echo, {echo: echo}]
    if NIGHTLY:
        forms += [echo.upper(), f"\n{echo}", [echo]]
    for name, value in body.items():
        for other in forms:
            yield {**body, name: other}
        if isinstance(value, list):
            yield {**body, name: [*value, echo]}
    yield {**body, echo: echo}
    yield {**body, "scopes": [echo]}
    yield {**body, "ip_ranges": [echo]}
    yield echo


async def asked(world: World, maker: Maker, echo: str) -> list[Request]:
    found: list[Request] = []
    for method, path in sorted(handlers(world)):
        filled = PARAMETER.sub(echo, path)
        if method == "GET":
            if filled != path:
                found.append((method, filled, None))
            found += [
                (method, f"{filled}?{query}", None) for query in (f"{echo}=1", f"limit={echo}")
            ]
            continue
        if (method, path) in BY_ITS_SERVER:
            found += [(method, filled, each) for each in spoilt({"tools": ["x"]}, echo)]
            continue
        change = await RECIPES[method, path](maker)
        if filled != path:
            found.append((method, filled, change.body))
        if change.body is not None:
            found += [(method, change.path, each) for each in spoilt(change.body, echo)]
    return found


async def test_a_detail_repeats_nothing_and_is_the_same_whatever_was_wrong(
    world: World, org_id: str, project_id: str
) -> None:
    details: list[list[tuple[Request, str | None]]] = []
    maker = Maker(world, org_id, project_id)
    for echo in ECHOES:
        refused = []
        for request in await asked(world, maker, echo):
            method, path, body = request
            answer = await world.call(method, path, body)
            refused.append((request, detail_of(answer, echo, request)))
        details.append(refused)
    for (request, first), (_, second) in zip(*details, strict=True):
        assert first == second, request
    assert sum(1 for _, detail in details[0] if detail is not None) > AT_LEAST


def detail_of(answer: httpx.Response, echo: str, request: Request) -> str | None:
    """None: it was no error."""
    if answer.status_code < 400:
        return None
    what = f"{request}: {answer.status_code} {answer.text}"
    assert answer.status_code < 500, what
    assert answer.headers["content-type"] == "application/problem+json", what
    problem = answer.json()
    for member in ("title", "detail", "type"):
        assert echo.lower() not in problem[member].lower(), what
    param = problem.get("param")
    assert param is None or f"'{param}'" not in problem["detail"] or param.startswith("If-"), what
    return str(problem["detail"])


async def test_the_scope_that_is_missing_stands_in_its_own_member(world: World) -> None:
    answer = await world.call("GET", f"{ADMIN}/keys", key=world.api_key)
    problem = answer.json()
    assert (answer.status_code, problem["scope"]) == (403, "admin:read")
    assert problem["detail"] == "This credential lacks a scope that this needs."
