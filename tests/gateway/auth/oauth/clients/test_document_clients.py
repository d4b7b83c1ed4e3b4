"""A client metadata document as a client like any other: what it says holds, and no more."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.clients.metadata_documents import ClientDocuments
from gateway.auth.oauth.clients.store import STRANGERS, FetchDocument
from gateway.auth.oauth.form import Form
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.net.egress import EgressTimeout
from gateway.tenancy.members.members import add_member
from tests.gateway.auth.bearer.revoking import revoke, seconds_until_refused
from tests.gateway.auth.issuing import FarEnd
from tests.gateway.auth.world import ACTOR, CODES, open_world

URL = "https://app.example.com/oauth/client.json"


@pytest.fixture
def far_end() -> FarEnd:
    return FarEnd()


@pytest.fixture
def fetch(far_end: FarEnd) -> FetchDocument:
    return ClientDocuments(far_end).find_client  # type: ignore[arg-type]


def document(**more: Any) -> dict[str, Any]:
    return {"client_id": URL, "redirect_uris": ["https://app.example.com/callback"]} | more


async def test_it_is_a_client_of_nobody_with_what_a_stranger_is_given(
    fetch: FetchDocument, far_end: FarEnd
) -> None:
    far_end.says(URL, document(client_name="App", scope="openid admin:* inference"))
    client = await fetch(URL)
    assert client is not None and (client.id, client.source) == (URL, "document")
    assert (client.name, client.org_id, client.confidential) == ("App", None, False)
    assert client.scopes == ["inference", "openid"] and not client.dpop_bound
    far_end.says(other := URL + "2", document(client_id=other))
    unnamed = await fetch(other)
    assert unnamed is not None and unnamed.name == "unnamed client"
    assert unnamed.scopes == sorted(STRANGERS)


async def test_a_promise_to_bind_its_tokens_holds(fetch: FetchDocument, far_end: FarEnd) -> None:
    """RFC 9449, section 5.2: who says so gets no token without a proof."""
    far_end.says(URL, document(dpop_bound_access_tokens=True))
    client = await fetch(URL)
    assert client is not None and client.dpop_bound


async def test_a_native_application_may_claim_an_https_redirect_too(
    fetch: FetchDocument, far_end: FarEnd
) -> None:
    """RFC 8252, sections 7.2 and 7.3."""
    uris = ["http://127.0.0.1/callback", "https://app.example.com/callback"]
    far_end.says(URL, document(redirect_uris=uris, application_type="native"))
    client = await fetch(URL)
    assert client is not None and client.native and client.redirect_uris == uris


async def test_what_breaks_a_rule_is_no_client_and_the_log_says_why(
    fetch: FetchDocument, far_end: FarEnd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    far_end.says(URL, document(client_secret="s3cret"))
    assert await fetch(URL) is None
    assert "client_secret: a public document" in caplog.text and "s3cret" not in caplog.text


async def test_one_that_cannot_be_had_is_not_one_that_is_none(
    fetch: FetchDocument, far_end: FarEnd, system_db: AsyncEngine, redis: Redis
) -> None:
    """A client that holds a refresh token must not be told to throw it away."""
    far_end.fails(URL, EgressTimeout("slow"))
    with pytest.raises(AuthUnavailable):
        await fetch(URL)
    async with open_world(system_db, redis) as world:
        world.clients._fetch = fetch
        with pytest.raises(OAuthError) as refused:
            await world.authority.clients.authenticate(
                Form({"client_id": URL}, {}), None, "192.0.2.1"
            )
        assert (refused.value.status, refused.value.error) == (503, "temporarily_unavailable")


async def test_its_codes_become_tokens_that_a_revocation_of_the_client_ends(
    fetch: FetchDocument, far_end: FarEnd, system_db: AsyncEngine, redis: Redis
) -> None:
    """No row stands for it anywhere: what holds other clients while they are issued something has
    nothing to hold here."""
    far_end.says(URL, document(grant_types=list(CODES)))
    client = await fetch(URL)
    assert client is not None
    async with open_world(system_db, redis) as world:
        names = {"org_id": world.org_id, "project_id": world.project_id, "user_id": world.user_id}
        async with system_db.begin() as conn:
            await add_member(conn, **names, role="member", actor=ACTOR)
        answer = await world.login(client)
        again = await world.refresh(client, answer["refresh_token"])
        principal = await world.principal(again["access_token"])
        assert (principal.client_id, principal.org_id) == (URL, world.org_id)
        await revoke(world, "client", URL)
        await seconds_until_refused(world.tokens, again["access_token"])
