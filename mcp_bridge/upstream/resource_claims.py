"""The claims of one server on resources: URIs, and templates of them (RFC 6570).

Pure.
"""

from __future__ import annotations

import hashlib

import msgspec
from mcp.shared.uri_template import InvalidUriTemplate, UriTemplate

MAX_URIS = 10_000
MAX_TEMPLATES = 256
"""Of one server; what is beyond them is as if it were not listed."""
MAX_TEMPLATE_LEN = 1_024
MAX_VARIABLES = 16
"""Of one template."""


class Claims:
    """The claims of a server; of URIs the digests are kept."""

    def __init__(self) -> None:
        self._uris: set[bytes] = set()
        self._templates: dict[str, UriTemplate | None] = {}

    def add(self, uri: object) -> None:
        if isinstance(uri, str) and len(self._uris) < MAX_URIS:
            self._uris.add(digest_of(uri))

    def add_template(self, template: object) -> None:
        """Add a template, unless it does not begin with a scheme: it would match all there is, and
        claims nothing. One that cannot be matched claims all that begins as it does."""
        if not isinstance(template, str) or len(template) > MAX_TEMPLATE_LEN:
            return
        if len(self._templates) < MAX_TEMPLATES and ":" in beginning_of(template):
            try:
                found = UriTemplate.parse(template, max_variables=MAX_VARIABLES)
            except InvalidUriTemplate:
                found = None
            self._templates[template] = found

    def has(self, uri: str) -> bool:
        """True if the server claims it. `uri`: a resource's, or a template as it is listed."""
        if digest_of(uri) in self._uris or uri in self._templates:
            return True
        return any(
            uri.startswith(beginning_of(template))
            and (parsed is None or parsed.match(uri) is not None)
            for template, parsed in self._templates.items()
        )


class KnownClaims(msgspec.Struct, frozen=True):
    """The claims that a server listed last.

    `generation`: the server's, when it was asked; `at`: on the loop's clock, in seconds.
    """

    claims: Claims
    generation: int
    at: float


def beginning_of(template: str) -> str:
    return template.partition("{")[0]


def digest_of(uri: str) -> bytes:
    return hashlib.blake2b(uri.encode(errors="surrogatepass"), digest_size=16).digest()
