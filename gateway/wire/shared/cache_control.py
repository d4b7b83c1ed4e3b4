"""Reads `cache_control` of a client's messages, parts of content and tools: up to where its prompt
is to be kept, and for how long.

Knows no template and no token: a place is one in the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from billing.cache_contracts import MAX_BREAKPOINTS, MAX_LOOKBACK, Ttl
from gateway.generate_request import CacheBreakpoint, PromptPlace
from gateway.request_errors import BadField

FIELD = "cache_control"
DEFAULT_TTL: Ttl = "5m"


class CacheControl(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's field, as gateways with OpenAI's format take it: all up to the end of what it
    stands in is to be kept."""

    type: Literal["ephemeral"]
    ttl: Ttl | None = None
    """None: 5m."""


Mark = tuple[str, CacheControl]
"""The path of a field, and its cache mark."""


class Block(NamedTuple):
    """A unit that counts as one when a breakpoint looks back: a tool, a part of content, a whole
    content or a message without any."""

    end: PromptPlace
    marks: list[Mark]
    """The cache marks of the block and, on a message's last block, of the message."""
    is_empty: bool = False


def to_breakpoints(
    messages: Sequence[Any], tools: Sequence[Any] = ()
) -> tuple[CacheBreakpoint, ...]:
    """Raises: BadField."""
    if not is_marked(messages, tools):
        return ()
    return breakpoints_of([*of_tools(tools), *_of_messages(messages)])


def breakpoints_of(blocks: Sequence[Block]) -> tuple[CacheBreakpoint, ...]:
    """Return the breakpoints of a whole prompt, in its order. Raises: BadField."""
    marked = [
        (position, param, control)
        for position, block in enumerate(blocks)
        for param, control in block.marks
    ]
    if len(marked) > MAX_BREAKPOINTS:
        param = marked[MAX_BREAKPOINTS][1]
        raise BadField(
            f"Invalid value for '{param}': at most {MAX_BREAKPOINTS} of them in a request.",
            param=param,
        )
    found: list[CacheBreakpoint] = []
    for position, param, control in marked:
        block, ttl = blocks[position], control.ttl or DEFAULT_TTL
        if block.is_empty:
            raise BadField(f"Invalid value for '{param}': the text is empty.", param=param)
        if ttl == "1h" and found and found[-1].ttl == "5m":
            raise BadField(
                f"Invalid value for '{param}.ttl': one of 1h must come before those of 5m.",
                param=f"{param}.ttl",
            )
        since = position - MAX_LOOKBACK
        found.append(CacheBreakpoint(block.end, ttl, blocks[since].end if since >= 0 else None))
    return tuple(found)


def is_marked(messages: Sequence[Any], tools: Sequence[Any]) -> bool:
    """Return whether a request has breakpoints; hardly any has."""
    contents = (message.content for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(each.cache_control is not None for each in (*tools, *messages, *parts))


def of_tools(tools: Sequence[Any]) -> Iterator[Block]:
    for number, tool in enumerate(tools):
        place = PromptPlace(num_tools=number + 1)
        yield Block(place, marks_of(tool, f"tools[{number}]"))


def _of_messages(messages: Sequence[Any]) -> Iterator[Block]:
    for number, message in enumerate(messages):
        path, whole = f"messages[{number}]", PromptPlace(num_messages=number + 1)
        own, content = marks_of(message, path), message.content
        if isinstance(content, list) and content:
            yield from _of_parts(content, path, number, own)
        else:
            yield Block(whole, own, is_empty=content == "" or content == [])


def _of_parts(parts: Sequence[Any], path: str, number: int, own: list[Mark]) -> Iterator[Block]:
    """The text parts of a message are lines of one text, which each ends further on."""
    num_chars = -1
    for index, part in enumerate(parts):
        num_chars += 1 + len(part.text)
        found = marks_of(part, f"{path}.content[{index}]")
        if index == len(parts) - 1:
            yield Block(PromptPlace(number + 1), found + own, is_empty=not part.text)
        else:
            yield Block(PromptPlace(number + 1, num_chars), found, is_empty=not part.text)


def marks_of(holder: Any, path: str) -> list[Mark]:
    control = holder.cache_control
    return [] if control is None else [(f"{path}.{FIELD}", control)]
