"""Describes a credential that was refused to whoever sent it: what it looks like, and its end.

Never more than the last four characters, and nothing of what is short: a password, say. Nothing is
looked up: the words depend on what was sent alone, so they tell nobody which credentials exist.
"""

from __future__ import annotations

import binascii
import re
from base64 import urlsafe_b64decode
from typing import Literal

import msgspec

Kind = Literal[
    "API key",
    "admin key",
    "malformed API key",
    "foreign API key",
    "access token",
    "refresh token",
    "client secret",
    "registration token",
    "webhook secret",
    "opaque token",
    "text",
]
SHOWN = 4
SHORTEST_SHOWN = 24
"""Nothing is shown of a shorter text."""
KEY_FORM = re.compile(r"sk-tg-(admin-)?[0-9A-Za-z]{43}", re.ASCII)
PREFIXES: dict[str, Kind] = {
    "sk-tg-": "malformed API key",
    "tg-refresh-": "refresh token",
    "tg-secret-": "client secret",
    "tg-registration-": "registration token",
    "whsec_": "webhook secret",
}
FOREIGN_KEY = re.compile(r"(?:sk|pk|rk|gsk|xai|hf|key|api)[-_][\w-]{8,}|AIza[\w-]{20,}", re.ASCII)
"""Forms of other vendors' keys."""
TOKEN = re.compile(r"[\w.~+/-]{16,}=*", re.ASCII)
"""The form of a token (`b64token`: RFC 6750, section 2.1)."""
END = re.compile(r"[\w-]{4}", re.ASCII)
MAX_HEADER_CHARS = 4096


class SentCredential(msgspec.Struct, frozen=True):
    kind: Kind
    ending: str | None
    """The last four characters. None: too short to show any."""
    as_api_key: bool = False
    """It came in the header X-Api-Key."""

    @property
    def end(self) -> str:
        shown = "" if self.ending is None else f" ending in '{self.ending}'"
        return shown + (" (sent as X-Api-Key)" if self.as_api_key else "")


def describe(credential: str, *, as_api_key: bool = False) -> SentCredential:
    ending = credential[-SHOWN:]
    shows = len(credential) >= SHORTEST_SHOWN and END.fullmatch(ending) is not None
    return SentCredential(kind_of(credential), ending if shows else None, as_api_key)


def kind_of(credential: str) -> Kind:
    if (found := KEY_FORM.fullmatch(credential)) is not None:
        return "API key" if found[1] is None else "admin key"
    for prefix, kind in PREFIXES.items():
        if credential.startswith(prefix):
            return kind
    if is_jwt(credential):
        return "access token"
    if FOREIGN_KEY.fullmatch(credential) is not None:
        return "foreign API key"
    return "opaque token" if TOKEN.fullmatch(credential) is not None else "text"


def is_jwt(credential: str) -> bool:
    """Tell whether it has the form of a JWT (RFC 7519, 7.2), whoever signed it."""
    header, *rest = credential.split(".")
    if len(rest) != 2 or len(header) > MAX_HEADER_CHARS:
        return False
    try:
        decoded = urlsafe_b64decode(header + "=" * (-len(header) % 4))
        return isinstance(msgspec.json.decode(decoded), dict)
    except (binascii.Error, ValueError, UnicodeError, RecursionError):
        return False


def refuse_in_words(sent: SentCredential) -> str:
    """Say what was sent and why it is no good, as far as its form tells."""
    end = sent.end
    match sent.kind:
        case "API key" | "admin key":
            why = "that is unknown, expired or revoked"
            return f"Incorrect API key provided: an {sent.kind}{end} {why}."
        case "malformed API key":
            why = "that does not have the form of one ('sk-tg-' and 43 letters and digits)"
            return f"Incorrect API key provided: an API key{end} {why}."
        case "foreign API key":
            why = "that is not one of this gateway's, which begin with 'sk-tg-'"
            return f"Incorrect API key provided: a key{end} {why}."
        case "access token":
            return f"The access token{end} is invalid, expired or revoked."
        case "refresh token" | "client secret" | "registration token" | "webhook secret":
            return f"A {sent.kind}{end} opens nothing here: send an API key or an access token."
        case "opaque token" | "text":
            shown = "an opaque token" if sent.kind == "opaque token" else "a text"
            why = "that is neither an API key ('sk-tg-...') nor an access token (a JWT)"
            return f"Incorrect credential provided: {shown}{end} {why}."
