"""The HTTP/1.1 client against a raw socket that says whatever a test wants."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.upstream import http1
from gateway.fleet.upstream.http1 import BrokenResponse, ConnectFailed, Connection, Pool, PoolFull

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
    pool = Pool(f"http://127.0.0.1:{peer.port}/v1/x?q=1", {"x-a": "b"})
    yield pool
    pool.close()


WAIT_S = 5.0


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
        pool.post(connection, body)
        status, _ = await connection.head(WAIT_S)
        return status, await read_all(connection)
    finally:
        pool.release(connection)


async def test_the_request(pool: Pool, peer: Peer) -> None:
    peer.answers = [[PLAIN]]
    assert await ask(pool, b'{"a": 1}') == (200, b"ok")
    assert peer.requests == [
        b"POST /v1/x?q=1 HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nx-a: b\r\ncontent-length: 8\r\n\r\n"
        b'{"a": 1}' % peer.port
    ]


async def test_headers_in_lower_case(pool: Pool, peer: Peer) -> None:
    peer.answers = [[b"HTTP/1.1 429 No\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"]]
    connection = await acquire(pool)
    pool.post(connection, b"")
    status, headers = await connection.head(WAIT_S)
    assert (status, headers) == (429, {"retry-after": "7", "content-length": "0"})
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
    pool.post(connection, b"{}")
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


async def test_an_old_connection_is_not_trusted(
    pool: Pool, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.answers = [[PLAIN], [PLAIN], [PLAIN]]
    await ask(pool)
    await ask(pool)
    assert len(peer.writers) == 1
    monkeypatch.setattr(http1, "IDLE_S", -1.0)
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
    with pytest.raises(BrokenResponse):
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
    pool.post(connection, b"{}")
    await connection.head(WAIT_S)
    await asyncio.sleep(0.2)
    taken = len(await connection.read(WAIT_S))
    assert taken < 4 * 1024 * 1024
    while data := await connection.read(WAIT_S):
        taken += len(data)
    assert taken == size
    assert connection.reusable
    pool.release(connection)


async def test_who_stops_waiting_frees_the_place(
    pool: Pool, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1, "MAX_CONNECTIONS", 1)
    for _ in range(3):
        peer.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"]]
        waiting = asyncio.create_task(ask(pool))
        await asyncio.sleep(0.02)
        with pytest.raises(PoolFull):
            await acquire(pool)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.02)  # the transport is closed in the next turn of the loop
    peer.answers = [[PLAIN]]
    assert await ask(pool) == (200, b"ok")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/", "http://no-such-host.invalid/"])
async def test_nobody_there(url: str) -> None:
    with pytest.raises(ConnectFailed):
        await acquire(Pool(url, {}))


@given(st.binary(max_size=120))
def test_any_bytes_are_an_answer_or_a_fault(data: bytes) -> None:
    """Without a socket: the protocol alone."""
    connection = Connection(set(), lambda lost: None)
    connection.send(b"")
    connection.data_received(b"HTTP/1.1 200 OK\r\n" + data)
    connection.connection_lost(None)

    async def take() -> None:
        await connection.head(WAIT_S)
        await read_all(connection)

    async def bounded() -> None:
        async with asyncio.timeout(5):
            try:
                await take()
            except BrokenResponse as error:
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
    pool = Pool(f"https://localhost:{port}/", {})
    with pytest.raises(ConnectFailed, match="SSLCertVerificationError"):
        await acquire(pool)
    trusting = Pool(
        f"https://localhost:{port}/", {}, ssl.create_default_context(cafile=certificate)
    )
    assert await ask(trusting) == (200, b"ok")
    trusting.close()
    server.close()
    await server.wait_closed()


async def test_a_wait_that_lasts_too_long_ends_and_one_that_did_not_counts_anew() -> None:
    """Bytes come every 50 ms; what is left out is noticed."""

    closed = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        for _ in range(4):
            writer.write(b"x")
            await asyncio.sleep(0.05)
        await reader.read()
        writer.close()
        closed.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = Pool(f"http://127.0.0.1:{port}/", {})
    connection = await acquire(pool)
    pool.post(connection, b"{}")
    await connection.head(0.5)
    got = b""
    with pytest.raises(TimeoutError):
        while True:
            got += await connection.read(0.3)
    assert got == b"xxxx"
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
    pool = Pool(f"http://127.0.0.1:{port}/", {})
    connection = await acquire(pool)
    waiting = asyncio.create_task(connection.head(WAIT_S))
    await asyncio.sleep(0)
    connection.interrupt(LookupError("gone"))
    with pytest.raises(LookupError):
        await waiting
    with pytest.raises(LookupError):
        await connection.read(WAIT_S)
    pool.post(connection, b"{}")
    assert (await connection.head(WAIT_S))[0] == 200
    assert await connection.read(WAIT_S) == b"ok"
    connection.abort()
    await closed.wait()
    server.close()
