"""A credential as whoever was given it may say it back, so that it can be left out. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from urllib.parse import quote

import msgspec

HIDDEN = b"[credential]"
MIN_HIDDEN_CHARS = 6
"""What is shorter is no secret, and a part of many words."""


def written(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """Return secrets as an answer may say them back: a value, what comes behind its scheme, or a
    line of it; plain, in JSON and in a URL. The longest first, so that none is left in pieces."""
    found: set[bytes] = set()
    for secret in secrets:
        for value in (secret, secret.partition(" ")[2], *secret.splitlines()):
            if len(value) >= MIN_HIDDEN_CHARS:
                found |= {value.encode(), quote(value, safe="").encode()}
                found |= {json.dumps(value)[1:-1].encode(), msgspec.json.encode(value)[1:-1]}
    return tuple(sorted(found, key=len, reverse=True))


def without(body: bytes, hidden: Sequence[bytes]) -> bytes:
    """Return a body without what is hidden. `hidden`: of `written`."""
    for each in hidden:
        body = body.replace(each, HIDDEN)
    return body
