"""Server-sent events, both ways, within bounds.

Pure: bytes in, events out.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

KEEPALIVE = b": keep-alive\n\n"
MAX_ID_LENGTH = 512
MAX_RETRY_MS = 60_000


class TooLong(Exception):
    """An event, or a line, of more than was allowed."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """`data`: empty where an event only tells its id, from which reading can go on."""

    data: bytes = b""
    name: bytes = b"message"
    id: str | None = None
    retry_ms: int | None = None


def encode(data: bytes, *, id: str | None = None, retry_ms: int | None = None) -> bytes:
    """`data` has no line breaks: it is JSON, or nothing."""
    lines = [] if id is None else [b"id: " + id.encode()]
    if retry_ms is not None:
        lines.append(b"retry: %d" % retry_ms)
    if data:
        lines.append(b"event: message")
    lines.append(b"data: " + data if data else b"data:")
    return b"\n".join(lines) + b"\n\n"


class Decoder:
    """Takes an answer's bytes as they come. `max_bytes`: of one event, comments included."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._size = 0
        self._data: list[bytes] = []
        self._id: str | None = None
        self._retry_ms: int | None = None
        self._name = b"message"
        self._any = False

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Raises: TooLong."""
        self._buffer += chunk
        while (line := self._take_line()) is not None:
            self._size += len(line) + 1
            if self._size > self._max_bytes:
                raise TooLong
            if line:
                self._read(line)
                continue
            if self._any:
                yield Event(
                    data=b"\n".join(self._data),
                    name=self._name,
                    id=self._id,
                    retry_ms=self._retry_ms,
                )
            self._data, self._id, self._retry_ms = [], None, None
            self._name = b"message"
            self._size, self._any = 0, False
        if self._size + len(self._buffer) > self._max_bytes:
            raise TooLong

    def _take_line(self) -> bytes | None:
        """Lines end with LF or CRLF; a CR alone, which the standard knows too, ends none: nobody
        writes it, and it would have to be waited behind."""
        end = self._buffer.find(b"\n", self._searched)
        if end < 0:
            self._searched = len(self._buffer)
            return None
        line = bytes(self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    def _read(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._any = True
        elif name == b"event":
            self._name = value
        elif name == b"id" and b"\0" not in value and len(value) <= MAX_ID_LENGTH:
            self._id = value.decode("utf-8", "replace")
            self._any = True
        elif name == b"retry" and value.isdigit() and len(value) < 10:
            self._retry_ms = min(int(value), MAX_RETRY_MS)
            self._any = True
