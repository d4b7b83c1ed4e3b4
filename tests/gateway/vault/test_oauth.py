"""The gateway as an OAuth client of an upstream, against a server that rotates refresh tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import ROLE_TENANT, create_engine, tenant
from gateway.net.egress import Egress
from gateway.secret import Cipher
from gateway.vault import oauth
from gateway.vault.credentials import UpstreamCredential, find_credential, put_credential
from gateway.vault.envelope import Vault
from gateway.vault.errors import ConsentNeeded, IssuerUnavailable, NoCredential, SignInRefused
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import (
    REFRESH_BEFORE_S,
    SIGN_IN_S,
    STATE_PURPOSE,
    Consents,
    UpstreamTokens,
)
from gateway.vault.token_endpoint import TokenEndpoint, UpstreamClient
from tests.gateway.a_secret import a_secret
from tests.gateway.vault.conftest import Tenants
from tests.gateway.vault.token_server import TokenServer, basic_of, running

NOW = 1_800_000_000.0
CANARY = "caller-token-canary"
"""The token that the caller sent to the gateway. It must never reach an upstream."""
BROWSER = "cookie"
CLIENT_SECRET = "s3cret/of ours"


class Clock:
    now = NOW

    def __call__(self) -> float:
        return self.now


class UpstreamWorker:
    """A worker with its own tenant_db, one server, and a tenant's user."""

    def __init__(self, server: TokenServer, tenant_db: AsyncEngine, tenants: Tenants) -> None:
        self.server, self.pool, self.tenants = server, tenant_db, tenants
        self.clock = Clock()
        self.vault = Vault(a_secret("one"))
        self.egress = Egress(allow_loopback=True)
        self.endpoint = TokenEndpoint(IssuerEgress(self.egress))
        self.consents = Consents(
            db=tenant_db,
            vault=self.vault,
            endpoint=self.endpoint,
            states=Cipher(a_secret("one"), STATE_PURPOSE),
            redirect_uri="https://gateway.example/callback",
            wall_clock=self.clock,
        )
        self.tokens = self.worker(tenant_db)
        self.client = UpstreamClient(
            authorization_endpoint=f"{server.url}/authorize",
            token_endpoint=f"{server.url}/token",
            client_id="us",
            client_secret=CLIENT_SECRET,
            issuer=server.url,
            scope="read",
            resource="https://upstream.example/mcp",
        )
        self.org_id, self.user_id = tenants.alice.org_id, tenants.alice.user_id

    def worker(self, tenant_db: AsyncEngine) -> UpstreamTokens:
        return UpstreamTokens(
            db=tenant_db, vault=self.vault, endpoint=self.endpoint, wall_clock=self.clock
        )

    def begin(self, client: UpstreamClient | None = None, user_id: str | None = None) -> str:
        return self.consents.start(
            client or self.client,
            org_id=self.org_id,
            upstream="github",
            user_id=user_id or self.user_id,
            began=self.user_id,
            browser=BROWSER,
        )

    async def finish(
        self, answer: dict[str, str], client: UpstreamClient | None = None, **who: str
    ) -> UpstreamCredential:
        whose = {"org_id": self.org_id, "began": self.user_id, "browser": BROWSER} | who
        consent = self.consents.read(answer["state"], **whose)
        return await self.consents.finish(consent, client or self.client, answer, COMMAND_LINE)

    async def sign_in(self) -> UpstreamCredential:
        return await self.finish(self.server.consent(self.begin()))

    async def token(self, tokens: UpstreamTokens | None = None, **more: Any) -> str:
        asked = {"org_id": self.org_id, "upstream": "github", "user_id": self.user_id} | more
        return (await (tokens or self.tokens).access_token(**asked)).access_token


@pytest.fixture
async def desk(tenant_db: AsyncEngine, tenants: Tenants) -> AsyncIterator[UpstreamWorker]:
    async with running() as server:
        made = UpstreamWorker(server, tenant_db, tenants)
        yield made
        await made.tokens.close()
        made.egress.close()


async def test_a_consent_becomes_a_token_that_is_sent_as_it_should_be(
    desk: UpstreamWorker, caplog: pytest.LogCaptureFixture
) -> None:
    url = desk.begin()
    asked = dict(parse_qsl(url.partition("?")[2]))
    assert asked["resource"] == "https://upstream.example/mcp" and asked["scope"] == "read"
    assert CLIENT_SECRET not in url
    made = await desk.finish(desk.server.consent(url) | {"iss": desk.server.url})
    assert (made.kind, made.user_id, made.version) == ("oauth", desk.user_id, 1)
    redeemed = desk.server.asked[0]
    assert basic_of(redeemed) == ("us", CLIENT_SECRET)
    assert redeemed.form["redirect_uri"] == "https://gateway.example/callback"
    assert redeemed.form["resource"] == "https://upstream.example/mcp"
    assert await desk.token() == await desk.token() == "access-2"
    assert len(desk.server.asked) == 1
    for text in (caplog.text, repr(desk.client), repr(made)):
        assert "access-2" not in text and CLIENT_SECRET not in text
    with pytest.raises(NoCredential):
        await desk.token(user_id=desk.tenants.alice.colleague_id)
    with pytest.raises(NoCredential):
        await desk.token(org_id=desk.tenants.mallory.org_id)


