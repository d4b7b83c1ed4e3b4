"""Servers that say too much, too long or too often, and what is not for who asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from mcp_bridge.protocol import envelope, rpc
from mcp_bridge.routing import exchanges
from mcp_bridge.routing.guard import NotificationBudget
from mcp_bridge.routing.sessions import MAX_SUBSCRIPTIONS, MAX_URI_LEN
from mcp_bridge.server import legacy as legacy_face
from mcp_bridge.server import modern as modern_face
from mcp_bridge.upstream.transports import streamable_http
from tests.mcp_bridge.attacks.hostile import (
    Attacker,
    answer,
    attacked,
    caller_of,
    events,
    note,
)
from tests.mcp_bridge.processes import LegacyClient, ask_modern, messages_of, modern
from tests.mcp_bridge.test_hostile import OK, SSE

CALL: dict[str, Any] = {"name": "t", "arguments": {}}


async def comments(server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
    """Without an event, for as long as somebody reads."""
    writer.write(OK + SSE + b"\r\n")
    while not writer.is_closing():
        writer.write(b": nothing\n\n" * 100)
        await writer.drain()
    return b""


@pytest.mark.parametrize("is_modern", [True, False])
async def test_a_stream_of_comments_has_an_end(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, is_modern: bool
) -> None:
    monkeypatch.setattr(streamable_http, "MAX_EXCHANGE_BYTES", 65_536)
    async with attacked(redis, Attacker(comments, modern=is_modern)) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"]["data"] == {"server": "s0", "reason": "too_much"}


async def test_streams_that_follow_each_other_have_one_bound_together(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream has 16 KiB, with a cap of 64: the fifth is the last."""
    monkeypatch.setattr(streamable_http, "MAX_EXCHANGE_BYTES", 65_536)
    monkeypatch.setattr(exchanges, "MIN_RETRY_MS", 0)

    class Pieces(Attacker):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if not head.startswith("get "):
                await super().reply(writer, message, head)
                return
            self.heard.append((head, message))
            writer.write(piece(self))

    def piece(server: Any) -> bytes:
        body = b"id: %d\nretry: 0\ndata:\n\n" % len(server.heard) + b": nothing\n" * 1600 + b"\n"
        return OK + SSE + b"content-length: %d\r\n\r\n" % len(body) + body

    server = Pieces(lambda server, _, __: piece(server), modern=False)
    async with attacked(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities={})
    assert found["error"]["data"] == {"server": "s0", "reason": "too_much"}
    assert sum(head.startswith("get ") for head, _ in server.heard) == 4


