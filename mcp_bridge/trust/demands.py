"""Finds where a definition asks something of a model, by `instruction_score`: in descriptions, in
the names of arguments, and where no prose belongs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mcp_bridge.canonical_json import Parts, walk
from mcp_bridge.text_safety.instruction_score import Demand, Place, find_demand, sentences, topic_of

VALUES = frozenset(
    ("title", "enum", "const", "default", "examples", "$comment", "_meta", "pattern", "required")
)
"""Members whose texts are values or labels, in which no prose belongs."""
MAX_CHARS = 32 << 10
MAX_OWN = 64
NONE = re.compile(r"(?!)")
UNWORDED = re.compile(r"[_\-.:/\s]+")


def find_demands(value: object) -> Iterator[tuple[Parts, Demand]]:
    """Yield what a tool, a prompt, a resource or instructions ask, and where. Raises:
    NotCanonical."""
    topic, own = 0, NONE
    if isinstance(value, Mapping):
        topic, own = topic_of(names_of(value), first_sentence(value)), own_names(value)
    for parts, place, text in texts_of(value):
        found = find_demand(own.sub("it", text[:MAX_CHARS]), place, topic)
        if found is not None:
            yield parts, found


def own_names(thing: Mapping[str, object]) -> re.Pattern[str]:
    """Return what matches the thing's own name and those of its arguments, which are no other
    tool's."""
    names = [str(thing.get("name", "")), *arguments_of(thing)]
    long = sorted((name for name in names if "_" in name), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, long[:MAX_OWN]))) if long else NONE


def arguments_of(thing: Mapping[str, object]) -> list[str]:
    schema = thing.get("inputSchema")
    arguments = schema.get("properties") if isinstance(schema, Mapping) else None
    return list(arguments) if isinstance(arguments, Mapping) else []


def first_sentence(thing: Mapping[str, object]) -> str:
    return next(iter(sentences(str(thing.get("description", ""))[:MAX_CHARS])), "")


def names_of(thing: Mapping[str, object]) -> Iterator[str]:
    """Yield the names that say what a thing is about."""
    yield spelled(str(thing.get("name", "")))
    for name in arguments_of(thing):
        if name.isalpha():  # `password`, and not `password_of_the_user`
            yield name


def texts_of(value: object) -> Iterator[tuple[Parts, Place, str]]:
    """Yield texts with what kind of place they stand in; the name of an argument with what is said
    of it."""
    for parts, one in walk(value):
        if isinstance(one, Mapping) and parts[-1:] == ("properties",):
            for name in one:
                yield (*parts, name), "argument", spelled(str(name))
        if not isinstance(one, str) or parts == ("name",):
            continue
        if parts[-1:] == ("description",):
            named = argument_of(parts)
            if named is None:
                yield parts, "description", one
            else:
                yield parts, "argument", f"{spelled(named)}: {one}"
        elif not parts:
            yield parts, "description", one
        elif not VALUES.isdisjoint(parts) and " " in one:
            yield parts, "value", one


def argument_of(parts: Parts) -> str | None:
    """Return the argument that a text describes."""
    names = [
        str(one) for before, one in zip(parts, parts[1:], strict=False) if before == "properties"
    ]
    return names[-1] if names else None


def spelled(name: str) -> str:
    """Return a name as the words that it consists of."""
    return UNWORDED.sub(" ", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name))