async def test_a_token_that_ends_is_refreshed_once_by_all_workers_together(
    desk: UpstreamWorker, postgres_url: str
) -> None:
    """A second use of a refresh token would end the consent."""
    made = await desk.sign_in()
    other_pool = create_engine(postgres_url, role=ROLE_TENANT)
    workers = [desk.tokens, desk.worker(desk.pool), desk.worker(other_pool)]
    for _ in range(3):
        desk.clock.now += 3600 - REFRESH_BEFORE_S + 1
        before = len(desk.server.grants("refresh_token"))
        found = await asyncio.gather(*(desk.token(each) for each in workers * 8))
        assert len(set(found)) == 1
        assert len(desk.server.grants("refresh_token")) == before + 1
    assert not desk.server.stolen
    async with tenant(desk.pool, desk.org_id) as conn:
        now = await find_credential(
            conn, org_id=desk.org_id, upstream="github", user_id=desk.user_id
        )
    assert now is not None and now.credential_set == made.credential_set
    await other_pool.dispose()


async def test_who_leaves_does_not_lose_the_token(desk: UpstreamWorker) -> None:
    await desk.sign_in()
    desk.clock.now += 3600
    desk.server.hold.clear()
    leaving = asyncio.create_task(desk.token())
    while not desk.server.grants("refresh_token"):
        await asyncio.sleep(0.005)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    staying = asyncio.create_task(desk.token())
    desk.server.hold.set()
    assert await staying == await desk.token()
    assert len(desk.server.grants("refresh_token")) == 1


async def test_a_token_that_the_upstream_refuses_is_refreshed_unless_it_was(
    desk: UpstreamWorker,
) -> None:
    await desk.sign_in()
    first = await desk.token()
    second = await desk.token(refused=first)
    assert second != first
    assert await desk.token(refused=first) == second
    assert len(desk.server.grants("refresh_token")) == 1


async def test_a_server_that_keeps_its_refresh_token(desk: UpstreamWorker) -> None:
    desk.server.rotates = False
    await desk.sign_in()
    for _ in range(2):
        desk.clock.now += 3600
        await desk.token()
    shown = {each.form["refresh_token"] for each in desk.server.grants("refresh_token")}
    assert len(shown) == 1


async def test_a_consent_that_was_taken_back_is_asked_for_again(desk: UpstreamWorker) -> None:
    """And the server is not asked again until it is there."""
    made = await desk.sign_in()
    desk.clock.now += 3600
    desk.server.answer = 400, {"error": "invalid_grant"}
    for _ in range(3):
        with pytest.raises(ConsentNeeded, match="github: its owner has to sign in"):
            await desk.token()
    assert len(desk.server.grants("refresh_token")) == 1
    desk.server.answer = None
    again = await desk.sign_in()
    assert (again.id, again.version, again.refused_at) == (made.id, 2, None)
    assert await desk.token()


@pytest.mark.parametrize(
    "answer",
    [
        (500, {"error": "invalid_grant"}),
        (400, {"error": "slow_down"}),
        (400, {"error": 7}),
        (200, {}),
        (200, {"access_token": "a b", "token_type": "Bearer"}),
        (200, {"access_token": "ab", "token_type": "mac"}),
        (200, {"access_token": "ab", "token_type": "Bearer", "expires_in": -1}),
        (200, {"access_token": "ab", "token_type": "Bearer", "expires_in": 1e300}),
        (200, {"access_token": "ab", "token_type": "Bearer", "refresh_token": "a\nb"}),
        (302, {}),
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + b"[" * 100_000,
        b"nonsense\r\n\r\n",
        b"",
    ],
    ids=str,
)
async def test_an_answer_of_no_use_ends_nothing(
    desk: UpstreamWorker, answer: tuple[int, dict[str, Any]] | bytes
) -> None:
    await desk.sign_in()
    desk.clock.now += 3600 - REFRESH_BEFORE_S + 1
    desk.server.answer = answer
    assert await desk.token() == "access-2", "it lasts a little yet"
    desk.clock.now += REFRESH_BEFORE_S
    with pytest.raises(IssuerUnavailable) as failed:
        await desk.token()
    assert "refresh-" not in str(failed.value) and "access-" not in str(failed.value)
    desk.server.answer = None
    assert (await desk.token()).startswith("access-")


async def test_tokens_that_end_without_another_need_consent(desk: UpstreamWorker) -> None:
    desk.server.answer = 200, {"access_token": "ab", "token_type": "bearer", "expires_in": "3600"}
    await desk.sign_in()
    assert await desk.token() == "ab"
    desk.clock.now += 3600
    with pytest.raises(ConsentNeeded, match="none to refresh it"):
        await desk.token()
    desk.server.answer = 200, {"access_token": "ab", "token_type": "bearer"}
    await desk.sign_in()
    desk.clock.now += 1e9
    assert await desk.token() == "ab", "nobody said that it ends"


