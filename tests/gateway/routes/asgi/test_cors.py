"""Browsers: a preflight without a credential, an answer for the pages of whose key it was, SSE."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from litestar import Litestar, Request, get, post
from litestar.response import Stream

from gateway.app.create import refuse
from gateway.auth.errors import InvalidKey
from gateway.networks import Networks
from gateway.principal import SCOPE_INFERENCE, Principal
from gateway.routes.asgi.cors import MAX_HEADERS_BYTES, Cors
from gateway.routes.shared.access import PUBLIC, needs
from gateway.routes.shared.guards import authenticate

OURS, THEIRS, STRANGER = "https://ours.example", "https://theirs.example", "https://evil.example"
ALLOW = "access-control-allow-origin"
PATH = "/v1/chat/completions"
SDK = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"


class Known:
    async def orgs_of(self, origin: str) -> frozenset[str]:
        listed = {OURS: {"org_ours"}, THEIRS: {"org_theirs"}}
        return frozenset(listed.get(origin, ()))


class Keys:
    async def authenticate(self, bearer: str) -> Principal:
        if not bearer.startswith("org_"):
            raise InvalidKey("unknown")
        return Principal(
            org_id=bearer,
            project_id="p",
            key_id="k",
            key_hint="",
            scopes=frozenset({SCOPE_INFERENCE}),
        )


@post(PATH, opt=needs(SCOPE_INFERENCE), status_code=200)
async def chat(request: Request[Principal, Any, Any]) -> Stream:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        yield b"data: [DONE]\n\n"

    return Stream(events(), media_type="text/event-stream")


@get("/v1/admin/keys", opt=needs("admin:read"))
async def keys() -> str:
    return "keys"


@post("/oauth/token", opt=PUBLIC, status_code=200)
async def token() -> str:
    return "a token"


@get("/oauth/userinfo", opt=needs(SCOPE_INFERENCE))
async def userinfo() -> str:
    return "a user"


@get(["/oauth/authorize", "/oauth/login", "/oauth/introspect"], opt=PUBLIC)
async def closed() -> str:
    return "not for other pages"


@get("/login", opt=PUBLIC)
async def login() -> str:
    return "not for other pages"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = Litestar(
        [chat, keys, login, token, userinfo, closed],
        guards=[authenticate],
        exception_handlers={Exception: refuse},
        openapi_config=None,
    )
    app.state.services = SimpleNamespace(
        authenticator=Keys(), cors_origins=Known(), trusted_proxies=Networks()
    )
    app.state.public_url = "https://tollgate.example"
    app.asgi_handler = Cors(app.asgi_handler)
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://t") as found:
        yield found


def asked(origin: str, headers: str | None = SDK) -> dict[str, str]:
    found = {"origin": origin, "access-control-request-method": "POST"}
    return found if headers is None else found | {"access-control-request-headers": headers}


async def test_a_preflight_is_answered_without_a_credential(client: httpx.AsyncClient) -> None:
    for origin in (OURS, THEIRS):
        answer = await client.options(PATH, headers=asked(origin))
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers[ALLOW] == origin
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == SDK
        assert "origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
    plain = await client.options(PATH, headers=asked(OURS, None))
    assert plain.status_code == 204 and "access-control-allow-headers" not in plain.headers


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (PATH, asked(STRANGER)),
        (PATH, asked("null")),
        (PATH, asked(OURS.upper())),
        (PATH, asked(OURS, "a" * (MAX_HEADERS_BYTES + 1))),
        (PATH, asked(OURS, "x-a: b")),
        (PATH, {"origin": OURS}),
        ("/login", asked(OURS)),
    ],
)
async def test_what_is_no_preflight_of_ours_gets_the_routes_own_answer(
    client: httpx.AsyncClient, path: str, headers: dict[str, str]
) -> None:
    answer = await client.options(path, headers=headers)
    allowed = {PATH: "POST", "/login": "GET"}
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed[path])
    assert "access-control-allow-methods" not in answer.headers
    if headers["origin"] != OURS or path == "/login":
        assert ALLOW not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/.well-known/oauth-authorization-server",
        "/.well-known/openid-configuration",
        "/.well-known/oauth-protected-resource",
        "/.well-known/oauth-protected-resource/v1",
        "/.well-known/oauth-protected-resource/mcp/org_1",
        "/oauth/jwks.json",
        "/oauth/token",
        "/oauth/revoke",
        "/oauth/userinfo",
        "/oauth/register",
        "/oauth/register/client_1",
    ],
)
async def test_clients_in_browsers_reach_the_authorization_server_from_any_origin(
    client: httpx.AsyncClient, path: str
) -> None:
    wanted = "authorization, content-type, dpop, mcp-protocol-version"
    answer = await client.options(path, headers=asked(STRANGER, wanted))
    assert (answer.status_code, answer.headers[ALLOW]) == (204, "*")
    assert answer.headers["access-control-allow-headers"] == wanted
    assert "access-control-allow-credentials" not in answer.headers
    missing = await client.get(path, headers={"origin": STRANGER})
    assert missing.headers[ALLOW] == "*", "errors can be read, too"


async def test_what_they_are_answered_can_be_read(client: httpx.AsyncClient) -> None:
    for headers in ({}, {"origin": STRANGER}, {"origin": OURS}):
        answer = await client.post("/oauth/token", headers=headers)
        assert (answer.status_code, answer.headers.get_list(ALLOW)) == (200, ["*"])
        exposed = answer.headers["access-control-expose-headers"]
        assert "dpop-nonce" in exposed and "www-authenticate" in exposed
        assert "access-control-allow-credentials" not in answer.headers
    refused = await client.get("/oauth/userinfo", headers={"origin": STRANGER})
    assert (refused.status_code, refused.headers[ALLOW]) == (401, "*")
    assert refused.headers["www-authenticate"].startswith("Bearer ")


@pytest.mark.parametrize("path", ["/oauth/authorize", "/oauth/login", "/oauth/introspect"])
async def test_pages_for_people_are_no_other_pages_business(
    client: httpx.AsyncClient, path: str
) -> None:
    for origin in (OURS, STRANGER):
        preflight = await client.options(path, headers=asked(origin))
        assert preflight.status_code == 405 and ALLOW not in preflight.headers
        answer = await client.get(path, headers={"origin": origin})
        assert answer.status_code == 200 and ALLOW not in answer.headers


async def test_two_origins_are_none(client: httpx.AsyncClient) -> None:
    answer = await client.options(
        PATH,
        headers=[
            ("origin", OURS),
            ("origin", STRANGER),
            ("access-control-request-method", "POST"),
        ],
    )
    assert answer.status_code == 405 and ALLOW not in answer.headers


@pytest.mark.parametrize(
    ("origin", "key", "status", "readable"),
    [
        (OURS, "org_ours", 200, True),
        (THEIRS, "org_ours", 200, False),
        (STRANGER, "org_ours", 200, False),
        (OURS, "nobody", 401, True),
        (THEIRS, "nobody", 401, True),
        (STRANGER, "nobody", 401, False),
    ],
)
async def test_an_answer_is_for_the_pages_of_whose_key_it_was(
    client: httpx.AsyncClient, origin: str, key: str, status: int, readable: bool
) -> None:
    headers = {"origin": origin, "authorization": f"Bearer {key}"}
    async with client.stream("POST", PATH, headers=headers) as answer:
        body = await answer.aread()
    assert answer.status_code == status
    if status == 200:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert body.endswith(b"data: [DONE]\n\n")
    assert (answer.headers.get(ALLOW) == origin) == readable
    assert "origin" in answer.headers["vary"]
    if readable:
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "x-ratelimit-reset-tokens" in answer.headers["access-control-expose-headers"]


async def test_without_an_origin_nothing_is_said(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, headers={"authorization": "Bearer org_ours"})
    assert answer.status_code == 200
    assert ALLOW not in answer.headers and "vary" not in answer.headers
    other = await client.get("/login", headers={"origin": OURS})
    assert other.status_code == 200 and ALLOW not in other.headers


@pytest.mark.parametrize(("key", "origin"), [("org_ours", THEIRS), ("org_theirs", OURS)])
async def test_a_refusal_of_a_key_is_for_the_pages_of_its_own_org(
    client: httpx.AsyncClient, key: str, origin: str
) -> None:
    own = {OURS: THEIRS, THEIRS: OURS}[origin]
    for page, readable in ((origin, False), (own, True)):
        headers = {"authorization": f"Bearer {key}", "origin": page}
        answer = await client.get("/v1/admin/keys", headers=headers)
        assert answer.status_code == 403 and (ALLOW in answer.headers) is readable
