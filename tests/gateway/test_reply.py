"""A response to a client that stops reading: given up, and its connection closed."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from litestar.types import Receive, Scope, Send

from gateway.delivery import Delivery
from gateway.routes import reply
from gateway.routes.counted import CLIENT_LEFT, OUTCOME
from gateway.routes.reply import Reply

STALLED_S = 0.3
CHUNK = b"x" * 65_536
MAX_CHUNKS = 1_000
"""64 MiB: more than the sockets of both sides hold."""


async def produce(delivery: Delivery) -> None:
    for _ in range(MAX_CHUNKS):
        if delivery.abandoned:
            return
        await delivery.put(CHUNK)
    delivery.end()


async def test_a_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "STALLED_READER_S", STALLED_S)
    states: list[dict[str, Any]] = []
    delivery = Delivery()
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.create_task(produce(delivery))
        await Reply(delivery, stream=True)(scope, receive, send)
        states.append(scope["state"])
        await asyncio.wait_for(producer, 5)
        done.set()

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=2**16)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")) == b"HTTP/1.1 200 OK\r\n"
    await asyncio.wait_for(done.wait(), 10)
    assert delivery.abandoned
    assert [state[OUTCOME] for state in states] == [CLIENT_LEFT]

    rest = await asyncio.wait_for(reader.read(), 10)
    assert len(rest) < len(CHUNK) * MAX_CHUNKS
    assert not rest.endswith(b"0\r\n\r\n"), "what was cut short must not look whole"
    writer.close()
    await writer.wait_closed()
    server.should_exit = True
    await asyncio.wait_for(serving, 10)
