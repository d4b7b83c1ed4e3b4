"""Lists what an output turns out to be, piece by piece: the closed list.

Knows no wire format and no model.
"""

from __future__ import annotations

import msgspec


class ContentDelta(msgspec.Struct, frozen=True):
    """A piece of the answer itself."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """A piece of what the model thought before it answered."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call has begun; what follows until the next start are its arguments. Whoever shows it makes
    its id."""

    index: int
    """0, 1, 2 ... in the order of the output."""
    name: str
    """The name of an offered tool."""


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """A piece of the call's arguments, as the model wrote them. Together they are a JSON object, or
    the beginning of one where the output ended, or went wrong, within it.
    """

    index: int
    """The index of the call."""
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta
