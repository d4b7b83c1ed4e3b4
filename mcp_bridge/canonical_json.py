"""Writes a JSON value in its one canonical form, and digests it: RFC 8785 (JSON Canonicalization
Scheme).

What RFC 8785 cannot write exactly is refused with its path, never rounded: integers that are not
as a double is written (I-JSON, RFC 7493 section 2.2), NaN and infinities, lone surrogates. Two
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
"""From here on ECMAScript writes a number with an exponent."""

SHORT_BYTES = 16 << 10
"""Of JSON that is looked at as it is written: it holds fewer values than MAX_NODES."""
NOT_PLAIN = re.compile(rb"\\|\x7f|null|[0-9][.eE]|[0-9]{16}")

ALGORITHM = "sha256"


def pointer(parts: Parts) -> str:
    """The JSON pointer (RFC 6901) of a place; of the whole document it is empty."""
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def walk(value: object) -> Iterator[tuple[Parts, object]]:
    """Yield every value of a document with its place, parents first; NotCanonical past the
    bounds."""
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
    """The UTF-8 of `value` as RFC 8785 writes it, of at most MAX_BYTES; NotCanonical else."""
    large = False
    for parts, one in walk(value):
        problem = problem_of(one)
        if problem:
            raise NotCanonical(pointer(parts), problem)
        large = large or beyond(one)
    if large:
        value = with_doubles(value)
    written = rfc8785.dumps(value)  # type: ignore[arg-type]
    if len(written) > MAX_BYTES:
        raise NotCanonical("", f"{len(written)} bytes, more than {MAX_BYTES}")
    return written


def problem_of(one: object) -> str | None:
    if isinstance(one, Mapping):
        if not all(isinstance(key, str) for key in one):
            return "a key that is no string"
        return "a key with a lone surrogate" if any(map(broken, one)) else None
    if one is None or isinstance(one, bool | list | tuple):
        return None
    if isinstance(one, int):
        return None if not beyond(one) or written_as_double(one) else "an integer beyond 2^53"
    if isinstance(one, float):
        return None if math.isfinite(one) else "no finite number"
    if isinstance(one, str):
        return "a lone surrogate" if broken(one) else None
    return f"no JSON: {type(one).__name__}"


def beyond(one: object) -> bool:
    return isinstance(one, int) and abs(one) > MAX_SAFE_INTEGER


def written_as_double(one: int) -> bool:
    """True if an integer beyond 2^53 that reads as a double is written: 2^53 itself is, so that
    what was written can be read again; 2^53 + 1 would be rounded."""
    return abs(one) < FIRST_EXPONENT and rfc8785.dumps(float(one)) == str(one).encode()


def with_doubles(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: with_doubles(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [with_doubles(inner) for inner in value]
    return float(value) if isinstance(value, int) and beyond(value) else value


def broken(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def written_shortly(value: object) -> bytes | None:
    """Its JSON, with its keys in order, if that shows by itself that `value` is within all bounds;
    None: it is to be walked. `value`: what JSON was read into."""
    try:
        written = msgspec.json.encode(value, order="sorted")
    except UnicodeEncodeError:
        return None
    if len(written) > SHORT_BYTES or written.count(b"{") + written.count(b"[") > MAX_DEPTH:
        return None
    return written


def written_plainly(value: object) -> bytes | None:
    """The canonical form of what JSON was read into, if it needs no thought: short, of ASCII
    without escapes, and no numbers but small integers. None: `canonical_bytes` knows it."""
    written = written_shortly(value)
    if written is None or not written.isascii() or NOT_PLAIN.search(written):
        return None
    return written


def digest_of_bytes(written: bytes) -> str:
    """Return `sha256:` and 64 hexadecimal digits."""
    return f"{ALGORITHM}:{hashlib.sha256(written).hexdigest()}"


def digest(value: object) -> str:
    """The digest of the canonical form; NotCanonical where there is none."""
    return digest_of_bytes(canonical_bytes(value))
