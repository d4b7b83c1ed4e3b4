"""Client ID Metadata Documents (draft-ietf-oauth-client-id-metadata-document-02): a client whose
`client_id` is an https URL publishes its metadata there, and needs no registration.

Such a client has no secret: it is public, or signs with a key that it publishes. A document is
cached for as long as its response allows, within bounds, and for a day more while its host does not
answer. Failures are not cached. Fetches of unknown documents are bounded per host and minute,
because anybody can make up their URLs; a document that is cached does not count.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from foundation.tasks import SharedTasks
from gateway.auth.errors import AuthUnavailable
from gateway.auth.oauth.clients.metadata import (
    GRANT_TYPES_OF_STRANGERS,
    SECRET_METHODS,
    ClientMetadata,
    InvalidMetadata,
    check_urls,
    from_document,
)
from gateway.auth.oauth.clients.store import Client, from_metadata, scopes_of_a_stranger
from gateway.lru import Lru
from gateway.net.egress import BodyTooLarge, Egress, EgressError, FetchResponse, ForbiddenTarget
from gateway.net.egress_targets import Forbidden, parse_target

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 5 * 1024
"""Recommended by section 8.7."""
MAX_CACHED = 4_096
MIN_AGE_S = 60.0
DEFAULT_AGE_S = 3_600.0
MAX_AGE_S = 86_400.0
MAX_STALE_S = 86_400.0
"""A document stays in use for so long after its expiry while its host does not answer."""
RETRY_S = 30.0
"""The wait before a host that did not answer is asked again."""
MAX_FETCHES_PER_MINUTE = 20
"""The maximum for one host, of documents that are not cached."""
TRANSIENT = frozenset({408, 425, 429})
"""Statuses, besides 5xx, that say nothing about the document."""
MAX_COUNTED_HOSTS = 4_096
MAX_AGE = re.compile(r"max-age\s*=\s*\"?([0-9]{1,9})\"?", re.ASCII)
SECRETS = ("client_secret", "client_secret_expires_at")


class ClientDocumentError(Exception):
    """The document cannot be used; the text is for the log. Clients read `invalid_client`."""


class ClientDocumentUnavailable(ClientDocumentError):
    """The document cannot be fetched now. Clients read `temporarily_unavailable`."""


class CachedDocument(msgspec.Struct, frozen=True, kw_only=True):
    client: ClientMetadata
    until: float
    stale_until: float


class ClientDocuments:
    """One per process. `clock`: monotonic seconds. `allow_loopback`: as the egress client's."""

    def __init__(
        self,
        egress: Egress,
        *,
        allow_loopback: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._egress = egress
        self._allow_loopback = allow_loopback
        self._clock = clock
        self._kept: Lru[str, CachedDocument] = Lru(MAX_CACHED)
        self._counted: Lru[str, tuple[int, int]] = Lru(MAX_COUNTED_HOSTS)
        """By host: the minute, and the number of fetches in it."""
        self._fetches: SharedTasks[str, ClientMetadata] = SharedTasks("fetch client document")

    async def find_client(self, url: str) -> Client | None:
        """Return the client whose id is `url`, or None if its document cannot be used.

        Nobody vouches for such a client, so it gets the scopes of a stranger.
        Raises: AuthUnavailable.
        """
        try:
            metadata = await self.fetch_metadata(url)
        except ClientDocumentUnavailable as error:
            raise AuthUnavailable(f"a client metadata document: {error}") from error
        except ClientDocumentError as error:
            log.info("a client metadata document cannot be used: %s", error)
            return None
        return from_metadata(url, metadata, scopes_of_a_stranger(metadata))

    async def fetch_metadata(self, url: str) -> ClientMetadata:
        """Return the metadata of the client whose id is `url`. Raises: ClientDocumentError."""
        host = check_client_id_url(url, allow_loopback=self._allow_loopback)
        kept, now = self._kept.get(url), self._clock()
        if kept is not None and now < kept.until:
            return kept.client
        if kept is not None and now >= kept.stale_until:
            kept = None
        if kept is None and url not in self._fetches:
            self._count(host)
        return await self._fetches.run(url, partial(self._fetch, url, kept))

    async def close(self) -> None:
        await self._fetches.close()

    def _count(self, host: str) -> None:
        minute = int(self._clock() // 60)
        counted, times = self._counted.get(host) or (minute, 0)
        times = times + 1 if counted == minute else 1
        if times > MAX_FETCHES_PER_MINUTE:
            raise ClientDocumentUnavailable("its host was asked too often")
        self._counted.put(host, (minute, times))

    async def _fetch(self, url: str, kept: CachedDocument | None) -> ClientMetadata:
        try:
            client, age_s = await self._read(url)
        except ClientDocumentUnavailable as error:
            if kept is None:
                raise
            log.info("a client metadata document stays as it was: %s", error)
            retry_at = self._clock() + RETRY_S
            self._kept.put(url, msgspec.structs.replace(kept, until=retry_at))
            return kept.client
        except ClientDocumentError:
            self._kept.drop(url)
            raise
        now = self._clock()
        self._kept.drop(url)
        if age_s > 0:
            until = now + age_s
            known = CachedDocument(client=client, until=until, stale_until=until + MAX_STALE_S)
            self._kept.put(url, known)
        return client

    async def _read(self, url: str) -> tuple[ClientMetadata, float]:
        """Fetch the document, and return for how long it may be cached.

        Redirects are not followed (section 5).
        Raises: ClientDocumentError.
        """
        try:
            found = await self._egress.get(url, max_body_bytes=MAX_DOCUMENT_BYTES)
        except (ForbiddenTarget, BodyTooLarge) as error:
            raise ClientDocumentError(f"{type(error).__name__}: {error}") from None
        except EgressError as error:
            raise ClientDocumentUnavailable(f"{type(error).__name__}: {error}") from None
        if found.status >= 500 or found.status in TRANSIENT:
            raise ClientDocumentUnavailable(f"status {found.status}")
        if found.status != 200:
            raise ClientDocumentError(f"status {found.status}")
        try:
            content = found.json_object()
        except EgressError as error:
            raise ClientDocumentError(str(error)) from None
        client = to_metadata(url, content)
        try:
            await check_urls(client, self._egress)
        except InvalidMetadata as error:
            raise ClientDocumentError(str(error)) from None
        return client, max_age_s(found)


def check_client_id_url(url: str, *, allow_loopback: bool = False) -> str:
    """Return the host of the URL, if it may be a client's id (section 3).

    Raises: ClientDocumentError.
    """
    try:
        target = parse_target(url, allow_loopback=allow_loopback)
    except Forbidden as error:
        raise ClientDocumentError(str(error)) from None
    path = urlsplit(url).path
    if path in ("", "/"):
        raise ClientDocumentError("no path")
    if not {".", ".."}.isdisjoint(path.lower().replace("%2e", ".").split("/")):
        raise ClientDocumentError("a dot segment in its path")
    return target.host


def max_age_s(found: FetchResponse) -> float:
    """Return for how long RFC 9111 allows to cache a response, within our bounds; 0: not at all."""
    control = found.headers.get("cache-control", "").lower()
    if "no-store" in control or "no-cache" in control:
        return 0.0
    stated = MAX_AGE.search(control)
    age_s = DEFAULT_AGE_S if stated is None else float(stated[1])
    return min(max(age_s, MIN_AGE_S), MAX_AGE_S)


def to_metadata(url: str, content: Mapping[str, Any]) -> ClientMetadata:
    """Raises: ClientDocumentError."""
    if content.get("client_id") != url:
        raise ClientDocumentError("client_id: not the document's own URL")
    if any(name in content for name in SECRETS):
        raise ClientDocumentError("client_secret: a public document holds no secret")
    if content.get("token_endpoint_auth_method") in SECRET_METHODS:
        raise ClientDocumentError("token_endpoint_auth_method: needs a shared secret")
    # The default of RFC 7591 needs a secret, which such a client does not have.
    document = {"token_endpoint_auth_method": "none", **content}
    grant_types = content.get("grant_types")
    if isinstance(grant_types, list):
        # One document is for many servers: grant types that this one does not offer are dropped.
        document["grant_types"] = [each for each in grant_types if each in GRANT_TYPES_OF_STRANGERS]
    try:
        found = from_document(document, grant_types=GRANT_TYPES_OF_STRANGERS)
    except InvalidMetadata as error:
        raise ClientDocumentError(str(error)) from None
    if not found.redirect_uris:
        raise ClientDocumentError("redirect_uris: at least one is needed")
    return found
