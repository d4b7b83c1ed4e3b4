"""A request is paid by what became of it: it went out or not, and was waited for or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisGone

from foundation.http1 import ConnectError
from mcp_bridge.caller import Caller
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import RpcError
from mcp_bridge.routing.exchanges import Event, LegacyExchange, NotificationEvent, ResultEvent
from mcp_bridge.routing.guard import (
    Guard,
    GuardedExchange,
    GuardedRequest,
    Outcome,
    RequestPermit,
)
from mcp_bridge.upstream.http import Timeouts
from tests.mcp_bridge.upstream.test_http import pool_to

PROGRESS = rpc.notification("notifications/progress", {"progressToken": 1, "progress": 1})


class Kept(RequestPermit):
    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


class Passing(Guard):
    def __init__(self) -> None:
        self.given = Kept()

    async def permit(self, *_: Any) -> Any:
        return self.given


class Inner:
    """Says `events`, the last of which may be an error to raise or None: it waits for ever."""

    holds = True

    def __init__(self, events: Sequence[Any], *, is_out: bool) -> None:
        self._events, self.is_out = events, is_out
        self.waits = asyncio.Event()

    async def events(self) -> AsyncGenerator[Event]:
        for event in self._events:
            if event is None:
                self.waits.set()
                await asyncio.get_running_loop().create_future()
            if isinstance(event, Exception):
                raise event
            yield event

    def carry(self, trace: Mapping[str, str]) -> None:
        """Nobody is told of a trace."""
        assert trace == {}

    async def answer(self, answers: Any) -> None:
        """Nothing was asked."""

    async def cancel(self, reason: str) -> None:
        """There is nobody to tell."""


def guarded(inner: Any) -> tuple[GuardedExchange, Kept]:
    guard = Passing()
    caller = Caller(org_id="org_a", project_id="p", subject="s", client="c")
    source: Any = type("Source", (), {"caller": caller, "name": "s"})
    asking: Any = GuardedRequest(upstream=source, alias="a", method="tools/call", params={})
    return GuardedExchange(inner, guard, caller, asking), guard.given


async def drained(exchange: GuardedExchange) -> None:
    async for _ in exchange.events():
        continue


@pytest.mark.parametrize("is_out", [True, False])
@pytest.mark.parametrize(
    "error", [RedisGone("gone"), RpcError(rpc.INTERNAL_ERROR, "no"), RuntimeError("a bug")]
)
async def test_what_fails_is_not_paid_for(error: Exception, is_out: bool) -> None:
    for before in ([], [NotificationEvent(PROGRESS)]):
        exchange, permit = guarded(Inner([*before, error], is_out=is_out))
        with pytest.raises(type(error)):
            await drained(exchange)
        assert permit.outcomes == ["failed"]


@pytest.mark.parametrize(("is_out", "expected"), [(True, "left"), (False, "failed")])
async def test_who_leaves_pays_for_what_went_out(is_out: bool, expected: Outcome) -> None:
    inner = Inner([None], is_out=is_out)
    exchange, permit = guarded(inner)
    waiting = asyncio.create_task(drained(exchange))
    await inner.waits.wait()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert permit.outcomes == [expected]


async def test_a_result_is_paid_for() -> None:
    exchange, permit = guarded(Inner([NotificationEvent(PROGRESS), ResultEvent({})], is_out=True))
    await drained(exchange)
    assert permit.outcomes == ["done"]


async def test_nothing_went_out_where_there_is_no_session() -> None:
    class Sessions:
        async def get(self, _: Any) -> Any:
            raise RedisGone("gone")

    upstream: Any = type("Upstream", (), {"next_id": staticmethod(lambda: 1), "name": "s"})
    sessions: Any = Sessions()
    inner = LegacyExchange(upstream, sessions, "tools/call", {"name": "t"}, {})
    exchange, permit = guarded(inner)
    with pytest.raises(RedisGone):
        await drained(exchange)
    assert not exchange.is_out and permit.outcomes == ["failed"]


async def test_a_request_is_out_once_there_is_a_connection_to_write_it_to() -> None:
    came: list[bytes] = []
    out: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    def went_out() -> None:
        out.append(len(came))

    async def ask(pool: Any) -> None:
        timeouts = Timeouts(connect=60.0, read=60.0, write=60.0, pool=60.0)
        headers = [(b"host", b"localhost"), (b"content-length", b"0")]
        async with pool.stream(
            "POST", pool.url, headers=headers, timeouts=timeouts, on_sent=went_out
        ) as response:
            async for _ in response.aiter_stream():
                continue

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool, nowhere = pool_to(server), pool_to(server)
    await ask(pool)
    assert out == [0] and len(came) == 1, "before it was written"
    pool.close()
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectError):
        await ask(nowhere)
    assert out == [0]
    nowhere.close()
