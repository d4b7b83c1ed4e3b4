"""The far end of federation: an issuer with keys of its own, and an egress client that only it
answers."""

from __future__ import annotations

import json
import warnings
from typing import Any

from joserfc import jwt
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from gateway.net.egress import EgressFailed, FetchResponse, ForbiddenTarget
from gateway.net.egress_targets import Forbidden, Target, parse_target

ISSUER = "https://issuer.example.com"
AUDIENCE = "api://tollgate"
NOW = 1_700_000_000.0


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def rsa_key(kid: str | None = "k1", bits: int = 2048, **more: str) -> RSAKey:
    return RSAKey.generate_key(bits, parameters={**({"kid": kid} if kid else {}), **more})


def ec_key(kid: str, curve: str = "P-256") -> ECKey:
    return ECKey.generate_key(curve, parameters={"kid": kid})


def okp_key(kid: str) -> OKPKey:
    return OKPKey.generate_key("Ed25519", parameters={"kid": kid})


class FarEnd:
    """Answers as `Egress` does, from a table of URLs; counts what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, FetchResponse | Exception] = {}
        self.asked: list[str] = []
        self.shown: list[str] = []
        """The bearer tokens that came along."""
        self.posted: list[tuple[str, dict[str, str], dict[str, str]]] = []

    def says(self, url: str, body: Any, *, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers[url] = FetchResponse(url=url, status=status, headers=named, body=content)

    def fails(self, url: str, error: Exception | None = None) -> None:
        self.answers[url] = error or EgressFailed("gone")

    def target(self, url: str) -> Target:
        try:
            return parse_target(url)
        except Forbidden as error:
            raise ForbiddenTarget(str(error)) from None

    async def check(self, url: str) -> None:
        self.target(url)

    async def get(self, url: str, *, bearer: str | None = None, **_options: Any) -> FetchResponse:
        self.asked.append(url)
        self.shown += [] if bearer is None else [bearer]
        return self._answer(url)

    async def post_form(
        self, url: str, form: dict[str, str], *, headers: dict[str, str] | None = None
    ) -> FetchResponse:
        self.posted.append((url, dict(form), dict(headers or {})))
        return self._answer(url)

    def _answer(self, url: str) -> FetchResponse:
        try:
            parse_target(url)
        except Forbidden as error:
            raise EgressFailed(str(error)) from None
        found = self.answers.get(url, EgressFailed("nobody there"))
        if isinstance(found, Exception):
            raise found
        return found


class FakeIssuer:
    """An OpenID provider at `issuer`, published on `far_end`."""

    def __init__(self, far_end: FarEnd, issuer: str = ISSUER) -> None:
        self.far_end = far_end
        self.issuer = issuer
        self.keys: list[Any] = [rsa_key()]
        self.publish()

    @property
    def discovery_url(self) -> str:
        return self.issuer.removesuffix("/") + "/.well-known/openid-configuration"

    @property
    def jwks_url(self) -> str:
        return self.issuer.removesuffix("/") + "/jwks"

    def publish(self, **more: Any) -> None:
        base = self.issuer.removesuffix("/")
        document = {
            "issuer": self.issuer,
            "jwks_uri": self.jwks_url,
            "authorization_endpoint": f"{base}/authorize",
            "token_endpoint": f"{base}/token",
        }
        self.far_end.says(self.discovery_url, document | more)
        self.publish_keys([key.as_dict(private=False) for key in self.keys])

    def publish_keys(self, keys: list[Any]) -> None:
        self.far_end.says(self.jwks_url, {"keys": keys})

    def claims(self, **more: Any) -> dict[str, Any]:
        given = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": "someone",
            "iat": int(NOW),
            "exp": int(NOW) + 300,
        } | more
        return {name: value for name, value in given.items() if value is not None}

    def sign(
        self,
        claims: dict[str, Any] | None = None,
        *,
        key: Any = None,
        alg: str = "RS256",
        **header: Any,
    ) -> str:
        used = key or self.keys[0]
        head = {"alg": alg, "kid": used.kid} | header
        head = {name: value for name, value in head.items() if value is not None}
        registry = JWSRegistry(algorithms=[alg], strict_check_header=False)
        content = self.claims() if claims is None else claims
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecurityWarning)  # EdDSA's new name
            signed: str = jwt.encode(head, content, used, [alg], registry)
        return signed


def import_public(key: Any) -> Any:
    return JWKRegistry.import_key(key.as_dict(private=False))
