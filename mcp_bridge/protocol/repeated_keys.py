"""Finds definitions whose JSON has a key twice, which two readers read as two definitions.

JSON parsers keep the last of two equal keys, others the first (RFC 8259, section 4), so a person
could approve one text and a client be shown another. A message is read as usual; only a list of
definitions that may have such a key is read a second time. Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import msgspec

NAMES = {
    "tools": "name",
    "prompts": "name",
    "resources": "uri",
    "resourceTemplates": "uriTemplate",
}
"""The members of a result that list definitions, and what identifies one."""
REFUSED = "tollgate/refused"
"""The member of a definition that is refused: a pointer, and the reason. It stands in the JSON,
since lists travel between workers; a server that sends it is refused by its own word."""
DISGUISES = (b" :", b"\t:", b"\n:", b"\r:", b"\\u0022", b"\\u003a", b"\\u003A")
"""Spellings of a quote and a colon that are not `":`."""


class RepeatedKeys(dict[str, Any]):
    """An object that had a key twice."""

    key = ""


class KeyRepeated(ValueError):
    """A key stands twice outside of a definition."""


def without_repeats(body: bytes, message: Any) -> Any:
    """Return a message without the definitions that have a key twice: each is replaced by its name
    and REFUSED. `message`: `body`, decoded. Raises: KeyRepeated."""
    result = message.get("result") if isinstance(message, dict) else None
    if not isinstance(result, dict) or NAMES.keys().isdisjoint(result):
        return message
    if not may_repeat(body, message):
        return message
    found: list[RepeatedKeys] = []

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) == len(pairs):
            return made
        marked = RepeatedKeys(made)
        (marked.key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        found.append(marked)
        return marked

    read = json.loads(body, object_pairs_hook=to_object)
    if not found:
        return message
    if any(isinstance(one, RepeatedKeys) for one in (read, read["result"])):
        raise KeyRepeated
    lists: dict[str, Any] = {}
    for member, name in NAMES.items():
        items = read["result"].get(member)
        if isinstance(items, list):
            lists[member] = [refused_or_same(item, name) for item in items]
    return {**message, "result": {**result, **lists}}


def may_repeat(body: bytes, message: Any) -> bool:
    """False if no key stands twice: the text has as many `":` as it has when it is written anew
    from what was read, in which each key stands once."""
    if any(disguise in body for disguise in DISGUISES):
        return True
    return body.count(b'":') != msgspec.json.encode(message).count(b'":')


def refused_or_same(item: Any, name: str) -> Any:
    repeated = first_repeat(item)
    if repeated is None:
        return item
    path, key = repeated
    reason = f"the key {json.dumps(key[:80])} stands twice"
    named = {name: item[name]} if isinstance(item, dict) and name in item else {}
    return {**named, REFUSED: [path, reason]}


def first_repeat(item: Any) -> tuple[str, str] | None:
    """Return the place of the first object with a repeated key, and the key."""
    waiting: list[tuple[str, Any]] = [("", item)]
    while waiting:
        path, one = waiting.pop()
        if isinstance(one, RepeatedKeys):
            return path, one.key
        if isinstance(one, dict):
            waiting.extend(
                (f"{path}/{key.replace('~', '~0').replace('/', '~1')}", inner)
                for key, inner in one.items()
            )
        elif isinstance(one, list):
            waiting.extend((f"{path}/{at}", inner) for at, inner in enumerate(one))
    return None
