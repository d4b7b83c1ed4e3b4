"""Errors of the OAuth endpoints: a code of an RFC and a constant description.

Details go to the log, never to the client.
"""

from __future__ import annotations

from collections.abc import Mapping

DESCRIPTIONS: Mapping[str, str] = {
    # RFC 6749, 5.2
    "invalid_request": "The request lacks a parameter, repeats one, or is otherwise malformed.",
    "invalid_client": "Client authentication failed.",
    "invalid_grant": "The grant is invalid, expired, revoked, or was issued to another client.",
    "unauthorized_client": "The client may not use this grant type.",
    "unsupported_grant_type": "The grant type is not supported.",
    "invalid_scope": "The scope is unknown, malformed, or exceeds what was granted.",
    # RFC 8707, 2
    "invalid_target": "The resource is unknown, malformed, or exceeds what was granted.",
    # RFC 9449, 5
    "invalid_dpop_proof": "The DPoP proof is missing, invalid, or was used before.",
    # RFC 7009, 2.2.1
    "unsupported_token_type": "Tokens of this type cannot be revoked.",
    # RFC 6750, 3.1
    "invalid_token": "The token is missing, invalid, expired or revoked.",
    "insufficient_scope": "The token lacks a scope that is needed here.",
    # RFC 7591, 3.2.2
    "invalid_redirect_uri": "A redirection URI is missing or not acceptable.",
    "invalid_client_metadata": "A field of the metadata is missing or not acceptable.",
    # RFC 6749, 4.1.2.1
    "access_denied": "The request was denied.",
    "server_error": "The server had an error.",
    "temporarily_unavailable": "The server cannot answer at the moment.",
}


class OAuthError(Exception):
    """An error response of an OAuth endpoint. `detail` is for the log."""

    def __init__(
        self, error: str, detail: str = "", *, status: int = 400, retry_after_s: int | None = None
    ) -> None:
        super().__init__(f"{error}: {detail}")
        self.error = error
        self.description = DESCRIPTIONS[error]
        self.status = status
        self.retry_after_s = retry_after_s


def invalid_client(detail: str) -> OAuthError:
    return OAuthError("invalid_client", detail, status=401)


def too_often(detail: str, *, retry_after_s: int) -> OAuthError:
    """Return a 429 (RFC 6585, section 4), with the only OAuth code that asks to retry later."""
    return OAuthError("temporarily_unavailable", detail, status=429, retry_after_s=retry_after_s)


def unavailable(detail: str) -> OAuthError:
    return OAuthError("temporarily_unavailable", detail, status=503, retry_after_s=1)
