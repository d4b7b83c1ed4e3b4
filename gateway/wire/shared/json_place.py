"""Finds where in a JSON body something is: from a byte to the path of its field,
`messages[0].content`.

It reads bodies that were refused, broken ones too, so it believes nothing of them: one pass of a
regular expression that cannot backtrack, a bounded number of steps in Python, and "unknown" (None)
where no field can be named. Knows no OpenAI.
"""

from __future__ import annotations

import re
from itertools import islice

import msgspec

from foundation.json_values import MAX_VALUES

MAX_STEPS = 2 * MAX_VALUES
"""A value is a step, and the end of an array or object is one: whatever `has_more_values` let pass
is read to its end."""
MAX_NAMED_DEPTH = 32
MAX_PATH_CHARS = 200
"""Keys are what a client made up."""

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPEN_STRING = _STRING + rb"?"
"""Up to the end of the body, if nothing closes it."""

_STEP = re.compile(
    rb'(?:[^"\[\]{},]++|%b)*+(?:(?P<mark>[{,])(?:\s*+(?P<key>%b))?+|(?P<edge>[\[\]}])|\Z)'
    % (_OPEN_STRING, _STRING),
    re.DOTALL,
)
"""Scalars, then what changes the path; after `{` or a comma the key that may follow."""

_NUMBER = re.compile(
    rb'(?:[^"0-9]++|%b)*+(?:(?P<number>[0-9][0-9.eE+-]*+)|\Z)' % _OPEN_STRING, re.DOTALL
)
_LONG_NUMBER = re.compile(rb"[0-9.]{300}|[eE]\+?[0-9]{3}")

_LONE_SURROGATE = re.compile(
    rb"\\(?<!\\\\)(?:\\\\)*+u"
    rb"(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)

_NUL = re.compile(rb"\\(?<!\\\\)(?:\\\\)*+u0000")

_BROKEN_LITERAL = re.compile(rb"(?<=[:\[,\s])[tfn](?!rue\b|alse\b|ull\b)")
LITERAL_BYTES = 6
"""`false` and what stands before it: the decoder tells of a broken literal behind its place."""


def locate(body: bytes, offset: int) -> str | None:
    """The path of the field that the byte belongs to; between two fields, of the one before it."""
    frames: list[bytes | int | None] = []  # of an array the index, of an object the key
    for step in islice(_STEP.finditer(body), MAX_STEPS):
        kind = "mark" if step["mark"] else "edge"
        mark = step[kind]
        if mark is None or step.start(kind) >= offset:
            return to_path(frames)
        match mark:
            case b"{":
                frames.append(step["key"])
            case b"[":
                frames.append(0)
            case b",":
                step_on(frames, step["key"])
            case _ if frames:
                frames.pop()
        if len(frames) > MAX_NAMED_DEPTH:
            return to_path(frames)
    return None


def step_on(frames: list[bytes | int | None], key: bytes | None) -> None:
    if not frames:
        return
    last = frames[-1]
    if isinstance(last, int):
        frames[-1] = last + 1
    elif key is not None:
        frames[-1] = key


def to_path(frames: list[bytes | int | None]) -> str | None:
    """Cut where it becomes too long to be read."""
    path = ""
    for frame in frames:
        if frame is None:
            break
        if isinstance(frame, int):
            longer = f"{path}[{frame}]"
        else:
            key = frame[1:-1].decode(errors="replace")
            longer = f"{path}.{key}" if path else key
        if len(longer) > MAX_PATH_CHARS:
            return path or longer[:MAX_PATH_CHARS]
        path = longer
    return path or None


def describe(body: bytes, offset: int) -> str:
    line = body.count(b"\n", 0, offset) + 1
    column = offset - body.rfind(b"\n", 0, offset)
    return f"line {line}, column {column}, byte {offset}"


def invalid_utf8(body: bytes) -> int | None:
    """The first byte that is not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        return error.start
    return None


def lone_surrogate(body: bytes) -> int | None:
    """Find where half of a surrogate pair is written as an escape, as in `"\\ud800"`."""
    found = _LONE_SURROGATE.search(body)
    return None if found is None else found.end() - 1


def escaped_nul(body: bytes) -> int | None:
    """Find where a NUL is written, which JSON knows as an escape alone."""
    found = _NUL.search(body)
    return None if found is None else found.end() - 1


def number_out_of_range(body: bytes) -> int | None:
    """Find where a number stands that neither an integer nor a float here can hold."""
    for found in islice(_NUMBER.finditer(body), MAX_STEPS):
        number = found["number"]
        if number is not None and _LONG_NUMBER.search(number):
            try:
                msgspec.json.decode(number)
            except msgspec.DecodeError:
                return found.start("number")
    return None


def start_of_literal(body: bytes, offset: int) -> int:
    """`offset`, or where the broken `true`, `false` or `null` just before it begins."""
    begin = max(0, offset - LITERAL_BYTES)
    found = _BROKEN_LITERAL.search(body, begin, offset)
    return offset if found is None else found.start()
