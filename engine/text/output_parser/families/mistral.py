"""Calls as Mistral's models write them behind `[TOOL_CALLS]`: a JSON list of objects, or from
version 11 of its tokenizer on a name, `[ARGS]` and the arguments, for each call anew.
"""

from __future__ import annotations

from engine.text.output_parser.families.call_object import read_call_list, read_call_object
from engine.text.output_parser.reading.call_format import CallFormat, named
from engine.text.output_parser.reading.reader import NotACall, Reader, Steps

OPENS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
WRITING = CallFormat(
    before=named("arguments"), after="}", opens=f"{OPENS}[", between=", ", closes="]"
)
WRITING_V11 = CallFormat(before=lambda name: f"{OPENS}{name}{ARGS}", after="")
MARKERS = (OPENS, CALL_ID, ARGS)


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_on(OPENS)):
        yield from reader.attempt(_calls(reader), len(OPENS))


def _calls(reader: Reader) -> Steps[None]:
    yield from reader.literal(OPENS)
    yield from reader.skip()
    begins = yield from reader.peek()
    if begins == "[":
        yield from read_call_list(reader)
    elif begins == "{":
        yield from read_call_object(reader)
    else:
        yield from _named_call(reader)


def _named_call(reader: Reader) -> Steps[None]:
    name: list[str] = []
    while (char := (yield from reader.peek())) not in ("{", "[", ""):
        name.append(char)
        yield from reader.literal(char)
    if (yield from reader.literal(CALL_ID)):
        yield from reader.up_to(ARGS)
    elif not (yield from reader.literal(ARGS)) and char != "{":
        raise NotACall
    yield from reader.skip()
    yield from reader.call("".join(name).strip())
