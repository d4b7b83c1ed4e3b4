"""The errors of authentication. `gateway.http_errors` gives them their HTTP status and body.

AuthError                one public message for all keys: it tells nobody which keys exist
├── MissingCredential    no `Authorization: Bearer ...`
│   └── UnknownScheme    `Authorization` with something else
├── InvalidKey           malformed or unknown
│   └── RepeatedHeader   more than one
├── ExpiredKey
├── RevokedKey           revoked, or its owner, project or org is archived
├── InvalidToken         an access token that is not ours
│   ├── ExpiredToken
│   ├── RevokedToken     revoked itself, or its grant, client or user is
│   └── WrongResource    a valid one that was issued for something else
├── WrongOrganization    a valid credential at another organization's or project's endpoint
└── WrongNetwork         a valid key, used from an address outside its allowlist
MissingScope             a valid credential without the scope that is needed (names `scope`)
AuthUnavailable          the credential cannot be checked at the moment
"""

from __future__ import annotations

from typing import ClassVar

from gateway.auth.sent_credential import SentCredential, refuse_in_words


class AuthError(Exception):
    """A refused credential. Its text is for the log; clients read `message`, or `public_message`
    where nothing of theirs is repeated. None of them ever holds a key."""

    code: ClassVar[str] = "invalid_api_key"
    public_message: ClassVar[str] = "Incorrect API key provided."
    sent: SentCredential | None = None
    """The credential that was sent. None: nobody said."""

    tells_sent: ClassVar[bool] = False
    """True if the credential itself is wrong, so that it is described."""

    @property
    def message(self) -> str:
        if self.sent is None or not self.tells_sent:
            return self.public_message
        return refuse_in_words(self.sent)


class MissingCredential(AuthError):
    public_message = (
        "You didn't provide an API key. Send it in the Authorization header: 'Bearer YOUR_KEY'."
    )


class UnknownScheme(MissingCredential):
    public_message = (
        "The Authorization header does not have the scheme Bearer. Send it as 'Bearer YOUR_KEY'."
    )


class InvalidKey(AuthError):
    tells_sent = True


class RepeatedHeader(InvalidKey):
    tells_sent = False
    public_message = (
        "More than one Authorization or X-Api-Key header was sent: send one credential."
    )


class ExpiredKey(AuthError):
    tells_sent = True


class RevokedKey(AuthError):
    tells_sent = True


class InvalidToken(AuthError):
    tells_sent = True
    public_message = "The access token is invalid, expired or revoked."


class ExpiredToken(InvalidToken):
    pass


class RevokedToken(InvalidToken):
    pass


class WrongResource(InvalidToken):
    tells_sent = False
    public_message = "The access token is valid, but it was issued for another resource."


class WrongOrganization(AuthError):
    """Says where the credential is good. `mine`: the path there."""

    code = "wrong_organization"
    public_message = (
        "The credential is valid, but not for the organization or project in this path."
    )

    def __init__(self, mine: str) -> None:
        super().__init__(mine)
        self.mine = mine

    @property
    def message(self) -> str:
        return f"{self.public_message} It is for {self.mine}."


class WrongNetwork(AuthError):
    code = "ip_not_authorized"
    public_message = "Your request's IP address is not on the allowlist of this API key."


class MissingScope(Exception):
    def __init__(self, scope: str) -> None:
        super().__init__(f"scope {scope!r} is required")
        self.scope = scope


class AuthUnavailable(Exception):
    pass
