"""A consent at an upstream of which we know the URL: what it names is believed about itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import create_engine
from gateway.net.egress import Egress
from gateway.secret import Cipher
from gateway.vault.challenge import Challenge, read_challenge
from gateway.vault.discovery import Discovery, covers, resource_places, server_places
from gateway.vault.envelope import Vault
from gateway.vault.errors import IssuerUnavailable, SignInRefused
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import STATE_PURPOSE, Consents
from gateway.vault.registration import KnownClient, OwnMetadata, Registration
from gateway.vault.sign_in import SignIn
from gateway.vault.token_endpoint import TokenEndpoint, UpstreamClient
from tests.gateway.a_secret import a_secret
from tests.gateway.vault.conftest import Tenant, Tenants

DOCUMENT = "https://gateway.example/client.json"
SAYS = 'Bearer realm="a, b", scope="read write", resource_metadata="https://up.example/m"'


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            SAYS,
            Challenge(scopes=("read", "write"), resource_metadata="https://up.example/m"),
        ),
        ('bearer error=insufficient_scope, scope="a"', ("insufficient_scope", ("a",))),
        (f'Basic realm="x", scope="no", {SAYS}, DPoP scope="other"', ("read", "write")),
        ('Bearer error="say \\"no\\""', 'say "no"'),
        ('Bearer scope="a a b"', ("a", "b")),
        ("Negotiate", Challenge()),
        ("Bearer", Challenge()),
        ("", Challenge()),
    ],
)
def test_a_bearers_challenge_is_read(header: str, expected: Any) -> None:
    found = read_challenge(header)
    parts = (found.error, found.scopes, (found.error, found.scopes), found)
    assert expected in parts


@given(st.text(max_size=200))
def test_whatever_a_server_says_is_read(header: str) -> None:
    assert isinstance(read_challenge(header), Challenge)
    assert isinstance(read_challenge(f"Bearer {header}"), Challenge)


@pytest.mark.parametrize(
    ("resource", "url", "expected"),
    [
        ("https://up.example/mcp", "https://up.example/mcp", True),
        ("https://UP.example/mcp/", "https://up.example/mcp", True),
        ("https://up.example", "https://up.example/mcp", True),
        ("https://up.example/mcp", "https://up.example/mcp/a", True),
        ("https://up.example/mcp", "https://up.example/mcpevil", False),
        ("https://up.example/mcp/a", "https://up.example/mcp", False),
        ("https://up.example:444/mcp", "https://up.example/mcp", False),
        ("http://up.example/mcp", "https://up.example/mcp", False),
        ("https://up.example.evil/mcp", "https://up.example/mcp", False),
        ("https://up.example/mcp#x", "https://up.example/mcp", False),
        ("https://up.example/mcp?a=1", "https://up.example/mcp?a=2", False),
    ],
)
def test_a_resource_covers_what_lies_below_it(resource: str, url: str, expected: bool) -> None:
    assert covers(resource, url) is expected


def test_metadata_is_where_the_rfcs_have_it() -> None:
    assert resource_places("https://up.example/mcp/") == (
        "https://up.example/.well-known/oauth-protected-resource/mcp",
        "https://up.example/.well-known/oauth-protected-resource",
    )
    assert server_places("https://as.example/one") == (
        "https://as.example/.well-known/oauth-authorization-server/one",
        "https://as.example/.well-known/openid-configuration/one",
        "https://as.example/one/.well-known/openid-configuration",
    )
    assert len(server_places("https://as.example")) == 2


class UpstreamIssuer:
    """An upstream and its authorization server in one. `documents`: by path."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.registered: list[dict[str, Any]] = []
        self.documents: dict[str, Any] = {}
        self.registration: dict[str, Any] = {"client_id": "made", "client_secret": "s"}

    def set(self, resource: dict[str, Any] | None = None, **server: Any) -> None:
        self.documents = {
            "/.well-known/oauth-protected-resource/mcp": {
                "resource": f"{self.url}/mcp",
                "authorization_servers": [self.url],
                **(resource or {}),
            },
            "/.well-known/oauth-authorization-server": {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "registration_endpoint": f"{self.url}/register",
                "code_challenge_methods_supported": ["S256"],
                **server,
            },
        }

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
        body = await reader.readexactly(length)
        path = head.split(" ", 2)[1]
        self.asked.append(path)
        said = self.documents.get(path)
        if path == "/register":
            self.registered.append(json.loads(body))
            said = self.registration
        elif path == "/token":
            said = {"access_token": "token", "token_type": "Bearer"}
        payload = json.dumps(said).encode()
        status = 404 if said is None else 200
        writer.write(
            f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        await writer.drain()
        writer.close()


@asynccontextmanager
async def placed() -> AsyncIterator[UpstreamIssuer]:
    place = UpstreamIssuer()
    server = await asyncio.start_server(place.serve, "127.0.0.1", 0)
    place.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    place.set()
    yield place
    server.close()


class SignInFlow:
    def __init__(
        self, place: UpstreamIssuer, tenant_db: AsyncEngine, who: Tenant, egress: Egress
    ) -> None:
        self.place, self.who = place, who
        self.consents = Consents(
            db=tenant_db,
            vault=Vault(a_secret("one")),
            endpoint=TokenEndpoint(IssuerEgress(egress)),
            states=Cipher(a_secret("one"), STATE_PURPOSE),
            redirect_uri="https://gateway.example/callback",
        )
        ourselves = OwnMetadata(
            redirect_uri="https://gateway.example/callback", document_url=DOCUMENT
        )
        discovery = Discovery(IssuerEgress(egress))
        self.sign_in = SignIn(
            discovery, Registration(IssuerEgress(egress), ourselves), self.consents
        )

    async def start(self, challenge: Challenge | None = None, **more: Any) -> dict[str, str]:
        """Start a sign-in, and return what the browser is sent with."""
        url = await self.sign_in.start(
            upstream="up",
            url=f"{self.place.url}/mcp",
            challenge=challenge or Challenge(),
            org_id=self.who.org_id,
            user_id=None,
            began=self.who.user_id,
            browser="cookie",
            **more,
        )
        assert url.startswith(f"{self.place.url}/authorize?")
        return dict(parse_qsl(url.partition("?")[2]))


@asynccontextmanager
async def furnished(tenant_db: AsyncEngine, who: Tenant) -> AsyncIterator[SignInFlow]:
    egress = Egress(allow_loopback=True)
    async with placed() as place:
        yield SignInFlow(place, tenant_db, who, egress)
    egress.close()


@pytest.fixture
async def desk() -> AsyncIterator[SignInFlow]:
    """Return a desk where a consent begins: nothing is kept yet, in no database."""
    nowhere = create_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
    async with furnished(nowhere, Tenant("org_1", "user_1", "user_2")) as made:
        yield made
    await nowhere.dispose()


@pytest.fixture
async def keeping(tenant_db: AsyncEngine, tenants: Tenants) -> AsyncIterator[SignInFlow]:
    async with furnished(tenant_db, tenants.alice) as made:
        yield made


async def test_a_url_is_all_that_it_takes(keeping: SignInFlow) -> None:
    asked = await keeping.start()
    assert asked["client_id"] == "made" and asked["resource"] == f"{keeping.place.url}/mcp"
    assert asked["code_challenge_method"] == "S256" and "scope" not in asked
    (registered,) = keeping.place.registered
    assert registered["application_type"] == "web"
    assert registered["grant_types"] == ["authorization_code", "refresh_token"]
    answer = {"code": "c", "state": asked["state"]}
    consent = keeping.consents.read(
        asked["state"], org_id=keeping.who.org_id, began=keeping.who.user_id, browser="cookie"
    )
    assert "made" not in repr(consent)
    made = await keeping.consents.finish(consent, None, answer, COMMAND_LINE)
    assert made.kind == "oauth" and made.upstream == "up"


async def test_an_issuer_that_says_it_names_itself_has_to(keeping: SignInFlow) -> None:
    keeping.place.set(authorization_response_iss_parameter_supported=True)
    asked = await keeping.start()
    consent = keeping.consents.read(
        asked["state"], org_id=keeping.who.org_id, began=keeping.who.user_id, browser="cookie"
    )
    for answer in ({"code": "c"}, {"code": "c", "iss": f"{keeping.place.url}/"}):
        with pytest.raises(SignInRefused, match="another issuer"):
            await keeping.consents.finish(consent, None, answer, COMMAND_LINE)
    good = {"code": "c", "iss": keeping.place.url}
    await keeping.consents.finish(consent, None, good, COMMAND_LINE)
    assert keeping.place.asked.count("/token") == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resource": {"resource": "https://evil.example/mcp"}}, "another resource"),
        ({"resource": {"resource": "https://["}}, "another resource"),
        ({"resource": {"authorization_servers": []}}, "names nobody"),
        ({"resource": {"authorization_servers": ["https://["]}}, "the name of its issuer"),
        ({"resource": {"authorization_servers": ["https://10.0.0.1"]}}, "the name of its issuer"),
        ({"resource": {"resource": 7}}, "metadata that is none"),
        ({"issuer": "https://evil.example"}, "another one's"),
        ({"code_challenge_methods_supported": ["plain"]}, "no PKCE"),
        ({"code_challenge_methods_supported": None}, "no PKCE"),
        ({"authorization_endpoint": "http://evil.example/a"}, "an endpoint of its issuer"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "an endpoint of its issuer"),
        ({"token_endpoint": "https://169.254.169.254/t"}, "an endpoint of its issuer"),
        ({"registration_endpoint": None}, "registers nobody"),
        ({"token_endpoint_auth_methods_supported": ["private_key_jwt"]}, "in a way that we know"),
    ],
)
async def test_what_does_not_fit_is_not_used(
    desk: SignInFlow, change: dict[str, Any], said: str
) -> None:
    desk.place.set(**change)
    with pytest.raises(IssuerUnavailable, match=said):
        await desk.start()
    assert not {"/register", "/token", "/authorize"} & set(desk.place.asked)


