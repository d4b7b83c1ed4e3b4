"""The authorization request: parsed, checked, and its response (RFC 6749, 4.1; OAuth 2.1; RFC 7636,
8252, 8707, 9207; OpenID Connect Core, 3.1.2).

Pure, once the client is found. Every client must use the code flow with PKCE by S256. Beyond
Authlib's checks it refuses repeated parameters and `plain`, reads `resource`, puts `iss` into every
response, and never echoes input in error descriptions.

An error is sent to the redirect URI only if it is known to be the client's; otherwise it is shown
to the user on our own page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from authlib.oauth2.rfc6749 import AuthorizationServer, OAuth2Error, OAuth2Request
from authlib.oauth2.rfc6749.errors import InvalidRequestError
from authlib.oauth2.rfc6749.grants import AuthorizationCodeGrant
from authlib.oauth2.rfc6749.requests import BasicOAuth2Payload
from authlib.oauth2.rfc7636 import CodeChallenge

from gateway import permissions as policy
from gateway.auth.login.sessions import Session
from gateway.auth.oauth.clients.metadata import AUTHORIZATION_CODE
from gateway.auth.oauth.clients.redirects import find_registered, is_native, origin_of
from gateway.auth.oauth.clients.store import Client
from gateway.auth.resources import InvalidTarget, Resource, find_resources

MAX_QUERY_LENGTH = 8192
MAX_PARAMETERS = 64
MAX_NONCE_LENGTH = 512
MAX_AGE_DIGITS = 9
CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}", re.ASCII)
"""A base64url-encoded SHA-256, without padding: a code challenge, a JWK's thumbprint."""
PROMPTS = frozenset({"none", "login", "consent", "select_account"})
RESPONSE_TYPE = re.compile(r"[\w ]*", re.ASCII)
"""Names with spaces between them (RFC 6749, A.3)."""
REPEATABLE = "resource"
MARK = "tg_asked"
"""A parameter of ours: when the user was asked to sign in again. It is removed before the client's
parameters are read."""
REQUEST_URI = "https://authorization-server/oauth/authorize"
"""Authlib requires a URI of the request, and reads nothing from it."""

DESCRIPTIONS: Mapping[str, str] = {
    "invalid_request": "A parameter is missing, malformed or given twice.",
    "invalid_client": "The client is not known here.",
    "unauthorized_client": "The client may not use the authorization code flow.",
    "access_denied": "The user, or their role, does not allow it.",
    "unsupported_response_type": "Only response_type=code is offered.",
    "invalid_scope": "A requested scope is unknown, or the client may not have it.",
    "invalid_target": "A requested resource is not one of this server.",
    "server_error": "The server had an error.",
    "temporarily_unavailable": "The server cannot answer at the moment.",
    "login_required": "The user has to sign in.",
    "consent_required": "The user has to consent.",
    "interaction_required": "The user has to be asked.",
    "request_not_supported": "Request objects are not read.",
    "request_uri_not_supported": "Request objects are not fetched.",
}
"""The `error_description` of each error."""


class AuthorizationRefused(Exception):
    """The request is refused. `redirect_uri` None: the error is shown on our own page."""

    def __init__(
        self, error: str, *, redirect_uri: str | None = None, state: str | None = None
    ) -> None:
        super().__init__(error)
        self.error = error
        self.redirect_uri = redirect_uri
        self.state = state

    @property
    def description(self) -> str:
        return DESCRIPTIONS[self.error]


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the query."""

    values: dict[str, str]
    resources: list[str]
    repeated: frozenset[str]
    mark: str | None

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def query(self, mark: str | None = None) -> str:
        """Return the parameters as a query, for a page that leads back here."""
        pairs = [*self.values.items(), *((REPEATABLE, each) for each in self.resources)]
        if mark is not None:
            pairs.append((MARK, mark))
        return urlencode(pairs)


class AuthorizationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request, for which a user may be asked to consent."""

    parameters: Parameters
    client: Client
    redirect_uri: str
    registered_uri: str
    """The registered URI that it matches; for a native client its port may differ."""
    state: str | None
    scopes: frozenset[str]
    resources: list[Resource]
    code_challenge: str
    nonce: str | None
    prompts: frozenset[str]
    max_age: int | None
    dpop_jkt: str | None

    @property
    def org_id(self) -> str | None:
        """The org that the user must belong to; None: any."""
        owners = [each.org_id for each in self.resources if each.org_id is not None]
        return self.client.org_id or next(iter(owners), None)

    @property
    def remembers(self) -> bool:
        """True if consent to it is remembered."""
        return not is_native(self.redirect_uri)

    @property
    def destination(self) -> str:
        return origin_of(self.redirect_uri)

    def refuse(self, error: str) -> AuthorizationRefused:
        return AuthorizationRefused(error, redirect_uri=self.redirect_uri, state=self.state)


