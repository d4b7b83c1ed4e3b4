"""Checks what a stranger can do to a worker with a connection alone, against uvicorn on a real
socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from gateway.app import connection
from gateway.app.connection import MAX_HEAD_BYTES, ClientConnection
from gateway.routes.shared.reply import received_at_of

DEADLINE_S = 30.0
LET_GO, SLOW_ENDED = threading.Event(), threading.Event()
NO_BODY = (b"content-length", b"0")
POST = b"POST /live HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body: before it came (/early), when it is let go (/held), or
    never (/slow)."""
    assert scope["type"] == "http"
    if scope["path"] == "/early":
        await send({"type": "http.response.start", "status": 401, "headers": [NO_BODY]})
        await send({"type": "http.response.body", "body": b""})
        return
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size, more = size + len(message["body"]), message["more_body"]
    if scope["path"] == "/slow":
        message = await receive()
        assert message["type"] == "http.disconnect"
        SLOW_ENDED.set()
        return
    while scope["path"] == "/held" and not LET_GO.is_set():
        await asyncio.sleep(0.02)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def served(protocol: type[ClientConnection]) -> Iterator[tuple[uvicorn.Server, int]]:
    """A worker of its own and the port it listens on."""
    config = uvicorn.Config(
        application,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(ClientConnection) as (_, port):
        yield port


@pytest.fixture
def client(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as opened:
        yield opened


@pytest.fixture
def ended() -> threading.Event:
    """Set when a /slow request has heard of its client's leaving."""
    SLOW_ENDED.clear()
    return SLOW_ENDED


def read_all(client: socket.socket) -> bytes:
    """Until the server closes."""
    found = b""
    while data := client.recv(65536):
        found += data
    return found


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """One answer with a length, on a connection that stays."""
    found = b""
    while b"\r\n\r\n" not in found:
        data = client.recv(65536)
        assert data, found
        found += data
    head, _, body = found.partition(b"\r\n\r\n")
    (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    while len(body) < int(length.partition(b":")[2]):
        body += client.recv(65536)
    return int(head.split()[1]), body


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert int(lines[0].split()[1]) == status, answer
    assert b"content-type: application/json" in lines and b"connection: close" in lines
    assert any(line.startswith(b"x-request-id: req_") for line in lines)
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


class Wire(asyncio.Transport):
    """A transport that leads nowhere."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


class ClosedWire(Wire):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


async def test_a_request_tells_when_its_first_byte_was_read() -> None:
    """It is told of each on a connection, however late the rest comes."""
    config = uvicorn.Config(application, http=ClientConnection, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    protocol = ClientConnection(config=config, server_state=state, app_state={})
    protocol.connection_made(Wire())
    last = 0.0
    for _ in range(2):
        protocol.data_received(LIVE[:5])
        between = time.perf_counter()
        protocol.data_received(LIVE[5:])
        received_at = received_at_of(protocol.cycle.scope)
        assert received_at is not None and last < received_at <= between
        last = between
        await asyncio.gather(*state.tasks)
    protocol.connection_lost(None)


async def test_a_connection_is_closed_once_no_request_has_come_for_long() -> None:
    """By the time since the last answer, looked at by one timer."""
    config = uvicorn.Config(application, http=ClientConnection, lifespan="off", log_config=None)
    config.load()
    state = uvicorn.server.ServerState()
    protocol = ClientConnection(config=config, server_state=state, app_state={})
    wire = ClosedWire()
    protocol.connection_made(wire)
    timers = set[asyncio.TimerHandle | None]()
    for _ in range(3):
        protocol.data_received(LIVE)
        await asyncio.gather(*state.tasks)
        protocol._close_if_long_idle()  # a look, which is too early
        timers.add(protocol.timeout_keep_alive_task)
        protocol.timeout_keep_alive_task = None
    assert None not in timers and not wire.is_closed
    protocol.data_received(LIVE[:5])
    protocol.timeout_keep_alive = 0
    protocol._close_if_long_idle()
    assert not wire.is_closed, "a request is coming"
    protocol.data_received(LIVE[5:])
    await asyncio.gather(*state.tasks)
    protocol._close_if_long_idle()
    assert wire.is_closed
    for timer in timers:
        assert timer is not None
        timer.cancel()
    protocol.connection_lost(None)
    assert protocol.timeout_keep_alive_task is None


def test_headers_without_an_end_are_refused_soon(client: socket.socket, port: int) -> None:
    client.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\nx: ")
    sent, block = 0, b"a" * (1 << 20)
    try:
        while sent < 64 << 20:
            sent += client.send(block)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert sent < 64 << 20, "all of it was taken"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as other:
        other.sendall(LIVE)
        assert read_answer(other) == (200, b"0")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /live HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\n" + b"x: a\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000,
        b"\r\n" * 100_000,
    ],
    ids=["a long value", "many headers", "a long path", "no end", "empty lines"],
)
@pytest.mark.parametrize("before", [b"", LIVE], ids=["first", "second"])
def test_a_large_head_is_a_431_that_says_so(
    client: socket.socket, head: bytes, before: bytes
) -> None:
    if before:
        client.sendall(before)
        assert read_answer(client)[0] == 200
    for start in range(0, len(head), 10_000):
        client.sendall(head[start : start + 10_000])
    error = error_of(read_all(client), 431)
    assert (error["param"], error["code"]) == ("headers", "request_header_fields_too_large")
    assert str(MAX_HEAD_BYTES) in error["message"]


def test_a_head_within_the_bound_and_any_body_pass(client: socket.socket) -> None:
    """On one connection, so that what is counted begins anew with each head."""
    for _ in range(3):
        body = b"b" * 500_000
        client.sendall(
            b"POST /live HTTP/1.1\r\nhost: x\r\nx: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (b"a" * (MAX_HEAD_BYTES - 200), len(body), body)
        )
        assert read_answer(client) == (200, b"500000")
    client.sendall(LIVE * 50)  # pipelined, more of them in a read than one head may have bytes
    answers = b""
    while answers.count(b"HTTP/1.1 200") < 50:
        answers += client.recv(65536)


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nhost: ", b"\r\n"])
def test_a_head_that_takes_too_long_is_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """However steadily a byte comes; and a connection that says nothing is no better."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
        began = time.monotonic()
        client.sendall(sent)
        found = b""
        while time.monotonic() < began + DEADLINE_S:
            try:
                data = client.recv(65536)
            except TimeoutError:
                if sent.startswith(b"GET"):
                    client.sendall(b"a")
                continue
            found += data
            if not data:
                break
        assert 0.4 < time.monotonic() - began < DEADLINE_S
    if sent.startswith(b"GET"):
        assert error_of(found, 408)["code"] == "request_timeout"
    else:
        assert found == b""


def test_a_request_that_takes_long_is_not_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        client.sendall(LIVE)
        assert read_answer(client)[0] == 200
        monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
        client.settimeout(1)
        client.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\nGET /li")
        with pytest.raises(TimeoutError):
            client.recv(1)


def dribble(client: socket.socket, data: bytes, *, every_s: float) -> tuple[bytes, float]:
    """Byte by byte until all is said or the server closes: its answer, and how long that took."""
    client.settimeout(every_s)
    began, found = time.monotonic(), b""
    left = iter(data)
    while time.monotonic() < began + DEADLINE_S:
        try:
            got = client.recv(65536)
        except TimeoutError:
            if (byte := next(left, None)) is not None:
                client.sendall(bytes([byte]))
            continue
        found += got
        if not got or found.startswith(b"HTTP/1.1 200"):
            break
    return found, time.monotonic() - began


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"content-length: 1000\r\n\r\n", b"b" * 1000),
        (b"transfer-encoding: chunked\r\n\r\n", b"1\r\nb\r\n" * 200),
    ],
    ids=["of a known length", "in chunks"],
)
def test_a_body_that_takes_too_long_is_given_up(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch, head: bytes, body: bytes
) -> None:
    """However steadily a byte comes."""
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.5)
    client.sendall(POST + head)
    found, took_s = dribble(client, body, every_s=0.05)
    error = error_of(found, 408)
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_timeout")
    assert 0.4 < took_s < DEADLINE_S


