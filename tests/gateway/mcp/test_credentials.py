"""A server is shown what the vault has for it, and a person is sent for when that helps."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.mcp.credentials import KNOWN_S, Challenges, VaultCredentials
from gateway.net.egress import Egress
from gateway.vault.challenge import Challenge
from gateway.vault.credentials import put_credential
from gateway.vault.envelope import Vault
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.oauth import UpstreamTokens, tokens_to_values
from gateway.vault.token_endpoint import TokenEndpoint, TokenResponse, UpstreamClient
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, CredentialSet, Refusal, UpstreamOwner
from mcp_bridge.upstream.transport import NotSent
from tests.gateway.a_secret import a_secret
from tests.gateway.vault.conftest import Tenants, tenants
from tests.gateway.vault.token_server import TokenServer, running

__all__ = ["tenants"]

WRITE = 'Bearer error="insufficient_scope", scope="write"'


class CredentialWorker:
    def __init__(
        self,
        server: TokenServer,
        tenant_db: AsyncEngine,
        who: UpstreamOwner,
        redis: redis.asyncio.Redis,
    ) -> None:
        self.server, self.pool, self.who = server, tenant_db, who
        self.now = 0.0
        self.egress = Egress(allow_loopback=True)
        self.vault = Vault(a_secret("one"))
        self.tokens = UpstreamTokens(
            db=tenant_db, vault=self.vault, endpoint=TokenEndpoint(IssuerEgress(self.egress))
        )
        self.challenges = Challenges(redis)
        self.credentials = VaultCredentials(
            db=tenant_db,
            vault=self.vault,
            tokens=self.tokens,
            challenges=self.challenges,
            clock=lambda: self.now,
        )

    async def put(self, values: dict[str, str], kind: str = "static") -> None:
        async with tenant(self.pool, self.who.org_id) as conn:
            await put_credential(
                conn,
                self.vault,
                org_id=self.who.org_id,
                upstream="up",
                user_id=None,
                values=values,
                actor=COMMAND_LINE,
                kind="oauth" if kind == "oauth" else "static",
            )

    async def consent(self, refresh_token: str | None = None) -> None:
        client = UpstreamClient(
            token_endpoint=f"{self.server.url}/token", client_id="us", scope="read"
        )
        tokens = TokenResponse(
            access_token="first", token_type="Bearer", refresh_token=refresh_token
        )
        await self.put(client.to_values() | tokens_to_values(tokens), "oauth")

    async def of(self, refused: Refusal | None = None) -> CredentialSet:
        return await self.credentials.of(self.who, "up", refused)

    async def refused(self, refused: Refusal) -> str:
        with pytest.raises(NotSent) as found:
            await self.of(refused)
        return found.value.reason


@pytest.fixture
async def desk(
    tenant_db: AsyncEngine, tenants: Tenants, redis: redis.asyncio.Redis
) -> AsyncIterator[CredentialWorker]:
    async with running() as server:
        made = CredentialWorker(
            server, tenant_db, UpstreamOwner(tenants.alice.org_id, tenants.alice.user_id), redis
        )
        yield made
        await made.tokens.close()
        made.egress.close()


async def test_who_has_none_is_sent_without_and_then_to_sign_in(desk: CredentialWorker) -> None:
    assert await desk.of() is NO_CREDENTIAL
    said = 'Bearer resource_metadata="https://up.example/m", scope="read"'
    assert await desk.refused(Refusal(NO_CREDENTIAL, 401, said)) == "consent_needed"
    kept = Challenge(scopes=("read",), resource_metadata="https://up.example/m")
    assert await desk.challenges.get(desk.who, "up") == kept
    other = UpstreamOwner(desk.who.org_id, "user_other")
    assert await desk.challenges.get(other, "up") == Challenge()
    await desk.consent()
    assert (await desk.of()).values == {"authorization": "Bearer first"}


async def test_what_was_given_is_shown_and_another_only_if_there_is_one(
    desk: CredentialWorker,
) -> None:
    await desk.put({"x-api-key": "one"})
    shown = await desk.of()
    assert shown.values == {"x-api-key": "one"} and "one" not in repr(shown)
    await desk.put({"x-api-key": "two"})
    assert await desk.of() is shown, "it is known for a while"
    newer = await desk.of(Refusal(shown, 401))
    assert newer.values == {"x-api-key": "two"} and newer.name != shown.name
    assert await desk.refused(Refusal(newer, 401)) == "credential_refused"
    await desk.put({"x-api-key": "three"})
    desk.now += KNOWN_S
    assert (await desk.of()).values == {"x-api-key": "three"}


async def test_a_token_that_is_refused_is_refreshed_once(desk: CredentialWorker) -> None:
    desk.server._refresh.add("r")
    await desk.consent("r")
    first = await desk.of()
    second = await desk.of(Refusal(first, 401, "Bearer"))
    assert second.values != first.values
    assert await desk.refused(Refusal(second, 401, "Bearer", is_last=True)) == "consent_needed"
    assert len(desk.server.grants("refresh_token")) == 1


async def test_a_token_that_nothing_can_refresh_wants_a_consent(desk: CredentialWorker) -> None:
    await desk.consent()
    said = 'Bearer scope="read"'
    assert await desk.refused(Refusal(await desk.of(), 401, said)) == "consent_needed"
    assert (await desk.challenges.get(desk.who, "up")).scopes == ("read",)


async def test_more_is_asked_for_but_not_what_was_granted(desk: CredentialWorker) -> None:
    await desk.consent()
    shown = await desk.of()
    assert await desk.refused(Refusal(shown, 403, WRITE)) == "consent_needed"
    assert (await desk.challenges.get(desk.who, "up")).scopes == ("write",)
    granted = WRITE.replace("write", "read")
    assert await desk.refused(Refusal(shown, 403, granted)) == "insufficient_scope"
    unsaid = 'Bearer error="insufficient_scope"'
    assert await desk.refused(Refusal(shown, 403, unsaid)) == "insufficient_scope"
