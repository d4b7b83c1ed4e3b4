"""Parses and checks the metadata of a client (RFC 7591, section 2). Pure.

Unknown members are ignored, as the RFC requires; a known one that is invalid is refused by name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from foundation.errors import LocatedError
from gateway.auth.oauth.clients.redirects import (
    MAX_URI_LENGTH,
    WEB,
    has_own_scheme,
    is_native,
    refusal,
)
from gateway.net.egress import Egress, ForbiddenTarget

AUTHORIZATION_CODE = "authorization_code"
REFRESH_TOKEN = "refresh_token"
CLIENT_CREDENTIALS = "client_credentials"
TOKEN_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
GRANT_TYPES = frozenset({AUTHORIZATION_CODE, REFRESH_TOKEN, CLIENT_CREDENTIALS, TOKEN_EXCHANGE})
GRANT_TYPES_OF_STRANGERS = frozenset({AUTHORIZATION_CODE, REFRESH_TOKEN})
"""The grant types of a client that registered itself or has a metadata document: all need a
user."""
SECRET_METHODS = frozenset({"client_secret_basic", "client_secret_post"})
AUTH_METHODS = SECRET_METHODS | {"private_key_jwt", "none"}
MAX_REDIRECT_URIS = 16
MAX_NAME_LENGTH = 100
MAX_KEYS = 16
MAX_CONTACTS = 8
MAX_TEXT_LENGTH = 256
LINKS = ("client_uri", "logo_uri", "tos_uri", "policy_uri")

AuthMethod = Literal["client_secret_basic", "client_secret_post", "private_key_jwt", "none"]
ApplicationType = Literal["web", "native"]


class InvalidMetadata(LocatedError):
    """The value of a field is invalid."""

    @property
    def error(self) -> str:
        """The error code (RFC 7591, 3.2.2)."""
        is_redirect = self.param == "redirect_uris"
        return "invalid_redirect_uri" if is_redirect else "invalid_client_metadata"


class ClientMetadata(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The members of RFC 7591, OpenID Connect Registration and RFC 9449 that are supported."""

    client_name: str | None = None
    redirect_uris: list[str] = []
    token_endpoint_auth_method: AuthMethod = "client_secret_basic"
    grant_types: list[str] = msgspec.field(default_factory=lambda: [AUTHORIZATION_CODE])
    response_types: list[str] = msgspec.field(default_factory=lambda: ["code"])
    scope: str | None = None
    application_type: ApplicationType | None = None
    jwks: dict[str, Any] | None = None
    jwks_uri: str | None = None
    dpop_bound_access_tokens: bool = False
    client_uri: str | None = None
    logo_uri: str | None = None
    tos_uri: str | None = None
    policy_uri: str | None = None
    contacts: list[str] = []
    software_id: str | None = None
    software_version: str | None = None

    @property
    def native(self) -> bool:
        """True if `application_type` says so. Without it, if all redirect URIs are native, or one
        has a private scheme: some agents register such a one beside an https URI."""
        if self.application_type is not None:
            return self.application_type == "native"
        if any(map(has_own_scheme, self.redirect_uris)):
            return True
        return bool(self.redirect_uris) and all(map(is_native, self.redirect_uris))

    @property
    def scopes(self) -> list[str]:
        return [] if self.scope is None else self.scope.split()


def from_document(document: Any, *, grant_types: frozenset[str] = GRANT_TYPES) -> ClientMetadata:
    """Return the metadata in a decoded JSON object. Raises: InvalidMetadata."""
    if not isinstance(document, Mapping):
        raise InvalidMetadata("body", "must be a JSON object")
    given = {name: value for name, value in document.items() if value is not None}
    for name in given.keys() & set(ClientMetadata.__struct_fields__):
        try:
            msgspec.convert({name: given[name]}, ClientMetadata)
        except msgspec.ValidationError:
            raise InvalidMetadata(str(name), "has the wrong type, or an unknown value") from None
    metadata = msgspec.convert(given, ClientMetadata)
    check(metadata, grant_types)
    return metadata


