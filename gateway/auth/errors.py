"""The errors of authentication. `gateway.http_errors` gives them their HTTP status and body.

AuthError                one public message for all keys: it tells nobody which keys exist
├── MissingCredential    no `Authorization: Bearer ...`
├── InvalidKey           malformed or unknown
├── ExpiredKey
├── RevokedKey           revoked, or its owner, project or org is archived
├── InvalidToken         an access token that is not ours, or not for this resource
│   ├── ExpiredToken
│   └── RevokedToken     revoked itself, or its grant, client or user is
└── WrongNetwork         a valid key, used from an address outside its allowlist
MissingScope             a valid credential without the scope that is needed (names `scope`)
AuthUnavailable          the credential cannot be checked at the moment
"""

from __future__ import annotations

from typing import ClassVar


class AuthError(Exception):
    """A refused credential. Its text is for the log; clients read `public_message`. Neither ever
    holds a key."""

    code: ClassVar[str] = "invalid_api_key"
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
    code = "ip_not_authorized"
    public_message = "Your request's IP address is not on the allowlist of this API key."


class MissingScope(Exception):
    def __init__(self, scope: str) -> None:
        super().__init__(f"scope {scope!r} is required")
        self.scope = scope


class AuthUnavailable(Exception):
    pass
