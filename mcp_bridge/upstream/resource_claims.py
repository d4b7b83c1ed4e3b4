"""The claims of one server on resources: the URIs and URI templates (RFC 6570) it lists. Pure."""

from __future__ import annotations

import hashlib

import msgspec
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate

MAX_URIS = 10_000
MAX_TEMPLATES = 256
"""Bounds of one server; URIs and templates beyond them count as not listed."""
MAX_TEMPLATE_LEN = 1_024
MAX_VARIABLES = 16
"""Variables of one template."""


class Claims:
    """The claims of a server; URIs are stored as digests."""

    def __init__(self) -> None:
        self._uris: set[bytes] = set()
        self._templates: dict[str, UriTemplate | None] = {}

    def add(self, uri: object) -> None:
        if isinstance(uri, str) and len(self._uris) < MAX_URIS:
            self._uris.add(digest_of(uri))

    def add_template(self, template: object) -> None:
        """Add a template. One without a scheme would match everything and is ignored; one that
        cannot be parsed claims every URI with its prefix."""
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE_LEN:
            return
        if len(self._templates) < MAX_TEMPLATES and ":" in beginning_of(template):
            try:
                found = UriTemplate.parse(template, max_variables=MAX_VARIABLES)
            except InvalidUriTemplate:
                found = None
            self._templates[template] = found

    def has(self, uri: str) -> bool:
        """True if the server claims `uri`, of a resource or a template as it is listed."""
        if digest_of(uri) in self._uris or uri in self._templates:
            return True
        return any(
            uri.startswith(beginning_of(template))
            and (parsed is None or parsed.match(uri) is not None)
            for template, parsed in self._templates.items()
        )


class KnownClaims(msgspec.Struct, frozen=True):
    """The claims of a last listing, with the upstream's generation and loop time then."""

    claims: Claims
    generation: int
    at: float


def beginning_of(template: str) -> str:
    return template.partition("{")[0]


def digest_of(uri: str) -> bytes:
    return hashlib.blake2b(uri.encode(errors="surrogatepass"), digest_size=16).digest()
