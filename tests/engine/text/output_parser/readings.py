"""Holds what a parser made of a text, however it was cut."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.text.output_parser.parser import OutputParser
from engine.text.output_parser.reading.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallStart,
)


class Reading(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    """Names and arguments."""
    ends_with_calls: bool = False


def read(parser: OutputParser, pieces: Iterable[str]) -> Reading:
    """Checks besides that starts are numbered and arguments belong to the last one."""
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    reading = Reading(ends_with_calls=parser.ends_with_calls)
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                reading.content += text
            case ReasoningDelta(text):
                reading.reasoning += text
            case ToolCallStart(index, name):
                assert index == len(reading.calls)
                reading.calls.append((name, ""))
            case ArgumentsDelta(index, text):
                assert index == len(reading.calls) - 1
                name, before = reading.calls[-1]
                reading.calls[-1] = (name, before + text)
        assert not hasattr(delta, "text") or delta.text, "an empty delta"
    return reading


def cuts(text: str) -> Iterable[tuple[str, ...]]:
    """Whole, character by character, and cut at each place."""
    yield (text,)
    yield tuple(text)
    for place in range(1, len(text)):
        yield text[:place], text[place:]
