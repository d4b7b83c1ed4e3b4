"""Parses and verifies JWTs of other issuers, and reads their claims. Pure.

Before the signature is verified, the token is used only to find the key. The algorithm is one of a
list, and goes with one kind of key.
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec
from joserfc import jwt
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jws import JWSRegistry

from gateway.auth.errors import InvalidToken
from gateway.auth.federation.issuer_keys import ALGORITHMS, PublicKey

MAX_TOKEN_BYTES = 8 * 1024
MAX_HEADER_BYTES = 4 * 1024
"""Large, for issuers that put their certificates there."""
MAX_LIFETIME_S = 24 * 3600
"""Tokens that live longer are refused: nobody tells us when another issuer revokes one."""
TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt", "application/jwt"})
"""No logout tokens, DPoP proofs or other types that are no credentials here."""


class ExternalJwsRegistry(JWSRegistry):
    """Ignores unknown header parameters (RFC 7515, section 4)."""

    max_header_length = MAX_HEADER_BYTES
    max_payload_length = MAX_TOKEN_BYTES


class UnverifiedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed token. Nothing of it is verified: use it to find the key and nothing else."""

    token: str
    alg: str
    kid: str | None
    claims: Mapping[str, Any]


class IssuerClaim(msgspec.Struct):
    iss: Any = None


PEEK = msgspec.json.Decoder(IssuerClaim)


def issuer_of(token: str) -> str | None:
    """Return the unverified `iss` of a token; None if it has none. It is cheap: it runs for each
    token, ours too."""
    payload = token[:MAX_TOKEN_BYTES].partition(".")[2].partition(".")[0]
    try:
        found = PEEK.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))).iss
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, and refuse duplicate names: parsers differ in which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a duplicate name")
    return found


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_part(part: str) -> dict[str, Any]:
    """Raises: InvalidToken."""
    try:
        data = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
        found = json.loads(data, object_pairs_hook=once_each, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidToken("a part that is not base64url of JSON") from None
    if not isinstance(found, dict):
        raise InvalidToken("not a JSON object")
    return found


def read(token: str) -> UnverifiedToken:
    """Raises: InvalidToken."""
    if len(token) > MAX_TOKEN_BYTES:
        raise InvalidToken("too long")
    parts = token.split(".")
    if len(parts) != 3 or not token.isascii():
        raise InvalidToken("not a signed JWT")
    header, claims = read_part(parts[0]), read_part(parts[1])
    alg, kid, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
    if not isinstance(alg, str) or alg not in ALGORITHMS:
        raise InvalidToken("an unsupported algorithm")
    if not isinstance(kid, str | None):
        raise InvalidToken("kid is not a string")
    if not isinstance(kind, str) or kind.lower() not in TYPES:
        raise InvalidToken("another type of token")
    if "crit" in header or "b64" in header:
        raise InvalidToken("an unsupported extension (crit or b64)")
    return UnverifiedToken(token=token, alg=alg, kid=kid, claims=claims)


def verify(unverified: UnverifiedToken, key: PublicKey) -> dict[str, Any]:
    """Verify the signature, and return the claims. Raises: InvalidToken."""
    algorithms = [unverified.alg]
    registry = ExternalJwsRegistry(algorithms=algorithms, strict_check_header=False)
    try:
        with warnings.catch_warnings():
            # joserfc warns of EdDSA, which RFC 9864 deprecates for not naming its curve; the key
            # names it here.
            warnings.simplefilter("ignore", SecurityWarning)
            found = jwt.decode(unverified.token, key, algorithms=algorithms, registry=registry)
    except (JoseError, ValueError):
        raise InvalidToken("bad signature") from None
    return found.claims


def check_claims(
    claims: Mapping[str, Any],
    *,
    issuer: str,
    audience: str,
    leeway_s: float,
    now: float,
    max_lifetime_s: float = MAX_LIFETIME_S,
) -> float:
    """Check issuer, audience, subject and times (RFC 7519, section 4.1).

    Return when the token expires (Unix seconds), leeway included. Raises: InvalidToken.
    """
    if claims.get("iss") != issuer:
        raise InvalidToken("another issuer")
    if audience not in audiences(claims):
        raise InvalidToken("for another audience")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 1 <= len(subject) <= 255 or "\x00" in subject:
        raise InvalidToken("no sub")
    ends = claims.get("exp")
    if not is_moment(ends):
        raise InvalidToken("no exp")
    if now >= ends + leeway_s:
        raise InvalidToken("expired")
    begins: list[float] = []
    for name in ("iat", "nbf"):
        moment = claims.get(name)
        if moment is None:
            continue
        if not is_moment(moment) or moment > now + leeway_s:
            raise InvalidToken(f"{name} lies in the future")
        begins.append(moment)
    if ends - min([now, *begins]) > max_lifetime_s + leeway_s:
        raise InvalidToken("lives too long")
    return ends + leeway_s


def is_moment(value: Any) -> TypeGuard[float]:
    """True for a number that a float holds exactly: no infinity, no NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53


def audiences(claims: Mapping[str, Any]) -> list[str]:
    """Return `aud`, which is a string or a list of them, as a list."""
    found = claims.get("aud")
    listed = found if isinstance(found, list) else [found]
    return [each for each in listed if isinstance(each, str)]


def texts_at(claims: Mapping[str, Any], path: str) -> list[str]:
    """Return the strings in the claim `path`: a claim of exactly that name, or else the one that
    its parts between dots lead to."""
    found: Any = claims
    if path in claims:
        found = claims[path]
    else:
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
    listed = found if isinstance(found, list) else [found]
    return [each for each in listed if isinstance(each, str)]
