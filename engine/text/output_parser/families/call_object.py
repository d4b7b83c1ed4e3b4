"""A call written as a JSON object, `{"name": "f", "arguments": {...}}`, as most families do."""

from __future__ import annotations

from engine.text.output_parser.reading.reader import NotACall, Reader, Steps

ARGUMENTS = ("arguments", "parameters")
LABELS = ("id", "type")
"""Keys that may stand beside name and arguments; the client gets ids of its own."""
NO_ARGUMENTS = "{}"


def read_call_object(reader: Reader) -> Steps[None]:
    """Keys may come in any order; who gives no arguments gives none. A call that has its arguments
    is one, whatever its object goes on with. Raises NotACall."""
    name = arguments = None
    yield from expect(reader, "{")
    while True:
        key = yield from _key(reader)
        if key == "name" and name is None:
            name = yield from reader.string()
        elif key in ARGUMENTS and name is not None and arguments is None:
            yield from reader.call(name)
            while (yield from reader.attempt(_label(reader))):
                pass
            yield from reader.closing("}")
            return
        elif key in ARGUMENTS and arguments is None:
            arguments = yield from reader.value()
        elif key in LABELS:
            yield from reader.string()
        else:
            raise NotACall
        yield from reader.skip()
        if (yield from reader.literal("}")):
            break
        yield from expect(reader, ",")
    if name is None:
        raise NotACall
    yield from reader.call(name, NO_ARGUMENTS if arguments is None else arguments)


def read_next_object(reader: Reader, separator: str) -> Steps[None]:
    """One more, behind `separator`. Raises NotACall."""
    yield from reader.skip()
    yield from expect(reader, separator)
    yield from reader.skip()
    yield from read_call_object(reader)


def read_call_list(reader: Reader) -> Steps[None]:
    """`[{...}, {...}]`. Raises NotACall unless it begins with a call."""
    yield from expect(reader, "[")
    yield from reader.skip()
    yield from read_call_object(reader)
    while (yield from reader.attempt(read_next_object(reader, ","))):
        pass
    yield from reader.closing("]")


def expect(reader: Reader, text: str) -> Steps[None]:
    if not (yield from reader.literal(text)):
        raise NotACall


def _key(reader: Reader) -> Steps[str]:
    yield from reader.skip()
    key = yield from reader.string()
    yield from reader.skip()
    yield from expect(reader, ":")
    yield from reader.skip()
    return key


def _label(reader: Reader) -> Steps[None]:
    yield from reader.skip()
    yield from expect(reader, ",")
    if (yield from _key(reader)) not in LABELS:
        raise NotACall
    yield from reader.string()
