"""Server-sent events (WHATWG HTML, section 9.2): framing of our own, parsing of an upstream's.

Knows no JSON and no vendor. Payloads are bytes; whether they are UTF-8 is for the one who reads
them to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""Of one line, and of one event's data. A completion chunk has a few hundred."""

DATA, END = b"data: ", b"\n\n"
BETWEEN = END + DATA
"""Two events of one line each."""
DONE = DATA + b"[DONE]" + END
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """The peer sent a line or an event beyond the bound."""


class Event(NamedTuple):
    data: bytes
    name: bytes = b"message"


def encode(data: bytes, name: bytes | None = None) -> bytes:
    """One event; most have no name."""
    named = b"" if name is None else b"event: " + name + b"\n"
    return named + b"data: " + data.replace(b"\n", b"\ndata: ") + b"\n\n"


def encode_run(before: bytes, texts: Sequence[bytes], after: bytes) -> bytes:
    """An event for each text. Nothing of it holds a line feed."""
    return DATA + before + (after + BETWEEN + before).join(texts) + after + END


class EventParser:
    """Bytes, cut anywhere, to events. Lines end in LF, CRLF or CR; comments, `id` and `retry`
    are skipped.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._line: list[bytes] = []
        """Pieces of the line that has not ended yet."""
        self._line_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._name = b""
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[Event]:
        """Events that are complete now. Raises EventTooLarge; the parser is of no use after
        that.
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
            if self._line or self._at_start or len(line) > self._max_event_bytes:
                self._extend_line(line)
                line = self._take_line()
            if line:
                self._read_field(line)
            elif self._data or self._name:
                event = self._dispatch()
                if event is not None:
                    events.append(event)
        self._extend_line(rest)
        return events

    @property
    def is_between_events(self) -> bool:
        """What comes next is the beginning of a line that begins an event."""
        return not (self._line or self._data or self._name or self._at_start or self._after_cr)

    def close(self) -> list[Event]:
        """The stream has ended. Its last event counts even where the blank line behind it is
        missing.
        """
        return self.feed(b"\n\n")

    def _extend_line(self, piece: bytes) -> None:
        if piece:
            self._line.append(piece)
            self._line_bytes += len(piece)
            if self._line_bytes > self._max_event_bytes:
                raise EventTooLarge(f"a line of more than {self._max_event_bytes} bytes")

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
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._data_bytes += len(value) + 1
            if self._data_bytes > self._max_event_bytes:
                raise EventTooLarge(f"an event of more than {self._max_event_bytes} bytes")
        elif field == b"event":
            self._name = value.removeprefix(b" ")

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._data_bytes, self._name = [], 0, b""
        return Event(b"\n".join(data), name or b"message") if data else None
