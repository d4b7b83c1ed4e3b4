"""A server's URL may not lead, however it says it, to this machine, to the operator's own networks,
or to where a cloud keeps its credentials. The tests run before a server that listens there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio

from gateway.mcp.upstreams import UpstreamResolver
from gateway.net.egress import Resolve, lookup_on
from tests.mcp_bridge.attacks.hostile import Attacker, Client, attacked
from tests.mcp_bridge.processes import ask_modern

CALL: dict[str, Any] = {"name": "t", "arguments": {}}
METADATA = "169.254.169.254"
LOOPBACK = "127.0.0.1"
PUBLIC = "93.184.215.14"


class Dials:
    """Hands addresses on to be dialled, and notes them."""

    def __init__(self, resolver: UpstreamResolver) -> None:
        self.addresses: list[str] = []
        self._resolver = resolver

    async def find(self, host: str, port: int) -> list[str]:
        found = await self._resolver.addresses(host, port)
        self.addresses += found
        return found


def resolving(*answers: list[str]) -> Resolve:
    """Each lookup has the next; the last one stays."""
    left = list(answers)

    async def look_up(host: str, port: int) -> list[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return look_up


class World:
    def __init__(self, client: Client, server: Attacker, dials: Dials) -> None:
        self.client, self.server, self.dials = client, server, dials

    async def call(self) -> dict[str, Any]:
        return await ask_modern(self.client, "/mcp", "tools/call", CALL)

    async def is_refused(self) -> None:
        found = await self.call()
        assert found["error"]["data"]["reason"] == "ForbiddenAddress", found
        assert LOOPBACK not in str(found), "an address is nothing for callers"
        assert self.server.heard == []


@asynccontextmanager
async def reaching(
    store: redis.asyncio.Redis,
    host: str,
    resolve: Resolve | None = None,
    *,
    near: bool = False,
    private: bool = False,
    answer: Any = None,
) -> AsyncIterator[World]:
    """A server of this machine, which is asked as `host`."""
    server = Attacker(answer)
    with ThreadPoolExecutor(1) as threads:
        dials = Dials(
            UpstreamResolver(
                resolve or lookup_on(threads), allow_loopback=near, allow_private=private
            )
        )
        url = f"http://{host}:PORT/mcp"
        async with attacked(store, server, resolve=dials.find, url=url) as client:
            yield World(client, server, dials)


@pytest.mark.parametrize(
    "host",
    [
        LOOPBACK,
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "0177.0.0.1",
        "0x7f.1",
        "2130706433",
        "127.1",
        "0.0.0.0",
        METADATA,
        "[fe80::1]",
    ],
)
async def test_this_machine_is_not_asked(redis: redis.asyncio.Redis, host: str) -> None:
    """By the machine's own resolver, which reads octal and short forms."""
    async with reaching(redis, host) as world:
        await world.is_refused()
        assert world.dials.addresses == []


@pytest.mark.parametrize("found", [[LOOPBACK], [PUBLIC, LOOPBACK], ["10.1.2.3"], [METADATA]])
async def test_a_name_that_leads_there_is_not_asked(
    redis: redis.asyncio.Redis, found: list[str]
) -> None:
    async with reaching(redis, "tools.example.com", resolving(found)) as world:
        await world.is_refused()
        assert world.dials.addresses == []


async def test_a_name_that_is_bound_anew_is_dialled_where_it_was_checked(
    redis: redis.asyncio.Redis,
) -> None:
    """The first answer is good, every later one is the metadata service's: a connection looks up
    once, and the next one is checked again."""
    resolve = resolving([LOOPBACK], [METADATA])

    async with reaching(redis, "tools.example.com", resolve, near=True) as world:
        assert "result" in await world.call()
        assert set(world.dials.addresses) == {LOOPBACK}
        for upstream in world.client.bridge._upstreams.values():
            await upstream.close()  # so that the next call needs a connection of its own
        again = await world.call()
        assert again["error"]["data"]["reason"] == "ForbiddenAddress"
        assert set(world.dials.addresses) == {LOOPBACK}


async def test_a_redirect_is_not_followed(redis: redis.asyncio.Redis) -> None:
    def redirects(server: Attacker, writer: Any, message: Any) -> bytes:
        return (
            b"HTTP/1.1 307 Temporary Redirect\r\ncontent-length: 0\r\n"
            b"location: http://169.254.169.254/latest/meta-data/\r\n\r\n"
        )

    async with reaching(redis, LOOPBACK, near=True, answer=redirects) as world:
        found = await world.call()
        assert "error" in found and found["error"]["data"]["server"] == "s0"
        assert set(world.dials.addresses) == {LOOPBACK}


async def test_own_networks_are_not_link_local(redis: redis.asyncio.Redis) -> None:
    for found in (METADATA, "fe80::1", LOOPBACK, "::ffff:10.0.0.1"):
        resolve = resolving([found])
        async with reaching(redis, "tools.internal", resolve, private=True) as world:
            await world.is_refused()


async def test_what_is_allowed_is_asked(redis: redis.asyncio.Redis) -> None:
    async with reaching(redis, "localhost", resolving([LOOPBACK]), near=True) as world:
        assert "result" in await world.call()
