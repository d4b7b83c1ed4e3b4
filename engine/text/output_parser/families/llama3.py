"""Calls as Llama 3.1 to 3.3 write them: the whole output is a JSON object with its arguments as
`parameters`, or several with `;` between, behind `<|python_tag|>` or without.
"""

from __future__ import annotations

from engine.text.output_parser.families.call_object import (
    expect,
    read_call_object,
    read_next_object,
)
from engine.text.output_parser.reading.call_format import CallFormat, named
from engine.text.output_parser.reading.reader import Reader, Steps

TAG = "<|python_tag|>"
WRITING = CallFormat(before=named("parameters"), after="}", between="; ", several=False)
"""Its template takes one call in a turn."""
MARKERS = (TAG,)


def read(reader: Reader) -> Steps[None]:
    reader.show_content((yield from reader.skip()))
    if (yield from reader.peek()) == "{":
        yield from _objects(reader, "")
    while (yield from reader.pass_on(TAG)):
        yield from _objects(reader, TAG)


def _objects(reader: Reader, tag: str) -> Steps[None]:
    if (yield from reader.attempt(_tagged(reader, tag), len(tag))):
        while (yield from reader.attempt(read_next_object(reader, ";"))):
            pass


def _tagged(reader: Reader, tag: str) -> Steps[None]:
    yield from expect(reader, tag)
    yield from reader.skip()
    yield from read_call_object(reader)
