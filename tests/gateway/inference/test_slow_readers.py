"""Clients that read a byte now and then: what they are owed is bounded, what writes for them stops,
nobody else notices, and they pay for what was generated."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from litestar.types import Receive, Scope, Send
from redis.asyncio import Redis

from billing.pricing.price_book import PriceBook
from billing.spool.spool import Spool
from engine.fake.engine import FAKE_CONFIG, FakeCore, FakeEngine
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from foundation.http1 import HIGH_WATER_BYTES
from foundation.tasks import TaskSet
from gateway.app.connection import ClientConnection
from gateway.fleet.engine.replica import EngineReplica
from gateway.fleet.prepare_threads import PrepareThreads
from gateway.fleet.replica import Replica
from gateway.fleet.router import Fleet, Route
from gateway.fleet.upstream.replica import UpstreamReplica
from gateway.generation_events import MeteredUsage
from gateway.inference.delivery import MAX_QUEUED_BYTES, MAX_QUEUED_CHUNKS, Delivery
from gateway.inference.services import GenerationServices
from gateway.principal import Plan
from gateway.routes.shared.reply import Reply
from tests.gateway.fleet.upstream.scripted_upstream import Exchange, Upstream, chunk
from tests.gateway.office import Office, PlainEncoder, WatchedLimiter
from tests.pace import skip

STALLED_S = 60.0
CHUNK_BYTES = 8192
READ_BYTES = 256 * 1024
"""asyncio takes this many bytes from a socket at once."""
WIDE = Plan(name="wide", tokens_per_minute=100_000_000, max_concurrent_streams=100)


class LongWinded(PlainEncoder):
    """So that a few tokens fill every buffer; counts how many it was given."""

    num_chunks = 0

    def encode(self, items: Sequence[object]) -> bytes:
        self.num_chunks += 1
        return b"#" * CHUNK_BYTES

    def finish(self, usage: MeteredUsage, cost: object = None) -> bytes:
        return b"[%d]" % usage.output


@pytest.fixture
async def open_office(tmp_path: Path, redis: Redis) -> AsyncIterator[Callable[..., Office]]:
    async with contextlib.AsyncExitStack() as stack:
        tasks, limiter = TaskSet(), WatchedLimiter(redis)
        stack.push_async_callback(tasks.close)
        stack.push_async_callback(limiter.close)
        spool = await Spool.open(tmp_path / "spool")
        stack.push_async_callback(spool.shutdown)

        def make(replica: Replica, kind: Any) -> Office:
            services = GenerationServices(
                fleet=Fleet([Route(model="m", kind=kind, replicas=(replica,))]),
                limiter=limiter,
                spool=spool,
                price_book=PriceBook.load(),
                tasks=tasks,
                cache_salts=lambda org: org,
                stalled_reader_s=STALLED_S,
            )
            return Office(services, redis)

        yield make


@pytest.fixture
async def engine(tokenizer: Tokenizer) -> AsyncIterator[FakeEngine]:
    """A token a millisecond for everybody."""
    engine = FakeEngine(FakeCore(FAKE_CONFIG, vocab_size=tokenizer.vocab_size), delay_s=0.001)
    yield engine
    await engine.close()
    engine.core.check_integrity()


@pytest.fixture
def office(
    open_office: Callable[..., Office],
    engine: FakeEngine,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    threads: PrepareThreads,
) -> Office:
    replica = EngineReplica(
        name="m", client=engine, tokenizer=tokenizer, template=template, threads=threads
    )
    return open_office(replica, "engine")


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Delivery], Any]]:
    """Puts a delivery behind a port whose sockets hold next to nothing; the client's end."""
    waiting: list[Delivery] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Reply(waiting.pop(0), stream=True)(scope, receive, send)

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = uvicorn.Server(
        uvicorn.Config(
            answer,
            http=ClientConnection.reading_within(STALLED_S),
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=1,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    clients: list[socket.socket] = []

    async def connect(delivery: Delivery) -> socket.socket:
        client = socket.socket()
        clients.append(client)
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listener.getsockname())
        waiting.append(delivery)
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return client

    yield connect
    for _ in range(600):
        if not server.server_state.connections:
            break
        skip(STALLED_S / 10)  # the slow one is still there
        await asyncio.sleep(0.05)
    assert not server.server_state.connections
    for client in clients:
        client.close()
    server.should_exit = True
    await asyncio.wait_for(serving, 30)


async def read_all(client: socket.socket) -> bytes:
    """To the end of the response."""
    loop, seen = asyncio.get_running_loop(), b""
    while not seen.endswith(b"\r\n0\r\n\r\n"):
        data = await asyncio.wait_for(loop.sock_recv(client, 2**20), 30)
        assert data, "it broke off"
        seen += data
    return seen


async def a_byte_now_and_then(client: socket.socket) -> None:
    """Until the connection ends."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while await loop.sock_recv(client, 1):
            await asyncio.sleep(0.1)


async def still(count: Callable[[], int]) -> int:
    """Return the count once it has not moved in twenty turns of the loop, with time in between."""
    seen, turns = count(), 0
    async with asyncio.timeout(30):
        while turns < 20:
            await asyncio.sleep(0.01)
            turns = turns + 1 if count() == seen else 0
            seen = count()
    return seen


async def test_a_byte_now_and_then_pauses_the_sequence_and_is_given_up(
    office: Office, engine: FakeEngine, serve: Callable[[Delivery], Any]
) -> None:
    slow = LongWinded()
    delivery = office.begin(WIDE, encoder=slow)
    client = await serve(delivery)
    reading = asyncio.create_task(a_byte_now_and_then(client))
    generated = await still(lambda: engine.status.generated_tokens)
    assert not delivery.abandoned, "it has its time"
    assert engine.status.num_running == 1 and not engine.core.has_work(), "it is paused"
    assert generated <= slow.num_chunks + 2, "but for a step under way nothing is generated unseen"
    assert len(delivery._chunks) <= MAX_QUEUED_CHUNKS
    assert delivery._num_bytes <= MAX_QUEUED_BYTES + CHUNK_BYTES

    others = [office.begin(WIDE, encoder=LongWinded(), max_tokens=100) for _ in range(8)]
    answers = await asyncio.gather(*[read_all(await serve(each)) for each in others])
    assert all(b"[100]" in answer for answer in answers)
    assert engine.status.generated_tokens == generated + 800, "the slow one rests all the while"

    await office.skip(STALLED_S)
    async with asyncio.timeout(30):
        while not delivery.abandoned:
            await asyncio.sleep(0.05)
    assert not reading.done(), "it would have read for hours"
    await office.settled()
    assert engine.status.num_running == 0
    (event,) = [each for each in await office.billed() if each.finish == "disconnect"]
    assert event.quantities.output == generated == engine.status.generated_tokens - 800
    reading.cancel()


async def test_an_upstream_is_not_read_from_while_its_reader_is_slow(
    open_office: Callable[..., Office], threads: PrepareThreads
) -> None:
    upstream = Upstream()
    written = 0

    async def floods(exchange: Exchange) -> None:
        nonlocal written
        await exchange.begin_stream()
        while True:
            await exchange.send(chunk("x" * CHUNK_BYTES))
            written += 1

    upstream.script = floods
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    replica = UpstreamReplica(
        name="u", base_url=f"http://127.0.0.1:{port}/v1", upstream_model="u", threads=threads
    )
    office = open_office(replica, "upstream")
    encoder = LongWinded()
    delivery = office.begin(WIDE, encoder=encoder, forward={"messages": [], "max_tokens": 100_000})
    stopped_at = await still(lambda: written)
    assert not delivery.abandoned and stopped_at > encoder.num_chunks
    assert delivery._num_bytes <= MAX_QUEUED_BYTES + CHUNK_BYTES
    (connection,) = replica._pool._open
    assert connection._num_buffered <= HIGH_WATER_BYTES + READ_BYTES, "the rest is in the sockets"
    await office.skip(STALLED_S)
    await asyncio.wait_for(upstream.exchanges[0].left.wait(), 30)
    await office.settled()
    assert delivery.abandoned
    (event,) = await office.billed()
    assert event.finish == "disconnect" and event.estimated
    assert 0 < event.quantities.output
    await replica.close()
    server.close()
    await server.wait_closed()


async def test_a_reader_that_wakes_up_gets_all_of_it(
    office: Office, engine: FakeEngine, serve: Callable[[Delivery], Any]
) -> None:
    encoder = LongWinded()
    client = await serve(office.begin(WIDE, encoder=encoder, max_tokens=300))
    paused = await still(lambda: engine.status.generated_tokens)
    assert paused < 200 and not engine.core.has_work()
    answer = await read_all(client)
    assert b"[300]" in answer and answer.count(b"#") == encoder.num_chunks * CHUNK_BYTES
    await office.settled()
    (event,) = await office.billed()
    assert (event.quantities.output, event.finish) == (300, "done")
