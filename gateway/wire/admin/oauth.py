"""The bodies and answers of the authorization server, as its OpenAPI document shows them. Structs
only.

Names are those of the RFCs; what is read, and what is written, is said by the modules of `auth`
that are named for them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Text = Annotated[str, Meta(max_length=8192)]


class OAuthErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error (RFC 6749, 5.2)."""

    error: str
    error_description: str


class RegistrationRefused(OAuthErrorBody, frozen=True, kw_only=True):
    """A refused registration (RFC 7591, 3.2.2)."""

    field: str
    """The field that is refused; `body`: all of it."""


class ClientForm(msgspec.Struct, kw_only=True):
    """The client's credentials where no header has them (RFC 6749, 2.3.1; RFC 7523, 2.2)."""

    client_id: Text | None = None
    client_secret: Text | None = None
    client_assertion_type: Text | None = None
    client_assertion: Text | None = None


class TokenForm(ClientForm, kw_only=True):
    """The form of the token endpoint: RFC 6749, 4.1.3, 4.4.2 and 6; RFC 7636, 4.5; RFC 8693, 2.1;
    RFC 8707, 2.2."""

    grant_type: Literal[
        "authorization_code",
        "refresh_token",
        "client_credentials",
        "urn:ietf:params:oauth:grant-type:token-exchange",
    ]
    code: Text | None = None
    redirect_uri: Text | None = None
    code_verifier: Text | None = None
    refresh_token: Text | None = None
    scope: Text | None = None
    resource: list[Text] = []
    audience: list[Text] = []
    subject_token: Text | None = None
    subject_token_type: Text | None = None
    actor_token: Text | None = None
    actor_token_type: Text | None = None
    requested_token_type: Text | None = None


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer with tokens: RFC 6749, 5.1; RFC 8693, 2.2.1; OpenID Connect Core, 3.1.3.3."""

    access_token: str
    token_type: Literal["Bearer", "DPoP"]
    expires_in: int
    scope: str
    refresh_token: str = ""
    id_token: str = ""
    issued_token_type: str = ""


class HeldToken(ClientForm, kw_only=True):
    """A token to revoke or to introspect (RFC 7009, 2.1; RFC 7662, 2.1)."""

    token: Text
    token_type_hint: Text | None = None


class Introspection(msgspec.Struct, frozen=True, kw_only=True):
    """An introspection (RFC 7662, 2.2): an inactive token has `active` alone."""

    active: bool
    token_type: str = ""
    scope: str = ""
    client_id: str = ""
    sub: str = ""
    aud: str | list[str] = ""
    iss: str = ""
    jti: str = ""
    iat: int = 0
    exp: int = 0


class UserInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The user as far as the token's scopes allow (OpenID Connect Core, 5.3.2)."""

    sub: str
    name: str = ""
    email: str = ""


class ServerMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The server's metadata (RFC 8414, 2, and OpenID Connect Discovery); it has more fields than
    these."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    registration_endpoint: str
    revocation_endpoint: str
    introspection_endpoint: str
    userinfo_endpoint: str
    scopes_supported: list[str]
    response_types_supported: list[str]
    grant_types_supported: list[str]
    code_challenge_methods_supported: list[Literal["S256"]]
    token_endpoint_auth_methods_supported: list[str]
    authorization_response_iss_parameter_supported: Literal[True]


class PublicKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The public keys (RFC 7517, 5)."""

    keys: list[dict[str, Any]]


class RegisteredClient(msgspec.Struct, frozen=True, kw_only=True):
    """A registered client (RFC 7591, 3.2.1; RFC 7592, 3), with what was registered besides."""

    client_id: str
    client_id_issued_at: int
    client_name: str
    redirect_uris: list[str]
    grant_types: list[str]
    response_types: list[str]
    token_endpoint_auth_method: str
    registration_client_uri: str
    registration_access_token: str = ""
    client_secret: str = ""
    client_secret_expires_at: int = 0


class AuthorizationQuery(msgspec.Struct, kw_only=True):
    """The query of the authorization endpoint: RFC 6749, 4.1.1; RFC 7636, 4.3; RFC 8707, 2.1;
    OpenID Connect Core, 3.1.2.1."""

    client_id: Text
    response_type: Literal["code"]
    code_challenge: Text
    code_challenge_method: Literal["S256"]
    redirect_uri: Text | None = None
    scope: Text | None = None
    state: Text | None = None
    nonce: Text | None = None
    prompt: Text | None = None
    max_age: Text | None = None
    login_hint: Text | None = None
    resource: list[Text] = []


class ConsentForm(msgspec.Struct, kw_only=True):
    """The form that the consent page sends back."""

    request: Text
    form_token: Text
    decision: Literal["allow", "deny"]
