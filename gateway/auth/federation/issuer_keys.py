"""Fetches and caches the public keys of external issuers: discovery document and JWK Set.

The rate of fetches is bounded per issuer, however many unknown `kid`s come. While an issuer does
not answer, its cached keys stay in use for a bounded time.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwk import ECKey, OKPKey, RSAKey

from foundation.tasks import SharedTasks
from gateway.lru import Lru
from gateway.net.egress import Egress, EgressError, EgressFailed

log = logging.getLogger(__name__)

MAX_ISSUERS = 1_024
MAX_KEYS = 64
REFRESH_S = 600.0
"""Keys are fetched again after it, so that withdrawn ones are forgotten."""
MAX_AGE_S = 3_600.0
"""Keys are used for at most so long after their fetch, even while the issuer does not answer."""
MIN_REFETCH_S = 30.0
"""The least time between two fetches for one issuer, however many unknown `kid`s come."""
ALGORITHMS: Mapping[str, str] = {
    "RS256": "RSA",
    "RS384": "RSA",
    "RS512": "RSA",
    "PS256": "RSA",
    "PS384": "RSA",
    "PS512": "RSA",
    "ES256": "P-256",
    "ES384": "P-384",
    "ES512": "P-521",
    "Ed25519": "Ed25519",
    "EdDSA": "Ed25519",
}
"""The algorithms that are accepted, each with its only kind of key. All are signatures of key
pairs: a MAC would allow algorithm confusion, with the public key as its secret."""

PublicKey = RSAKey | ECKey | OKPKey
FAMILIES: Mapping[str, type[RSAKey] | type[ECKey] | type[OKPKey]] = {
    "RSA": RSAKey,
    "EC": ECKey,
    "OKP": OKPKey,
}
"""By `kty`. Symmetric keys are no public keys."""


class LoginIssuerUnavailable(Exception):
    """The issuer's documents cannot be fetched or used; the text is for the log."""


class IssuerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The members of an issuer's metadata that are used (OpenID Connect Discovery 1.0, section
    3)."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str | None = None
    token_endpoint: str | None = None
    userinfo_endpoint: str | None = None
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class IssuerKey(msgspec.Struct, frozen=True, kw_only=True):
    key: PublicKey
    kid: str | None
    kind: str
    """A value of ALGORITHMS."""
    alg: str | None


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    discovered: IssuerMetadata
    keys: tuple[IssuerKey, ...]
    as_of: float

    def find(self, kid: str | None, alg: str) -> PublicKey | None:
        """Return the only key that fits a token's header; None if none or several do."""
        fit = [
            each
            for each in self.keys
            if each.kind == ALGORITHMS[alg]
            and each.alg in (None, alg)
            and (kid is None or each.kid == kid)
        ]
        return fit[0].key if len(fit) == 1 else None


class IssuerKeys:
    """The keys that one process knows. `clock`: monotonic seconds."""

    def __init__(self, egress: Egress, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._egress = egress
        self._clock = clock
        self._kept: Lru[str, Keys] = Lru(MAX_ISSUERS)
        self._tried: Lru[str, float] = Lru(MAX_ISSUERS)
        """By issuer: when the last fetch began, successful or not."""
        self._fetches: SharedTasks[str, None] = SharedTasks("fetch issuer keys")

    async def close(self) -> None:
        await self._fetches.close()

    async def find(self, issuer: str, kid: str | None, alg: str) -> PublicKey | None:
        """Return the issuer's key; None: it has no such key. Raises: LoginIssuerUnavailable."""
        found = (await self._current(issuer)).find(kid, alg)
        if found is None and self._may_ask(issuer):
            await self._fetch(issuer)
            found = (await self._current(issuer)).find(kid, alg)
        return found

    async def discover(self, issuer: str) -> IssuerMetadata:
        """Return the issuer's metadata. Raises: LoginIssuerUnavailable."""
        return (await self._current(issuer)).discovered

    async def _current(self, issuer: str) -> Keys:
        kept = self._kept.get(issuer)
        if (kept is None or self._clock() - kept.as_of > REFRESH_S) and self._may_ask(issuer):
            await self._fetch(issuer)
            kept = self._kept.get(issuer)
        if kept is None or self._clock() - kept.as_of > MAX_AGE_S:
            raise LoginIssuerUnavailable(f"{issuer}: no keys")
        return kept

    def _may_ask(self, issuer: str) -> bool:
        """True if a fetch may begin now, or is under way and can be waited for."""
        if issuer in self._fetches:
            return True
        tried = self._tried.get(issuer)
        return tried is None or self._clock() - tried >= MIN_REFETCH_S

    async def _fetch(self, issuer: str) -> None:
        if issuer not in self._fetches:
            self._tried.put(issuer, self._clock())
        await self._fetches.run(issuer, partial(self._fetch_once, issuer))

    async def _fetch_once(self, issuer: str) -> None:
        """Fetch metadata and keys; a failure is logged and keeps the cached ones."""
        try:
            url = issuer.removesuffix("/") + "/.well-known/openid-configuration"
            discovered = to_discovered(issuer, await self._get(url))
            keys = to_keys(await self._get(discovered.jwks_uri))
        except (EgressError, LoginIssuerUnavailable) as error:
            log.warning("issuer %s: %s: %s", issuer, type(error).__name__, error)
            return
        self._kept.put(issuer, Keys(discovered=discovered, keys=keys, as_of=self._clock()))

    async def _get(self, url: str) -> dict[str, Any]:
        found = await self._egress.get(url)
        if found.status != 200:
            raise EgressFailed(f"status {found.status}")
        return found.json_object()


def to_discovered(issuer: str, content: dict[str, Any]) -> IssuerMetadata:
    """Raises: LoginIssuerUnavailable."""
    try:
        found = msgspec.convert(content, IssuerMetadata)
    except msgspec.ValidationError as error:
        raise LoginIssuerUnavailable(f"discovery: {error}") from None
    if found.issuer != issuer:  # exactly (OpenID Connect Discovery, 4.3)
        raise LoginIssuerUnavailable("discovery: the document is another issuer's")
    return found


def to_keys(content: dict[str, Any]) -> tuple[IssuerKey, ...]:
    """Return the keys that can be used; others are ignored (RFC 7517, section 5).

    Raises: LoginIssuerUnavailable.
    """
    jwks = content.get("keys")
    if not isinstance(jwks, list) or len(jwks) > MAX_KEYS:
        raise LoginIssuerUnavailable(f"jwks: no list of up to {MAX_KEYS} keys")
    return tuple(key for jwk in jwks if (key := to_key(jwk)) is not None)


def to_key(jwk: Any) -> IssuerKey | None:
    """Return the key; None if it is no public key for signatures, or a weak one."""
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig":
        return None
    family = FAMILIES.get(str(jwk.get("kty")))
    if family is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SecurityWarning)  # RSA of less than 2048 bits
            key = family.import_key(jwk)
    except (JoseError, SecurityWarning, ValueError, TypeError, KeyError, AttributeError):
        return None
    kind = "RSA" if isinstance(key, RSAKey) else str(jwk.get("crv"))
    kid, alg = jwk.get("kid"), jwk.get("alg")
    if kind not in ALGORITHMS.values() or not isinstance(kid, str | None):
        return None
    if alg is not None and (not isinstance(alg, str) or alg not in ALGORITHMS):
        return None
    return IssuerKey(key=key, kid=kid, kind=kind, alg=alg)
