"""Calls that were continued, and are then cancelled: their server hears of it, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import redis.asyncio

from mcp_bridge.worker_relay import Relay
from tests.mcp_bridge.attacks.hostile import Attacker, Client, attacked
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import OK, SSE, whole

CALL: dict[str, Any] = {"name": "asks", "arguments": {}}
ACCEPTED = {"action": "accept", "content": {}}
QUESTION = {
    "jsonrpc": "2.0",
    "id": "question",
    "method": "elicitation/create",
    "params": {"message": "?", "requestedSchema": {"type": "object"}},
}


class Asking(Attacker):
    """Asks on the stream of the call, and never ends it. `takes_answers`: whether what it is
    answered is acknowledged."""

    def __init__(self, *, takes_answers: bool) -> None:
        super().__init__(self.ask, modern=False)
        self.takes_answers = takes_answers
        self.answered, self.cancelled = asyncio.Event(), asyncio.Event()
        self.cancels: list[Any] = []
        self.may_end = asyncio.Event()

    async def ask(self, server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
        body = whole(QUESTION).partition(b"\r\n\r\n")[2]
        writer.write(OK + SSE + b"connection: close\r\n\r\ndata: " + body + b"\n\n")
        await writer.drain()
        await self.may_end.wait()
        writer.close()
        return b""

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if message.get("id") == "question":
            self.answered.set()
            if not self.takes_answers:
                await self.may_end.wait()
        elif message.get("method") == "notifications/cancelled":
            self.cancels.append(message["params"]["requestId"])
            self.cancelled.set()
        await super().reply(writer, message, head)


@asynccontextmanager
async def workers(store: redis.asyncio.Redis, server: Asking) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        try:
            yield [await stack.enter_async_context(attacked(store, server)) for _ in range(2)]
        finally:
            server.may_end.set()


async def leave(turn: asyncio.Task[Any]) -> None:
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)


@pytest.mark.parametrize("takes_answers", [True, False])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_who_leaves_in_a_later_turn_cancels_the_call(
    redis: redis.asyncio.Redis, takes_answers: bool, elsewhere: bool
) -> None:
    server = Asking(takes_answers=takes_answers)
    async with workers(redis, server) as clients:
        first = await ask_modern(clients[0], "/mcp", "tools/call", CALL)
        answers = dict.fromkeys(first["result"]["inputRequests"], ACCEPTED)
        again = {**CALL, "inputResponses": answers, "requestState": first["result"]["requestState"]}
        turn = asyncio.create_task(ask_modern(clients[elsewhere], "/mcp", "tools/call", again))
        await server.answered.wait()
        await leave(turn)
        await server.cancelled.wait()
        assert server.cancels == [server.calls[0]["id"]]
        assert not clients[0].bridge.modern._held


@pytest.mark.parametrize("takes_answers", [True, False])
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_call_that_was_answered_is_cancelled_by_its_client(
    redis: redis.asyncio.Redis, takes_answers: bool, elsewhere: bool
) -> None:
    server = Asking(takes_answers=takes_answers)
    async with workers(redis, server) as clients:
        session = await LegacyClient.open(clients[0], "/mcp")
        turn = asyncio.create_task(session.ask("/mcp", "tools/call", CALL))
        pending = clients[0].bridge.legacy.questions.pending
        while not pending:
            await asyncio.sleep(0.01)
        said = {"jsonrpc": "2.0", "id": next(iter(pending)), "result": ACCEPTED}
        other = LegacyClient(clients[elsewhere], session.id, "alice", "2025-11-25")
        assert (await other.send("/mcp", said)).status_code == 202
        await server.answered.wait()
        params = {"requestId": 1, "reason": "enough"}
        said = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
        assert (await other.send("/mcp", said)).status_code == 202
        await server.cancelled.wait()
        assert server.cancels == [server.calls[0]["id"]]
        assert (await turn)["error"]["code"] == -32800


async def test_a_request_of_another_worker_that_is_left_at_once_is_begun_and_left(
    redis: redis.asyncio.Redis,
) -> None:
    """Both are heard before it could begin; it knows best what is to be done about it."""
    left = asyncio.Event()

    async def serve(payload: Any, emit: Any) -> dict[str, Any]:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        return {}

    relay = Relay(redis)
    relay.servers["kind"] = serve
    relay._dispatch(msgspec.json.encode({"kind": "kind", "back": "nobody", "number": "1"}))
    relay._dispatch(msgspec.json.encode({"kind": "abandoned", "number": "1"}))
    await left.wait()
    while relay._serving:
        await asyncio.sleep(0)
    await relay.close()
