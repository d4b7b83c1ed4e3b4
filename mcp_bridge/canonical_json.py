"""Encodes a JSON value in its canonical form (RFC 8785) and digests it.

Values that RFC 8785 cannot encode exactly are refused with their path, never rounded: integers
that no double represents (I-JSON, RFC 7493 section 2.2), NaN and infinities, lone surrogates. Two
documents with one digest are thus the same document. Pure; bounded in depth, nodes and bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import msgspec
import rfc8785

from mcp_bridge.errors import NotCanonical

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
Parts: TypeAlias = tuple[str | int, ...]

MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_BYTES = 4 << 20
MAX_SAFE_INTEGER = 2**53 - 1
FIRST_EXPONENT = 10**21
"""ECMAScript writes numbers from here on with an exponent."""

SHORT_BYTES = 16 << 10
"""JSON of this size holds fewer than MAX_NODES values, so it need not be walked to be bounded."""

NOT_PLAIN = re.compile(rb"\\|\x7f|null|[0-9][.eE]|[0-9]{16}")

ALGORITHM = "sha256"


def pointer(parts: Parts) -> str:
    """Return the JSON pointer (RFC 6901) of a place; it is empty for the whole document."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def walk(value: object) -> Iterator[tuple[Parts, object]]:
    """Yield every value of a document with its place, parents first.

    Raises: NotCanonical, past the bounds.
    """
    waiting: list[tuple[Parts, object]] = [((), value)]
    seen = 0
    while waiting:
        parts, one = waiting.pop()
        seen += 1
        if seen > MAX_NODES:
            raise NotCanonical("", f"more than {MAX_NODES} values")
        if len(parts) > MAX_DEPTH:
            raise NotCanonical(pointer(parts[:4]) + "/...", f"nests deeper than {MAX_DEPTH}")
        yield parts, one
        if isinstance(one, Mapping):
            waiting.extend(((*parts, key), inner) for key, inner in reversed(list(one.items())))
        elif isinstance(one, list | tuple):
            waiting.extend(((*parts, at), one[at]) for at in reversed(range(len(one))))


def canonical_bytes(value: object) -> bytes:
    """Return the canonical form of `value` in UTF-8, at most MAX_BYTES. Raises: NotCanonical."""
    large = False
    for parts, one in walk(value):
        problem = problem_of(one)
        if problem:
            raise NotCanonical(pointer(parts), problem)
        large = large or is_large_int(one)
    if large:
        value = with_doubles(value)
    encoded = rfc8785.dumps(value)  # type: ignore[arg-type]
    if len(encoded) > MAX_BYTES:
        raise NotCanonical("", f"{len(encoded)} bytes, more than {MAX_BYTES}")
    return encoded


def problem_of(one: object) -> str | None:
    """Return why a value, without what is inside it, has no canonical form; None: it has one."""
    if isinstance(one, Mapping):
        if not all(isinstance(key, str) for key in one):
            return "a key that is no string"
        return "a key with a lone surrogate" if any(map(has_lone_surrogate, one)) else None
    if one is None or isinstance(one, bool | list | tuple):
        return None
    if isinstance(one, int):
        return None if not is_large_int(one) or is_exact_double(one) else "an integer beyond 2^53"
    if isinstance(one, float):
        return None if math.isfinite(one) else "no finite number"
    if isinstance(one, str):
        return "a lone surrogate" if has_lone_surrogate(one) else None
    return f"no JSON: {type(one).__name__}"


def is_large_int(one: object) -> bool:
    return isinstance(one, int) and abs(one) > MAX_SAFE_INTEGER


def is_exact_double(one: int) -> bool:
    """True if a double holds a large integer exactly and is printed with the same digits.

    2^53 is one, so that canonical JSON can be read and encoded again; 2^53 + 1 would be rounded.
    """
    return abs(one) < FIRST_EXPONENT and rfc8785.dumps(float(one)) == str(one).encode()


def with_doubles(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: with_doubles(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_doubles(inner) for inner in value]
    return float(value) if isinstance(value, int) and is_large_int(value) else value


def has_lone_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def short_json(value: object) -> bytes | None:
    """Return decoded JSON encoded again, keys sorted, if it is so short that it is in all bounds.

    None: it has to be walked.
    """
    try:
        encoded = msgspec.json.encode(value, order="sorted")
    except (UnicodeEncodeError, RecursionError):
        return None
    if len(encoded) > SHORT_BYTES or encoded.count(b"{") + encoded.count(b"[") > MAX_DEPTH:
        return None
    return encoded


def plain_json(value: object) -> bytes | None:
    """Return the canonical form of decoded JSON that is short, ASCII without escapes, and has no
    numbers but small integers. None: use `canonical_bytes`."""
    encoded = short_json(value)
    if encoded is None or not encoded.isascii() or NOT_PLAIN.search(encoded):
        return None
    return encoded


def digest_of_bytes(encoded: bytes) -> str:
    """Return `sha256:` and 64 hexadecimal digits."""
    return f"{ALGORITHM}:{hashlib.sha256(encoded).hexdigest()}"


def digest(value: object) -> str:
    """Return the digest of the canonical form. Raises: NotCanonical."""
    return digest_of_bytes(canonical_bytes(value))
