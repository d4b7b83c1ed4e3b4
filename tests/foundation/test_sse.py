"""Server-sent events: the parser against a plain reading of the standard, however bytes are cut."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.sse import DONE, Event, EventParser, EventTooLarge, encode

LINES = st.one_of(
    st.sampled_from(
        [b"", b"data", b"data:", b"data: ", b"data:  two", b": note", b"event: error", b"event"]
    ),
    st.sampled_from([b"id: 1", b"retry: 5", b"unknown: x", b"data: \xef\xbb\xbf", b"data: \xff"]),
    st.binary(max_size=6).filter(lambda line: b"\r" not in line and b"\n" not in line),
    st.binary(max_size=9)
    .filter(lambda text: b"\r" not in text and b"\n" not in text)
    .map(lambda text: b"data: " + text),
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


def by_the_book(stream: bytes) -> list[Event]:
    """WHATWG HTML, 9.2.6, on the whole stream; an unfinished event at the end is dropped."""
    *lines, _ = re.split(b"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    events: list[Event] = []
    data: list[bytes] = []
    name = b""
    for line in lines:
        if not line:
            if data:
                events.append(Event(b"\n".join(data), name or b"message"))
            data, name = [], b""
            continue
        field, colon, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return events


def parse(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def cut(stream: bytes, data: st.DataObject) -> list[bytes]:
    places = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    return [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True)]


@given(STREAMS, st.booleans(), st.data())
def test_any_cut_gives_what_the_standard_says(
    stream: bytes, with_mark: bool, data: st.DataObject
) -> None:
    stream = b"\xef\xbb\xbf" * with_mark + stream
    assert parse(cut(stream, data)) == by_the_book(stream)
    assert parse([stream[i : i + 1] for i in range(len(stream))]) == by_the_book(stream)


@given(st.lists(st.binary(max_size=20).filter(lambda data: b"\r" not in data), max_size=5))
def test_what_is_framed_can_be_parsed(payloads: list[bytes]) -> None:
    stream = b"".join(encode(payload) for payload in payloads)
    assert [event.data for event in parse([stream])] == payloads


def test_the_last_event_counts_without_its_blank_line() -> None:
    for stream in (b"data: a\n\ndata: b", b"data: a\n\ndata: b\n", b"data: a\n\ndata: b\n\n"):
        parser = EventParser()
        events = parser.feed(stream) + parser.close()
        assert [event.data for event in events] == [b"a", b"b"]


def test_done() -> None:
    assert parse([DONE]) == [Event(b"[DONE]")]


@pytest.mark.parametrize("pieces", [[b"x" * 11], [b"x" * 6] * 2, [b"data: 123\n"] * 3])
def test_lines_and_events_are_bounded(pieces: list[bytes]) -> None:
    parser = EventParser(max_event_bytes=10)
    with pytest.raises(EventTooLarge):
        for piece in pieces:
            parser.feed(piece)


def test_the_bound_is_for_one_event_at_a_time() -> None:
    parser = EventParser(max_event_bytes=10)
    events = [event for _ in range(50) for event in parser.feed(b"data: 1234\n\n")]
    assert len(events) == 50
