"""OAuth 2.0 Protected Resource Metadata (RFC 9728), and the challenges that point to it. Pure.

There are three kinds of resources, each with its metadata in path form: the installation, its API,
and one MCP endpoint for each org. The metadata is the same for every org; the route checks that the
org exists. Every value in a challenge is a constant or a URL of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from gateway.auth.errors import AuthError, MissingCredential, MissingScope
from gateway.auth.oauth.rfc9449_dpop import ALGORITHMS, InvalidProof
from gateway.auth.resources import API_PATH, MCP_PATH
from gateway.permissions import KEY_SCOPES, SCOPE_MCP_CALL

WELL_KNOWN = "/.well-known/oauth-protected-resource"
RESOURCE_NAME = "Tollgate"

ChallengeError = Literal["invalid_token", "insufficient_scope", "invalid_dpop_proof"]
"""The codes of RFC 6750, 3.1 and RFC 9449, 7.1."""
Scheme = Literal["Bearer", "DPoP"]


class ProtectedResource(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a resource (RFC 9728, section 2)."""

    resource: str
    authorization_servers: tuple[str, ...]
    scopes_supported: tuple[str, ...]
    bearer_methods_supported: tuple[str, ...] = ("header",)
    resource_name: str = RESOURCE_NAME


def find_metadata(path: str, public_url: str) -> ProtectedResource | None:
    """Return the metadata of the resource at a URL path (empty for the installation), if there is
    such a resource."""
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
    """Return the URL of the metadata: the well-known part is between host and path (section
    3.1)."""
    return public_url + WELL_KNOWN + path


def find_error(error: Exception) -> ChallengeError | None:
    """Return the `error` of a challenge; None: no credential was sent (RFC 6750, 3.1), or the error
    is not about the credential."""
    match error:
        case MissingScope():
            return "insufficient_scope"
        case InvalidProof():
            return "invalid_dpop_proof"
        case MissingCredential():
            return None
        case AuthError():
            return "invalid_token"
        case _:
            return None


def challenge(
    path: str,
    public_url: str,
    *,
    scope: str | None = None,
    error: ChallengeError | None = None,
    scheme: Scheme = "Bearer",
) -> str:
    """Return the value of `WWW-Authenticate` (section 5.1; RFC 6750, section 3; RFC 9449, 7.1).

    `error`: only if a credential was sent. `scheme`: the one of that credential.
    """
    parts = [] if error is None else [f'error="{error}"']
    if scope is not None:
        parts.append(f'scope="{scope}"')
    if scheme == "DPoP":
        parts.append(f'algs="{" ".join(ALGORITHMS)}"')
    parts.append(f'resource_metadata="{metadata_url(path, public_url)}"')
    return f"{scheme} " + ", ".join(parts)