async def test_a_server_that_wants_to_be_asked_again_at_once_is_left(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`retry: 0` with another id each time: neither a loop without a pause nor one without end."""
    monkeypatch.setattr(exchanges, "MAX_POLLS", 7)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def slept(pause_s: float) -> None:
        pauses.append(pause_s)
        await sleep(0)

    monkeypatch.setattr(exchanges.asyncio, "sleep", slept)

    def again(server: Any) -> bytes:
        body = b"id: %d\nretry: 0\ndata:\n\n" % len(server.heard)
        return OK + SSE + b"content-length: %d\r\n\r\n" % len(body) + body

    class Polled(Attacker):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if head.startswith("get "):
                self.heard.append((head, message))
                writer.write(again(self))
            else:
                await super().reply(writer, message, head)

    server = Polled(lambda server, _, __: again(server), modern=False)
    async with attacked(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities={})
    monkeypatch.undo()
    assert found["error"]["data"] == {"server": "s0", "reason": "too_much"}
    assert sum(head.startswith("get ") for head, _ in server.heard) == 7
    assert min(pauses) >= exchanges.MIN_RETRY_MS / 1000


async def test_a_call_has_a_deadline_in_either_era(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the server says that it goes on."""

    async def going_on(server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
        writer.write(OK + SSE + b"\r\n")
        while not writer.is_closing():
            writer.write(b": still there\n\n")
            await writer.drain()
            await asyncio.sleep(0.01)
        return b""

    monkeypatch.setattr(modern_face, "CALL_S", 0.1)
    monkeypatch.setattr(legacy_face, "CALL_S", 0.1)
    async with attacked(redis, Attacker(going_on)) as client:
        session = await LegacyClient.open(client, "/mcp")
        for found in (
            await ask_modern(client, "/mcp", "tools/call", CALL),
            await session.ask("/mcp", "tools/call", CALL),
        ):
            assert found["error"]["message"] == "It took too long"


@pytest.mark.parametrize("is_modern", [True, False])
async def test_only_what_is_of_a_request_is_said_on_its_stream(
    redis: redis.asyncio.Redis, is_modern: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it counts by the bytes that were read."""
    take, sizes = NotificationBudget.take, list[int | None]()

    def noting(self: NotificationBudget, message: Any, size: int | None = None) -> bool:
        sizes.append(size)
        return take(self, message, size)

    monkeypatch.setattr(NotificationBudget, "take", noting)

    def telling(server: Any, writer: Any, message: Any) -> bytes:
        return events(
            note("notifications/progress", progressToken="another's", progress=1),
            note("notifications/progress", progressToken=1, progress=2),
            note("notifications/progress", progress=3),
            note("notifications/cancelled", requestId=1),
            note("notifications/progress", progressToken="1", progress=4),
            answer(message["id"]),
        )

    async with attacked(redis, Attacker(telling, modern=is_modern)) as client:
        session = await LegacyClient.open(client, "/mcp")
        asked, headers = modern("tools/call", CALL)
        asked["params"]["_meta"]["progressToken"] = "1"
        old = {**CALL, "_meta": {"progressToken": "1"}}
        of_old = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": old}
        for said in (
            messages_of(await client.post("/mcp", json=asked, headers=headers)),
            messages_of(await session.send("/mcp", of_old)),
        ):
            assert [each["params"]["progress"] for each in said[:-1]] == [4]
            assert "result" in said[-1]
    passed_on = note("notifications/progress", progressToken="1", progress=4)
    assert sizes == [len(rpc.encode(passed_on))] * 2


async def test_questions_outside_of_requests_are_few_at_once(redis: redis.asyncio.Redis) -> None:
    """A server that asks without end is read no further than its questions are answered."""
    begun, asked = asyncio.Event(), 10 * exchanges.MAX_ASKED

    class Asking(Attacker):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if not head.startswith("get "):
                await super().reply(writer, message, head)
                return
            each = [{"jsonrpc": "2.0", "id": n, "method": "roots/list"} for n in range(asked)]
            cancelled = note("notifications/cancelled", requestId=1)
            writer.write(OK + SSE + b"\r\n" + events(cancelled, *each).partition(b"\r\n\r\n")[2])
            await writer.drain()
            begun.set()
            await asyncio.Event().wait()

    async with attacked(redis, Asking(modern=False)) as client:
        session = await LegacyClient.open(client, "/mcp")
        hearing = asyncio.create_task(client.get("/mcp", headers=session.headers))
        legacy = client.bridge.legacy
        try:
            await begun.wait()
            while len(legacy.questions.pending) < exchanges.MAX_ASKED:
                await asyncio.sleep(0.01)
            for _ in range(100):  # turns in which more could be taken
                await asyncio.sleep(0)
            assert len(legacy.questions.pending) == exchanges.MAX_ASKED
            assert legacy.streams.tasks.num_running <= exchanges.MAX_ASKED + 2
        finally:
            client.bridge.begin_drain()
            heard = await hearing
        assert "cancelled" not in heard.text


async def test_a_call_that_is_cancelled_at_once_ends(redis: redis.asyncio.Redis) -> None:
    """A caller that waits for its answer is told, also where the call had not begun."""

    async def slow(server: Any, writer: Any, message: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with attacked(redis, Attacker(slow, modern=False)) as client:
        opened = await LegacyClient.open(client, "/mcp")
        legacy, who = client.bridge.legacy, caller_of("alice")
        endpoint = client.bridge.endpoint(who.org_id)
        assert endpoint is not None
        session = await legacy.find(who, endpoint, opened.id)
        for turns in (0, 1):
            call = {"jsonrpc": "2.0", "id": turns, "method": "tools/call", "params": CALL}
            stream = legacy.begin(endpoint, session, call)
            for _ in range(turns):
                await asyncio.sleep(0)
            assert legacy._cancel(session.id, turns)
            assert await stream.next() is None
            assert stream.answer is not None
            assert stream.answer["error"]["message"] == "Cancelled", turns
            while legacy._calls:
                await asyncio.sleep(0)


@pytest.mark.parametrize(
    "uris",
    [
        [f"a:{number}" for number in range(MAX_SUBSCRIPTIONS + 1)],
        ["a:" + "b" * MAX_URI_LEN],
        "a:b",
        ["a:b", 1],
    ],
    ids=["many", "long", "text", "number"],
)
async def test_a_client_subscribes_to_so_much(redis: redis.asyncio.Redis, uris: Any) -> None:
    """Each would be asked of every server."""
    server = Attacker(modern=False)
    async with attacked(redis, server) as client:
        wanted = {"notifications": {"resourceSubscriptions": uris}}
        found = await ask_modern(client, "/mcp", "subscriptions/listen", wanted, id=5)
        assert found["error"]["code"] == -32602
        assert "notifications.resourceSubscriptions" in str(found["error"])
        session = await LegacyClient.open(client, "/mcp")
        uri = uris[0] if len(uris) == 1 else "a:b"
        told = await session.ask("/mcp", "resources/subscribe", {"uri": uri})
        assert ("error" in told) == (len(uri) > MAX_URI_LEN)
    heard = [
        message for _, message in server.heard if message.get("method") == "resources/subscribe"
    ]
    assert len(heard) == (len(uri) <= MAX_URI_LEN)


async def test_what_a_client_says_of_itself_is_short(redis: redis.asyncio.Redis) -> None:
    """It is kept with each session, and goes to each server."""
    long = {"x": "y" * envelope.MAX_INFO_BYTES}
    server = Attacker(modern=False)
    async with attacked(redis, server) as client:
        for field, place in (("capabilities", "clientCapabilities"), ("clientInfo", "clientInfo")):
            said: dict[str, Any] = {
                "protocolVersion": "2025-11-25",
                "capabilities": {},
                "clientInfo": {"name": "c", "version": "1"},
            }
            said[field] |= {"experimental": {"x": long}} if field == "capabilities" else long
            asked = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": said}
            refused = (await client.post("/mcp", json=asked)).json()["error"]
            assert refused["message"].startswith(f"{field}: more than ")
            message, headers = modern("tools/call", CALL)
            message["params"]["_meta"][f"io.modelcontextprotocol/{place}"] = said[field]
            answer = await client.post("/mcp", json=message, headers=headers)
            assert answer.status_code == 400
            assert (
                f"io.modelcontextprotocol/{place}: more than " in answer.json()["error"]["message"]
            )
    assert not server.heard
    assert not await redis.keys("mcp:{org_alice}:*")


async def test_abilities_that_are_made_up_need_no_sessions_of_their_own(
    redis: redis.asyncio.Redis,
) -> None:
    """One that clients share, at a server of the older era."""
    server = Attacker(modern=False)
    async with attacked(redis, server) as client:
        for number in range(20):
            capabilities = {"roots": {"listChanged": bool(number % 2)}, f"own-{number}": {}}
            found = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities=capabilities)
            assert "result" in found
    assert server.sessions == 2, "one to see what it is"
    assert len(await redis.keys("mcp:{org_alice}:shared:*")) == 1
