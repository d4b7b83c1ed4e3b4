"""HTTP/1.1 to a server: what is an answer, what is none, and when a connection is used again."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.http1 import (
    HIGH_WATER_BYTES,
    MAX_HEAD_BYTES,
    ConnectError,
    HttpClientError,
    LocalProtocolError,
    PoolTimeout,
    ReadTimeout,
    RemoteProtocolError,
)
from mcp_bridge.upstream.http import ServerPool, Timeouts
from tests.budget import examples

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
SOON_S = 0.05
LONG_S = 30.0
PATIENT = Timeouts(connect=LONG_S, read=LONG_S, write=LONG_S, pool=LONG_S)


class Peer:
    """Answers each request with the bytes that it is to; None: it closes."""

    def __init__(self) -> None:
        self.pieces: list[bytes | None] = [OK]
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.pieces:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@pytest_asyncio.fixture
async def peer() -> Peer:
    return Peer()


@pytest_asyncio.fixture
async def pool(peer: Peer) -> AsyncIterator[ServerPool]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    made = pool_to(server)
    yield made
    made.close()
    server.close()


def pool_to(server: asyncio.Server, scheme: str = "http", **more: Any) -> ServerPool:
    url = f"{scheme}://localhost:{server.sockets[0].getsockname()[1]}/mcp"
    given: dict[str, Any] = {"max_connections": 2, "max_idle": 1, "idle_s": 30.0}
    made = ServerPool(url, **(given | more))
    made.url = url  # type: ignore[attr-defined]
    return made


async def ask(pool: ServerPool, /, body: bytes = b"{}", **more: Any) -> tuple[int, bytes]:
    async with pool.stream(
        "POST",
        pool.url,  # type: ignore[attr-defined]
        headers=[(b"host", b"localhost"), (b"content-length", b"%d" % len(body))],
        content=body,
        timeouts=msgspec.structs.replace(PATIENT, **more),
    ) as response:
        return response.status, b"".join([data async for data in response.aiter_stream()])


async def test_a_connection_is_kept(pool: ServerPool, peer: Peer) -> None:
    assert [await ask(pool, b"{1}"), await ask(pool, b"{2}")] == [(200, b"{}")] * 2
    assert peer.connections == 1
    assert peer.requests[1].startswith(b"POST /mcp HTTP/1.1\r\nhost: localhost\r\n")
    assert peer.requests[1].endswith(b"\r\n\r\n{2}")


@pytest.mark.parametrize("answer", [OK, CHUNKED], ids=["length", "chunks"])
@pytest.mark.parametrize("size", [1, 2, 7])
async def test_whatever_the_cuts(pool: ServerPool, peer: Peer, answer: bytes, size: int) -> None:
    peer.pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
    assert await ask(pool) == (200, b"{}")
    assert await ask(pool) == (200, b"{}")
    assert peer.connections == 1


async def test_an_interim_answer_is_none(pool: ServerPool, peer: Peer) -> None:
    peer.pieces = [b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n", OK]
    assert await ask(pool) == (200, b"{}")


async def test_a_body_may_end_with_the_connection(pool: ServerPool, peer: Peer) -> None:
    peer.pieces = [b"HTTP/1.1 200 OK\r\n\r\n", b"{}", None]
    assert await ask(pool) == (200, b"{}")
    assert await ask(pool) == (200, b"{}")
    assert peer.connections == 2


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\n", None],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}", None],
        [CHUNKED[:-5], None],
        [b"SSH-2.0-OpenSSH_9.6\r\n"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}"],
        [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nx: ", b"a" * (MAX_HEAD_BYTES + 1)],
        [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4000],
        [OK + OK],
    ],
    ids=lambda pieces: str(pieces[0])[:40],
)
async def test_what_is_no_answer(pool: ServerPool, peer: Peer, pieces: list[bytes | None]) -> None:
    """And what came over that connection is nobody's next answer."""
    peer.pieces = pieces
    with pytest.raises(RemoteProtocolError):
        await ask(pool)
    peer.pieces = [OK]
    assert await ask(pool) == (200, b"{}")
    assert peer.connections == 2


