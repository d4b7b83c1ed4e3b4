"""How an authorization server that we have never met knows us.

In this order: as the client that the operator registered with it; as the one that we were there
already; by the URL of our metadata document; by dynamic registration (RFC 7591). A client is good
at the issuer that it was made for and nowhere else.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from gateway.lru import Lru
from gateway.net.egress import EgressError
from gateway.vault.discovery import Server
from gateway.vault.errors import IssuerUnavailable
from gateway.vault.issuer_egress import IssuerEgress
from gateway.vault.token_endpoint import UpstreamClient

MAX_ANSWER_BYTES = 64 * 1024
MADE_S = 600.0
"""So long a registration serves all who begin: a person who begins often makes one client."""
MAX_MADE = 1_000
SHORT = re.compile(r"[\x21-\x7e]{1,1024}", re.ASCII)
"""Ids and secrets that we are given: they travel in a state."""
GRANTS = ["authorization_code", "refresh_token"]
AuthMethod = Literal["client_secret_basic", "client_secret_post", "none"]


class ClientRegistration(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 7591, 3.2.1."""

    client_id: str
    client_secret: str | None = None
    token_endpoint_auth_method: str | None = None


class KnownClient(msgspec.Struct, frozen=True, kw_only=True):
    """A client that the operator registered by hand."""

    client_id: str
    client_secret: str | None = None
    issuer: str | None = None
    """The issuer that the client is registered with; None: the one that the upstream names."""

    def __repr__(self) -> str:
        return f"KnownClient({self.client_id!r})"


class OwnMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The name under which we register as a client. `document_url`: where our metadata can be read,
    if it can be."""

    redirect_uri: str
    name: str = "Tollgate"
    document_url: str | None = None

    def metadata(self, method: AuthMethod) -> dict[str, Any]:
        """Return our client metadata (RFC 7591, section 2)."""
        near = self.redirect_uri.startswith("http:")
        return {
            "client_name": self.name,
            "redirect_uris": [self.redirect_uri],
            "grant_types": GRANTS,
            "response_types": ["code"],
            "token_endpoint_auth_method": method,
            "application_type": "native" if near else "web",
        }


class Registration:
    """One per process. `clock`: monotonic seconds."""

    def __init__(
        self,
        egress: IssuerEgress,
        ourselves: OwnMetadata,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._egress, self._ourselves, self._clock = egress, ourselves, clock
        self._made: Lru[tuple[str, Server], tuple[UpstreamClient, float]] = Lru(MAX_MADE)

    async def identify(
        self,
        upstream: str,
        server: Server,
        *,
        known: KnownClient | None = None,
        before: UpstreamClient | None = None,
    ) -> UpstreamClient:
        """Return the client that we are there; `before`: the one of the last consent.

        Raises: IssuerUnavailable.
        """
        if known is not None:
            return self._client(server, known.client_id, known.client_secret, None)
        if before is not None and before.issuer == server.issuer:
            method = before.auth_method
            return self._client(server, before.client_id, before.client_secret, method)
        url = self._ourselves.document_url
        if url is not None and server.client_id_metadata_document_supported:
            return self._client(server, url, None, None)
        if server.registration_endpoint is None:
            raise IssuerUnavailable(upstream, "its issuer does not know us, and registers nobody")
        made = self._made.get((upstream, server))
        if made is None or self._clock() >= made[1]:
            client = await self._register(upstream, server, server.registration_endpoint)
            made = client, self._clock() + MADE_S
            self._made.put((upstream, server), made)
        return made[0]

    async def _register(self, upstream: str, server: Server, endpoint: str) -> UpstreamClient:
        asked = best_method(server)
        if asked is None:
            raise IssuerUnavailable(upstream, "its issuer takes no secret in a way that we know")
        body = msgspec.json.encode(self._ourselves.metadata(asked))
        try:
            found = await self._egress.of(upstream).post_json_for_json(
                endpoint, body, max_body_bytes=MAX_ANSWER_BYTES
            )
            said = found.json_object()
        except EgressError as error:
            raise IssuerUnavailable(upstream, f"no client: {type(error).__name__}") from error
        if found.status not in (200, 201):
            raise IssuerUnavailable(upstream, f"it did not register us, status {found.status}")
        try:
            made = msgspec.convert(
                {k: v for k, v in said.items() if v is not None}, ClientRegistration
            )
        except msgspec.ValidationError:
            raise IssuerUnavailable(upstream, "a registration that is none") from None
        method = made.token_endpoint_auth_method or asked
        values = [made.client_id] + ([] if made.client_secret is None else [made.client_secret])
        if method not in get_args(AuthMethod) or not all(map(SHORT.fullmatch, values)):
            raise IssuerUnavailable(upstream, "a registration of no use to us")
        secret = None if method == "none" else made.client_secret
        return self._client(server, made.client_id, secret, method)

    def _client(
        self, server: Server, client_id: str, secret: str | None, method: str | None
    ) -> UpstreamClient:
        by_post = (method or best_method(server)) == "client_secret_post"
        return UpstreamClient(
            token_endpoint=server.token_endpoint,
            authorization_endpoint=server.authorization_endpoint,
            client_id=client_id,
            client_secret=secret,
            auth_method="client_secret_post" if by_post else "client_secret_basic",
            issuer=server.issuer,
        )


def best_method(server: Server) -> AuthMethod | None:
    """Return the best method that both know; a secret rather than none."""
    for method in get_args(AuthMethod):
        if method in server.token_endpoint_auth_methods_supported:
            found: AuthMethod = method
            return found
    return None
