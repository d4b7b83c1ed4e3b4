"""The HTTP/1.1 client against a raw socket that says whatever a test wants."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from foundation.http1 import (
    HIGH_WATER_BYTES,
    MAX_HEAD_BYTES,
    ConnectError,
    Connection,
    HttpClientError,
    LocalProtocolError,
    Pool,
    PoolFull,
    ReadTimeout,
    RemoteProtocolError,
    WriteError,
    WriteTimeout,
    request_head,
)
from tests.pace import skip

Answer = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Peer:
    """Reads requests and writes `answers`, one for each, in the pieces it is made of."""

    def __init__(self) -> None:
        self.answers: list[list[bytes]] = []
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.close_after = False
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if self.close_after:
                    writer.close()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()  # the client left


@pytest_asyncio.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    peer.port = server.sockets[0].getsockname()[1]
    yield peer
    server.close()
    for writer in peer.writers:
        writer.close()
    await server.wait_closed()


@pytest_asyncio.fixture
async def pool(peer: Peer) -> AsyncIterator[Pool]:
    pool = pool_to(peer.port)
    yield pool
    pool.close()


WAIT_S = 30.0


def pool_to(port: int, scheme: str = "http", **more: Any) -> Pool:
    given: dict[str, Any] = {"max_connections": 8, "max_idle": 4, "idle_s": 30.0}
    return Pool(f"{scheme}://localhost:{port}/", **(given | more))


def request(body: bytes) -> bytes:
    headers = [(b"host", b"x"), (b"content-length", b"%d" % len(body))]
    return request_head("POST", "/v1/x?q=1", headers) + body


async def acquire(pool: Pool) -> Connection:
    return pool.take_idle() or await pool.connect()


async def read_all(connection: Connection) -> bytes:
    body = b""
    while data := await connection.read(WAIT_S):
        body += data
    return body


async def ask(pool: Pool, body: bytes = b"{}") -> tuple[int, bytes]:
    connection = await acquire(pool)
    try:
        connection.send(request(body))
        status, _ = await connection.head(WAIT_S)
        return status, await read_all(connection)
    finally:
        pool.release(connection)


async def test_the_request(pool: Pool, peer: Peer) -> None:
    peer.answers = [[PLAIN]]
    assert await ask(pool, b'{"a": 1}') == (200, b"ok")
    assert peer.requests == [
        b'POST /v1/x?q=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 8\r\n\r\n{"a": 1}'
    ]


async def test_headers_in_lower_case(pool: Pool, peer: Peer) -> None:
    peer.answers = [[b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"]]
    connection = await acquire(pool)
    connection.send(request(b""))
    status, headers = await connection.head(WAIT_S)
    assert (status, headers) == (429, [(b"retry-after", b"7"), (b"content-length", b"0")])
    assert await connection.read(WAIT_S) == b""
    pool.release(connection)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_whatever_the_cuts(pool: Pool, peer: Peer, size: int) -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n3\r\nay!\r\n0\r\n\r\n"
    )
    early = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    for answer, body in ((PLAIN, b"ok"), (chunked, b"okay!"), (early + PLAIN, b"ok")):
        peer.answers.append([answer[i : i + size] for i in range(0, len(answer), size)])
        assert await ask(pool) == (200, body)
    assert len(peer.writers) == 1


async def test_a_connection_is_kept_only_when_its_answer_was_read(pool: Pool, peer: Peer) -> None:
    peer.answers = [[PLAIN], [PLAIN], [PLAIN]]
    await ask(pool)
    connection = await acquire(pool)
    connection.send(request(b"{}"))
    await connection.head(WAIT_S)
    pool.release(connection)  # unread
    await ask(pool)
    assert len(peer.writers) == 2


@pytest.mark.parametrize("header", [b"Connection: close\r\n", b""], ids=["close", "closed"])
async def test_a_closed_connection_is_not_used_again(pool: Pool, peer: Peer, header: bytes) -> None:
    peer.close_after = True
    for _ in range(2):
        peer.answers = [[b"HTTP/1.1 200 OK\r\n%bContent-Length: 2\r\n\r\nok" % header]]
        assert await ask(pool) == (200, b"ok")
        await asyncio.sleep(0.02)
    assert len(peer.writers) == 2


async def test_a_body_may_end_with_the_connection(pool: Pool, peer: Peer) -> None:
    peer.close_after = True
    peer.answers = [[b"HTTP/1.1 200 OK\r\n\r\n", b"all of", b" this"]]
    assert await ask(pool) == (200, b"all of this")


async def test_an_old_connection_is_not_trusted(pool: Pool, peer: Peer) -> None:
    peer.answers = [[PLAIN], [PLAIN], [PLAIN]]
    await ask(pool)
    await ask(pool)
    assert len(peer.writers) == 1
    pool._idle_s = -1.0
    await ask(pool)
    assert len(peer.writers) == 2


BROKEN = {
    "no HTTP": [b"SSH-2.0-OpenSSH\r\n"],
    "cut head": [b"HTTP/1.1 200 OK\r\nContent-"],
    "cut body": [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok"],
    "cut chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nok"],
    "no last chunk": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"],
    "no number": [b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nok"],
    "two lengths": [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"],
    "upgrade": [b"HTTP/1.1 101 Up\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\x00"],
    "long head": [b"HTTP/1.1 200 OK\r\n", *([b"x: %b\r\n" % (b"y" * 9000)] * 9)],
    "nothing": [b""],
}


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_no_answer(pool: Pool, peer: Peer, pieces: list[bytes]) -> None:
    peer.close_after = True
    peer.answers = [pieces]
    with pytest.raises(RemoteProtocolError):
        await ask(pool)


async def test_a_second_answer_to_one_request_poisons_the_connection(
    pool: Pool, peer: Peer
) -> None:
    peer.answers = [[PLAIN + PLAIN.replace(b"ok", b"no")], [PLAIN]]
    assert await ask(pool) == (200, b"ok")
    assert await ask(pool) == (200, b"ok")
    assert len(peer.writers) == 2


async def test_what_comes_unasked_closes_an_idle_connection(pool: Pool, peer: Peer) -> None:
    peer.answers = [[PLAIN], [PLAIN]]
    assert await ask(pool) == (200, b"ok")
    peer.writers[0].write(PLAIN.replace(b"ok", b"no"))
    await asyncio.sleep(0.02)
    assert await ask(pool) == (200, b"ok")
    assert len(peer.writers) == 2


async def test_what_nobody_reads_is_not_taken_from_the_peer(pool: Pool, peer: Peer) -> None:
    size = 32 * 1024 * 1024
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    peer.answers = [[head, *[b"x" * 65536] * (size // 65536)]]
    connection = await acquire(pool)
    connection.send(request(b"{}"))
    await connection.head(WAIT_S)
    await asyncio.sleep(0.2)
    taken = len(await connection.read(WAIT_S))
    assert taken < 4 * 1024 * 1024
    while data := await connection.read(WAIT_S):
        taken += len(data)
    assert taken == size
    assert connection.reusable
    pool.release(connection)


async def test_who_stops_waiting_frees_the_place_at_once(peer: Peer) -> None:
    pool = pool_to(peer.port, max_connections=1)
    for _ in range(3):
        peer.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"]]
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.02)
        with pytest.raises(PoolFull):
            await acquire(pool)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    peer.answers = [[PLAIN]]
    assert await ask(pool) == (200, b"ok")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "http://no-such-host.invalid/"])
async def test_nobody_there(url: str) -> None:
    with pytest.raises(ConnectError):
        await acquire(Pool(url, max_connections=1, max_idle=1, idle_s=1.0))


class SinkTransport(asyncio.Transport):
    """Takes everything and sends it nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@given(st.binary(max_size=120))
