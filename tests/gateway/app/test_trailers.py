"""Checks that what comes after a request's head changes nothing that the head decided, on the
whole application under uvicorn as a worker configures it, over raw sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from uvicorn import Server

from gateway.app.connection import ClientConnection
from gateway.app.worker import server_config
from gateway.audit.log import COMMAND_LINE
from gateway.db import create_engine, tenant
from gateway.networks import Networks
from gateway.settings.load import load
from gateway.tenancy.keys.keys import PEPPER_PURPOSE, create_key
from gateway.tenancy.keys.restrictions import Restrictions
from tests.databases import Databases
from tests.gateway.whole_app import SECRET, World, world
from tests.shared_application import in_one_task, on_one_loop, stores_of_its_own

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE_S = 30.0
INSIDE = b"10.1.1.1"
BODY = b"2\r\n{}\r\n0\r\n"
LIST_PROJECTS = b"GET /v1/admin/projects HTTP/1.1\r\n"
ASK_MCP = b"POST /mcp/acme HTTP/1.1\r\naccept: application/json, text/event-stream\r\n"


class WorkerSocket:
    """The worker's socket, and a key that is good only from inside."""

    def __init__(self, port: int, found: World, inside_key: str) -> None:
        self.port, self.key = port, found.acme.admin.encode()
        self.inside_key = inside_key.encode()

    async def ask(self, *packets: bytes, answers: int = 1) -> list[tuple[int, bytes]]:
        """Send the packets one after the other on a connection of their own; the status and body
        of each answer, 0 for one that never came."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        async with asyncio.timeout(DEADLINE_S):
            for index, packet in enumerate(packets):
                if index:
                    await asyncio.sleep(0.05)
                writer.write(packet)
            found = [await read_answer(reader) for _ in range(answers)]
        writer.close()
        return found

    async def status(self, *packets: bytes) -> int:
        ((status, _),) = await self.ask(*packets)
        return status


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
    except asyncio.IncompleteReadError:
        return 0, b""
    length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
    return int(head.split()[1]), await reader.readexactly(int(length))


@on_one_loop(scope="module")
async def door(
    databases: Databases, redis_server_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WorkerSocket]:
    """Serve all tests here: none of them leaves anything."""
    home = tmp_path_factory.mktemp("home")
    trusted = Networks.of(["127.0.0.1"])
    async with stores_of_its_own(databases, redis_server_url) as (url, redis_url):
        store = redis.asyncio.from_url(redis_url)
        started = world(url, store, home, trusted_proxies=trusted)
        async with in_one_task(started) as found, serving(found.app, home) as port:
            yield WorkerSocket(port, found, await inside_key(url, found))
        await store.aclose()


async def inside_key(postgres_url: str, found: World) -> str:
    """Make a key that is good only from inside."""
    db, key = create_engine(postgres_url), SECRET.current
    async with tenant(db, found.acme.org_id) as conn:
        inside = await create_key(
            conn,
            org_id=found.acme.org_id,
            project_id=found.acme.project_id,
            name="inside",
            scopes=["admin:*"],
            restrictions=Restrictions(ip_ranges=["10.1.1.0/24"]),
            pepper=key.derive(PEPPER_PURPOSE),
            pepper_id=key.id,
            actor=COMMAND_LINE,
        )
    await db.dispose()
    return inside.secret


@asynccontextmanager
async def serving(app: Any, home: Path) -> AsyncIterator[int]:
    """Serve the application whose services are wired already, and yield the port."""
    config = server_config(app, load({"home": home}, {}), ClientConnection)
    config.lifespan = "off"
    server = Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server._serve(sockets=[listener]))  # leaves signals alone
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


def request(start: bytes, *headers: bytes, trailers: bytes = b"") -> bytes:
    """A whole chunked request, in one packet."""
    lines = [b"host: x", b"transfer-encoding: chunked", b"content-type: application/json", *headers]
    return start + b"\r\n".join([*lines, b"", b""]) + BODY + trailers + b"\r\n"


def bearer(key: bytes) -> bytes:
    return b"authorization: Bearer " + key


async def test_a_forwarded_address_in_a_trailer_opens_no_key_that_is_bound_to_addresses(
    door: WorkerSocket,
) -> None:
    header, key = b"x-forwarded-for: " + INSIDE, bearer(door.inside_key)
    assert await door.status(request(LIST_PROJECTS, key, header)) == 200
    assert await door.status(request(LIST_PROJECTS, key)) == 401
    for trailer in (header, b"X-Forwarded-For: " + INSIDE, b"forwarded: for=" + INSIDE):
        asked = request(LIST_PROJECTS, key, trailers=trailer + b"\r\n")
        assert await door.status(asked) == 401, trailer
        for cut in (len(asked) - 2, asked.index(BODY), asked.index(trailer), len(asked) - 6):
            assert await door.status(asked[:cut], asked[cut:]) == 401, (trailer, cut)


@pytest.mark.parametrize("start", [LIST_PROJECTS, ASK_MCP], ids=["admin", "mcp"])
async def test_a_credential_in_a_trailer_is_none(door: WorkerSocket, start: bytes) -> None:
    assert await door.status(request(start, trailers=bearer(door.key) + b"\r\n")) == 401
    assert await door.status(request(start, trailers=b"x-api-key: " + door.key + b"\r\n")) == 401


async def test_a_trailer_reaches_neither_its_own_request_nor_the_next(door: WorkerSocket) -> None:
    """Not even one without a value, behind which httptools keeps the name for a while."""
    plain = LIST_PROJECTS + b"host: x\r\n\r\n"
    first = request(LIST_PROJECTS, bearer(door.key), trailers=bearer(door.key) + b"\r\nx:\r\n")
    answers = await door.ask(first + plain + first + plain, answers=4)
    assert [status for status, _ in answers] == [200, 401, 200, 401]
    answers = await door.ask(first, plain, first, plain, answers=4)
    assert [status for status, _ in answers] == [200, 401, 200, 401]


async def test_a_trailer_neither_names_a_host_nor_doubles_one(door: WorkerSocket) -> None:
    assert (
        await door.status(request(LIST_PROJECTS, bearer(door.key), trailers=b"host: y\r\n")) == 200
    )
    without = request(LIST_PROJECTS, bearer(door.key), trailers=b"host: y\r\n")
    assert await door.status(without.replace(b"host: x\r\n", b"", 1)) == 400