async def test_a_consent_is_its_owners_its_browsers_and_soon(desk: UpstreamWorker) -> None:
    answer = desk.server.consent(desk.begin())
    for who in (
        {"browser": "another"},
        {"began": desk.tenants.alice.colleague_id},
        {"org_id": desk.tenants.mallory.org_id},
    ):
        with pytest.raises(SignInRefused, match="begun elsewhere"):
            await desk.finish(answer, **who)
    for state in ("", "x", answer["state"][:-8] + "AAAAAAA=", "one." + "A" * 7000):
        with pytest.raises(SignInRefused, match="a state that is not ours"):
            await desk.finish(answer | {"state": state})
    for change, text in (
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"error": "access_denied"}, "did not say yes"),
        ({"code": ""}, "did not say yes"),
        ({"code": "other"}, "its code is not taken: invalid_grant"),
    ):
        with pytest.raises(SignInRefused, match=text):
            await desk.finish(answer | change)
    desk.clock.now += SIGN_IN_S
    with pytest.raises(SignInRefused, match="too long ago"):
        await desk.finish(answer)
    with pytest.raises(SignInRefused, match="no authorization endpoint"):
        desk.begin(msgspec.structs.replace(desk.client, authorization_endpoint=None))


async def test_other_clients_of_a_server(desk: UpstreamWorker) -> None:
    public = msgspec.structs.replace(desk.client, client_secret=None, scope=None, resource=None)
    post = msgspec.structs.replace(desk.client, auth_method="client_secret_post")
    for client in (public, post):
        await desk.finish(desk.server.consent(desk.begin(client)), client)
        asked = desk.server.asked[-1]
        assert "authorization" not in asked.headers
        assert asked.form["client_id"] == "us"
        assert asked.form.get("client_secret") == client.client_secret
        desk.clock.now += 3600
        await desk.token()
        assert desk.server.asked[-1].form.get("client_secret") == client.client_secret
        assert UpstreamClient.from_values(client.to_values()) == client


async def test_what_we_sign_is_exchanged_and_the_callers_token_goes_nowhere(
    desk: UpstreamWorker, db: AsyncEngine
) -> None:
    """RFC 8693. All that the server was ever sent is searched, and all that is kept."""
    minted = 0

    async def mint() -> str:
        nonlocal minted
        minted += 1
        return f"our.assertion.{minted}"

    async def exchanged(user_id: str) -> str:
        token = await desk.tokens.exchanged(
            desk.client, mint, org_id=desk.org_id, upstream="github", user_id=user_id
        )
        return token.access_token

    caller = {"authorization": f"Bearer {CANARY}"}  # as a request brings it
    await desk.sign_in()
    await desk.token()
    found = await asyncio.gather(*(exchanged(desk.user_id) for _ in range(5)))
    other = await exchanged(desk.tenants.alice.colleague_id)
    assert len(set(found)) == 1 and other not in found
    asked = desk.server.grants("urn:ietf:params:oauth:grant-type:token-exchange")
    assert [each.form["subject_token"] for each in asked] == ["our.assertion.1", "our.assertion.2"]
    assert asked[0].form["resource"] == "https://upstream.example/mcp"
    assert asked[0].form["subject_token_type"] == "urn:ietf:params:oauth:token-type:jwt"
    desk.clock.now += oauth.EXCHANGED_S + 1
    assert await exchanged(desk.user_id) not in found
    canary = caller["authorization"].partition(" ")[2].encode()
    assert all(canary not in each.raw for each in desk.server.asked)
    async with db.connect() as conn:
        rows = await conn.scalars(sa.text("SELECT c::text FROM upstream_credentials c"))
        assert all(canary.decode() not in row for row in rows)
    desk.server.answer = 400, {"error": "invalid_target"}
    with pytest.raises(ConsentNeeded, match="invalid_target"):
        await exchanged("user_x")
    refresh = {"access_token": "ab", "token_type": "Bearer"}
    desk.server.answer = 200, refresh | {"issued_token_type": "urn:x:refresh_token"}
    with pytest.raises(IssuerUnavailable, match="another type"):
        await exchanged("user_x")


async def test_tokens_asked_for_at_once_are_bounded(
    desk: UpstreamWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oauth, "MAX_REFRESHING", 0)
    await desk.sign_in()
    desk.clock.now += 3600
    with pytest.raises(IssuerUnavailable, match="too many"):
        await desk.token()


async def test_a_plain_credential_is_no_token(desk: UpstreamWorker) -> None:
    async with tenant(desk.pool, desk.org_id) as conn:
        await put_credential(
            conn,
            desk.vault,
            org_id=desk.org_id,
            upstream="github",
            user_id=None,
            values={"TOKEN": "x"},
            actor=COMMAND_LINE,
        )
    with pytest.raises(NoCredential):
        await desk.token()
