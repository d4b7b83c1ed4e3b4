"""OAuth 2.0 Protected Resource Metadata (RFC 9728), and the challenges that lead there.

Pure. Three kinds of resources, each with its metadata in path form: the installation, its API, and
one MCP endpoint for each org. What it says is the same for every org; the route says it of those
that there are. Every value that goes into a challenge is a constant or one of our own URLs.
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
"""RFC 6750, 3.1; RFC 9449, 7.1."""
Scheme = Literal["Bearer", "DPoP"]


class ProtectedResource(msgspec.Struct, frozen=True, kw_only=True):
    """RFC 9728, section 2."""

    resource: str
    authorization_servers: tuple[str, ...]
    scopes_supported: tuple[str, ...]
    bearer_methods_supported: tuple[str, ...] = ("header",)
    resource_name: str = RESOURCE_NAME


def find_metadata(path: str, public_url: str) -> ProtectedResource | None:
    """Return the metadata of the resource at `path` (of its URL; empty for the installation); None:
    there is none."""
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
    """Return the URL of the metadata (section 3.1): the well-known part stands between host and
    path."""
    return public_url + WELL_KNOWN + path


def find_error(error: Exception) -> ChallengeError | None:
    """Return what a challenge says of why a credential was refused; None: there was none (RFC 6750,
    3.1: then nothing is said), or it was not for the credential."""
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
    """The value of `WWW-Authenticate` (section 5.1; RFC 6750, section 3; RFC 9449, 7.1). error:
    only where a credential was shown; scheme: the one that it was shown by."""
    parts = [] if error is None else [f'error="{error}"']
    if scope is not None:
        parts.append(f'scope="{scope}"')
    if scheme == "DPoP":
        parts.append(f'algs="{" ".join(ALGORITHMS)}"')
    parts.append(f'resource_metadata="{metadata_url(path, public_url)}"')
    return f"{scheme} " + ", ".join(parts)
