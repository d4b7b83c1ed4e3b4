"""Leaves out of a body the fields that nobody here knows, where an installation ignores them.

Pure. A reader names one unknown field at a time; it is taken out of that object and of those beside
it that are of the same kind (messages of one role, parts of one type), and the body is read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from gateway.request_errors import BadField, UnknownField

IGNORED_HEADER = "x-tollgate-ignored-fields"
MAX_NAME_CHARS = 64
"""The header shortens a longer field name to this."""
MAX_IGNORED = 16
"""Names of unknown fields in one body. Each costs a reading; with more the next one is refused."""
_STEP = re.compile(r"(?P<name>[^.\[\]]+)|\[(?P<index>[0-9]+)\]")
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]-]")
_INDEX = re.compile(r"\[[0-9]+\]")


def known_part(body: bytes, read: Callable[[bytes], object]) -> tuple[bytes, tuple[str, ...]]:
    """Return the body without its unknown fields, and their paths without indices.

    `read`: the reader of the body. Raises: UnknownField, where there are too many or one cannot be
    found. What else is wrong with the body is left to who reads it.
    """
    ignored: list[str] = []
    while (found := unknown_in(body, read)) is not None:
        fields = msgspec.json.decode(body)
        if len(ignored) == MAX_IGNORED or not take_out(fields, steps_to(found.place), found.field):
            raise found
        body = msgspec.json.encode(fields)
        place = _INDEX.sub("[]", found.place)
        ignored.append(f"{place}.{found.field}" if place else found.field)
    return body, tuple(ignored)


def to_ignored_header(ignored: Iterable[str]) -> dict[str, str]:
    """Return the header that names what was left out. A name is the client's: what no field of a
    vendor has in its name is written `?`."""
    names = (_ODD.sub("?", name[:MAX_NAME_CHARS]) for name in ignored)
    found = ", ".join(names)
    return {IGNORED_HEADER: found} if found else {}


def unknown_in(body: bytes, read: Callable[[bytes], object]) -> UnknownField | None:
    """Return the first unknown field; None: there is none, or something else is wrong before it."""
    try:
        read(body)
    except UnknownField as error:
        return error
    except BadField:
        return None
    return None


def steps_to(place: str) -> list[str | int]:
    return [each["name"] or int(each["index"]) for each in _STEP.finditer(place)]


def take_out(node: Any, steps: list[str | int], field: str) -> int:
    """Take a field out of the object that the steps lead to, and of those of its kind. Return of
    how many."""
    if not steps:
        if not isinstance(node, dict) or field not in node:
            return 0
        del node[field]
        return 1
    step, *rest = steps
    if isinstance(step, int):
        if not isinstance(node, list) or step >= len(node):
            return 0
        kind = kind_of(node[step])
        return sum(take_out(each, rest, field) for each in node if kind_of(each) == kind)
    return take_out(node.get(step), rest, field) if isinstance(node, dict) else 0


def kind_of(node: Any) -> Any:
    return (node.get("role"), node.get("type")) if isinstance(node, dict) else type(node)
