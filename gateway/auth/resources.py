"""The resources of this installation that a token can be issued for (RFC 8707).

There are three kinds: the issuer itself, its API, and one MCP endpoint for each org. A resource has
one spelling, without a slash at its end: so it is stored, compared and written into `aud`.
"""

from __future__ import annotations

import re

import msgspec

MAX_RESOURCES = 8
"""The maximum in one request."""
MAX_RESOURCE_LENGTH = 512
API_PATH = "/v1"
MCP_PATH = re.compile(r"/mcp/(org_[0-9a-f]{32})", re.ASCII)


class InvalidTarget(Exception):
    """The `resource` parameter names no resource of ours (RFC 8707: `invalid_target`)."""


class Resource(msgspec.Struct, frozen=True):
    uri: str
    org_id: str | None
    """The org whose users and clients alone may use it; None: everybody may."""


def find_resource(value: str, public_url: str) -> Resource:
    """Return the resource that a `resource` parameter names. Raises: InvalidTarget."""
    if len(value) > MAX_RESOURCE_LENGTH:
        raise InvalidTarget("too long")
    base = public_url.rstrip("/")
    if not (value == base or value.startswith(base + "/")):
        raise InvalidTarget("not ours")
    path = value[len(base) :].removesuffix("/")
    if path in ("", API_PATH):
        return Resource(base + path, None)
    found = MCP_PATH.fullmatch(path)
    if found is None:
        raise InvalidTarget("not ours")
    return Resource(base + path, found[1])


def find_resources(values: list[str], public_url: str) -> list[Resource]:
    """Return each named resource once, sorted.

    Raises: InvalidTarget; also if they belong to more than one org.
    """
    if len(values) > MAX_RESOURCES:
        raise InvalidTarget("too many")
    found = {each.uri: each for each in (find_resource(value, public_url) for value in values)}
    if len({each.org_id for each in found.values() if each.org_id is not None}) > 1:
        raise InvalidTarget("of two organizations")
    return [found[uri] for uri in sorted(found)]
