"""Access tokens as JWTs (RFC 9068): signs them, and makes all checks that need no database.

No claim is used before the signature is verified: the algorithm is always RS256, the key is one of
ours by its id, and `typ` is `at+jwt`, so that no other JWT that we sign (an ID token) passes for an
access token.
"""

from __future__ import annotations

from typing import Any

import msgspec
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import RSAKey

from gateway.auth.errors import ExpiredToken, InvalidToken
from gateway.auth.oauth.tokens.signing_keys import ALGORITHM, KeyRing, Ring
from gateway.ids import uuid7

TOKEN_TYPE = "at+jwt"
TOKEN_TYPES = (TOKEN_TYPE, "application/at+jwt")
"""The valid `typ` (RFC 9068, section 4), compared without case."""
MAX_LIFETIME_S = 600
MAX_TOKEN_BYTES = 8 * 1024
CLOCK_SKEW_S = 5
"""`iat` may be so far in the future, for the clocks of the gateways differ. `exp` has no leeway."""
MAX_ACTORS = 4
"""The maximum length of the chain of `act`."""


class ActorClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The actor for the subject, with the earlier actors in `act` (RFC 8693, section 4.1)."""

    sub: str
    act: ActorClaim | None = None


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """The key that the token is bound to (RFC 9449, section 6.1)."""

    jkt: str


class AccessClaims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The claims of RFC 9068, section 2.2, and our own."""

    iss: str
    sub: str
    aud: str | list[str]
    client_id: str
    jti: str
    iat: int
    exp: int
    scope: str
    org_id: str
    project_id: str | None = None
    """The project that is billed; a token without one cannot use what costs money."""
    user_id: str | None = None
    service_account_id: str | None = None
    grant_id: str | None = None
    auth_time: int | None = None
    derived_from: list[str] = []
    """The `jti` of each token this one was exchanged from; it is revoked with any of them."""
    passed_through: list[str] = []
    """The clients that those were issued to; it is revoked with any of them."""
    act: ActorClaim | None = None
    cnf: Confirmation | None = None

    @property
    def audiences(self) -> frozenset[str]:
        return frozenset([self.aud] if isinstance(self.aud, str) else self.aud)

    @property
    def scopes(self) -> frozenset[str]:
        return frozenset(self.scope.split())

    @property
    def jkt(self) -> str | None:
        """The thumbprint of the key that the token is bound to."""
        return None if self.cnf is None else self.cnf.jkt


def confirmation(jkt: str | None) -> Confirmation | None:
    """Return the `cnf` claim of a token that is bound to a key, if it is."""
    return None if jkt is None else Confirmation(jkt=jkt)


def token_id() -> str:
    return uuid7().hex


def as_audience(resources: list[str]) -> str | list[str]:
    """Return the `aud` claim: a string for one resource, else a list (RFC 7519, 4.1.3)."""
    return resources[0] if len(resources) == 1 else resources


def sign(ring: Ring, claims: AccessClaims, *, kid: str | None = None) -> str:
    """Sign the claims. `kid`: the key of an earlier signature to repeat; None: the active key.

    The same claims under the same key make the same bytes.
    Raises: InvalidToken if that key is gone.
    """
    assert claims.exp - claims.iat <= MAX_LIFETIME_S
    key = ring.active if kid is None else ring.signing.get(kid)
    if key is None:
        raise InvalidToken("the signing key is gone")
    return encode(key, msgspec.to_builtins(claims), TOKEN_TYPE)


def encode(key: RSAKey, claims: dict[str, Any], typ: str) -> str:
    """Sign a JWT with this key. (Given a set of keys, joserfc would choose any of them.)"""
    header = {"alg": ALGORITHM, "kid": key.kid, "typ": typ}
    return jwt.encode(header, claims, key, algorithms=[ALGORITHM])


async def read(ring: KeyRing, token: str, *, issuer: str, now: float) -> AccessClaims:
    """Verify a token, and return its claims.

    Raises: InvalidToken, ExpiredToken, AuthUnavailable.
    """
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidToken("too long")
    try:
        header = jws.extract_compact(token.encode("ascii")).headers()
    except (JoseError, ValueError) as error:
        raise InvalidToken("not a JWS") from error
    kid, typ = header.get("kid"), header.get("typ")
    if header.get("alg") != ALGORITHM:
        raise InvalidToken("another algorithm")
    if not isinstance(typ, str) or typ.lower() not in TOKEN_TYPES:
        raise InvalidToken("another type")
    key = await ring.verifier(kid) if isinstance(kid, str) else None
    if key is None:
        raise InvalidToken("unknown key")
    try:
        found = jwt.decode(token, key, algorithms=[ALGORITHM]).claims
        claims = msgspec.convert(found, AccessClaims)
    except (JoseError, ValueError) as error:
        raise InvalidToken(type(error).__name__) from error
    if claims.iss != issuer:
        raise InvalidToken("another issuer")
    if claims.iat > now + CLOCK_SKEW_S or claims.exp - claims.iat > MAX_LIFETIME_S:
        raise InvalidToken("iat in the future, or too long a lifetime")
    if claims.exp <= now:
        raise ExpiredToken(claims.jti)
    return claims
