"""Access tokens as JWTs (RFC 9068): issued, and read back with every check that needs no database.

Knows no revocation and no tenant beyond the names in the claims.

Of a token that comes in, nothing is believed before its signature: the algorithm is RS256 and never
the token's choice, the key is one of ours by its id, `typ` says `at+jwt`, so that no other JWT that
we sign (an ID token) passes for one.
"""

from __future__ import annotations

import binascii
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
"""RFC 9068, section 4; media types are compared without case."""
MAX_LIFETIME_S = 600
MAX_TOKEN_BYTES = 8 * 1024
"""What is longer is refused unread."""
CLOCK_SKEW_S = 5
"""Between gateways of one installation: how far ahead `iat` may lie. `exp` has no leeway."""
MAX_ACTORS = 4
"""In the chain of `act`."""


class ActorClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 8693, section 4.1: who acts for the subject, for whom that one acts, ..."""

    sub: str
    act: ActorClaim | None = None


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9449, section 6.1: the key that must come with the token."""

    jkt: str


class AccessClaims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9068, section 2.2, and ours."""

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
    """Who is billed; a token without one may administer, and use nothing that costs."""
    user_id: str | None = None
    service_account_id: str | None = None
    grant_id: str | None = None
    auth_time: int | None = None
    derived_from: list[str] = []
    """The `jti` of each token this one was exchanged from: revoked with any of them."""
    passed_through: list[str] = []
    """The clients that those were issued to: refused with any of them, too."""
    act: ActorClaim | None = None
    cnf: Confirmation | None = None

    @property
    def audiences(self) -> frozenset[str]:
        return frozenset([self.aud] if isinstance(self.aud, str) else self.aud)

    @property
    def scopes(self) -> frozenset[str]:
        return frozenset(self.scope.split())


def token_id() -> str:
    return uuid7().hex


def as_audience(resources: list[str]) -> str | list[str]:
    """One resource stands as a string (RFC 7519, 4.1.3)."""
    return resources[0] if len(resources) == 1 else resources


def sign(ring: Ring, claims: AccessClaims, *, kid: str | None = None) -> str:
    """Sign the claims; `kid`: the key that an answer was signed with before; None: the active one.

    The same claims under the same key make the same bytes.
    Raises: InvalidToken where that key is gone.
    """
    assert claims.exp - claims.iat <= MAX_LIFETIME_S
    key = ring.active if kid is None else ring.signing.get(kid)
    if key is None:
        raise InvalidToken("its key is gone")
    return encode(key, msgspec.to_builtins(claims), TOKEN_TYPE)


def encode(key: RSAKey, claims: dict[str, Any], typ: str) -> str:
    """Encode with one key, never with a set of keys, of which joserfc would choose any."""
    header = {"alg": ALGORITHM, "kid": key.kid, "typ": typ}
    return jwt.encode(header, claims, key, algorithms=[ALGORITHM])


async def read(ring: KeyRing, token: str, *, issuer: str, now: float) -> AccessClaims:
    """The claims of a good token. Raises: InvalidToken, ExpiredToken, AuthUnavailable."""
    claims = await read_expired(ring, token, issuer=issuer, now=now)
    if claims.exp <= now:
        raise ExpiredToken(claims.jti)
    return claims


async def read_expired(ring: KeyRing, token: str, *, issuer: str, now: float) -> AccessClaims:
    """Read a token that was good once, like `read` without its end."""
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidToken("too long")
    try:
        header = jws.extract_compact(token.encode("ascii")).headers()
    except (JoseError, ValueError, binascii.Error) as error:
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
    except (JoseError, ValueError, msgspec.ValidationError) as error:
        raise InvalidToken(type(error).__name__) from error
    if claims.iss != issuer:
        raise InvalidToken("another issuer")
    if claims.iat > now + CLOCK_SKEW_S or claims.exp - claims.iat > MAX_LIFETIME_S:
        raise InvalidToken("times that we do not issue")
    return claims
