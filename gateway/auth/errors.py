"""The errors between a credential and a principal.

Knows no HTTP: `gateway.http_errors` gives them their status and body.

    AuthError                one public face, so that nobody learns which keys once existed
    ├── MissingCredential    no `Authorization: Bearer ...`
    ├── InvalidKey           malformed or unknown
    ├── ExpiredKey
    ├── RevokedKey           revoked, or whose it is, its project or its org is gone
    ├── InvalidToken         an access token that is not ours, or not for this
    │   ├── ExpiredToken
    │   └── RevokedToken     or its grant, its client, its user
    └── WrongNetwork         a good key, shown from where it may not be used
    MissingScope             a good credential that may not do this (names `scope`)
    AuthUnavailable          the credential cannot be checked at the moment
"""

from __future__ import annotations

from typing import ClassVar


class AuthError(Exception):
    """Its text is for the log; clients read `public_message`. Neither ever holds a key."""

    public_message: ClassVar[str] = "Incorrect API key provided."


class MissingCredential(AuthError):
    public_message = (
        "You didn't provide an API key. Send it in the Authorization header: 'Bearer YOUR_KEY'."
    )


class InvalidKey(AuthError):
    pass


class ExpiredKey(AuthError):
    pass


class RevokedKey(AuthError):
    pass


class InvalidToken(AuthError):
    public_message = "The access token is invalid, expired or revoked."


class ExpiredToken(InvalidToken):
    pass


class RevokedToken(InvalidToken):
    pass


class WrongNetwork(AuthError):
    public_message = "Your request's IP address is not on the allowlist of this API key."


class MissingScope(Exception):
    def __init__(self, scope: str) -> None:
        super().__init__(f"scope {scope!r} is required")
        self.scope = scope


class AuthUnavailable(Exception):
    pass
