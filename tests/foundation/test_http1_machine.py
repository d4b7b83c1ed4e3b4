"""The HTTP/1.1 client under responses of all kinds, cut anywhere, over one connection.

The model knows what was written; the client has to say just that, or that it is of no use.
"""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from foundation.http1 import HIGH_WATER_BYTES, MAX_HEAD_BYTES, Connection, HttpClientError
from tests.budget import examples
from tests.foundation.test_http1 import SinkTransport

HEADERS = st.lists(
    st.tuples(st.sampled_from([b"X-A", b"x-b", b"Retry-After"]), st.sampled_from([b"1", b"a b"])),
    max_size=3,
)
PIECES = st.lists(st.binary(min_size=1, max_size=40), max_size=5)
INTERIM = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"


def lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(b"%b: %b\r\n" % each for each in headers)


class WrittenResponse:
    """A response as bytes, and what is to be read of it."""

    def __init__(
        self,
        framing: str,
        status: int,
        headers: list[tuple[bytes, bytes]],
        pieces: list[bytes],
        trailers: list[tuple[bytes, bytes]],
        interims: int,
    ) -> None:
        self.status, self.body = status, b"".join(pieces)
        self.is_endless = framing == "connection"
        self.closes = self.is_endless or framing == "close"
        own = {
            "length": [(b"Content-Length", b"%d" % len(self.body))],
            "close": [(b"Content-Length", b"%d" % len(self.body)), (b"Connection", b"close")],
            "chunks": [(b"Transfer-Encoding", b"chunked")],
            "connection": [],
        }[framing]
        self.headers = [(name.lower(), value) for name, value in [*headers, *own]]
        self.head = b"HTTP/1.1 %d Yes\r\n%b\r\n" % (status, lines([*headers, *own]))
        sent = self.body
        if framing == "chunks":
            chunks = [b"%x;e=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
            sent = b"".join([*chunks, b"0\r\n", lines(trailers), b"\r\n"])
        self.data = INTERIM * interims + self.head + sent


responses = st.builds(
    WrittenResponse,
    st.sampled_from(["length", "chunks", "close", "connection"]),
    st.sampled_from([200, 404, 503]),
    HEADERS,
    PIECES,
    HEADERS,
    st.integers(0, 2),
)


class ConnectionMachine(RuleBasedStateMachine):
    """One connection at a time, without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.response: WrittenResponse | None = None

    def teardown(self) -> None:
        self.loop.close()

    @initialize()
    def connect(self) -> None:
        self.lost: list[Connection] = []
        self.sink = SinkTransport()
        self.connection = Connection(self.lost.append)
        self.connection.connection_made(self.sink)

    @precondition(lambda self: self.response is None)
    @rule(response=responses)
    def ask(self, response: WrittenResponse) -> None:
        self.connection.send(b"")
        self.response, self.left, self.taken, self.fed = response, response.data, b"", 0

    @precondition(lambda self: self.response is not None and self.left)
    @rule(size=st.integers(1, 60))
    def feed(self, size: int) -> None:
        self.connection.data_received(self.left[:size])
        self.fed += min(size, len(self.left))
        self.left = self.left[size:]

    @precondition(lambda self: self.response is not None)
    @rule()
    def take(self) -> None:
        """Only what is there: nothing waits here."""
        if self.connection._chunks:
            self.taken += self.loop.run_until_complete(self.connection.read(0))

    @precondition(lambda self: self.response is not None and not self.left)
    @rule()
    def end(self) -> None:
        assert self.response is not None
        if self.response.is_endless:
            assert not self.connection._complete, "who says that it is over?"
            self.connection.connection_lost(None)
        status, headers = self.loop.run_until_complete(self.connection.head(0))
        assert (status, headers) == (self.response.status, self.response.headers)
        self.take()
        assert self.loop.run_until_complete(self.connection.read(0)) == b""
        assert self.taken == self.response.body
        assert self.connection.reusable != self.response.closes
        if self.response.closes:
            self.connect()
        self.response = None

    @precondition(lambda self: self.response is not None and self.left)
    @rule()
    def lose(self) -> None:
        """A response that is cut short is none, unless only its connection could end it."""
        assert self.response is not None
        head_is_there = self.connection._status is not None
        self.connection.connection_lost(None)
        try:
            self.take()
            self.loop.run_until_complete(self.connection.head(0))
            assert self.loop.run_until_complete(self.connection.read(0)) == b""
        except HttpClientError:
            assert not (self.response.is_endless and head_is_there)
        else:
            assert self.response.is_endless and head_is_there
        assert self.lost == [self.connection]
        self.connect()
        self.response = None

    @precondition(lambda self: self.response is None)
    @rule(data=st.binary(min_size=1, max_size=20))
    def say_unasked(self, data: bytes) -> None:
        self.connection.data_received(data)
        assert not self.connection.is_open and not self.connection.reusable
        self.connect()

    @invariant()
    def nothing_is_said_that_was_not_written(self) -> None:
        if self.response is not None:
            waiting = b"".join(self.connection._chunks)
            assert self.response.body.startswith(self.taken + waiting)
            assert self.connection.fault is None
            assert self.connection._num_buffered == len(waiting) <= HIGH_WATER_BYTES


TestConnectionMachine = ConnectionMachine.TestCase
TestConnectionMachine.settings = settings(max_examples=examples(100), deadline=None)


@settings(max_examples=examples(200), deadline=None)
@given(responses, st.data())
def test_a_response_that_was_tampered_with_is_one_or_a_fault(
    response: WrittenResponse, data: st.DataObject
) -> None:
    """It ends, and no more is kept than was sent."""
    raw = bytearray(response.data)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(raw)))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    connection, sink = Connection(lambda lost: None), SinkTransport()
    connection.connection_made(sink)
    connection.send(b"")
    for at in range(0, len(raw), size := data.draw(st.integers(1, 50))):
        if connection.is_open:
            connection.data_received(bytes(raw[at : at + size]))
    connection.connection_lost(None)

    async def read() -> int:
        num_bytes = 0
        try:
            await connection.head(0)
            while body := await connection.read(0):
                num_bytes += len(body)
        except HttpClientError as error:
            assert str(error)
        return num_bytes

    assert asyncio.run(read()) <= len(raw)
    assert connection._bodiless_bytes <= MAX_HEAD_BYTES
    assert not connection.reusable
