"""Requests that go straight to a hot route's handler, and those that go the long way: the answers
are the same."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from litestar import Litestar

from gateway.routes.asgi import cors
from gateway.routes.asgi.fast_path import FastPath, is_plain
from tests.gateway.routes.asgi.test_request_metrics import BEARER, CHAT, app

__all__ = ["app"]


@pytest.fixture
def long_way(app: Litestar, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths of those that went it."""
    seen: list[str] = []
    call = cors.Cors.__call__

    async def noted(self: cors.Cors, scope, receive, send) -> None:
        seen.append(scope["path"])
        await call(self, scope, receive, send)

    monkeypatch.setattr(cors.Cors, "__call__", noted)
    yield seen


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        (CHAT, {}, b"{}"),
        (CHAT, BEARER, b"{}"),
        (CHAT, BEARER, b"no JSON"),
        (CHAT, BEARER, b'{"model": "nobody", "messages": []}'),
        (CHAT, BEARER | {"content-encoding": "gzip"}, b"{}"),
        (CHAT, BEARER | {"x-request-timeout-ms": "soon"}, b"{}"),
        (CHAT, BEARER, b" " * 2048),
        ("/mcp", {}, b"{}"),
        ("/mcp", BEARER, b"{}"),
        ("/mcp/org_nobody", BEARER, b"{}"),
        ("/mcp/org_nobody/proj_1/tools", {}, b"{}"),
    ],
)
async def test_both_ways_answer_alike(
    app: Litestar, long_way: list[str], path: str, headers: dict[str, str], body: bytes
) -> None:
    app.state.public_url = "http://test"
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        straight = await client.post(path, headers=headers, content=body)
        assert long_way == []
        longer = await client.post(path + "/", headers=headers, content=body)
    assert long_way == [path + "/"]
    assert 400 <= straight.status_code < 500
    assert (straight.status_code, straight.content) == (longer.status_code, longer.content)
    assert without_names(straight.headers) == without_names(longer.headers)


def without_names(headers: httpx.Headers) -> dict[str, str]:
    own = ("x-request-id", "request-id", "openai-processing-ms")
    return {name: value for name, value in headers.items() if name not in own}


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", CHAT, {}),
        ("OPTIONS", CHAT, {}),
        ("POST", "/v1/models", {}),
        ("POST", CHAT, {"origin": "https://page.example"}),
        ("POST", CHAT, {"host": "a b"}),
        ("POST", CHAT, {"host": "[::1]:8000"}),
        ("GET", "/mcp/org_nobody", {}),
        ("POST", "/mcp/org_nobody/a/b/c", {}),
        ("POST", "/mcp//a", {}),
        ("POST", "/mcp/a.b", {}),
    ],
)
async def test_whatever_else_it_is_goes_the_long_way(
    method: str, path: str, headers: dict[str, str], app: Litestar, long_way: list[str]
) -> None:
    app.state.services.cors_origins = NobodysOrigins()
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.request(method, path, headers=headers | BEARER)
    assert long_way == [path]


class NobodysOrigins:
    async def orgs_of(self, origin: str) -> frozenset[str]:
        return frozenset()


async def test_what_is_no_request_is_passed_on() -> None:
    passed = []

    async def inner(scope, receive, send) -> None:
        passed.append(scope["type"])

    straight = FastPath(inner, Litestar([]))
    await straight({"type": "websocket"}, None, None)
    assert passed == ["websocket"]


def test_plain_headers() -> None:
    assert is_plain([(b"host", b"api.example:8000"), (b"accept", b"*/*")])
    assert not is_plain([(b"host", b"x"), (b"origin", b"null")])
    assert not is_plain([(b"host", b"a\xffb")])
