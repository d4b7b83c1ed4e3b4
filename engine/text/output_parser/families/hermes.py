"""Calls as Hermes, Qwen 2.5 and 3 and penny write them: each a JSON object between
`<tool_call>` and `</tool_call>`, behind or without content.
"""

from __future__ import annotations

from engine.text.output_parser.families.call_object import expect, read_call_object
from engine.text.output_parser.reading.call_format import CallFormat, named
from engine.text.output_parser.reading.reader import Reader, Steps

OPENS, CLOSES = "<tool_call>", "</tool_call>"
_OBJECT = named("arguments")
WRITING = CallFormat(
    before=lambda name: f"{OPENS}\n{_OBJECT(name)}", after=f"}}\n{CLOSES}", between="\n"
)
MARKERS = (OPENS, CLOSES)


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_on(OPENS)):
        yield from reader.attempt(_call(reader), len(OPENS))


def _call(reader: Reader) -> Steps[None]:
    yield from expect(reader, OPENS)
    yield from reader.skip()
    yield from read_call_object(reader)
    yield from reader.closing(CLOSES)
