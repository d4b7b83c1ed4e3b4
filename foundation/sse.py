"""Write and parse server-sent events (WHATWG HTML, section 9.2).

Knows no JSON and no vendor. Payloads are bytes; whether they are UTF-8 is for the one who reads
them to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""The bound on one event, its comments included. A completion chunk has a few hundred bytes."""
MAX_ID_LENGTH = 512
MAX_RETRY_MS = 60_000

KEEPALIVE = b": keep-alive\n\n"
"""A comment, which no client is told of."""
DATA, END = b"data: ", b"\n\n"
BETWEEN = END + DATA
"""Two events of one line each."""
DONE = DATA + b"[DONE]" + END
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """The peer sent a line or an event beyond the bound."""


class Event(NamedTuple):
    """An event. `data` is empty where it only tells its id, from which reading can go on."""

    data: bytes = b""
    name: bytes = b"message"
    id: str | None = None
    retry_ms: int | None = None


def encode(
    data: bytes, name: bytes | None = None, *, id: str | None = None, retry_ms: int | None = None
) -> bytes:
    """Return one event; most have no name."""
    named = b"" if name is None else b"event: " + name + b"\n"
    if retry_ms is not None:
        named = b"retry: %d\n%b" % (retry_ms, named)
    if id is not None:
        named = b"id: %b\n%b" % (id.encode(), named)
    return named + b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def encode_run(before: bytes, texts: Sequence[bytes], after: bytes) -> bytes:
    """Return an event for each text. No argument holds a line feed."""
    return DATA + before + (after + BETWEEN + before).join(texts) + after + END


class EventParser:
    """Turns bytes, cut anywhere, into events. Lines end in LF, CRLF or CR; comments are skipped.

    with_ids: read `id` and `retry`, and return an event that has only these, too.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES, *, with_ids: bool = False) -> None:
        self._max_event_bytes = max_event_bytes
        self._with_ids = with_ids
        self._id: str | None = None
        self._retry_ms: int | None = None
        self._line: list[bytes] = []
        """Pieces of the line that has not ended yet."""
        self._line_bytes = 0
        self._data: list[bytes] = []
        self._event_bytes = 0
        """The bytes of the unfinished event's lines, with their line ends."""
        self._name = b""
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that are complete now. Raises EventTooLarge, after which the parser
        is of no use.
        """
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]  # the second half of a CRLF; the CR alone has ended the line
            self._after_cr = False
        if chunk:
            self._after_cr = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = []
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            if self._line or self._at_start:
                self._extend_line(line)
                line = self._take_line()
            if line:
                if self._event_bytes + len(line) > self._max_event_bytes:
                    raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")
                self._event_bytes += len(line) + 1
                self._read_field(line)
            elif self._event_bytes:
                event = self._dispatch()
                if event is not None:
                    events.append(event)
        self._extend_line(rest)
        return events

    @property
    def is_between_events(self) -> bool:
        """True if the next byte begins a line that begins an event."""
        return not (self._line or self._event_bytes or self._at_start or self._after_cr)

    def close(self) -> list[Event]:
        """Return the last event of a stream that has ended without the blank line behind it."""
        return self.feed(b"\n\n")

    def _extend_line(self, piece: bytes) -> None:
        if piece:
            self._line.append(piece)
            self._line_bytes += len(piece)
            if self._event_bytes + self._line_bytes > self._max_event_bytes:
                raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")

    def _take_line(self) -> bytes:
        line = b"".join(self._line)
        self._line.clear()
        self._line_bytes = 0
        if self._at_start:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        return line

    def _read_field(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ")
        elif self._with_ids:
            value = value.removeprefix(b" ")
            if field == b"id" and b"\0" not in value and len(value) <= MAX_ID_LENGTH:
                self._id = value.decode("utf-8", "replace")
            elif field == b"retry" and value.isdigit() and len(value) < 10:
                self._retry_ms = min(int(value), MAX_RETRY_MS)

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._event_bytes, self._name = [], 0, b""
        if not self._with_ids:
            return Event(b"\n".join(data), name or b"message") if data else None
        id, retry_ms = self._id, self._retry_ms
        self._id = self._retry_ms = None
        if not data and id is None and retry_ms is None:
            return None
        return Event(b"\n".join(data), name or b"message", id, retry_ms)
