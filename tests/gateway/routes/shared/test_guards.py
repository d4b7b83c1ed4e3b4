"""The guard in a real application: who gets in, and that nobody's body is read before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar, Request, Response, get, post
from litestar.config.app import AppConfig
from litestar.datastructures import State
from litestar.params import JSONBody
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.bearer.api_keys import Authenticator
from gateway.auth.errors import InvalidKey, MissingCredential
from gateway.http_errors.table import to_http_error
from gateway.principal import SCOPE_INFERENCE, SCOPE_USAGE_READ, Principal
from gateway.processes.bootstrap import BootstrapResult, bootstrap
from gateway.routes.shared.access import PUBLIC, needs
from gateway.routes.shared.guards import authenticate, read_authorization, read_bearer

PEPPER, PEPPER_ID = b"p" * 32, "pepper-1"


class Body(msgspec.Struct):
    number: int


@post("/infer", opt=needs(SCOPE_INFERENCE))
async def infer(request: Request[Principal, Any, Any], data: JSONBody[Body]) -> str:
    return request.user.key_id


@get("/usage", opt=needs(SCOPE_USAGE_READ))
async def usage(request: Request[Principal, Any, Any]) -> str:
    return request.user.key_hint


@get("/keys", opt=needs("admin:keys"))
async def keys() -> str:
    return "keys"


@get("/open", opt=PUBLIC)
async def everybody() -> str:
    return "hello"


@get("/forgotten")
async def forgotten() -> str:
    return "nobody said who may read this"


def refuse(_request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    http_error = to_http_error(error)
    return Response(
        http_error.encode(), status_code=http_error.status, media_type="application/json"
    )


@pytest.fixture
async def first_keys(db: AsyncEngine) -> BootstrapResult:
    return await bootstrap(db, pepper=PEPPER, pepper_id=PEPPER_ID, plans=[], default_plan=None)


@pytest.fixture
async def client(db: AsyncEngine, redis: Redis) -> AsyncIterator[httpx.AsyncClient]:
    authenticator = Authenticator(db=db, redis=redis, pepper=PEPPER, pepper_id=PEPPER_ID)
    await authenticator.start()

    def wire(config: AppConfig) -> AppConfig:
        config.state = State({"services": SimpleNamespace(authenticator=authenticator)})
        return config

    app = Litestar(
        [infer, usage, keys, everybody, forgotten],
        guards=[authenticate],
        exception_handlers={Exception: refuse},
        on_app_init=[wire],
        openapi_config=None,
    )
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as found:
        yield found
    await authenticator.close()


def bearer(key: str | None) -> dict[str, str]:
    assert key is not None
    return {"authorization": f"Bearer {key}"}


async def test_a_key_opens_the_routes_of_its_scopes(
    client: httpx.AsyncClient, first_keys: BootstrapResult
) -> None:
    api, admin = bearer(first_keys.api_key), bearer(first_keys.admin_key)
    statuses = {
        (name, path): (
            await client.request(
                "POST" if path == "/infer" else "GET",
                path,
                headers=headers,
                json={"number": 1} if path == "/infer" else None,
            )
        ).status_code
        for name, headers in (("api", api), ("admin", admin), ("nobody", {}))
        for path in ("/infer", "/usage", "/keys", "/open", "/forgotten")
    }
    assert statuses == {
        ("api", "/infer"): 201,
        ("api", "/usage"): 403,
        ("api", "/keys"): 403,
        ("api", "/open"): 200,
        ("api", "/forgotten"): 403,
        ("admin", "/infer"): 403,
        ("admin", "/usage"): 200,
        ("admin", "/keys"): 200,
        ("admin", "/open"): 200,
        ("admin", "/forgotten"): 403,
        ("nobody", "/infer"): 401,
        ("nobody", "/usage"): 401,
        ("nobody", "/keys"): 401,
        ("nobody", "/open"): 200,
        ("nobody", "/forgotten"): 401,
    }


@pytest.mark.parametrize("body", [b"{not json", b'{"number": "one"}', b""])
async def test_who_is_refused_is_refused_before_the_body_is_parsed(
    client: httpx.AsyncClient, first_keys: BootstrapResult, body: bytes
) -> None:
    unknown = "sk-tg-" + "0" * 43
    for headers, status in (
        ({}, 401),
        (bearer(unknown), 401),
        (bearer(first_keys.admin_key), 403),
        (bearer(first_keys.api_key), 400),
    ):
        headers = {**headers, "content-type": "application/json"}
        response = await client.post("/infer", content=body, headers=headers)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert unknown not in response.text


async def told(client: httpx.AsyncClient, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.get("/usage", headers=named)
    assert answer.status_code == 401
    message: str = answer.json()["error"]["message"]
    return message


async def test_who_is_refused_is_told_what_was_sent(client: httpx.AsyncClient) -> None:
    unknown = "sk-tg-" + "0" * 39 + "abcd"
    said = await told(client, authorization=f"Bearer {unknown}")
    assert "an API key ending in 'abcd' that is unknown, expired or revoked" in said
    said = await told(client, x_api_key=unknown)
    assert "an API key ending in 'abcd' (sent as X-Api-Key) that is unknown" in said
    assert "does not have the scheme Bearer" in await told(client, authorization="Basic dTpw")
    assert "does not have the scheme Bearer" in await told(client, authorization=unknown)
    assert "didn't provide an API key" in await told(client)
    twice = [("authorization", f"Bearer {unknown}")] * 2
    answer = await client.get("/usage", headers=twice)
    assert "More than one" in answer.json()["error"]["message"]


async def test_the_principal_is_the_user_of_the_request(
    client: httpx.AsyncClient, first_keys: BootstrapResult
) -> None:
    assert first_keys.api_key is not None and first_keys.admin_key is not None
    infer_as = await client.post("/infer", json={"number": 1}, headers=bearer(first_keys.api_key))
    assert infer_as.text.startswith("key_")
    usage_as = await client.get("/usage", headers=bearer(first_keys.admin_key))
    assert usage_as.text == f"sk-tg-admin-...{first_keys.admin_key[-4:]}"


@pytest.mark.parametrize(
    "header", ["Bearer abc", "bearer abc", "BEARER abc", "Bearer  abc", " Bearer abc "]
)
def test_the_scheme_is_read_in_any_case(header: str) -> None:
    assert read_bearer(header) == "abc"


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic abc", "abc", "Bearerabc"])
def test_what_is_no_bearer_is_missing(header: str) -> None:
    with pytest.raises(MissingCredential):
        read_bearer(header)


@pytest.mark.parametrize("first", [b"", b"Bearer x"])
def test_of_two_credentials_none_counts_not_even_behind_an_empty_one(first: bytes) -> None:
    name = b"authorization"
    with pytest.raises(InvalidKey):
        read_authorization([(name, first), (b"x", b""), (name, b"Bearer good")])
    assert read_authorization([(name, first)]) == first.decode()
    assert read_authorization([]) == ""
    key = (b"x-api-key", b"sk")
    assert read_authorization([key]) == "Bearer sk"
    assert read_authorization([key, (name, first)]) == first.decode()
    with pytest.raises(InvalidKey):
        read_authorization([key, key])
