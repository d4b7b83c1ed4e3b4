"""A server is asked in its client's era, where it speaks that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio

from foundation.tasks import end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.server import elicitation
from mcp_bridge.upstream.transports.channel import Channel
from tests.mcp_bridge.attacks.hostile import Attacker, attacked
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import CALL, whole
from tests.mcp_bridge.trust.test_trust import URL, World, bridge_of

NEWER, OLDER = "2026-07-28", "2025-11-25"


class Speaking(Attacker):
    """Says in which era it was called. `keeps_sessions`: of the older era."""

    def __init__(self, speaks: str, *, keeps_sessions: bool = True) -> None:
        is_newer = speaks in (NEWER, "both")
        super().__init__(self.tell, modern=is_newer)
        self.both, self.keeps_sessions = speaks == "both", keeps_sessions

    def tell(self, server: Any, writer: Any, message: Any) -> bytes:
        meta = message["params"].get("_meta") or {}
        era = NEWER if "io.modelcontextprotocol/protocolVersion" in meta else OLDER
        found = {"content": [{"type": "text", "text": era}], "tools": []}
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": found})

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if message.get("method") == "initialize" and not self.keeps_sessions:
            self.heard.append((head, message))
            result = {"protocolVersion": OLDER, "capabilities": {"tools": {}}}
            writer.write(whole({"jsonrpc": "2.0", "id": message["id"], "result": result}))
            return
        await super().reply(writer, message, head)

    @property
    def methods(self) -> list[str]:
        return [message.get("method", "") for _, message in self.heard]


def said(answer: dict[str, Any]) -> str:
    if "error" in answer:
        return str(answer["error"]["data"]["reason"])
    return str(answer["result"]["content"][0]["text"])


@pytest.mark.parametrize(
    ("speaks", "era", "to_older", "to_newer"),
    [
        ("both", "auto", OLDER, NEWER),
        (OLDER, "auto", OLDER, OLDER),
        (NEWER, "auto", NEWER, NEWER),
        ("both", OLDER, OLDER, OLDER),
        ("both", NEWER, NEWER, NEWER),
        (OLDER, NEWER, "version", "version"),
    ],
)
async def test_a_server_is_asked_in_the_era_of_its_client(
    redis: redis.asyncio.Redis, speaks: str, era: Any, to_older: str, to_newer: str
) -> None:
    server = Speaking(speaks)
    async with attacked(redis, server, era=era) as client:
        for _ in range(2):
            assert said(await ask_modern(client, "/mcp", "tools/call", CALL)) == to_newer
            session = await LegacyClient.open(client, "/mcp")
            assert said(await session.ask("/mcp", "tools/call", CALL)) == to_older
    if era != "auto":
        assert ("server/discover" in server.methods) == (era == NEWER)
        assert ("initialize" in server.methods) == (era == OLDER)
    if speaks in (OLDER, NEWER) and era == "auto":
        assert server.methods.count("server/discover") == 1, "what it speaks is found out once"


async def test_a_server_of_one_era_refuses_the_other_by_name(redis: redis.asyncio.Redis) -> None:
    async with attacked(redis, Speaking(NEWER), era=OLDER) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"]["code"] == -32603


async def test_one_without_sessions_is_asked_in_the_newer_era(redis: redis.asyncio.Redis) -> None:
    """In the older it could ask its client nothing."""
    for speaks, era in (("both", NEWER), (OLDER, OLDER)):
        async with attacked(redis, Speaking(speaks, keeps_sessions=False)) as client:
            session = await LegacyClient.open(client, "/mcp")
            assert said(await session.ask("/mcp", "tools/call", CALL)) == era


async def test_one_that_breaks_at_a_handshake_is_asked_in_the_newer_era(
    redis: redis.asyncio.Redis,
) -> None:
    class Breaking(Speaking):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if message.get("method") == "initialize":
                raise ConnectionError
            await super().reply(writer, message, head)

    async with attacked(redis, Breaking(NEWER)) as client:
        session = await LegacyClient.open(client, "/mcp")
        assert said(await session.ask("/mcp", "tools/call", CALL)) == NEWER


async def test_one_that_forgets_its_session_at_the_handshake_has_ended(
    redis: redis.asyncio.Redis,
) -> None:
    class Forgetful(Speaking):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if message.get("method") == "notifications/initialized":
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                return
            await super().reply(writer, message, head)

    async with attacked(redis, Forgetful(OLDER), era=OLDER) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert said(found) == "upstream_ended"


async def test_an_older_client_is_asked_what_a_server_asks_in_that_era_alone(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elicitation, "ANSWER_S", 0.05)
    question = {"message": "?", "requestedSchema": {"type": "object", "properties": {}}}

    class Asking(Speaking):
        def tell(self, server: Any, writer: Any, message: Any) -> bytes:
            if "mcp-session-id" not in server.calls[-1]["head"]:
                return super().tell(server, writer, message)
            asked = {"jsonrpc": "2.0", "id": 1, "method": "elicitation/create", "params": question}
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
            body = whole(asked).partition(b"\r\n\r\n")[2]
            return b"data: " + body + b"\n\n"

    server = Asking("both")
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
        calling = asyncio.create_task(session.send("/mcp", message))
        while not any(each.get("id") == 1 and "error" in each for _, each in server.heard):
            await asyncio.sleep(0.01)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        replies = [each for _, each in server.heard if "method" not in each and each]
    assert replies[0]["error"]["message"] == "The client did not answer"


class InMemory:
    """A stream of a process that speaks both eras. `left`: never by itself."""

    legacy_only = left = False

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._replies: asyncio.Queue[Message] = asyncio.Queue()

    async def send(self, message: Message) -> None:
        self.sent.append(message["method"])
        answers = {
            "server/discover": {"supportedVersions": [NEWER], "capabilities": {}},
            "initialize": {"protocolVersion": OLDER, "capabilities": {}},
        }
        if message["method"] in answers:
            self._replies.put_nowait(rpc.result(message["id"], answers[message["method"]]))

    async def messages(self) -> AsyncIterator[Message]:
        while True:
            yield await self._replies.get()


@pytest.mark.parametrize(
    ("era", "sent"),
    [
        ("auto", ["server/discover"]),
        (NEWER, ["server/discover"]),
        (OLDER, ["initialize", "notifications/initialized"]),
    ],
)
async def test_a_connection_that_callers_share_is_in_one_era(era: Any, sent: list[str]) -> None:
    stream: Any = InMemory()
    channel = Channel("s", {"name": "t", "version": "1"}, stream, era=era)
    running = asyncio.create_task(channel.run())
    try:
        await channel.start()
    finally:
        await end_tasks(running)
    assert stream.sent == sent
    assert channel.modern == (era != OLDER)


async def test_what_is_approved_is_the_same_for_clients_of_both_eras(
    redis: redis.asyncio.Redis,
) -> None:
    """It is what the newer era lists, though the older one lists something else."""
    world = World()
    world.server.both = True
    lists = world.server.answer

    def by_era(server: Any, writer: Any, message: Any) -> Any:
        if "mcp-session-id" in server.calls[-1]["head"] and message["method"] == "tools/list":
            tools = [{**world.tools[0], "description": "Another one"}]
            result = {"tools": tools}
            return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})
        return lists(server, writer, message)

    world.server.answer = by_era
    async with bridge_of(world, redis):
        await world.approve()
        assert await world.names() == ["weather"]
        session = await LegacyClient.open(world.client, URL)
        for _ in range(2):
            shown = (await session.ask(URL, "tools/list"))["result"]["tools"]
            assert [each["description"] for each in shown] == [world.tools[0]["description"]]
            assert await world.names() == ["weather"]
        params = {"name": "weather", "arguments": {"city": "Rome"}}
        assert "result" in await session.ask(URL, "tools/call", params)
    assert "mcp-session-id" in world.went_out[-1]["head"]
