"""Exchanges a statement of ours about the user for a token, at servers whose authorization server
takes our word for who calls (RFC 8693). A statement is for one authorization server and one minute;
whoever has our JWKS (/oauth/jwks.json) can verify it. The token that the caller has shown us is not
known here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.tokens.rfc9068_access_token import encode, token_id
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.db import tenant
from gateway.mcp.clients import client_fields
from gateway.settings.load import Settings
from gateway.settings.mcp_servers import EXCHANGE
from gateway.tenancy.member_tables import users
from gateway.vault.errors import ConsentNeeded, IssuerUnavailable
from gateway.vault.oauth import UpstreamToken, UpstreamTokens
from gateway.vault.token_endpoint import UpstreamClient

TYPE = "JWT"
ASSERTION_S = 60
"""Our assertion is valid this long: the server must ask for a token by then."""


class Exchanges:
    """The token exchanges of one process. `clients`: our client identity at each of those servers'
    issuers. `db`: the tenants' pool. `wall_clock`: Unix seconds."""

    def __init__(
        self,
        *,
        db: AsyncEngine,
        tokens: UpstreamTokens,
        keys: KeyRing,
        issuer: str,
        clients: Mapping[str, UpstreamClient],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._db, self._tokens, self._keys = db, tokens, keys
        self._issuer, self._clients, self._wall_clock = issuer, clients, wall_clock

    def replace(self, clients: Mapping[str, UpstreamClient]) -> None:
        """Exchange at the issuers of these servers from now on."""
        self._clients = clients

    def has(self, server: str) -> bool:
        return server in self._clients

    async def token(
        self, org_id: str, user_id: str, server: str, refused: str | None
    ) -> UpstreamToken:
        """Return a token for a user at a server. `refused`: one that the server has just answered
        401 to. Raises: ConsentNeeded (its issuer does not know the user), IssuerUnavailable."""
        client = self._clients[server]

        async def mint() -> str:
            return await self._sign(org_id, user_id, server, client)

        return await self._tokens.exchanged(
            client, mint, org_id=org_id, upstream=server, user_id=user_id, refused=refused
        )

    async def _sign(self, org_id: str, user_id: str, server: str, client: UpstreamClient) -> str:
        found = sa.select(users.c.email).where(users.c.id == user_id, users.c.org_id == org_id)
        async with tenant(self._db, org_id) as conn:
            email = await conn.scalar(found)
        if email is None:
            raise ConsentNeeded(server, "there is no such user any more")
        now = int(self._wall_clock())
        claims = {
            "iss": self._issuer,
            "sub": user_id,
            "aud": client.issuer or client.token_endpoint,
            "iat": now,
            "exp": now + ASSERTION_S,
            "jti": token_id(),
            "org_id": org_id,
            "email": email,
        }
        try:
            return encode(self._keys.ring.active, claims, TYPE)
        except AuthUnavailable as error:
            raise IssuerUnavailable(server, "nothing can be signed for it now") from error


def open_exchanges(
    settings: Settings, *, db: AsyncEngine, tokens: UpstreamTokens, keys: KeyRing
) -> Exchanges:
    """Open the exchanges of the settings. Raises: SettingsError, for a secret that the environment
    does not have."""
    clients = exchange_clients(settings)
    return Exchanges(db=db, tokens=tokens, keys=keys, issuer=settings.issuer, clients=clients)


def exchange_clients(settings: Settings) -> dict[str, UpstreamClient]:
    """Return what we are at the issuers of the servers that take our word, by server. Raises:
    SettingsError."""
    return {
        each.name: UpstreamClient(**client_fields(each.oauth))
        for each in settings.mcp.servers
        if each.oauth is not None and each.oauth.grant == EXCHANGE
    }