def read_parameters(query: str) -> Parameters:
    """Raises: AuthorizationRefused without a redirect URI, since none is checked yet."""
    if len(query) > MAX_QUERY_LENGTH:
        raise AuthorizationRefused("invalid_request")
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS
        )
    except ValueError:
        raise AuthorizationRefused("invalid_request") from None
    values: dict[str, str] = {}
    resources: list[str] = []
    repeated: set[str] = set()
    for name, value in pairs:
        if "\0" in name + value:
            raise AuthorizationRefused("invalid_request")
        if name == REPEATABLE:
            resources.append(value)
        elif name in values:
            repeated.add(name)
        else:
            values[name] = value
    mark = values.pop(MARK, None)
    # A parameter without a value counts as omitted (RFC 6749, 3.1), but can still be repeated.
    return Parameters(
        values={name: value for name, value in values.items() if value},
        resources=[each for each in resources if each],
        repeated=frozenset(repeated),
        mark=mark,
    )


class _Client:
    """A client with the methods that Authlib calls."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def check_redirect_uri(self, uri: str) -> bool:
        return (
            find_registered(self._client.redirect_uris, uri, native=self._client.native) is not None
        )

    def get_default_redirect_uri(self) -> str | None:
        """Return the only registered URI, which a request may omit (OAuth 2.1)."""
        uris = self._client.redirect_uris
        return uris[0] if len(uris) == 1 else None

    def check_response_type(self, response_type: str) -> bool:
        return response_type == "code" and AUTHORIZATION_CODE in self._client.grant_types

    def get_allowed_scope(self, scope: str | None) -> str | None:
        requested = default_scopes(self._client) if scope is None else set(scope.split())
        return " ".join(sorted(requested & policy.expanded(self._client.scopes))) or None


class _S256(CodeChallenge):  # type: ignore[misc]
    """RFC 7636 without `plain`, for all clients."""

    def validate_code_challenge(self, grant: Any, redirect_uri: str) -> None:
        data = grant.request.payload.data
        challenge = data.get("code_challenge", "")
        if data.get("code_challenge_method") != "S256" or not CHALLENGE.fullmatch(challenge):
            raise InvalidRequestError()


class _Server(AuthorizationServer):  # type: ignore[misc]
    """Authlib's server for one request of a client that was looked up before."""

    def __init__(self, client: Client) -> None:
        super().__init__(scopes_supported=policy.SCOPES)
        self._client = _Client(client)
        self.register_grant(AuthorizationCodeGrant, [_S256(required=True)])

    def query_client(self, client_id: str) -> _Client:
        return self._client

    def create_oauth2_request(self, request: OAuth2Request) -> OAuth2Request:
        return request


def default_scopes(client: Client) -> set[str]:
    """Return the scopes of a request that names none: all but those of administration."""
    left_out = policy.ADMIN_SCOPES | policy.OPERATOR_SCOPES
    return {scope for scope in client.scopes if scope not in left_out}


def check_request(
    parameters: Parameters, client: Client | None, public_url: str
) -> AuthorizationRequest:
    """Raises: AuthorizationRefused."""
    if client is None:
        raise AuthorizationRefused("invalid_client")
    if parameters.repeated & {"client_id", "redirect_uri"}:
        raise AuthorizationRefused("invalid_request")
    uri, state = parameters.get("redirect_uri"), parameters.get("state")
    if uri is not None and find_registered(client.redirect_uris, uri, native=client.native) is None:
        # Authlib would repeat it in a description, and raise ValueError for invalid characters.
        raise AuthorizationRefused("invalid_request")
    values = {**parameters.values}
    if RESPONSE_TYPE.fullmatch(values.get("response_type", "")) is None:
        values["response_type"] = ""  # as above
    request = OAuth2Request("GET", REQUEST_URI)
    request.payload = BasicOAuth2Payload(values)
    try:
        grant = _Server(client).get_consent_grant(request)
    except OAuth2Error as error:
        known = error.error if error.error in DESCRIPTIONS else "invalid_request"
        uri = getattr(error, "redirect_uri", None)
        raise AuthorizationRefused(known, redirect_uri=uri, state=state) from None
    redirect_uri: str = grant.redirect_uri
    try:
        return _check_extensions(
            parameters, client, redirect_uri, request.scope.split(), public_url
        )
    except AuthorizationRefused as refused:
        raise AuthorizationRefused(refused.error, redirect_uri=redirect_uri, state=state) from None


