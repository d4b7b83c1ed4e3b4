"""Parses the bodies of the OAuth endpoints: application/x-www-form-urlencoded, each parameter once
(RFC 6749, 3.2)."""

from __future__ import annotations

from urllib.parse import parse_qsl

import msgspec

from gateway.auth.oauth.rfc6749_errors import OAuthError

MEDIA_TYPE = "application/x-www-form-urlencoded"
MAX_BODY_BYTES = 64 * 1024
MAX_PARAMETERS = 64
REPEATABLE = frozenset({"resource", "audience"})
"""Parameters that may be repeated (RFC 8707, section 2; RFC 8693, section 2.1)."""


class Form(msgspec.Struct, frozen=True):
    """The parameters of a request; one without a value counts as not sent (RFC 6749, 3.2)."""

    values: dict[str, str]
    repeated: dict[str, list[str]]

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def require(self, name: str) -> str:
        """Raises: OAuthError."""
        if name not in self.values:
            raise OAuthError("invalid_request", f"no {name}")
        return self.values[name]

    def all(self, name: str) -> list[str]:
        """Return all values of a parameter of REPEATABLE."""
        return self.repeated.get(name, [])


def parse(body: bytes, content_type: str) -> Form:
    """Raises: OAuthError."""
    if content_type.partition(";")[0].strip().lower() != MEDIA_TYPE:
        raise OAuthError("invalid_request", "another media type")
    if len(body) > MAX_BODY_BYTES:
        raise OAuthError("invalid_request", "too long")
    try:
        pairs = parse_qsl(
            body.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(body),
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except ValueError as error:
        raise OAuthError("invalid_request", "not a form") from error
    values: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, value in pairs:
        if "\0" in value:
            raise OAuthError("invalid_request", "a NUL")
        if name in REPEATABLE:
            repeated.setdefault(name, []).append(value)
            continue
        if name in seen:
            raise OAuthError("invalid_request", "a repeated parameter")
        seen.add(name)
        if value:
            values[name] = value
    return Form(values, repeated)