async def test_where_the_challenge_points_is_the_only_place(desk: SignInFlow) -> None:
    elsewhere = Challenge(resource_metadata=f"{desk.place.url}/nowhere")
    with pytest.raises(IssuerUnavailable, match="where it should be"):
        await desk.start(elsewhere)
    assert desk.place.asked == ["/nowhere"]
    inside = Challenge(resource_metadata="http://169.254.169.254/latest")
    with pytest.raises(IssuerUnavailable, match="ForbiddenTarget"):
        await desk.start(inside)


async def test_who_we_are_there_is_the_nearest_that_is_known(desk: SignInFlow) -> None:
    desk.place.set(client_id_metadata_document_supported=True)
    assert (await desk.start())["client_id"] == DOCUMENT
    before = UpstreamClient(
        token_endpoint="https://old.example/t", client_id="before", issuer=desk.place.url
    )
    assert (await desk.start(before=before))["client_id"] == "before"
    known = KnownClient(client_id="ours", client_secret="s", issuer=desk.place.url)
    assert (await desk.start(before=before, known=known))["client_id"] == "ours"
    assert desk.place.registered == []


async def test_a_client_of_another_issuer_is_nobody_here(desk: SignInFlow) -> None:
    before = UpstreamClient(
        token_endpoint="https://old.example/t",
        client_id="before",
        client_secret="s3cret",
        issuer="https://old.example",
        scope="old",
    )
    asked = await desk.start(before=before)
    assert asked["client_id"] == "made" and "scope" not in asked
    known = KnownClient(client_id="ours", client_secret="s", issuer="https://old.example")
    with pytest.raises(IssuerUnavailable, match="not of the issuer that we know"):
        await desk.start(known=known)


