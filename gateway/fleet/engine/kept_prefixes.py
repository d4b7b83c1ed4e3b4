"""The places up to which a prompt is to be kept, in tokens: where breakpoints of a conversation lie
in what the chat template made of it.

Knows no engine, no tenant and no price.

A template says what it makes of a conversation, not where its parts end up in it. So the part of
the conversation before a place is rendered alone: as far as that and the whole prompt are the same
text, the prompt does not depend on what comes behind, and the tokens that end there are the prefix.
What a template puts elsewhere (tools into the system message, a date before everything) moves the
place to where that is true. Places are whole blocks, as the engine keeps them, and leave the last
token out, which is always computed.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from billing.cache_contracts import FLOORS, Breakpoint
from engine.errors import InvalidRequest
from gateway.generate_request import ChatPrompt, PromptPlace

SYSTEM = ("system", "developer")
Message = dict[str, Any]


class Prefixes(msgspec.Struct, frozen=True):
    """The parts of a prompt that are to be kept."""

    breakpoints: tuple[Breakpoint, ...] = ()
    digests: tuple[bytes, ...] = ()
    """The digests of the tokens before each place."""


NO_PREFIXES = Prefixes()


class KeepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The prefixes that one attempt asked an engine to keep."""

    org_id: str
    model: str
    engine_id: str
    """The id of the engine's process."""
    asked_at: float
    """Unix seconds."""
    breakpoints: tuple[Breakpoint, ...]
    prefixes: tuple[bytes, ...]
    """The digests of the tokens before each."""


OnAsked = Callable[[str, KeepRequest], None]
"""A callback that gets an attempt's id and its request to keep a prefix."""
Render = Callable[[Sequence[Message], int | None], str]
"""A part of a conversation, with so many of its tools (None: all), to which nobody is to answer.
Raises `engine.errors.InvalidRequest`."""


def unheard(_attempt_id: str, _asked: KeepRequest) -> None:
    """Do nothing: nobody wants to know."""


def find_breakpoints(
    prompt: ChatPrompt, text: str, ends: Sequence[int], render: Render, block_size: int
) -> tuple[Breakpoint, ...]:
    """Find where the breakpoints of a conversation lie in its tokens. `text`: the whole prompt;
    `ends`: where each of its tokens ends in it. What lies before the contract's least is too short
    to be kept, and of two that come to the same place one is."""
    last = (len(ends) - 1) // block_size * block_size

    def tokens_before(place: PromptPlace) -> int:
        num_chars = common_chars(render_before(prompt.messages, place, render), text)
        return min(last, bisect_right(ends, num_chars) // block_size * block_size)

    found: list[Breakpoint] = []
    for each in prompt.breakpoints:
        position = tokens_before(each.end)
        least = found[-1].position + 1 if found else FLOORS["explicit"].min_tokens
        if position >= least:
            since = 0 if each.since is None else tokens_before(each.since)
            found.append(Breakpoint(position, each.ttl, since))
    return tuple(found)


def render_before(messages: Sequence[Message], place: PromptPlace, render: Render) -> str:
    """Render what the template makes of the conversation before a place. One that does not take
    that alone may take it before a message that says nothing; of one that takes neither nothing is
    known."""
    before, num_tools = messages_before(messages, place), None
    if not place.num_messages:
        num_tools = place.num_tools
    following = [{**each, "content": ""} for each in messages[len(before) :][:1]]
    for part in (before, before + following):
        try:
            return render(part, num_tools)
        except InvalidRequest:
            continue
    return ""


def messages_before(messages: Sequence[Message], place: PromptPlace) -> list[Message]:
    """Return the messages before a place. Tools stand beside the system's message, wherever a
    template puts them."""
    if not place.num_messages:
        return [each for each in messages[:1] if each["role"] in SYSTEM]
    *whole, last = messages[: place.num_messages]
    if place.num_chars is not None:
        last = {**last, "content": last["content"][: place.num_chars]}
    if place.num_calls is not None:
        calls = last["tool_calls"][: place.num_calls]
        last = {name: value for name, value in last.items() if name != "tool_calls"}
        last |= {"tool_calls": calls} if calls else {}
    return [*whole, last]


def common_chars(one: str, other: str) -> int:
    """Count the characters with which both begin."""
    if other.startswith(one):
        return len(one)
    shorter = range(min(len(one), len(other)))
    return bisect_left(shorter, True, key=lambda at: one[: at + 1] != other[: at + 1])


def to_prefixes(token_ids: Sequence[int], breakpoints: tuple[Breakpoint, ...]) -> Prefixes:
    digests = (
        blake2b(array("I", token_ids[: each.position]).tobytes(), digest_size=32).digest()
        for each in breakpoints
    )
    return Prefixes(breakpoints, tuple(digests))


def under(salt: str, digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return a name that nobody can compute who does not know the salt."""
    key = blake2b(salt.encode(), digest_size=32).digest()
    return tuple(blake2b(each, key=key, digest_size=16).digest() for each in digests)


def num_renders(prompt: ChatPrompt) -> int:
    """Count how often parts of the conversation are rendered for its breakpoints."""
    return sum(1 if each.since is None else 2 for each in prompt.breakpoints)
