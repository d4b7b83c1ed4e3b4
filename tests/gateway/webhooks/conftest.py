"""A receiver of webhooks on a real socket, which answers as it is told; senders that go to it; an
org with an endpoint there."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from gateway.audit.log import COMMAND_LINE
from gateway.db import tenant
from gateway.net.egress import Egress
from gateway.secret import Cipher, Secret, SecretKey
from gateway.tenancy.orgs import create_org
from gateway.webhooks.endpoints import CIPHER_PURPOSE, EndpointOnce, create_endpoint
from gateway.webhooks.sender import Sender, WebhookChannel

SECRET = Secret(version=1, keys=(SecretKey(id="one", secret=base64.b64encode(b"s" * 32).decode()),))
BOTH = ("budget.threshold_reached", "rate_limit.threshold_reached")

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Received(msgspec.Struct, frozen=True):
    path: str
    headers: dict[str, str]
    body: bytes


def says(status: str, *lines: str, body: bytes = b"") -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *lines]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        await writer.drain()

    return answer


OK = says("204 No Content")


class Receiver:
    """Answers with each of `script` in turn, and with the last from then on."""

    def __init__(self) -> None:
        self.script: list[Answer] = [OK]
        self.received: list[Received] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.rstrip().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (each.partition(":") for each in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.received.append(Received(first.split(" ")[1], headers, body))
            answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            await answer(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    yield made
    server.close()


@pytest.fixture
async def org_id(db: AsyncEngine) -> str:
    async with db.begin() as conn:
        return (await create_org(conn, name="acme", is_operator=False, actor=COMMAND_LINE)).id


@pytest.fixture
def cipher() -> Cipher:
    return Cipher(SECRET, CIPHER_PURPOSE)


async def add_endpoint(
    db: AsyncEngine, cipher: Cipher, org_id: str, url: str, *event_types: str
) -> EndpointOnce:
    async with tenant(db, org_id) as conn:
        return await create_endpoint(
            conn,
            cipher,
            org_id=org_id,
            url=url,
            description=None,
            event_types=event_types or BOTH,
            actor=COMMAND_LINE,
            allow_loopback=True,
        )


@pytest.fixture
async def endpoint(
    db: AsyncEngine, cipher: Cipher, org_id: str, receiver: Receiver
) -> EndpointOnce:
    return await add_endpoint(db, cipher, org_id, receiver.url)


MakeSender = Callable[..., Sender]
CHANNEL_OPTIONS = ("on_outcome", "wall_clock", "draw")


@pytest.fixture
async def make_sender(system_db: AsyncEngine, cipher: Cipher) -> AsyncIterator[MakeSender]:
    made: list[tuple[Sender, Egress]] = []

    def make(timeout_s: float = 5.0, **options: Any) -> Sender:
        egress = Egress(allow_loopback=True, timeout_s=timeout_s)
        of_channel = {name: options.pop(name) for name in CHANNEL_OPTIONS if name in options}
        channel = WebhookChannel(cipher, egress, **{"draw": lambda low, high: 1.0, **of_channel})
        sender = Sender(system_db, [channel], **options)
        made.append((sender, egress))
        return sender

    yield make
    for sender, egress in made:
        await sender.close()
        egress.close()


async def turn(sender: Sender) -> None:
    """All that is due now, to its end."""
    await sender.poll()
    await sender.drain()


async def rows(db: AsyncEngine, query: str, **values: Any) -> list[Any]:
    async with db.begin() as conn:
        return list(await conn.execute(sa.text(query), values))


async def hurry(db: AsyncEngine) -> None:
    """Make what waits to be tried again due now."""
    async with db.begin() as conn:
        await conn.execute(sa.text("UPDATE webhook_deliveries SET due_at = now()"))
