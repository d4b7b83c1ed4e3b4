"""Reads the tags that a request is counted by beside its key and model, as its client says:
`X-Tollgate-Tags: team=search,feature=chat`.

Knows no HTTP but the header's name.
"""

from __future__ import annotations

from collections.abc import Iterable

from billing.events import Tags
from billing.ledger.tags import (
    KEY_PATTERN,
    MAX_KEY_CHARS,
    MAX_TAGS,
    MAX_VALUE_CHARS,
    VALUE_PATTERN,
    to_tag,
)
from gateway.request_errors import BadField

HEADER = "x-tollgate-tags"
HEADER_BYTES = HEADER.encode()
MAX_CHARS = MAX_TAGS * (MAX_KEY_CHARS + MAX_VALUE_CHARS + len("=, "))
NO_TAGS: Tags = {}
_ONE = f"[ \\t]*{KEY_PATTERN}={VALUE_PATTERN}[ \\t]*"
TAGS_PATTERN = f"^{_ONE}(,{_ONE}){{0,{MAX_TAGS - 1}}}$"


def read_tags(headers: Iterable[tuple[bytes, bytes]]) -> Tags:
    """From ASGI's headers; several lines are one list (RFC 9110, 5.3). Raises: BadField."""
    lines = [value for name, value in headers if name == HEADER_BYTES]
    if not lines:
        return NO_TAGS
    text = b",".join(lines).decode("latin-1")
    if len(text) > MAX_CHARS:
        raise _bad(f"more than {MAX_CHARS} characters")
    found: Tags = {}
    for written in text.split(","):
        tag = to_tag(written.strip(" \t"))
        if tag is None:
            raise _bad("expected key=value, separated by commas")
        key, value = tag
        if key in found:
            raise _bad("a key is given twice")
        found[key] = value
    if len(found) > MAX_TAGS:
        raise _bad(f"more than {MAX_TAGS} tags")
    return found


def _bad(why: str) -> BadField:
    return BadField(f"Invalid value for '{HEADER}': {why}.", param=HEADER)
