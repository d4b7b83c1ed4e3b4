"""OAuth 2.0 Protected Resource Metadata (RFC 9728), and the challenges that lead there.

Above: the routes of the metadata and of the resources. Below: `resources`, `policy`. Pure. Three
kinds of resources, each with its metadata in path form: the installation, its API, and one MCP
endpoint for each org. What it says is the same for every org, known or not: it tells nobody which
ones there are. Every value that goes into a challenge is a constant or one of our own URLs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.auth.policy import KEY_SCOPES, SCOPE_MCP_CALL
from gateway.auth.resources import API_PATH, MCP_PATH

WELL_KNOWN = "/.well-known/oauth-protected-resource"
RESOURCE_NAME = "Tollgate"

BearerError = Literal["invalid_request", "invalid_token", "insufficient_scope"]
"""RFC 6750, 3.1."""


class ProtectedResource(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9728, section 2."""

    resource: str
    authorization_servers: tuple[str, ...]
    scopes_supported: tuple[str, ...]
    bearer_methods_supported: tuple[str, ...] = ("header",)
    resource_name: str = RESOURCE_NAME


def find_metadata(path: str, public_url: str) -> ProtectedResource | None:
    """Of the resource at `path` (of its URL; empty for the installation); None: there is none."""
    scopes: Iterable[str]
    if path in ("", API_PATH):
        scopes = KEY_SCOPES
    elif MCP_PATH.fullmatch(path):
        scopes = {SCOPE_MCP_CALL}
    else:
        return None
    return ProtectedResource(
        resource=public_url + path,
        authorization_servers=(public_url,),
        scopes_supported=tuple(sorted(scopes)),
    )


def metadata_url(path: str, public_url: str) -> str:
    """Section 3.1: the well-known part stands between host and path."""
    return public_url + WELL_KNOWN + path


def challenge(
    path: str, public_url: str, *, scope: str | None = None, error: BearerError | None = None
) -> str:
    """The value of `WWW-Authenticate` (section 5.1; RFC 6750, section 3). error: only where a
    credential was shown."""
    parts = [] if error is None else [f'error="{error}"']
    if scope is not None:
        parts.append(f'scope="{scope}"')
    parts.append(f'resource_metadata="{metadata_url(path, public_url)}"')
    return "Bearer " + ", ".join(parts)