@pytest.mark.parametrize(
    ("methods", "given", "secret", "by_post"),
    [
        (["client_secret_post", "none"], None, "s", True),
        (["none"], None, "s", False),
        (["client_secret_basic"], "none", None, False),
        (["client_secret_basic"], "client_secret_post", "s", True),
    ],
)
async def test_a_registration_says_how_its_secret_is_shown(
    desk: SignInFlow, methods: list[str], given: str | None, secret: str | None, by_post: bool
) -> None:
    desk.place.set(token_endpoint_auth_methods_supported=methods)
    desk.place.registration["token_endpoint_auth_method"] = given
    asked = await desk.start()
    consent = desk.consents.read(
        asked["state"], org_id=desk.who.org_id, began=desk.who.user_id, browser="cookie"
    )
    assert consent.client is not None
    assert desk.place.registered[0]["token_endpoint_auth_method"] == methods[0]
    wanted = None if methods == ["none"] or given == "none" else secret
    assert consent.client.client_secret == wanted
    assert (consent.client.auth_method == "client_secret_post") is by_post


@pytest.mark.parametrize(
    "made", [{}, {"client_id": ""}, {"client_id": "a" * 2000}, {"client_id": "a b"}]
)
async def test_a_registration_of_no_use_is_refused(desk: SignInFlow, made: dict[str, Any]) -> None:
    desk.place.registration = made
    with pytest.raises(IssuerUnavailable):
        await desk.start()


async def test_scopes_are_those_of_the_challenge_besides_what_was_granted(desk: SignInFlow) -> None:
    listed = {"scopes_supported": ["all", "of", "them"]}
    desk.place.set(resource=listed, scopes_supported=["offline_access"])
    assert (await desk.start())["scope"] == "all of them offline_access"
    before = UpstreamClient(
        token_endpoint="https://x.example/t", client_id="b", issuer=desk.place.url, scope="read"
    )
    asked = await desk.start(Challenge(scopes=("write", "read")), before=before)
    assert asked["scope"] == "read write offline_access"
