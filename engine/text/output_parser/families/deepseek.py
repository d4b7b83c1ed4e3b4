"""Calls as DeepSeek V3, R1 (arguments in a fence behind the word `function`) and V3.1 (bare) write
them.
"""

from __future__ import annotations

from engine.text.output_parser.families.call_object import expect
from engine.text.output_parser.reading.call_format import CallFormat
from engine.text.output_parser.reading.reader import Reader, Steps

OPENS, CLOSES = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, NAMED, CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIND = "function"
FENCE, FENCED = "```json", "```"
WRITING = CallFormat(
    before=lambda name: f"{CALL}{KIND}{NAMED}{name}\n{FENCE}\n",
    after=f"\n{FENCED}{CALLED}",
    opens=OPENS,
    between="\n",
    closes=CLOSES,
)
WRITING_V31 = CallFormat(
    before=lambda name: f"{CALL}{name}{NAMED}", after=CALLED, opens=OPENS, closes=CLOSES
)
MARKERS = (OPENS, CLOSES, CALL, NAMED, CALLED)


def read(reader: Reader) -> Steps[None]:
    while (yield from reader.pass_on(OPENS)):
        if (yield from reader.attempt(_first(reader), len(OPENS))):
            while (yield from reader.attempt(_call(reader))):
                pass
            yield from reader.closing(CLOSES)


def _first(reader: Reader) -> Steps[None]:
    yield from expect(reader, OPENS)
    yield from _call(reader)


def _call(reader: Reader) -> Steps[None]:
    yield from reader.skip()
    yield from expect(reader, CALL)
    name = yield from reader.up_to(NAMED)
    yield from reader.skip()
    is_fenced = name == KIND and (yield from reader.peek()) != "{"
    if is_fenced:
        name = yield from reader.up_to(FENCE)
        yield from reader.skip()
    yield from reader.call(name.strip())
    if is_fenced:
        yield from reader.closing(FENCED)
    yield from reader.closing(CALLED)
