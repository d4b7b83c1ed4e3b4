"""OAuth clients and grants as `/v1/admin/oauth/...` shows and takes them. Structs only.

Names are RFC 7591's where it has one. What may be said in them is `oauth.clients.metadata`'s to
check. Moments are Unix seconds, as in all of administration.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

AuthMethod = Literal["client_secret_basic", "client_secret_post", "private_key_jwt", "none"]
Uri = Annotated[str, Meta(max_length=2048)]
Id = Annotated[str, Meta(min_length=1, max_length=200)]
ScopeName = Annotated[str, Meta(min_length=1, max_length=100)]


class ClientWritten(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client as an administrator wants it; an update says all of it again."""

    client_name: Annotated[str, Meta(min_length=1, max_length=100)]
    redirect_uris: Annotated[list[Uri], Meta(max_length=16)] = []
    token_endpoint_auth_method: AuthMethod = "client_secret_basic"
    grant_types: Annotated[list[str], Meta(max_length=8)] | None = None
    """None: authorization_code and refresh_token."""
    scopes: Annotated[list[ScopeName], Meta(max_length=64)] | None = None
    """None: inference, mcp:call, usage:read and OpenID's, as far as you may give them."""
    application_type: Literal["web", "native"] | None = None
    jwks: dict[str, Any] | None = None
    jwks_uri: Uri | None = None
    dpop_bound_access_tokens: bool = False
    client_uri: Uri | None = None
    logo_uri: Uri | None = None
    tos_uri: Uri | None = None
    policy_uri: Uri | None = None
    contacts: Annotated[list[str], Meta(max_length=8)] = []
    project_id: Id | None = None
    """The project that is billed; None: a project of the user."""
    service_account_id: Id | None = None
    """The service account that it acts for when it comes alone."""
    plan: Id | None = None
    """The limits that all holders of its tokens share; None: no limits of its own."""


class SecretRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    grace_s: Annotated[int, Meta(ge=0, le=7 * 86_400)] = 0
    """So long the old secret goes on working."""


class OAuthClient(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "oauth.client"
    id: str
    client_name: str
    redirect_uris: list[str]
    token_endpoint_auth_method: str
    grant_types: list[str]
    scopes: list[str]
    application_type: str
    jwks: dict[str, Any] | None
    jwks_uri: str | None
    dpop_bound_access_tokens: bool
    metadata: dict[str, Any]
    project_id: str | None
    service_account_id: str | None
    plan: str | None
    created_at: int | None
    archived_at: int | None


class OAuthClientOnce(OAuthClient, frozen=True, kw_only=True):
    client_secret: str | None
    """In this answer alone; null where its method needs none."""


class OAuthGrant(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "oauth.grant"
    id: str
    user_id: str
    client_id: str
    project_id: str | None
    resources: list[str]
    scopes: list[str]
    created_at: int
    revoked_at: int | None
    revoked_because: str | None
