"""A grammar for an output that may call, and whose calls are to be valid: free text around them in
the family's own form, or an answer of another grammar in their place.

Knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol import Grammar
from engine.text.output_parser.grammars.forced_calls import Tool, forced_calls
from engine.text.output_parser.grammars.lark import Lark, grammar_rule
from engine.text.output_parser.reading.call_format import CallFormat
from engine.text.output_parser.reading.reader import MAX_CALLS

NO_CALL = r"/([^ \t\r\n{\[`](.|\n)*)?/"
"""Text without a call, for formats that are recognized only by the output's first character."""


def answer_or_calls(
    answer: Grammar, writing: CallFormat, lark: Lark, tools: Sequence[Tool], *, max_calls: int
) -> list[str]:
    """Rules, `offer` first. Of a family with a marker: the library's lexer is greedy, and drops an
    answer that goes the first steps of a call together with it. Raises msgspec.DecodeError."""
    rules = forced_calls(writing, lark, tools, max_calls=max_calls)
    return ["offer: calls | answer", f"answer: {grammar_rule(answer)}", *rules]


def text_and_calls(
    writing: CallFormat,
    markers: Sequence[str],
    lark: Lark,
    tools: Sequence[Tool],
    *,
    max_calls: int,
) -> list[str]:
    """Rules, `offer` first. Whatever follows one of `markers` that a call begins with is a call."""
    marker = marker_of(writing, markers)
    if marker is None:
        rules = forced_calls(writing, lark, tools, max_calls=max_calls)
        return ["offer: calls | text", f"text: {NO_CALL}", *rules]
    turns = "turn?" if max_calls == 1 else f"turn{{0,{MAX_CALLS}}}"
    return [
        f"offer: {turns} text",
        "turn: lead calls",
        *lark.up_to("lead", marker),
        r"text: /(.|\n)*/",
        *forced_calls(behind(marker, writing), lark, tools, max_calls=max_calls),
    ]


def marker_of(writing: CallFormat, markers: Sequence[str]) -> str | None:
    """Return what a call, or several, begins with and nothing else does."""
    begins = writing.opens or writing.before("")
    return next((each for each in markers if begins.startswith(each)), None)


def behind(marker: str, writing: CallFormat) -> CallFormat:
    """Return what is left of it; a turn is one call where each begins with the marker."""
    if writing.opens:
        return writing._replace(opens=writing.opens[len(marker) :])
    return writing._replace(before=lambda name: writing.before(name)[len(marker) :], several=False)