def _check_extensions(
    parameters: Parameters, client: Client, redirect_uri: str, scopes: list[str], public_url: str
) -> AuthorizationRequest:
    """Check the parameters beyond RFC 6749. Raises: AuthorizationRefused."""
    if parameters.repeated:
        raise AuthorizationRefused("invalid_request")
    for name in ("request", "request_uri"):
        if parameters.get(name) is not None:
            raise AuthorizationRefused(f"{name}_not_supported")
    if parameters.get("response_mode") not in (None, "query"):
        raise AuthorizationRefused("invalid_request")
    prompts = frozenset((parameters.get("prompt") or "").split())
    if not prompts <= PROMPTS or ("none" in prompts and len(prompts) > 1):
        raise AuthorizationRefused("invalid_request")
    jkt, nonce = parameters.get("dpop_jkt"), parameters.get("nonce")
    if jkt is not None and not CHALLENGE.fullmatch(jkt):
        raise AuthorizationRefused("invalid_request")
    if nonce is not None and len(nonce) > MAX_NONCE_LENGTH:
        raise AuthorizationRefused("invalid_request")
    registered = find_registered(client.redirect_uris, redirect_uri, native=client.native)
    assert registered is not None, "it was just checked"
    checked = AuthorizationRequest(
        parameters=parameters,
        client=client,
        redirect_uri=redirect_uri,
        registered_uri=registered,
        state=parameters.get("state"),
        scopes=frozenset(scopes),
        resources=_read_resources(parameters.resources, public_url),
        code_challenge=parameters.values["code_challenge"],
        nonce=nonce,
        prompts=prompts,
        max_age=_read_max_age(parameters.get("max_age")),
        dpop_jkt=jkt,
    )
    if any(each.org_id not in (None, checked.org_id) for each in checked.resources):
        raise AuthorizationRefused("invalid_target")
    return checked


def _read_resources(values: list[str], public_url: str) -> list[Resource]:
    try:
        return find_resources(values, public_url)
    except InvalidTarget:
        raise AuthorizationRefused("invalid_target") from None


def _read_max_age(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_AGE_DIGITS):
        raise AuthorizationRefused("invalid_request")
    return int(value)


def must_sign_in(
    request: AuthorizationRequest,
    session: Session | None,
    *,
    asked_at: datetime | None,
    now: datetime,
) -> bool:
    """True if the user must sign in, or sign in again. `asked_at`: when this request asked them to.

    Raises: AuthorizationRefused if they must, and `prompt=none` forbids it.
    """
    good = session is not None and request.org_id in (None, session.org_id)
    if good and session is not None:
        if request.prompts & {"login", "select_account"}:
            good = asked_at is not None and session.auth_time >= asked_at
        if request.max_age is not None and now - session.auth_time > timedelta(
            seconds=request.max_age
        ):
            # A login that this request asked for counts, although it took a moment.
            good = asked_at is not None and session.auth_time >= asked_at
    if not good and "none" in request.prompts:
        raise request.refuse("login_required")
    return not good


def grantable(request: AuthorizationRequest, session: Session) -> frozenset[str]:
    """Return the requested scopes that the user's role allows.

    Raises: AuthorizationRefused if none is left, besides those about the user's identity.
    """
    allowed = policy.within(
        session.role,
        request.scopes,
        is_operator=session.is_operator,
        owns_project=session.owns_project,
    )
    requested = request.scopes - policy.IDENTITY_SCOPES
    if requested and not allowed & requested:
        raise request.refuse("access_denied")
    return allowed


def to_location(redirect_uri: str, issuer: str, **parameters: str | None) -> str:
    """Return the redirect URI with the response's parameters and `iss` (RFC 9207); its own query is
    kept."""
    pairs = {name: value for name, value in parameters.items() if value is not None}
    separator = "&" if "?" in redirect_uri else "?"
    return f"{redirect_uri}{separator}{urlencode({**pairs, 'iss': issuer})}"
