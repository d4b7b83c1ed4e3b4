"""A response to a client that stops reading: given up, and its connection closed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from litestar.types import Message, Receive, Scope, Send

from gateway.app.connection import ClientConnection
from gateway.fleet.errors import ReplicaOverloaded
from gateway.inference.delivery import Delivery
from gateway.net.listener import bound_unread
from gateway.routes.shared.reply import Reply
from gateway.routes.shared.request_state import CLIENT_LEFT, ERROR_CODE, OUTCOME

STALLED_S = 0.3
CHUNK = b"x" * 65_536
MAX_CHUNKS = 1_000
"""64 MiB: more than the sockets of both sides hold."""


NUM_SMALL = 50


async def produce(delivery: Delivery) -> None:
    for _ in range(MAX_CHUNKS):
        if delivery.abandoned:
            return
        await delivery.put(CHUNK, nobody_rests)
    delivery.end()


async def nobody_rests(resting: bool) -> None: ...


@pytest.mark.parametrize(
    ("path", "code"), [("/v1/chat/completions", "overloaded"), ("/v1/messages", "overloaded_error")]
)
@pytest.mark.parametrize("has_begun", [False, True])
async def test_an_answer_that_fails_notes_the_code_that_it_tells(
    path: str, code: str, has_begun: bool
) -> None:
    delivery, sent = Delivery(stalled_reader_s=STALLED_S), list[Message]()
    if has_begun:
        await delivery.put(b"data: {}\n\n", nobody_rests)
    delivery.fail(ReplicaOverloaded("full", retry_after_s=1.0))

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "path": path, "state": {}}
    await Reply(delivery, stream=True)(scope, receive, send)
    assert scope["state"][ERROR_CODE] == code
    assert code.encode() in b"".join(each.get("body", b"") for each in sent)  # type: ignore[misc]


async def produce_slowly(delivery: Delivery) -> None:
    """Put each of some chunks when the one before it was read."""
    for number in range(NUM_SMALL):
        await delivery.put(b"%d," % number, nobody_rests)
        while delivery._chunks or delivery._awaited is None:
            await asyncio.sleep(0)
    delivery.put_last(b"end")


class Server:
    """One response to whoever asks, under uvicorn."""

    produce = staticmethod(produce)

    def __init__(self, http: Any) -> None:
        self.delivery = Delivery(stalled_reader_s=STALLED_S)
        self.outcomes: list[str] = []
        self.done = asyncio.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            self.answer,
            interface="asgi3",
            http=http,
            ws="none",
            lifespan="off",
            log_config=None,
        )
        self.uvicorn = uvicorn.Server(config)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.create_task(self.produce(self.delivery))
        await Reply(self.delivery, stream=True)(scope, receive, send)
        self.outcomes.append(scope["state"][OUTCOME])
        await asyncio.wait_for(producer, 30)
        self.done.set()

    async def ask(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname(), limit=2**16)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
        return reader, writer


@pytest.fixture(params=["httptools", ClientConnection], ids=["uvicorn's", "ours"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    """Ours tells of a client's leaving, of uvicorn's own it must be asked."""
    server = Server(request.param)
    serving = asyncio.create_task(server.uvicorn.serve(sockets=[server.listener]))
    yield server
    server.uvicorn.should_exit = True
    await asyncio.wait_for(serving, 30)


async def test_a_client_that_stops_reading_is_given_up(server: Server) -> None:
    reader, writer = await server.ask()
    await asyncio.wait_for(server.done.wait(), 30)
    assert server.delivery.abandoned
    assert server.outcomes == [CLIENT_LEFT]

    rest = await asyncio.wait_for(reader.read(), 30)
    assert len(rest) < len(CHUNK) * MAX_CHUNKS
    assert not rest.endswith(b"0\r\n\r\n"), "what was cut short must not look whole"
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_leaves_is_known_to_have_left_at_once(server: Server) -> None:
    server.delivery.stalled_reader_s = 60.0
    reader, writer = await server.ask()
    writer.transport.abort()
    await asyncio.wait_for(server.done.wait(), 30)
    assert server.delivery.abandoned and server.delivery.was_left
    assert server.outcomes == [CLIENT_LEFT]


async def test_a_client_that_never_reads_again_holds_no_connection(server: Server) -> None:
    bound_unread(server.listener, STALLED_S)
    _, writer = await server.ask()
    async with asyncio.timeout(30):
        await server.done.wait()
        while server.uvicorn.server_state.connections:
            await asyncio.sleep(0.02)
    writer.close()


async def test_a_stream_whose_reader_waits_for_each_chunk_is_whole_and_in_order(
    server: Server,
) -> None:
    """Our own server sends these without the reader."""
    server.produce = produce_slowly  # type: ignore[assignment]
    async with httpx.AsyncClient() as client:
        host, port = server.listener.getsockname()
        answers = [await client.get(f"http://{host}:{port}/")]
        await asyncio.wait_for(server.done.wait(), 30)
        server.delivery, server.done = Delivery(stalled_reader_s=STALLED_S), asyncio.Event()
        answers.append(await client.get(f"http://{host}:{port}/"))
    whole = "".join(f"{number}," for number in range(NUM_SMALL)) + "end"
    assert [each.text for each in answers] == [whole, whole], "on one connection"
    assert server.outcomes == ["200", "200"]


async def test_a_stream_ends_with_its_last_chunk() -> None:
    """Nothing follows it, and who waits for it to be sent hears of that."""
    delivery, sent, heard = Delivery(stalled_reader_s=STALLED_S), list[Message](), list[int]()
    await delivery.put(b"first", nobody_rests)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body") == b"first":
            delivery.put_last(b"last")
            delivery.once_sent(lambda: heard.append(len(sent)))

    scope: Any = {"type": "http", "path": "/v1/chat/completions", "state": {}}
    await Reply(delivery, stream=True)(scope, receive, send)
    assert [(each["body"], each["more_body"]) for each in sent[1:]] == [  # type: ignore[typeddict-item]
        (b"first", True),
        (b"last", False),
    ]
    assert heard == [3] and scope["state"][OUTCOME] == "200"