def test_a_body_that_comes_fast_enough_may_take_longer(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connection, "MIN_BODY_BYTES_PER_S", 1)
    client.sendall(POST + b"content-length: 30\r\n\r\n")
    found, took_s = dribble(client, b"b" * 30, every_s=0.05)
    assert found.startswith(b"HTTP/1.1 200") and took_s > 1.4


def test_a_body_behind_its_own_answer_is_not_waited_for(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was refused before its body came and goes on sending it holds nothing for
    long."""
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.5)
    client.sendall(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n")
    found, took_s = dribble(client, b"b" * 1000, every_s=0.05)
    assert found.count(b"HTTP/1.1") == 1 and found.startswith(b"HTTP/1.1 401")
    assert 0.4 < took_s < DEADLINE_S


def test_a_body_behind_a_slow_answer_is_not_late(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is we who do not read it."""
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", 0.3)
    LET_GO.clear()
    client.sendall(b"POST /held HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    time.sleep(0.1)
    client.sendall(POST + b"content-length: 2\r\n\r\nb")
    time.sleep(1)
    monkeypatch.setattr(connection, "BODY_TIMEOUT_S", DEADLINE_S)  # from now on the client is late
    LET_GO.set()
    assert read_answer(client) == (200, b"0")
    client.sendall(b"b")
    assert read_answer(client) == (200, b"2")


@pytest.mark.parametrize("around", [b"1;" + b"a" * 200_000, b"1\r\nb\r\n0\r\nx: " + b"a" * 200_000])
def test_what_stands_around_the_chunks_of_a_body_is_bounded(
    client: socket.socket, around: bytes
) -> None:
    """An extension of a chunk, and a trailer, neither of which ends."""
    client.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
    time.sleep(0.1)
    for start in range(0, len(around), 10_000):
        client.sendall(around[start : start + 10_000])
    assert error_of(read_all(client), 431)["code"] == "request_header_fields_too_large"


@pytest.mark.parametrize(
    "trailers",
    [b"a: b\r\n" * (MAX_HEAD_BYTES // 5), b"a: " + b"b" * MAX_HEAD_BYTES + b"\r\n"],
    ids=["many", "large"],
)
@pytest.mark.parametrize("size", [1 << 20, 10_000], ids=["at once", "in parts"])
def test_trailers_are_bounded(client: socket.socket, trailers: bytes, size: int) -> None:
    whole = CHUNKED + b"2\r\nbb\r\n0\r\n" + trailers + b"\r\n"
    for start in range(0, len(whole), size):
        client.sendall(whole[start : start + size])
    error = error_of(read_all(client), 431)
    assert (error["param"], error["code"]) == ("trailers", "request_header_fields_too_large")
    assert str(MAX_HEAD_BYTES) in error["message"]


def test_trailers_and_the_headers_around_many_chunks_pass(client: socket.socket) -> None:
    """On one connection: what is counted begins anew with each request."""
    whole = CHUNKED + b"1\r\nb\r\n" * 3 + b"0\r\na: %b\r\n\r\n" % (b"b" * 40_000)
    for _ in range(3):
        client.sendall(whole)
        assert read_answer(client) == (200, b"3")


def test_the_headers_of_a_chunk_each_count_for_themselves(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD_BYTES", 200)
    client.sendall(CHUNKED)
    for part in (*[b"1\r\n", b"b\r\n"] * 100, b"0\r\n\r\n"):
        client.sendall(part)
        time.sleep(0.001)
    assert read_answer(client) == (200, b"100")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("split", [False, True], ids=["one packet", "packets"])
def test_the_body_of_a_request_that_asks_for_another_protocol_is_no_request(
    client: socket.socket, protocol: bytes, split: bool
) -> None:
    """Such as Java's client sends, which offers HTTP/2 with each request. A proxy in front of us
    reads a body there, and so must we."""
    asked = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: " + protocol + b"\r\n"
    length = POST + asked + b"content-length: %d\r\n\r\n" % len(LIVE)
    chunks = CHUNKED[:-2] + asked + b"\r\n"
    in_chunks = b"%x\r\n%b\r\n0\r\nhost: y\r\n\r\n" % (len(LIVE), LIVE)
    parts = [length, LIVE, chunks, in_chunks, LIVE[:-2] + asked + b"\r\n", LIVE] * 3
    for part in parts if split else [b"".join(parts)]:
        client.sendall(part)
        time.sleep(0.01)
    size = str(len(LIVE)).encode()
    answers = b""
    while answers.count(b"HTTP/1.1 200") < 12:
        answers += client.recv(65536)
    bodies = [each.partition(b"\r\n\r\n")[2] for each in answers.split(b"HTTP/1.1 ")[1:]]
    assert bodies == [size, size, b"0", b"0"] * 3


def get(*headers: bytes, version: bytes = b"1.1", target: bytes = b"/live") -> bytes:
    return b"GET %b HTTP/%b\r\n%b\r\n" % (target, version, b"".join(h + b"\r\n" for h in headers))


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        (get(), "no Host"),
        (get(b"x: y"), "no Host"),
        (get(version=b"2.0"), "no Host"),
        (b"GET /live\r\n\r\n", "no Host"),
        (get(b"host: x", b"host: x"), "more than one"),
        (get(b"host: x", b"Host: y"), "more than one"),
        (get(b"host: x", b"host: y", version=b"1.0"), "more than one"),
        (get(b"host:"), "not a host"),
        (get(b"host: x, y"), "not a host"),
        (get(b"host: x,y"), "not a host"),
        (get(b"host: user@x"), "not a host"),
        (get(b"host: x/y"), "not a host"),
        (get(b"host: x y"), "not a host"),
        (get(b"host: x:8x"), "not a host"),
        (get(b"host: x", target=b"http://y/live"), "another host"),
        (get(b"host: x", target=b"http://x@y/live"), "another host"),
    ],
)
def test_a_request_names_one_host(client: socket.socket, asked: bytes, word: str) -> None:
    client.sendall(asked)
    error = error_of(read_all(client), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_host")
    assert error["param"] == "Host" and word in error["message"]


@pytest.mark.parametrize(
    "asked",
    [
        get(b"host: x.example:8080"),
        get(b"host: 127.0.0.1:1"),
        get(b"host: [::1]:80"),
        get(b"host: under_score"),
        get(b"host: X", target=b"http://x/live"),
        get(b"host: x:80", target=b"HTTP://x:80/live"),
        get(version=b"1.0"),
    ],
)
def test_one_host_is_enough(client: socket.socket, asked: bytes) -> None:
    """HTTP/1.0 knows none: health checks of load balancers speak it."""
    client.sendall(asked)
    assert read_answer(client) == (200, b"0")


def in_chunks(body: bytes) -> bytes:
    return b"".join(
        b"%x\r\n%b\r\n" % (len(part), part)
        for part in (body[start : start + 1_000_000] for start in range(0, len(body), 1_000_000))
    )


LARGE = 64 * 1024 * 1024


@pytest.mark.parametrize("chunked", [False, True], ids=["of a known length", "in chunks"])
@pytest.mark.parametrize(
    "asked",
    [
        b"POST /early HTTP/1.1\r\nhost: x\r\n",
        b"POST /early HTTP/1.1\r\nhost: x\r\nconnection: close\r\n",
        b"POST /early HTTP/1.0\r\nhost: x\r\n",
        b"POST /early HTTP/1.1\r\n",
    ],
    ids=["kept", "to be closed", "HTTP/1.0", "a head that is refused"],
)
def test_the_answer_to_a_large_body_is_read_by_who_sends_all_of_it_first(
    client: socket.socket, asked: bytes, chunked: bool
) -> None:
    body = b"b" * LARGE
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    whole = in_chunks(body) + b"0\r\n\r\n" if chunked else body
    client.sendall(asked + framing + b"\r\n\r\n" + whole)
    is_kept = b"/1.1" in asked and b"host" in asked and b"close" not in asked
    if is_kept:
        assert read_answer(client)[0] == 401
        client.sendall(LIVE)
        assert read_answer(client) == (200, b"0")
    else:
        status = b"401" if b"host" in asked else b"400"
        assert read_all(client).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    "asked",
    [
        b"POST /early HTTP/1.1\r\nhost: x\r\n",
        b"POST /early HTTP/1.1\r\nhost: x\r\nconnection: close\r\n",
        b"POST /early HTTP/1.1\r\n",
    ],
)
def test_a_body_without_an_end_is_not_read_for_ever(
    client: socket.socket, monkeypatch: pytest.MonkeyPatch, asked: bytes
) -> None:
    monkeypatch.setattr(connection, "MAX_DRAINED_BYTES", 8 << 20)
    client.sendall(asked + b"transfer-encoding: chunked\r\n\r\n")
    sent, block = 0, in_chunks(b"b" * (1 << 20))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while sent < 64 << 20:
            sent += client.send(block)
    assert sent < 64 << 20, "all of it was taken"


def test_nothing_is_served_behind_a_last_answer(client: socket.socket) -> None:
    """The rest of a body is read for its answer's sake alone."""
    head = b"POST /early HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\n"
    client.sendall(head)
    time.sleep(0.1)
    client.sendall(b"body" + LIVE)
    assert read_all(client).count(b"HTTP/1.1") == 1


def test_a_client_that_leaves_with_a_request_waiting_ends_the_one_in_flight(
    port: int, ended: threading.Event
) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        slow = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        client.sendall(slow + POST + b"content-length: 1\r\n\r\nb")
        time.sleep(0.2)
        assert not ended.is_set()
    assert ended.wait(DEADLINE_S)


def test_a_malformed_body_is_a_400(client: socket.socket) -> None:
    client.sendall(POST + b"transfer-encoding: chunked\r\n\r\nnonsense\r\n")
    assert error_of(read_all(client), 400)["code"] == "invalid_http"


def test_beyond_the_bound_a_request_is_a_503_that_says_when(
    client: socket.socket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.sendall(LIVE)
    assert read_answer(client)[0] == 200
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 1)
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as one_more:
        one_more.sendall(LIVE)
        answer = read_all(one_more)
    assert error_of(answer, 503)["code"] == "overloaded"
    assert b"\r\nretry-after: 1\r\n" in answer
    client.settimeout(DEADLINE_S)
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:  # until the other one has gone
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as again:
            monkeypatch.setattr(connection, "MAX_CONNECTIONS", 2)
            again.sendall(LIVE)
            if again.recv(65536).startswith(b"HTTP/1.1 200"):
                return
    raise AssertionError("nobody is served any more")


def test_far_beyond_the_bound_a_connection_is_closed(
    client: socket.socket, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.sendall(LIVE)
    assert read_answer(client)[0] == 200
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 0)
    monkeypatch.setattr(connection, "SPARE_CONNECTIONS", 0)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S),
        socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as one_more,
        pytest.raises(ConnectionResetError),
    ):
        one_more.recv(1)
        raise ConnectionResetError  # an end without a reset is one, too


@pytest.mark.parametrize(
    "request_bytes",
    [b"nonsense\r\n\r\n", b"GET /live HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\x02\x00"],
)
def test_malformed_http_is_a_400_in_the_shape_of_all_errors(
    client: socket.socket, request_bytes: bytes
) -> None:
    client.sendall(request_bytes)
    error = error_of(read_all(client), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")


def test_nonsense_behind_a_request_in_flight_is_not_answered_into_its_answer(
    client: socket.socket,
) -> None:
    client.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    time.sleep(0.2)
    client.sendall(b"nonsense\r\n\r\n")
    try:
        assert read_all(client) == b""
    except ConnectionResetError:
        pass


def test_a_get_is_answered_though_its_client_sends_no_more(client: socket.socket) -> None:
    client.sendall(LIVE)
    client.shutdown(socket.SHUT_WR)
    assert read_answer(client) == (200, b"0")


def test_a_post_whose_client_sends_no_more_was_hung_up(client: socket.socket) -> None:
    client.sendall(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    client.shutdown(socket.SHUT_WR)
    assert read_all(client) == b""


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)


def until_nobody_listens(port: int) -> None:
    with contextlib.suppress(ConnectionRefusedError):
        while True:
            connected(port).close()
            time.sleep(0.01)


def test_a_worker_that_leaves_answers_what_is_on_its_way() -> None:
    with served(ClientConnection) as (server, port), contextlib.ExitStack() as opened:
        new, kept, begun, idle = (opened.enter_context(connected(port)) for _ in range(4))
        kept.sendall(LIVE)
        assert read_answer(kept)[0] == 200
        begun.sendall(LIVE[:10])
        server.should_exit = True
        until_nobody_listens(port)
        for client, rest in ((new, LIVE), (kept, LIVE), (begun, LIVE[10:])):
            client.sendall(rest)
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        assert idle.recv(1) == b""


def test_who_is_let_in_by_a_worker_that_leaves_is_answered_once() -> None:
    protocol = ClientConnection.reading_within(DEADLINE_S)
    with served(protocol) as (_, port):
        protocol.leaving = True
        with connected(port) as client:
            client.sendall(LIVE)
            answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        with connected(port) as silent:
            assert silent.recv(1) == b""


def test_who_counts_hears_of_a_refusal_by_the_id_that_its_client_has() -> None:
    heard: list[tuple[str, int]] = []
    protocol = ClientConnection.reading_within(DEADLINE_S)
    protocol.on_refused = lambda *refusal: heard.append(refusal)
    with served(protocol) as (_, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(DEADLINE_S)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * MAX_HEAD_BYTES + b"\r\n\r\n")
        answer = read_all(client)
    [(request_id, status)] = heard
    assert status == 431 and f"x-request-id: {request_id}".encode() in answer
