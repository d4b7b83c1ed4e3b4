"""Calls of a model whose family has no form of its own: an output that is a JSON object with a name
and arguments, or a list of such, fenced or not.
"""

from __future__ import annotations

from engine.text.output_parser.families.call_object import read_call_list, read_call_object
from engine.text.output_parser.reading.call_format import CallFormat, named
from engine.text.output_parser.reading.reader import Reader, Steps

FENCE, FENCED = "```json", "```"
WRITING = CallFormat(
    before=named("arguments"), after="}", opens="[", between=", ", closes="]", alone=True
)


def read(reader: Reader) -> Steps[None]:
    reader.show_content((yield from reader.skip()))
    if (yield from reader.peek()) in ("{", "[", "`"):
        yield from reader.attempt(_calls(reader))
    yield from reader.pass_on()


def _calls(reader: Reader) -> Steps[None]:
    is_fenced = yield from reader.literal(FENCE)
    yield from reader.skip()
    if (yield from reader.peek()) == "[":
        yield from read_call_list(reader)
    else:
        yield from read_call_object(reader)
    if is_fenced:
        yield from reader.closing(FENCED)
