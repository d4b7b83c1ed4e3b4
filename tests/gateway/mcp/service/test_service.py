"""/mcp/{org} and the metadata of resources: who is let in, and where the others are sent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar

from gateway.app.create import create_app
from gateway.auth.errors import AuthUnavailable, ExpiredToken, InvalidKey
from gateway.mcp.service.service import fingerprint_of
from gateway.principal import Principal
from gateway.settings.file import WrittenMcpServer
from gateway.settings.load import load
from gateway.telemetry.metrics import Telemetry

PUBLIC_URL = "https://gateway.example.com"
ALICE, MALLORY = "org_" + "a" * 32, "org_" + "b" * 32
ALICES = f"{PUBLIC_URL}/mcp/{ALICE}"
METADATA = f'resource_metadata="{PUBLIC_URL}/.well-known/oauth-protected-resource/mcp/{ALICE}"'


def somebody(**more: Any) -> Principal:
    given: dict[str, Any] = {
        "org_id": ALICE,
        "project_id": "proj_1",
        "key_id": "client_1",
        "key_hint": "a client",
        "scopes": frozenset({"mcp:call"}),
        "kind": "token",
        "audiences": frozenset({ALICES}),
        "org_name": "alice & co",
        "project_name": "web",
    }
    return Principal(**(given | more))


CREDENTIALS: dict[str, Principal | Exception] = {
    "good": somebody(),
    "key": somebody(kind="key", audiences=frozenset()),
    "of-mallory": somebody(
        org_id=MALLORY, org_name="mallory", audiences=frozenset({f"{PUBLIC_URL}/mcp/{MALLORY}"})
    ),
    "key-of-mallory": somebody(
        org_id=MALLORY, org_name="mallory", kind="key", audiences=frozenset()
    ),
    "mallorys-for-alice": somebody(org_id=MALLORY),
    "for-all": somebody(audiences=frozenset({PUBLIC_URL})),
    "without-names": somebody(kind="key", audiences=frozenset(), org_name="", project_name=""),
    "for-the-api": somebody(audiences=frozenset({f"{PUBLIC_URL}/v1"})),
    "for-nothing": somebody(audiences=frozenset()),
    "of-another-host": somebody(audiences=frozenset({f"https://other.example.com/mcp/{ALICE}"})),
    "without-scope": somebody(scopes=frozenset({"inference"})),
    "expired": ExpiredToken("jti"),
    "away": AuthUnavailable("gone"),
}


class Doorkeeper:
    async def authenticate(self, bearer: str, *_: Any, **__: Any) -> Principal:
        found = CREDENTIALS.get(bearer, InvalidKey("unknown"))
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Litestar:
    home: Path = tmp_path_factory.mktemp("home")
    made = create_app(load({"home": home, "public_url": PUBLIC_URL}, {}))
    made.state.services = SimpleNamespace(
        telemetry=Telemetry(models=[]), authenticator=Doorkeeper(), mcp=None
    )
    return made


@pytest.fixture
async def http(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as found:
        yield found


async def ask(
    http: httpx.AsyncClient, credential: str | None, method: str = "POST", **more: Any
) -> httpx.Response:
    headers = {} if credential is None else {"authorization": f"Bearer {credential}"}
    headers |= more.pop("headers", {})
    path = more.pop("path", f"/mcp/{ALICE}")
    body = {"jsonrpc": "2.0", "id": 7, "method": "tools/list"}
    given = {"json": body} if method == "POST" and "content" not in more else {}
    return await http.request(method, path, headers=headers, **given, **more)


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_without_a_token_one_is_sent_to_the_metadata(
    http: httpx.AsyncClient, method: str
) -> None:
    refused = await ask(http, None, method)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == f'Bearer scope="mcp:call", {METADATA}'


@pytest.mark.parametrize(
    "credential",
    [
        "unknown",
        "expired",
        "of-mallory",
        "key-of-mallory",
        "mallorys-for-alice",
        "for-the-api",
        "for-nothing",
        "of-another-host",
    ],
)
async def test_a_token_for_something_else_is_invalid_here(
    http: httpx.AsyncClient, credential: str
) -> None:
    refused = await ask(http, credential)
    assert refused.status_code == 401
    said = f'Bearer error="invalid_token", scope="mcp:call", {METADATA}'
    assert refused.headers["www-authenticate"] == said


NAMED = "/mcp/alice%20%26%20co"


@pytest.mark.parametrize(
    ("path", "credentials"),
    [
        ("/mcp", ["key", "good", "for-all"]),
        (f"/mcp/{ALICE}", ["key", "good"]),
        (f"/mcp/{ALICE}/proj_1", ["key", "good"]),
        (f"/mcp/{ALICE}/web/space", ["key", "good"]),
        (NAMED, ["key", "good", "for-all"]),
        (f"{NAMED}/web", ["key", "good", "for-all"]),
        (f"{NAMED}/proj_1/space", ["key", "good", "for-all"]),
    ],
)
async def test_names_and_ids_lead_to_the_same_endpoint(
    http: httpx.AsyncClient, path: str, credentials: list[str]
) -> None:
    for credential in ("key", "good", "for-all", "for-the-api", "of-mallory", "key-of-mallory"):
        answer = await ask(http, credential, path=path)
        if path == "/mcp" and credential.endswith("mallory"):
            continue  # it is mallory's own
        expected = 200 if credential in credentials else 401
        assert answer.status_code == expected, (path, credential, answer.text)


@pytest.mark.parametrize("org", ["acme", MALLORY, "org_" + "f" * 32, "alice", "web"])
async def test_a_valid_credential_elsewhere_is_told_where_it_is_good_and_nothing_else(
    http: httpx.AsyncClient, org: str
) -> None:
    for credential in ("key", "good"):
        refused = await ask(http, credential, path=f"/mcp/{org}")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "wrong_organization"
        assert refused.json()["error"]["message"] == (
            "The credential is valid, but not for the organization or project in this path."
            f" It is for /mcp/{ALICE}."
        )
    refused = await ask(http, "key", path=f"/mcp/{ALICE}/{org}")
    if org != "web":
        assert refused.json()["error"]["message"].endswith(f"It is for /mcp/{ALICE}/proj_1.")
    bad = (await ask(http, "unknown", path=f"/mcp/{org}")).json()["error"]
    assert bad["code"] == "invalid_api_key" and "valid, but" not in bad["message"]
    other = (await ask(http, "for-the-api", path=f"/mcp/{org}")).json()["error"]
    assert other["message"] == (
        "The access token is valid, but it was issued for another resource."
    )


async def test_no_name_is_the_name_of_nobody(http: httpx.AsyncClient) -> None:
    assert (await ask(http, "without-names", path="/mcp/")).status_code == 200
    assert (await ask(http, "without-names", path="/mcp/%20")).status_code == 401


async def test_a_token_without_the_scope_is_told_which(http: httpx.AsyncClient) -> None:
    refused = await ask(http, "without-scope")
    assert refused.status_code == 403
    said = f'Bearer error="insufficient_scope", scope="mcp:call", {METADATA}'
    assert refused.headers["www-authenticate"] == said


async def test_what_cannot_be_checked_is_not_refused_for_good(http: httpx.AsyncClient) -> None:
    later = await ask(http, "away")
    assert later.status_code == 503 and "www-authenticate" not in later.headers


@pytest.mark.parametrize("credential", ["good", "key"])
async def test_a_good_credential_is_answered_in_the_protocol(
    http: httpx.AsyncClient, credential: str
) -> None:
    answered = await ask(http, credential)
    assert answered.status_code == 200
    error = {"code": -32601, "message": "Method not found"}
    assert answered.json() == {"jsonrpc": "2.0", "id": 7, "error": error}
    newer = await ask(http, credential, headers={"mcp-protocol-version": "2026-07-28"})
    assert newer.status_code == 404 and newer.json()["error"] == error


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b'{"jsonrpc":"2.0","method":"notifications/initialized"}', 202, None),
        (b'{"jsonrpc":"2.0","id":1,"result":{}}', 202, None),
        (b"{", 400, -32700),
        (b"\xff", 400, -32700),
        (b'{"params":' + b"[" * 100_000, 400, -32700),
        (b"[]", 400, -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"x"}', 400, -32600),
        (b"{}", 400, -32600),
    ],
)
async def test_what_is_no_request_is_told_so(
    http: httpx.AsyncClient, content: bytes, status: int, code: int | None
) -> None:
    answered = await ask(http, "good", content=content)
    assert answered.status_code == status
    if code is None:
        assert answered.content == b""
    else:
        assert answered.json()["error"]["code"] == code


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_there_is_no_stream_and_no_session(http: httpx.AsyncClient, method: str) -> None:
    refused = await ask(http, "good", method)
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["", "/v1"])
async def test_anybody_may_read_the_metadata(http: httpx.AsyncClient, path: str) -> None:
    found = await http.get(f"/.well-known/oauth-protected-resource{path}")
    assert found.status_code == 200
    assert found.headers["content-type"] == "application/json"
    assert found.headers["access-control-allow-origin"] == "*"
    assert found.json()["resource"] == PUBLIC_URL + path
    assert found.json()["authorization_servers"] == [PUBLIC_URL]


@pytest.mark.parametrize("path", ["/mcp/alice", "/v2", "/mcp"])
async def test_what_is_no_resource_has_none(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(f"/.well-known/oauth-protected-resource{path}")).status_code == 404


async def test_what_no_header_can_hold_is_refused_all_the_same(app: Litestar) -> None:
    """A path that cannot be an org's stands in no challenge, so that nothing breaks out of it."""
    transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url=PUBLIC_URL) as client:
        for path in (
            "/mcp/%C3%B8%12",
            "/mcp/x%0D%0Aset-cookie%3A%20a%3Db",
            "/mcp/x%22%2C%20b%3D%22",
        ):
            for headers in ({}, {"authorization": "Bearer good"}):
                answer = await client.post(path, json={}, headers=headers)
                assert answer.status_code == 401
                said = answer.headers["www-authenticate"]
                assert (
                    said.isascii() and said.isprintable() and said.count('"') == 2 * said.count("=")
                )


def test_a_fingerprint_is_of_what_a_connection_is_made_of() -> None:
    """A server that somebody else may call, or that is trusted otherwise, keeps its processes."""
    server = WrittenMcpServer(name="s", command="/bin/s", args=["--a"])
    kept = msgspec.structs.replace(server, orgs=["org_1"], trust="all", taints=True, recheck_s=0)
    assert fingerprint_of(kept) == fingerprint_of(server)
    for change in ({"args": ["--b"]}, {"environment": {"A": "b"}}, {"offline": True}):
        assert fingerprint_of(msgspec.structs.replace(server, **change)) != fingerprint_of(server)
