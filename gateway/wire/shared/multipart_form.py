"""A form with one file in it (RFC 7578), read as it comes: fields are kept, the file is handed on.

Knows no field by name but the file's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from gateway.request_errors import BadField

FORM_DATA = "multipart/form-data"
FILE = "file"
MAX_PARTS = 8
MAX_FIELD_BYTES = 4096
MAX_OVERHEAD_BYTES = 64 * 1024
"""The bound on a form beyond its file, since the bound on files need not be exact."""
Sink = Callable[[bytes], Awaitable[None]]
_BROKEN = "We could not parse the multipart body of your request."


class MultipartForm(msgspec.Struct, frozen=True, kw_only=True):
    filename: str | None
    """None: there was no file."""
    fields: dict[str, str]


def boundary_of(content_type: str) -> str:
    """Raises: BadField."""
    media_type, options = parse_options_header(content_type)
    boundary: str = options.get("boundary", "")
    if media_type != FORM_DATA or not boundary or not boundary.isascii() or "\n" in boundary:
        message = f"Invalid value for 'Content-Type': expected {FORM_DATA} with a boundary."
        raise BadField(message, param="Content-Type", detail=f"Expected {FORM_DATA}.")
    return boundary


async def read_form(body: AsyncIterator[bytes], boundary: str, sink: Sink) -> MultipartForm:
    """`sink` gets the file, piece by piece. Raises: BadField, what `body` and `sink` raise."""
    reading = _FormReader(sink)
    try:
        with PushMultipartParser(boundary, max_segment_count=MAX_PARTS) as parser:
            async for chunk in body:
                if chunk and not parser.closed:
                    for event in parser.parse(chunk):
                        await reading.take(event)
    except MultipartError as error:
        raise BadField(f"{_BROKEN} ({error})", detail=_BROKEN) from error
    return MultipartForm(filename=reading.filename, fields=reading.fields)


class _FormReader:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.filename: str | None = None
        self.fields: dict[str, str] = {}
        self._name, self._value = "", bytearray()

    async def take(self, event: MultipartSegment | bytes | bytearray | None) -> None:
        if event is None:
            self._end()
        elif isinstance(event, MultipartSegment):
            self._begin(event)
        elif self._name == FILE:
            await self._sink(bytes(event))
        else:
            self._value += event
            if len(self._value) > MAX_FIELD_BYTES:
                raise _invalid(self._name, f"at most {MAX_FIELD_BYTES} bytes")

    def _begin(self, part: MultipartSegment) -> None:
        self._name = part.name
        self._value.clear()
        if part.name in self.fields or (part.name == FILE and self.filename is not None):
            raise _invalid(part.name, "given once")
        if part.name == FILE:
            if part.filename is None:
                raise _invalid(FILE, "a file, with its name")
            self.filename = part.filename

    def _end(self) -> None:
        if self._name != FILE:
            try:
                self.fields[self._name] = self._value.decode()
            except UnicodeDecodeError:
                raise _invalid(self._name, "a UTF-8 text") from None


def _invalid(name: str, wanted: str) -> BadField:
    shown = name[:64]
    message = f"Invalid value for '{shown}': expected {wanted}."
    return BadField(message, param=shown or None, detail=f"Expected {wanted}.")
