"""Asks an upstream's authorization server for tokens, and reads what is of use of its answer.

RFC 6749 (sections 4.1.3, 5, 6), RFC 8707 (`resource`) and RFC 8693 (section 2). Knows no tenant and
no table. It has no parameter for the token that the caller showed us: that one is nobody else's to
see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.auth.federation.external_login import basic
from gateway.net.egress import EgressError
from gateway.vault.errors import IssuerUnavailable
from gateway.vault.issuer_egress import IssuerEgress

MAX_ANSWER_BYTES = 64 * 1024
MAX_LIFETIME_S = 366 * 24 * 3600.0
TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]{1,8192}=*", re.ASCII)
"""RFC 6750, 2.1."""
OPAQUE = re.compile(r"[\x20-\x7e]{1,8192}", re.ASCII)
"""RFC 6749, appendix A.17."""
FINAL = frozenset(("invalid_grant", "invalid_client", "unauthorized_client", "invalid_target"))
"""Errors that asking again does not mend: somebody has to consent, or to mend the client."""

EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
JWT = "urn:ietf:params:oauth:token-type:jwt"


class UpstreamClient(msgspec.Struct, frozen=True, kw_only=True):
    """The client that we are at an upstream's authorization server. Endpoints are asked through the
    egress, wherever they lie."""

    token_endpoint: str
    client_id: str
    authorization_endpoint: str | None = None
    client_secret: str | None = None
    auth_method: Literal["client_secret_basic", "client_secret_post"] = "client_secret_basic"
    """How the client sends its secret, if it has one."""
    issuer: str | None = None
    """Compared with `iss` of what comes back (RFC 9207)."""
    scope: str | None = None
    resource: str | None = None
    """The upstream: its tokens are for nobody else."""

    def __repr__(self) -> str:
        return f"UpstreamClient({self.client_id!r})"

    def to_values(self) -> dict[str, str]:
        """Return the client's values for the vault, beside the tokens."""
        return {k: v for k, v in msgspec.structs.asdict(self).items() if v is not None}

    @classmethod
    def from_values(cls, values: Mapping[str, str]) -> UpstreamClient:
        fields = {name: values[name] for name in cls.__struct_fields__ if name in values}
        return msgspec.convert(fields, cls)


class TokenResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A good answer. RFC 6749, 5.1."""

    access_token: str
    token_type: str
    expires_in: float | None = None
    refresh_token: str | None = None
    issued_token_type: str | None = None

    def __repr__(self) -> str:
        return "Tokens(...)"


class TokenRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that means no, for good. RFC 6749, 5.2."""

    error: str


class TokenEndpoint:
    def __init__(self, egress: IssuerEgress) -> None:
        self._egress = egress

    async def redeem(
        self, upstream: str, client: UpstreamClient, *, code: str, verifier: str, redirect_uri: str
    ) -> TokenResponse | TokenRefusal:
        """An authorization code (RFC 6749, 4.1.3; RFC 7636). Raises: IssuerUnavailable."""
        form = {"grant_type": "authorization_code", "code": code, "code_verifier": verifier}
        form |= {"redirect_uri": redirect_uri, **_named(resource=client.resource)}
        return await self._ask(upstream, client, form)

    async def refresh(
        self, upstream: str, client: UpstreamClient, refresh_token: str
    ) -> TokenResponse | TokenRefusal:
        """Refresh a token (RFC 6749, 6). Raises: IssuerUnavailable."""
        form = {"grant_type": "refresh_token", "refresh_token": refresh_token}
        form |= _named(resource=client.resource)
        return await self._ask(upstream, client, form)

    async def exchange(
        self, upstream: str, client: UpstreamClient, assertion: str
    ) -> TokenResponse | TokenRefusal:
        """Exchange a token; assertion: a JWT that we have signed about the user for this one server
        (RFC 8693, 2.1).

        Raises: IssuerUnavailable.
        """
        form = {
            "grant_type": EXCHANGE,
            "subject_token": assertion,
            "subject_token_type": JWT,
            "requested_token_type": ACCESS_TOKEN,
            **_named(resource=client.resource, scope=client.scope),
        }
        found = await self._ask(upstream, client, form)
        if isinstance(found, TokenResponse) and found.issued_token_type not in (None, ACCESS_TOKEN):
            raise IssuerUnavailable(upstream, "it issued a token of another type")
        return found

    async def _ask(
        self, upstream: str, client: UpstreamClient, form: Mapping[str, str]
    ) -> TokenResponse | TokenRefusal:
        headers: dict[str, str] = {}
        # The official MCP SDK's servers look for it there, beside `Authorization`, too.
        sent = {**form, "client_id": client.client_id}
        secret = client.client_secret
        if secret is not None and client.auth_method == "client_secret_basic":
            headers["authorization"] = basic(client.client_id, secret)
        elif secret is not None:
            sent["client_secret"] = secret
        try:
            found = await self._egress.of(upstream).post_form(
                client.token_endpoint, sent, headers=headers, max_body_bytes=MAX_ANSWER_BYTES
            )
            said = found.json_object()
        except EgressError as error:
            raise IssuerUnavailable(upstream, f"no answer: {type(error).__name__}") from error
        if found.status == 200:
            return _good(upstream, said)
        code = said.get("error")
        if 400 <= found.status < 500 and isinstance(code, str) and code in FINAL:
            return TokenRefusal(error=code)
        raise IssuerUnavailable(upstream, f"no tokens, status {found.status}")


def _good(upstream: str, said: dict[str, Any]) -> TokenResponse:
    try:
        tokens = msgspec.convert(said, TokenResponse, strict=False)
    except msgspec.ValidationError:
        raise IssuerUnavailable(upstream, "an answer that is none") from None
    if TOKEN.fullmatch(tokens.access_token) is None or tokens.token_type.lower() != "bearer":
        raise IssuerUnavailable(upstream, "its token is no bearer token")
    if tokens.refresh_token is not None and OPAQUE.fullmatch(tokens.refresh_token) is None:
        raise IssuerUnavailable(upstream, "its refresh token is none")
    if tokens.expires_in is not None and not 0 < tokens.expires_in <= MAX_LIFETIME_S:
        raise IssuerUnavailable(upstream, "its token is for no time that can be")
    return tokens


def _named(**values: str | None) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
