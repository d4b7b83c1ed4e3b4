"""Shapes errors of paths below `/oauth/` and of the console for whoever asks there: OAuth's JSON
(RFC 6749, 5.2; RFC 6750, 3.1) for clients, a page for people.

Every code is an RFC's, every text constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Request, Response

from gateway.auth.login.reset import RESET_PATH
from gateway.auth.oauth.rfc6749_errors import DESCRIPTIONS
from gateway.auth.oauth.rfc7591_register import PATH as REGISTRATION_PATH
from gateway.auth.oauth.rfc8414_metadata import (
    INTROSPECTION_PATH,
    JWKS_PATH,
    REVOCATION_PATH,
    TOKEN_PATH,
    USERINFO_PATH,
)
from gateway.console.pages import CONSOLE
from gateway.http_errors.table import HttpError
from gateway.routes.shared.browser import page
from gateway.routes.shared.media_types import JSON
from gateway.tenancy.members.invites import ACCEPT_PATH

OAUTH = "/oauth/"
ELSEWHERE = (ACCEPT_PATH, RESET_PATH)
"""Pages that stand outside of it."""
MACHINES = (
    TOKEN_PATH,
    REVOCATION_PATH,
    INTROSPECTION_PATH,
    USERINFO_PATH,
    JWKS_PATH,
    REGISTRATION_PATH,
    "/oauth/passkeys/sign-in",
    "/oauth/passkeys/register",
)
"""These paths and all below them are no pages; all others are."""
CODES: Mapping[int, str] = {
    401: "invalid_token",
    403: "insufficient_scope",
    429: "temporarily_unavailable",
    500: "server_error",
    503: "temporarily_unavailable",
}
TEXTS: Mapping[int, str] = {
    404: "There is no such page.",
    405: "This page does not take what was sent.",
}
"""For people."""


def speaks_oauth(path: str) -> bool:
    return path.startswith(OAUTH) or path in ELSEWHERE


def asks_for_console(request: Request[Any, Any, Any]) -> bool:
    """Tell whether a browser asks for a page of the console; a script of one asks for JSON."""
    path = request.scope["path"]
    is_there = path == CONSOLE or path.startswith(CONSOLE + "/")
    return is_there and "text/html" in request.headers.get("accept", "")


def to_response(
    request: Request[Any, Any, Any], http_error: HttpError, headers: Mapping[str, str]
) -> Response[bytes]:
    code = CODES.get(http_error.status, "invalid_request")
    too_large = http_error.status == 413  # its text is ours, and says the limit
    description = http_error.body.message if too_large else DESCRIPTIONS[code]
    if is_for_people(request, http_error.status):
        return page(
            "error",
            status=http_error.status,
            headers=dict(headers),
            error=code,
            description=TEXTS.get(http_error.status, description),
        )
    return Response(
        msgspec.json.encode({"error": code, "error_description": description}),
        status_code=http_error.status,
        media_type=JSON,
        headers={"cache-control": "no-store", "pragma": "no-cache", **headers},
    )


def is_for_people(request: Request[Any, Any, Any], status: int) -> bool:
    path = request.scope["path"]
    if any(path == each or path.startswith(each + "/") for each in MACHINES):
        return False
    if asks_for_console(request):
        return True
    # What is not there is neither: a browser says that it wants a page.
    return status != 404 or "text/html" in request.headers.get("accept", "")
