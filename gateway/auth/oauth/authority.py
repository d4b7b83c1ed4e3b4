"""The services of the authorization server, and the checks that several of its endpoints share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from redis.asyncio import Redis
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway import permissions as policy
from gateway.auth.bearer.access_tokens import AccessTokens
from gateway.auth.oauth.client_authentication import ClientAuthentication
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.rfc6749_errors import OAuthError
from gateway.auth.oauth.tokens.refresh_tokens import RefreshTokens
from gateway.auth.oauth.tokens.rfc9068_access_token import MAX_LIFETIME_S, AccessClaims
from gateway.auth.oauth.tokens.signing_keys import KeyRing
from gateway.auth.resources import API_PATH, InvalidTarget, find_resources
from gateway.secret import Peppers

MAX_SCOPES = 64


class Authority(msgspec.Struct, frozen=True, kw_only=True):
    """The authorization server of one process."""

    issuer: str
    db: AsyncEngine
    """The system pool: clients, codes and tokens are looked up before their org is known."""
    redis: Redis
    keys: KeyRing
    clients: ClientAuthentication
    codes: Peppers
    refresh_tokens: RefreshTokens
    access_tokens: AccessTokens
    clock: Callable[[], float]
    """Unix seconds."""

    @property
    def token_endpoint(self) -> str:
        return f"{self.issuer}/oauth/token"

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)

    def narrowed_resources(
        self, requested: list[str], granted: Sequence[str], org_id: str
    ) -> list[str]:
        """Return the resources of a token: the requested ones of the granted, or all of them.

        A grant without resources is for the API. Raises: OAuthError.
        """
        allowed = list(granted) or [self.issuer + API_PATH]
        try:
            wanted = find_resources(requested, self.issuer)
            owners = {each.org_id for each in find_resources(allowed, self.issuer)}
        except InvalidTarget as error:
            raise OAuthError("invalid_target", str(error)) from error
        uris = [each.uri for each in wanted] or allowed
        if not set(uris) <= set(allowed) or not owners <= {None, org_id}:
            raise OAuthError("invalid_target", "more than was granted")
        return uris


class IssuedTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token response (RFC 6749, 5.1; OpenID Connect Core, 3.1.3.3; RFC 8693, 2.2.1)."""

    access_token: str
    token_type: str
    expires_in: int
    refresh_token: str | None = None
    scope: str
    id_token: str | None = None
    issued_token_type: str | None = None

    def __repr__(self) -> str:
        return f"IssuedTokens({self.token_type})"

    @classmethod
    def of(cls, claims: AccessClaims, access_token: str, **more: Any) -> IssuedTokens:
        """Return the response with an access token of these claims."""
        return cls(
            access_token=access_token,
            token_type=token_type(claims),
            expires_in=claims.exp - claims.iat,
            scope=claims.scope,
            **more,
        )


def narrowed_scopes(requested: str | None, granted: Collection[str]) -> list[str]:
    """Return the scopes of a token, sorted: the requested ones, or all that were granted.

    Raises: OAuthError if more is requested than was granted, or if there are none.
    """
    if requested is None:
        scopes = set(granted)
    else:
        scopes = set(requested.split(" "))
        if len(scopes) > MAX_SCOPES or not scopes <= policy.expanded(granted):
            raise OAuthError("invalid_scope", "more than was granted")
    if not scopes:
        raise OAuthError("invalid_scope", "none")
    return sorted(scopes)


def check_grant_type(client: Client, grant_type: str) -> None:
    """Raises: OAuthError."""
    if grant_type not in client.grant_types:
        raise OAuthError("unauthorized_client", grant_type)


def check_binding(client: Client, jkt: str | None, bound_to: str | None = None) -> None:
    """Check the proof of a DPoP key. `jkt`: the thumbprint of the key that was proven, if any;
    `bound_to`: that of the key that the code or token is bound to.

    Raises: OAuthError.
    """
    if jkt is None and (client.dpop_bound or bound_to is not None):
        raise OAuthError("invalid_dpop_proof", "missing")
    if bound_to is not None and jkt != bound_to:
        raise OAuthError("invalid_grant", "bound to another key")


def token_type(claims: AccessClaims) -> str:
    return "Bearer" if claims.cnf is None else "DPoP"


def expiry(now: float, *bounds: int) -> int:
    """Return the `exp` of a token: MAX_LIFETIME_S from now, and not after any of `bounds`."""
    return min([int(now) + MAX_LIFETIME_S, *bounds])
