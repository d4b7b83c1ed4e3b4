"""Removes credentials from texts of those who were given them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from urllib.parse import quote

import msgspec

HIDDEN = b"[credential]"
MIN_HIDDEN_CHARS = 6
"""Shorter values are no secrets, and parts of many words."""


def spellings(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """Return how a text may spell secrets: a value, its part behind the scheme, or a line of it;
    plain, in JSON and in a URL. The longest come first, so that no part of one is left."""
    found: set[bytes] = set()
    for secret in secrets:
        for value in (secret, secret.partition(" ")[2], *secret.splitlines()):
            if len(value) >= MIN_HIDDEN_CHARS:
                found |= {value.encode(), quote(value, safe="").encode()}
                found |= {json.dumps(value)[1:-1].encode(), msgspec.json.encode(value)[1:-1]}
    return tuple(sorted(found, key=len, reverse=True))


def without(body: bytes, hidden: Sequence[bytes]) -> bytes:
    """Return a body without secrets. `hidden`: their `spellings`."""
    for each in hidden:
        body = body.replace(each, HIDDEN)
    return body