async def test_an_answer_that_nobody_read_ends_its_connection(pool: ServerPool, peer: Peer) -> None:
    async with pool.stream(
        "POST",
        pool.url,  # type: ignore[attr-defined]
        headers=[(b"content-length", b"0")],
        content=b"",
        timeouts=PATIENT,
    ):
        pass
    assert await ask(pool) == (200, b"{}")
    assert peer.connections == 2


async def test_what_comes_unasked_ends_an_idle_connection() -> None:
    """A server's answer to nothing would be the next request's."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while await reader.readuntil(b"{}"):
            writer.write(OK)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = pool_to(server)
    try:
        await ask(pool)
        writers[0].write(OK.replace(b"{}", b"[]"))
        idle = pool._pool._idle[0]
        while idle.is_open:
            await asyncio.sleep(0)
        assert await ask(pool) == (200, b"{}")
        assert len(writers) == 2
    finally:
        pool.close()
        for writer in writers:
            writer.close()
        server.close()


async def test_a_silent_server_is_left(pool: ServerPool, peer: Peer) -> None:
    peer.pieces = []
    with pytest.raises(ReadTimeout):
        await ask(pool, read=SOON_S)
    peer.pieces = [OK]
    assert await ask(pool) == (200, b"{}")


async def test_connections_are_bounded_and_come_back(pool: ServerPool, peer: Peer) -> None:
    """A caller that leaves in the middle gives its place back."""
    peer.pieces = []
    asking = [asyncio.create_task(ask(pool)) for _ in range(2)]
    while len(peer.requests) < 2:
        await asyncio.sleep(0)
    with pytest.raises(PoolTimeout):
        await ask(pool, pool=SOON_S)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    peer.pieces = [OK]
    assert await asyncio.gather(ask(pool), ask(pool)) == [(200, b"{}")] * 2


async def test_nobody_there(pool: ServerPool) -> None:
    server = await asyncio.start_server(Peer().serve, "127.0.0.1", 0)
    nowhere = pool_to(server)
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectError):
        await ask(nowhere)


async def test_what_nobody_reads_stays_in_the_socket() -> None:
    """A server that sends for ever fills HIGH_WATER_BYTES of ours, and then it waits."""
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            while True:
                writer.write(bytes(64 * 1024))
                await writer.drain()
                sent += 64 * 1024
        except ConnectionError:
            return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = pool_to(server)
    try:
        async with pool.stream(
            "GET",
            pool.url,  # type: ignore[attr-defined]
            headers=[(b"host", b"localhost")],
            content=b"",
            timeouts=PATIENT,
        ):
            (connection,) = pool._pool._open
            before = -1
            while sent != before or not connection._paused:
                before = sent
                await asyncio.sleep(0.02)
            assert connection._num_buffered <= 2 * HIGH_WATER_BYTES
    finally:
        pool.close()
        server.close()


@pytest.mark.parametrize(
    "url", ["http://localhost.evil.example/", "https://localhost/", "http://evil.example/mcp"]
)
async def test_another_hosts_url_is_not_asked(pool: ServerPool, peer: Peer, url: str) -> None:
    pool.url = url  # type: ignore[attr-defined]
    with pytest.raises(LocalProtocolError):
        await ask(pool)
    assert peer.requests == []


@given(st.binary(max_size=300))
@settings(max_examples=examples(60), deadline=None)
def test_any_bytes_are_an_answer_or_an_error(data: bytes) -> None:
    async def run() -> None:
        peer = Peer()
        peer.pieces = [data, None]
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        pool = pool_to(server)
        try:
            await ask(pool)
        except HttpClientError:
            pass
        finally:
            pool.close()
            server.close()

    asyncio.run(run())


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=DNS:localhost", "-out", str(certificate), "-keyout", str(key)]
    made = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    assert await made.wait() == 0
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    server = await asyncio.start_server(Peer().serve, "127.0.0.1", 0, ssl=serving)
    doubting = pool_to(server, "https")
    trusting = pool_to(server, "https", trust=ssl.create_default_context(cafile=certificate))
    try:
        with pytest.raises(ConnectError, match="SSLCertVerificationError"):
            await ask(doubting)
        assert await ask(trusting) == (200, b"{}")
    finally:
        trusting.close()
        server.close()