def test_any_bytes_are_an_answer_or_a_fault(data: bytes) -> None:
    """Without a socket: the protocol alone."""
    connection = Connection(lambda lost: None)
    connection.connection_made(SinkTransport())
    connection.send(b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\n" + data)
    connection.connection_lost(None)

    async def take() -> None:
        await connection.head(WAIT_S)
        await read_all(connection)

    async def bounded() -> None:
        async with asyncio.timeout(60):
            try:
                await take()
            except HttpClientError as error:
                assert str(error)

    asyncio.run(bounded())


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=DNS:localhost", "-out", str(certificate), "-keyout", str(key)]
    made = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    assert await made.wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    peer = Peer()
    peer.answers = [[PLAIN]]
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    pool = pool_to(port, "https")
    with pytest.raises(ConnectError, match="SSLCertVerificationError"):
        await acquire(pool)
    trusting = pool_to(port, "https", trust=ssl.create_default_context(cafile=certificate))
    assert await ask(trusting) == (200, b"ok")
    trusting.close()
    server.close()
    await server.wait_closed()


async def test_a_wait_that_lasts_too_long_ends_and_one_that_did_not_counts_anew() -> None:
    """Time passes between the bytes, and more of it after the last."""

    closed = asyncio.Event()
    due: asyncio.Queue[bytes] = asyncio.Queue()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        for _ in range(4):
            writer.write(await due.get())
        await reader.read()
        writer.close()
        closed.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = pool_to(port)
    connection = await acquire(pool)
    connection.send(request(b"{}"))
    await connection.head(WAIT_S)
    for _ in range(4):
        reading = asyncio.create_task(connection.read(100.0))
        await asyncio.sleep(0)
        skip(60.0)
        await asyncio.sleep(0)
        due.put_nowait(b"x")
        assert await reading == b"x"
    reading = asyncio.create_task(connection.read(100.0))
    await asyncio.sleep(0)
    skip(100.0)
    with pytest.raises(ReadTimeout):
        await reading
    pool.release(connection)
    await closed.wait()
    server.close()


async def test_who_is_interrupted_hears_it_at_once_and_the_next_exchange_does_not() -> None:
    closed = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.read()
        writer.close()
        closed.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = pool_to(port)
    connection = await acquire(pool)
    waiting = asyncio.create_task(connection.head(WAIT_S))
    await asyncio.sleep(0)
    connection.interrupt(LookupError("gone"))
    with pytest.raises(LookupError):
        await waiting
    with pytest.raises(LookupError):
        await connection.read(WAIT_S)
    connection.send(request(b"{}"))
    assert (await connection.head(WAIT_S))[0] == 200
    assert await connection.read(WAIT_S) == b"ok"
    connection.abort()
    await closed.wait()
    server.close()


def chunked(*, trailers: bytes = b"", extension: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"2%b\r\nok\r\n0\r\n%b\r\n" % (extension, trailers)


async def test_trailers_are_dropped(pool: Pool, peer: Peer) -> None:
    peer.answers = [[chunked(trailers=b"Content-Encoding: gzip\r\nx: y\r\n")], [PLAIN]]
    connection = await acquire(pool)
    connection.send(request(b""))
    _, headers = await connection.head(WAIT_S)
    assert await read_all(connection) == b"ok"
    assert headers == [(b"transfer-encoding", b"chunked")]
    pool.release(connection)
    await ask(pool)
    assert len(peer.writers) == 1, "the connection is of use"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000],
        [b"HTTP/1.1 200 OK\r\nx: ", b"a" * (MAX_HEAD_BYTES + 1)],
        [chunked()[:-2], *[b"x: %b\r\n" % (b"y" * 9000)] * 9],
        [chunked()[:-5], b"1;", *[b"y" * 9000] * 9],
    ],
    ids=["interim", "head", "trailers", "extension"],
)
async def test_what_is_no_body_is_bounded(pool: Pool, peer: Peer, pieces: list[bytes]) -> None:
    peer.answers = [pieces]
    with pytest.raises(RemoteProtocolError, match="too long"):
        await ask(pool)


