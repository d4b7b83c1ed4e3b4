"""Clients connect, and a client that listens hears, whatever its servers do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from mcp_bridge.protocol.envelope import read_envelope
from tests.mcp_bridge.attacks.hostile import (
    Attacker,
    answer,
    attacked,
    caller_of,
    events,
    note,
)
from tests.mcp_bridge.processes import LegacyClient, messages_of, modern
from tests.mcp_bridge.test_hostile import whole
from tests.mcp_bridge.trust.test_trust import URL, World, bridge_of

LEVELS = ("debug", "warning", "error", "alert")
SAID = [note("notifications/message", level=level, data=level) for level in LEVELS]
CHANGED = note("notifications/tools/list_changed")


class Talker(Attacker):
    """In a call it says `said`; on the stream of a session `aside`, then asks whether that was
    heard. Has `uris`, and refuses to tell of them if it is to."""

    def __init__(
        self,
        *uris: str,
        said: Any = (),
        aside: Any = (),
        refuses: bool = False,
        modern: bool = False,
    ) -> None:
        super().__init__(self.by_method, modern=modern)
        self.uris, self.refuses = uris, refuses
        self.said, self.aside = said, aside
        self.was_heard = asyncio.Event()
        self.capabilities = {
            "tools": {"listChanged": True},
            "resources": {"subscribe": True},
            "logging": {},
        }

    def by_method(self, server: Any, writer: Any, message: Any) -> bytes:
        method = message["method"]
        if method == "tools/call":
            return events(*self.said, answer(message["id"]))
        result: dict[str, Any] = {}
        if method == "resources/list":
            result = {"resources": [{"uri": uri, "name": uri} for uri in self.uris]}
        elif method == "resources/subscribe" and self.refuses:
            error = {"code": -32002, "message": "Resource not found"}
            return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})
        elif method == "resources/read":
            error = {"code": -32602, "message": "Resource not found"}
            return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if message.get("id") == "heard":
            self.was_heard.set()
        if head.startswith("get "):
            ping = {"jsonrpc": "2.0", "id": "heard", "method": "ping"}
            writer.write(events(*self.aside, ping))
        else:
            await super().reply(writer, message, head)

    @property
    def subscribed(self) -> set[str]:
        asked = [each for each in self.calls if each["method"] == "resources/subscribe"]
        return {each["params"]["uri"] for each in asked}


@pytest.mark.parametrize("is_approved", [True, False])
async def test_a_client_connects_where_no_server_answers(
    redis: Redis, monkeypatch: pytest.MonkeyPatch, is_approved: bool
) -> None:
    async def down(writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        writer.write(b"HTTP/1.1 503 Later\r\ncontent-length: 0\r\n\r\n")

    world = World()
    monkeypatch.setattr(world.server, "reply", down)
    async with bridge_of(world, redis):
        if is_approved:
            await world.approve()
        assert "tools" in (await world.ask("server/discover"))["result"]["capabilities"]
        client = await LegacyClient.open(world.client, URL)
        listed = (await client.ask(URL, "tools/list"))["result"]["tools"]
        assert [each["name"] for each in listed] == ["weather"] * is_approved
        assert "error" in await world.call()


@pytest.mark.parametrize("is_modern", [True, False])
async def test_a_log_below_the_clients_level_is_not_told(redis: Redis, is_modern: bool) -> None:
    """By a server that was told the level, and does not heed it."""
    server = Talker(said=SAID, modern=is_modern)
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, URL)
        for wanted in ("error", "debug"):
            await session.ask(URL, "logging/setLevel", {"level": wanted})
            message = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "x"}}
            *told, _ = messages_of(await session.send(URL, message))
            expected = LEVELS[LEVELS.index(wanted) :]
            assert [each["params"]["level"] for each in told] == list(expected)


async def test_a_log_of_a_sessions_stream_stands_under_the_level_too(redis: Redis) -> None:
    hiding = note("notifications/message", level="error", data="a\x1b[31m\u202eb")
    server = Talker(aside=[*SAID, hiding])
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, URL)
        await session.ask(URL, "logging/setLevel", {"level": "error"})
        listening = asyncio.create_task(client.get(URL, headers=session.headers))
        await server.was_heard.wait()
        client.bridge.begin_drain()
        logs = [each for each in messages_of(await listening) if "level" in each.get("params", {})]
        said = {(each["params"]["level"], each["params"]["data"]) for each in logs}
        assert said == {("error", "error"), ("alert", "alert"), ("error", "ab")}


async def test_a_subscription_goes_to_whose_it_is_and_a_refusal_ends_nothing(redis: Redis) -> None:
    refusing = Talker("a://a?token=SECRET", aside=[CHANGED], refuses=True)
    other = Talker("b://b")
    async with attacked(redis, refusing, other) as client:
        uris = ["a://a?token=SECRET", "b://b", "c://nobodys"]
        wanted = {"toolsListChanged": True, "resourceSubscriptions": uris}
        message, headers = modern("subscriptions/listen", {"notifications": wanted}, id=5)
        given = [(name.lower(), value) for name, value in headers.items()]
        endpoint = client.bridge.endpoint("org_alice", None, None, prunes=False)
        assert endpoint is not None
        told: asyncio.Queue[Any] = asyncio.Queue()
        envelope = read_envelope(message, given)
        work = client.bridge.modern.answer(
            caller_of("alice"), endpoint, envelope, message, given, told.put
        )
        listening = asyncio.create_task(work)
        try:
            acknowledged, changed = await told.get(), await told.get()
        finally:
            client.bridge.begin_drain()
            await listening
    assert (refusing.subscribed, other.subscribed) == ({uris[0]}, {uris[1]})
    assert acknowledged["params"]["notifications"]["resourceSubscriptions"] == ["b://b"]
    assert changed["method"] == CHANGED["method"]
