"""Discovers the authorization server of an upstream, from what the upstream and that server
publish.

RFC 9728 (the protected resource's metadata), then RFC 8414 or OpenID Connect Discovery 1.0 (the
authorization server's). A document is believed about the URL that it was asked at and about nothing
else: the resource is the upstream or what it lies below, the issuer is the one whose well-known URL
it came from, to the letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec

from gateway.net.egress import EgressError, FetchResponse, ForbiddenTarget
from gateway.vault.challenge import Challenge
from gateway.vault.errors import IssuerUnavailable
from gateway.vault.issuer_egress import IssuerEgress

RESOURCE_WELL_KNOWN = "/.well-known/oauth-protected-resource"
SERVER_WELL_KNOWN = "/.well-known/oauth-authorization-server"
OPENID_WELL_KNOWN = "/.well-known/openid-configuration"
MAX_DOCUMENT_BYTES = 128 * 1024
MAX_ISSUERS = 16
S256 = "S256"

T = TypeVar("T")


class ResourceMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9728, section 2."""

    resource: str
    authorization_servers: tuple[str, ...] = ()
    scopes_supported: tuple[str, ...] = ()


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 8414, section 2, and what later documents added to it."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    registration_endpoint: str | None = None
    scopes_supported: tuple[str, ...] = ()
    code_challenge_methods_supported: tuple[str, ...] = ()
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False
    client_id_metadata_document_supported: bool = False


class DiscoveredServer(msgspec.Struct, frozen=True, kw_only=True):
    resource: ResourceMetadata
    server: Server


class Discovery:
    def __init__(self, egress: IssuerEgress) -> None:
        self._egress = egress

    async def find(
        self, upstream: str, url: str, challenge: Challenge, *, issuer: str | None = None
    ) -> DiscoveredServer:
        """Find the authorization server of an upstream; url: the upstream's. issuer: the only one
        that will do, if it is named.

        Raises: IssuerUnavailable.
        """
        resource = await self._resource(upstream, url, challenge)
        issuers = resource.authorization_servers[:MAX_ISSUERS]
        if issuer is not None and issuer not in issuers:
            raise IssuerUnavailable(upstream, "its tokens are not of the issuer that we know")
        if not issuers:
            raise IssuerUnavailable(upstream, "it names nobody who gives tokens for it")
        return DiscoveredServer(
            resource=resource, server=await self._server(upstream, issuer or issuers[0])
        )

    async def _resource(self, upstream: str, url: str, challenge: Challenge) -> ResourceMetadata:
        if challenge.resource_metadata is not None:
            places: Sequence[str] = (challenge.resource_metadata,)
        else:
            places = resource_places(url)
        found = await self._first(upstream, places, ResourceMetadata)
        if not covers(found.resource, url):
            raise IssuerUnavailable(upstream, "its metadata is about another resource")
        return found

    async def _server(self, upstream: str, issuer: str) -> Server:
        try:
            self._egress.of(upstream).target(issuer)
        except ForbiddenTarget as error:
            raise IssuerUnavailable(upstream, f"the name of its issuer: {error}") from None
        found = await self._first(upstream, server_places(issuer), Server)
        if found.issuer != issuer:
            raise IssuerUnavailable(upstream, "the metadata of its issuer is another one's")
        if S256 not in found.code_challenge_methods_supported:
            raise IssuerUnavailable(upstream, "its issuer knows no PKCE with S256")
        endpoints = (found.authorization_endpoint, found.token_endpoint)
        for endpoint in (*endpoints, found.registration_endpoint or found.token_endpoint):
            try:
                self._egress.of(upstream).target(endpoint)
            except ForbiddenTarget as error:
                raise IssuerUnavailable(upstream, f"an endpoint of its issuer: {error}") from None
        return found

    async def _first(self, upstream: str, places: Sequence[str], kind: type[T]) -> T:
        """Return the document of the first place that has one."""
        for place in places:
            try:
                egress = self._egress.of(upstream)
                found = await egress.get(place, max_body_bytes=MAX_DOCUMENT_BYTES)
                if found.status == 200:
                    return read(found, kind)
            except EgressError as error:
                raise IssuerUnavailable(upstream, f"no metadata: {type(error).__name__}") from error
            except msgspec.ValidationError as error:
                raise IssuerUnavailable(upstream, "metadata that is none") from error
            if not 400 <= found.status < 500:
                raise IssuerUnavailable(upstream, f"no metadata, status {found.status}")
        raise IssuerUnavailable(upstream, "it has no metadata where it should be")


def read(found: FetchResponse, kind: type[T]) -> T:
    """Raises: EgressFailed, msgspec.ValidationError. A null is what is not said."""
    said: dict[str, Any] = {k: v for k, v in found.json_object().items() if v is not None}
    return msgspec.convert(said, kind)


def resource_places(url: str) -> tuple[str, ...]:
    """Return where the metadata may be (RFC 9728, 3.1): first for this path, then for all of the
    host."""
    parts = urlsplit(url)
    host = f"{parts.scheme}://{parts.netloc}{RESOURCE_WELL_KNOWN}"
    path = parts.path.rstrip("/")
    return (host + path, host) if path else (host,)


def server_places(issuer: str) -> tuple[str, ...]:
    """Return where a server's metadata may be: RFC 8414, 3.1; then as OpenID Connect has it, by
    that rule and by its own."""
    parts = urlsplit(issuer)
    host, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    own = (f"{host}{path}{OPENID_WELL_KNOWN}",) if path else ()
    return (f"{host}{SERVER_WELL_KNOWN}{path}", f"{host}{OPENID_WELL_KNOWN}{path}", *own)


def covers(resource: str, url: str) -> bool:
    """True if a URL is this resource, or lies below it."""
    try:
        wider, narrower = urlsplit(resource), urlsplit(url)
    except ValueError:
        return False
    if wider.fragment or origin_of(resource) != origin_of(url):
        return False
    if wider.query and wider.query != narrower.query:
        return False
    path = wider.path.rstrip("/")
    return narrower.path.rstrip("/") == path or narrower.path.startswith(f"{path}/")


def origin_of(url: str) -> str:
    parts = urlsplit(url.strip())
    return urlunsplit((parts.scheme.lower(), parts.netloc.lower(), "", "", ""))
