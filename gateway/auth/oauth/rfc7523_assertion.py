"""Verifies client assertions: `private_key_jwt` (RFC 7523, section 3; OpenID Connect Core, section
9).

An assertion is good once: its `jti` is stored until it expires, and committed before the assertion
is accepted.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import msgspec
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.tasks import SharedTasks
from gateway.auth.oauth.clients.store import Client
from gateway.auth.oauth.rfc6749_errors import invalid_client
from gateway.auth.tables import oauth_assertions
from gateway.db import delete_some
from gateway.lru import Lru
from gateway.net.egress import Egress, EgressError

log = logging.getLogger(__name__)

TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
ALGORITHMS = ("RS256", "PS256", "ES256", "ES384", "Ed25519")
MAX_BYTES = 8 * 1024
MAX_LIFETIME_S = 600
CLOCK_SKEW_S = 60
MAX_PURGED = 100
TYPES = (None, "JWT", "client-authentication+jwt")

KEYS_KEPT_S = 300.0
KEYS_RETRY_S = 30.0
"""The wait before a URI that failed is fetched again."""
MAX_KEPT_KEYS = 1024

FetchKeys = Callable[[str], Awaitable[dict[str, Any] | None]]
"""Returns the JWK Set at a client's `jwks_uri`; None if it cannot be fetched."""


class AssertionClaims(msgspec.Struct, frozen=True, kw_only=True):
    iss: str
    sub: str
    aud: str | list[str]
    jti: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    exp: int | float
    iat: int | float | None = None
    nbf: int | float | None = None


def stated_client(assertion: str) -> str:
    """Return the unverified `sub` of an assertion. Raises: OAuthError."""
    if len(assertion) > MAX_BYTES:
        raise invalid_client("the assertion is too long")
    try:
        payload = jws.extract_compact(assertion.encode("ascii")).payload
        claims = msgspec.json.decode(payload, type=AssertionClaims)
    except (JoseError, ValueError, RecursionError) as error:
        raise invalid_client("not an assertion") from error
    return claims.sub


async def verify(
    assertion: str,
    client: Client,
    *,
    db: AsyncEngine,
    audiences: frozenset[str],
    now: float,
    fetch: FetchKeys | None,
) -> None:
    """Raises: OAuthError."""
    keys = client.jwks
    if keys is None and client.jwks_uri is not None and fetch is not None:
        keys = await fetch(client.jwks_uri)
    try:
        key = _choose(keys or {}, jws.extract_compact(assertion.encode("ascii")).headers())
        found = jwt.decode(assertion, key, algorithms=ALGORITHMS).claims
        claims = msgspec.convert(found, AssertionClaims)
    except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise invalid_client(type(error).__name__) from error
    if not claims.iss == claims.sub == client.id:
        raise invalid_client("for another client")
    named = {claims.aud} if isinstance(claims.aud, str) else set(claims.aud)
    if not named or not named <= audiences:
        raise invalid_client("for another server")
    if not now < claims.exp <= now + MAX_LIFETIME_S + CLOCK_SKEW_S:
        raise invalid_client("expired, or its lifetime is too long")
    if max(claims.iat or 0, claims.nbf or 0) > now + CLOCK_SKEW_S:
        raise invalid_client("iat or nbf is in the future")
    async with db.begin() as conn:
        await _use_up(conn, client.id, claims, now)


def _choose(keys: dict[str, Any], header: dict[str, Any]) -> Key:
    """Return the key that the header names, or the only one. Raises: KeyError, JoseError, ..."""
    if header.get("alg") not in ALGORITHMS or header.get("typ") not in TYPES:
        raise KeyError("algorithm")
    kid = header.get("kid")
    fit = [
        jwk
        for jwk in keys.get("keys", [])
        if isinstance(jwk, dict)
        and jwk.get("kty") in ("RSA", "EC", "OKP")
        and (kid is None or jwk.get("kid") == kid)
    ]
    if len(fit) != 1:
        raise KeyError("kid")
    return JWKRegistry.import_key(fit[0])


async def _use_up(
    conn: AsyncConnection, client_id: str, claims: AssertionClaims, now: float
) -> None:
    """Store an assertion as used. Raises: OAuthError if it was used before."""
    await delete_some(
        conn,
        oauth_assertions.c.jti_hash,
        oauth_assertions.c.client_id == client_id,
        oauth_assertions.c.expires_at < datetime.fromtimestamp(now - CLOCK_SKEW_S, UTC),
        limit=MAX_PURGED,
    )
    used = insert(oauth_assertions).values(
        client_id=client_id,
        jti_hash=hashlib.sha256(claims.jti.encode()).hexdigest(),
        expires_at=datetime.fromtimestamp(claims.exp, UTC),
    )
    if (await conn.execute(used.on_conflict_do_nothing())).rowcount == 0:
        raise invalid_client("the assertion was used before")


class ClientKeys:
    """Fetches the keys at clients' `jwks_uri`, and caches them. One per process. `clock`: monotonic
    seconds.

    A URI is fetched once per KEYS_KEPT_S, or per KEYS_RETRY_S while it fails, however many
    assertions arrive. The egress client bounds concurrent fetches.
    """

    def __init__(self, egress: Egress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._egress = egress
        self._clock = clock
        self._kept: Lru[str, tuple[float, dict[str, Any] | None]] = Lru(MAX_KEPT_KEYS)
        self._fetches: SharedTasks[str, dict[str, Any] | None] = SharedTasks("fetch client keys")

    async def close(self) -> None:
        await self._fetches.close()

    async def fetch(self, uri: str) -> dict[str, Any] | None:
        """Return the JWK Set, or None if it cannot be fetched."""
        kept = self._kept.get(uri)
        if kept is not None:
            lifetime_s = KEYS_RETRY_S if kept[1] is None else KEYS_KEPT_S
            if self._clock() - kept[0] < lifetime_s:
                return kept[1]
        return await self._fetches.run(uri, partial(self._fetch, uri))

    async def _fetch(self, uri: str) -> dict[str, Any] | None:
        found = None
        try:
            found = (await self._egress.get(uri)).json_object()
        except EgressError as error:
            log.info("the keys of a client cannot be fetched: %s", error)
        self._kept.put(uri, (self._clock(), found))
        return found