async def test_a_connection_that_is_lost_before_it_is_used_says_so_at_once(
    pool: Pool, peer: Peer
) -> None:
    connection = await acquire(pool)
    while not peer.writers:
        await asyncio.sleep(0)
    peer.writers[0].transport.abort()
    while connection.is_open:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    connection.send(request(b"{}"))
    with pytest.raises(WriteError):
        await connection.head(WAIT_S)
    pool.release(connection)
    peer.answers = [[PLAIN]]
    assert await ask(pool) == (200, b"ok")


async def test_a_peer_that_takes_nothing_is_not_waited_for() -> None:
    """And whoever waits when the connection is lost is told."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.transport.pause_reading()  # type: ignore[attr-defined]

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    pool = pool_to(server.sockets[0].getsockname()[1])
    large = request(bytes(32 * 1024 * 1024))
    connection = await acquire(pool)
    connection.send(large)
    with pytest.raises(WriteTimeout):
        await connection.drain(0.05)
    pool.release(connection)
    assert not connection.is_open, "what was sent in part is not used again"
    connection = await acquire(pool)
    connection.send(large)
    waiting = asyncio.create_task(connection.drain(WAIT_S))
    while len(writers) < 2:
        await asyncio.sleep(0.001)
    connection.abort()
    with pytest.raises(WriteError):
        await waiting
    pool.close()
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_only_the_addresses_that_were_found_are_dialled(peer: Peer) -> None:
    """The next one where nobody answers; the name itself never."""
    asked: list[tuple[str, int]] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return ["127.0.0.2", "127.0.0.1"]

    peer.answers = [[PLAIN], [PLAIN]]
    url = f"http://tools.invalid:{peer.port}/"
    pool = Pool(url, max_connections=1, max_idle=1, idle_s=30.0, resolve=resolve)
    assert await ask(pool) == await ask(pool) == (200, b"ok")
    assert asked == [("tools.invalid", peer.port)], "once for a connection"
    pool.close()

    async def nowhere(host: str, port: int) -> list[str]:
        return []

    lost = Pool(url, max_connections=1, max_idle=1, idle_s=30.0, resolve=nowhere)
    with pytest.raises(ConnectError, match="no address"):
        await acquire(lost)


async def test_a_head_that_drips_has_an_end(pool: Pool, peer: Peer) -> None:
    """Each line comes in time, the head never; nor does a body whose chunks never begin."""

    async def drip(line: bytes, waiting: asyncio.Task[Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not waiting.done():
                peer.writers[-1].write(line)
                await asyncio.sleep(0.02)

    for answer, line in (
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5", b";a"),
    ):
        peer.answers = [[answer]]
        connection = await acquire(pool)
        connection.send(request(b"{}"))
        if b"chunked" in answer:
            await connection.head(WAIT_S)
        reads = connection.read if b"chunked" in answer else connection.head
        waiting: asyncio.Task[Any] = asyncio.create_task(reads(0.3))  # type: ignore[arg-type]
        while len(peer.requests) == 0:
            await asyncio.sleep(0)
        await drip(line, waiting)
        with pytest.raises(ReadTimeout):
            await waiting
        pool.release(connection)
        peer.requests.clear()


async def test_a_read_without_a_bound_outlasts_one_with_a_bound(pool: Pool, peer: Peer) -> None:
    """A timer that an earlier wait has set ends no later one."""
    peer.answers = [[PLAIN[:-2]]]
    connection = await acquire(pool)
    connection.send(request(b"{}"))
    await connection.head(100.0)
    reading = asyncio.create_task(connection.read(None))
    await asyncio.sleep(0)
    skip(100.0)
    _, late = await asyncio.wait([reading], timeout=0.2)
    assert late
    peer.writers[0].write(b"ok")
    assert await reading == b"ok"
    pool.release(connection)


@pytest.mark.parametrize("bad", [b"a\r\nx: y", b"a\nb", b"a\0"])
def test_a_header_stays_one(bad: bytes) -> None:
    for name, value in ((b"x", bad), (bad, b"x"), (b"x y", b"x"), (b"", b"x")):
        with pytest.raises(LocalProtocolError):
            request_head("POST", "/", [(name, value)])
    for target in ("/a b", "/\r\nx", "", "/é"):
        with pytest.raises(LocalProtocolError):
            request_head("POST", target, [])


def test_what_nobody_reads_pauses_the_peer() -> None:
    connection, sink = Connection(lambda lost: None), SinkTransport()
    connection.connection_made(sink)
    paused: list[bool] = []
    sink.pause_reading = lambda: paused.append(True)  # type: ignore[method-assign]
    sink.resume_reading = lambda: paused.append(False)  # type: ignore[method-assign]
    connection.send(b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(HIGH_WATER_BYTES))
    assert paused == []
    connection.data_received(b"x")
    assert paused == [True]

    async def read() -> None:
        assert len(await connection.read(WAIT_S)) == HIGH_WATER_BYTES + 1

    asyncio.run(read())
    assert paused == [True, False]
