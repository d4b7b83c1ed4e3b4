"""Sends MCP servers the credentials of the vault: the tenant's or the user's own.

A server without a stored credential gets the request without one, and its challenge is stored for
the sign-in. A person is sent to sign in only if that can change something: a scope that was granted
already is not requested again. A server whose issuer accepts token exchange gets a token for the
calling user.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.federation.external_login import digest
from gateway.db import tenant
from gateway.lru import Lru
from gateway.mcp.exchanges import Exchanges
from gateway.tenancy.changes import EVERYTHING
from gateway.vault.challenge import Challenge, read_challenge, split_scopes
from gateway.vault.credentials import OpenCredential, open_credential
from gateway.vault.envelope import Vault
from gateway.vault.errors import VaultError
from gateway.vault.oauth import UpstreamToken, UpstreamTokens
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, CredentialSet, Refusal, UpstreamOwner
from mcp_bridge.upstream.transport import NotSent

KNOWN_S = 5.0
"""How long a credential is used before the vault is read again."""
MAX_KNOWN = 10_000
CHALLENGE_S = 3_600
CONSENT_NEEDED = "consent_needed"
REFUSED = "credential_refused"
INSUFFICIENT = "insufficient_scope"


class Challenges:
    """The challenges of servers that refused a credential, by its owner; kept for an hour."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def put(self, owner: UpstreamOwner, server: str, challenge: Challenge) -> None:
        key = self._key(owner, server)
        await self._redis.set(key, msgspec.json.encode(challenge), ex=CHALLENGE_S)

    async def get(self, owner: UpstreamOwner, server: str) -> Challenge:
        found = await self._redis.get(self._key(owner, server))
        return Challenge() if found is None else msgspec.json.decode(found, type=Challenge)

    def _key(self, owner: UpstreamOwner, server: str) -> str:
        return f"mcp:{{{owner.org_id}}}:challenge:{server}:{owner.user_id or ''}"


class VaultCredentials:
    """The `Credentials` of the bridge, from the vault.

    `db`: the tenants' pool. `sign_in_url`: the page to sign in at a server, if people do. `clock`:
    monotonic seconds.
    """

    def __init__(
        self,
        *,
        db: AsyncEngine,
        vault: Vault,
        tokens: UpstreamTokens,
        challenges: Challenges,
        sign_in_url: Callable[[UpstreamOwner, str], str | None] = lambda _whose, _server: None,
        exchanges: Exchanges | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._vault, self._tokens = db, vault, tokens
        self._challenges, self._clock = challenges, clock
        self._sign_in_url, self._exchanges = sign_in_url, exchanges
        self._known: Lru[tuple[UpstreamOwner, str], tuple[CredentialSet, float]] = Lru(MAX_KNOWN)

    def forget(self, org_id: str) -> None:
        """Forget the cached credentials of an org. EVERYTHING: of all orgs."""
        for key in [key for key, _ in self._known.items()]:
            if org_id in (EVERYTHING, key[0].org_id):
                self._known.drop(key)

    async def of(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        """Raises: NotSent."""
        key = (owner, server)
        known = self._known.get(key)
        if refused is None and known is not None and self._clock() < known[1]:
            return known[0]
        self._known.drop(key)
        try:
            found = await self._find(owner, server, refused)
        except VaultError as error:
            if refused is not None:
                await self._keep(owner, server, read_challenge(refused.challenge))
            raise self._not_sent(error.code, owner, server) from error
        if found is not NO_CREDENTIAL:
            self._known.put(key, (found, self._clock() + KNOWN_S))
        return found

    async def _find(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None
    ) -> CredentialSet:
        exchanges = self._exchanges
        if exchanges is not None and owner.user_id is not None and exchanges.has(server):
            if refused is not None and (refused.status != 401 or refused.is_last):
                reason = REFUSED if refused.status == 401 else INSUFFICIENT
                await self._refuse(owner, server, refused, reason)
            old_token = token_in(refused)
            return bearer(await exchanges.token(owner.org_id, owner.user_id, server, old_token))
        async with tenant(self._db, owner.org_id) as conn:
            found = await open_credential(
                conn, self._vault, org_id=owner.org_id, upstream=server, user_id=owner.user_id
            )
        if found is None:
            if refused is None:
                return NO_CREDENTIAL
            await self._refuse(owner, server, refused, CONSENT_NEEDED)
        elif found.credential.kind == "static":
            current = CredentialSet(found.credential.credential_set, found.values)
            if refused is None or refused.credential.name != current.name:
                return current
            await self._refuse(owner, server, refused, REFUSED)
        elif refused is not None and (refused.status != 401 or refused.is_last):
            await self._refuse(owner, server, refused, reason_of(found, refused))
        return await self._token(owner, server, refused)

    async def _token(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None
    ) -> CredentialSet:
        token = await self._tokens.access_token(
            org_id=owner.org_id,
            upstream=server,
            user_id=owner.user_id,
            refused=token_in(refused),
        )
        return bearer(token)

    async def _refuse(
        self, owner: UpstreamOwner, server: str, refused: Refusal, reason: str
    ) -> NoReturn:
        await self._keep(owner, server, read_challenge(refused.challenge))
        raise self._not_sent(reason, owner, server)

    def _not_sent(self, reason: str, owner: UpstreamOwner, server: str) -> NotSent:
        is_for_people = reason == CONSENT_NEEDED
        return NotSent(reason, self._sign_in_url(owner, server) if is_for_people else None)

    async def _keep(self, owner: UpstreamOwner, server: str, challenge: Challenge) -> None:
        try:
            await self._challenges.put(owner, server, challenge)
        except RedisError as error:
            raise NotSent("challenge_lost") from error


def token_in(refused: Refusal | None) -> str | None:
    """Return the access token that a server refused."""
    value = None if refused is None else refused.credential.values.get("authorization")
    return None if value is None else value.partition(" ")[2]


def bearer(token: UpstreamToken) -> CredentialSet:
    name = f"{token.credential_set}.{digest(token.access_token)[:16]}"
    return CredentialSet(name, {"authorization": f"Bearer {token.access_token}"})


def reason_of(found: OpenCredential, refused: Refusal) -> str:
    """Return CONSENT_NEEDED if a person can grant more, INSUFFICIENT if all was granted already."""
    if refused.status == 401:
        return CONSENT_NEEDED
    wanted = read_challenge(refused.challenge).scopes
    granted = split_scopes(found.values.get("scope", ""))
    return CONSENT_NEEDED if set(wanted) - set(granted) else INSUFFICIENT
