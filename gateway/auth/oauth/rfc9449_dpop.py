"""DPoP proofs (RFC 9449): they show that the sender of a token, or of a token request, holds a
private key.

Nonces, which section 8 leaves to the server, are not required: a proof is good for a minute, once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key
from joserfc.util import urlsafe_b64encode
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.auth.errors import AuthError, AuthUnavailable

TYPE = "dpop+jwt"
ALGORITHMS = ("ES256", "ES384", "PS256", "RS256", "Ed25519")
MAX_PROOF_BYTES = 4096
MAX_AGE_S = 60
CLOCK_SKEW_S = 10
"""A proof's `iat` may be so far in the future."""
SEEN = "tollgate:dpop:"
ENCODED = re.compile(r"%([0-9A-Fa-f]{2})", re.ASCII)
UNRESERVED = re.compile(r"[A-Za-z0-9\-._~]", re.ASCII)


class InvalidProof(AuthError):
    public_message = "The DPoP proof is missing, invalid, or was used before."


class ProofJwsRegistry(jws.JWSRegistry):
    """Allows longer headers: a proof's holds a public key."""

    max_header_length = 2048


class ProofClaims(msgspec.Struct, frozen=True, kw_only=True):
    """The claims of a proof (RFC 9449, section 4.2)."""

    jti: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    htm: str
    htu: str
    iat: int
    ath: str | None = None


async def verify(
    proof: str, *, redis: Redis, method: str, url: str, now: float, access_token: str | None = None
) -> str:
    """Verify the proof of a request, and return the thumbprint of its key.

    `url`: as it was sent, without query. `access_token`: the one that the proof came with.
    Raises: InvalidProof, AuthUnavailable (Redis).
    """
    key, claims = _open(proof)
    if claims.htm != method or _without_query(claims.htu) != _normal(url):
        raise InvalidProof("for another request")
    if not now - MAX_AGE_S <= claims.iat <= now + CLOCK_SKEW_S:
        raise InvalidProof("too old, or from the future")
    if access_token is not None:
        expected = urlsafe_b64encode(hashlib.sha256(access_token.encode()).digest())
        if not hmac.compare_digest(expected, _encode(claims.ath or "")):
            raise InvalidProof("for another token")
    jkt = key.thumbprint()
    digest = urlsafe_b64encode(hashlib.sha256(_encode(f"{jkt} {claims.jti}")).digest())
    try:
        is_new = await redis.set(
            SEEN + digest.decode(), b"1", nx=True, ex=MAX_AGE_S + CLOCK_SKEW_S + 1
        )
    except (RedisError, OSError) as error:
        raise AuthUnavailable("replayed proofs cannot be detected") from error
    if not is_new:
        raise InvalidProof("used before")
    return jkt


def _open(proof: str) -> tuple[Key, ProofClaims]:
    if len(proof) > MAX_PROOF_BYTES:
        raise InvalidProof("too long")
    registry = ProofJwsRegistry(algorithms=ALGORITHMS)
    try:
        header = jws.extract_compact(proof.encode("ascii"), registry=registry).headers()
        if header.get("typ") != TYPE or header.get("alg") not in ALGORITHMS:
            raise InvalidProof("an unsupported type or algorithm")
        jwk = header.get("jwk")
        if not isinstance(jwk, dict) or jwk.get("kty") not in ("EC", "RSA", "OKP"):
            raise InvalidProof("no public key")
        key = JWKRegistry.import_key(jwk)
        if key.is_private:
            raise InvalidProof("a private key")
        claims = jwt.decode(proof, key, algorithms=ALGORITHMS, registry=registry).claims
        return key, msgspec.convert(claims, ProofClaims)
    except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidProof(type(error).__name__) from error


def _without_query(url: str) -> str:
    """Return the URI as section 4.3 compares it: without query and fragment, scheme and host in
    lower case (RFC 3986, 6.2.2.1).

    Raises: InvalidProof.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidProof("htu is not a URL") from error
    return _normal(f"{parts.scheme.lower()}://{parts.netloc.lower()}{parts.path}")


def _normal(url: str) -> str:
    """Normalize percent-encoding (RFC 3986, 6.2.2.1 and 6.2.2.2): unreserved characters are
    decoded, and hexadecimal digits are upper case."""
    return ENCODED.sub(lambda found: _as_needed(chr(int(found[1], 16)), found[0]), url)


def _as_needed(character: str, encoded: str) -> str:
    return character if UNRESERVED.fullmatch(character) else encoded.upper()


def _encode(text: str) -> bytes:
    """Encode as UTF-8, also lone surrogates, which JSON can hold."""
    return text.encode("utf-8", "surrogatepass")