def check(metadata: ClientMetadata, grant_types: frozenset[str]) -> None:
    """Raises: InvalidMetadata."""
    _check_name(metadata.client_name)
    unknown = set(metadata.grant_types) - grant_types
    if unknown or not metadata.grant_types:
        raise InvalidMetadata("grant_types", "must be one or more of the supported ones")
    needs_user = AUTHORIZATION_CODE in metadata.grant_types
    if metadata.response_types not in (["code"], []) or (
        needs_user and not metadata.response_types
    ):
        raise InvalidMetadata("response_types", 'must be ["code"]')
    _check_redirects(metadata, needs_user)
    _check_keys(metadata)
    if CLIENT_CREDENTIALS in metadata.grant_types:
        if metadata.token_endpoint_auth_method == "none":
            raise InvalidMetadata("token_endpoint_auth_method", "client_credentials needs a secret")
    for name in LINKS:
        uri = getattr(metadata, name)
        if uri is not None and (len(uri) > MAX_URI_LENGTH or WEB.fullmatch(uri) is None):
            raise InvalidMetadata(name, "must be an https URI")
    _check_texts(metadata)


async def check_urls(metadata: ClientMetadata, egress: Egress) -> None:
    """Refuse a `jwks_uri` that would not be fetched, and links that lead a person to an address
    that is not public. Where a link's name leads is its reader's affair: nothing is fetched there.

    Raises: InvalidMetadata.
    """
    for name in ("jwks_uri", *LINKS):
        url = getattr(metadata, name)
        if url is None:
            continue
        try:
            if name == "jwks_uri":
                await egress.check(url)
            else:
                egress.target(url)
        except ForbiddenTarget as error:
            raise InvalidMetadata(name, f"is not allowed: {error}") from None


def _check_name(name: str | None) -> None:
    if name is None:
        return
    if not 1 <= len(name) <= MAX_NAME_LENGTH or name != name.strip():
        raise InvalidMetadata("client_name", f"must have 1 to {MAX_NAME_LENGTH} characters")
    # Category Cf has characters that reverse text: a name could read as another one.
    if any(unicodedata.category(c)[0] == "C" for c in name):
        raise InvalidMetadata("client_name", "must be printable")


def _check_redirects(metadata: ClientMetadata, needs_user: bool) -> None:
    uris = metadata.redirect_uris
    if needs_user and not uris:
        raise InvalidMetadata("redirect_uris", "authorization_code needs at least one")
    if len(uris) > MAX_REDIRECT_URIS or len(set(uris)) < len(uris):
        raise InvalidMetadata(
            "redirect_uris", f"must be at most {MAX_REDIRECT_URIS}, without duplicates"
        )
    public = metadata.token_endpoint_auth_method == "none"
    for uri in uris:
        reason = refusal(uri, native=metadata.native, public=public)
        if reason is not None:
            raise InvalidMetadata("redirect_uris", reason)


def _check_keys(metadata: ClientMetadata) -> None:
    """Check that keys are public, given in one way, and present if they are needed."""
    if metadata.jwks is not None and metadata.jwks_uri is not None:
        raise InvalidMetadata("jwks", "cannot be given with jwks_uri")
    if metadata.token_endpoint_auth_method == "private_key_jwt":
        if metadata.jwks is None and metadata.jwks_uri is None:
            raise InvalidMetadata("jwks", "private_key_jwt needs jwks or jwks_uri")
    uri = metadata.jwks_uri
    if uri is not None and (len(uri) > MAX_URI_LENGTH or WEB.fullmatch(uri) is None):
        raise InvalidMetadata("jwks_uri", "must be an https URI")
    if metadata.jwks is None:
        return
    keys = metadata.jwks.get("keys")
    if not isinstance(keys, list) or not 1 <= len(keys) <= MAX_KEYS:
        raise InvalidMetadata("jwks", f"must have 1 to {MAX_KEYS} keys")
    try:
        found = KeySet.import_key_set({"keys": keys}).keys
        public = all(key.key_type != "oct" and not key.is_private for key in found)
    except (JoseError, ValueError, TypeError, KeyError, AttributeError):
        raise InvalidMetadata("jwks", "must be a JWK Set") from None
    if not public:
        raise InvalidMetadata("jwks", "must have public keys only")


def _check_texts(metadata: ClientMetadata) -> None:
    texts = {"software_id": metadata.software_id, "software_version": metadata.software_version}
    for name, value in texts.items():
        if value is not None and len(value) > MAX_TEXT_LENGTH:
            raise InvalidMetadata(name, f"must have at most {MAX_TEXT_LENGTH} characters")
    contacts = metadata.contacts
    if len(contacts) > MAX_CONTACTS or any(len(each) > MAX_TEXT_LENGTH for each in contacts):
        most = f"must be at most {MAX_CONTACTS} of {MAX_TEXT_LENGTH} characters"
        raise InvalidMetadata("contacts", most)
    if metadata.scope is not None and len(metadata.scope) > MAX_URI_LENGTH:
        raise InvalidMetadata("scope", f"must have at most {MAX_URI_LENGTH} characters")
