"""A tenant with many keys: of what a worker has it gets its share, and others are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from mcp_bridge.routing import change_streams as changes
from mcp_bridge.server import http as door
from mcp_bridge.server import legacy as legacy_face
from mcp_bridge.server import modern as modern_face
from mcp_bridge.server.slots import Slots
from mcp_bridge.upstream import http as upstream_http
from mcp_bridge.upstream import upstream
from mcp_bridge.upstream.transports import factory as transports
from tests.mcp_bridge.attacks.hostile import Attacker, attacked, events
from tests.mcp_bridge.processes import LegacyClient, ask_modern, modern
from tests.mcp_bridge.test_hostile import OK, SSE, whole

SHARE, KEYS = 4, 7
SLOW: dict[str, Any] = {"name": "slow", "arguments": {}}
QUICK: dict[str, Any] = {"name": "quick", "arguments": {}}
MANY = [f"key-{number}@flood" for number in range(KEYS)]


class Slow(Attacker):
    """An attacker whose answers to `slow` wait until `may_end`."""

    def __init__(self, *, modern: bool = True) -> None:
        super().__init__(self.when_it_may, modern=modern)
        self.may_end = asyncio.Event()

    async def when_it_may(self, server: Any, writer: Any, message: Any) -> bytes:
        if message["params"].get("name") == "slow":
            await self.may_end.wait()
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": self.result})


async def flood(server: Slow, asking: list[asyncio.Task[Any]]) -> None:
    """Until each of them is at the server or was answered."""
    while len(server.calls) + sum(task.done() for task in asking) < len(asking):
        await asyncio.sleep(0.01)


async def test_calls_of_many_keys_of_one_tenant_leave_room_for_others(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legacy_face, "MAX_CALLS_OF_ORG", SHARE)
    server = Slow(modern=False)
    async with attacked(redis, server) as client:
        sessions = [await LegacyClient.open(client, "/mcp", caller=who) for who in MANY]
        other = await LegacyClient.open(client, "/mcp", caller="bob")
        asking = [asyncio.create_task(each.ask("/mcp", "tools/call", SLOW)) for each in sessions]
        await flood(server, asking)
        refused = [task.result() for task in asking if task.done()]
        assert len(refused) == KEYS - SHARE
        assert {each["error"]["message"] for each in refused} == {"Too many requests are under way"}
        assert "result" in await other.ask("/mcp", "tools/call", QUICK)
        server.may_end.set()
        found = await asyncio.gather(*asking)
        assert sum("result" in each for each in found) == SHARE
        assert "result" in await sessions[0].ask("/mcp", "tools/call", QUICK, id=2)


async def test_open_requests_of_many_keys_of_one_tenant_leave_room_for_others(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "MAX_OPEN_OF_ORG", SHARE)
    server = Slow()
    async with attacked(redis, server) as client:
        message, headers = modern("tools/call", SLOW)
        asking = [
            asyncio.create_task(
                client.post("/mcp", json=message, headers={**headers, "x-caller": who})
            )
            for who in MANY
        ]
        await flood(server, asking)
        assert [task.result().status_code for task in asking if task.done()] == [429] * (
            KEYS - SHARE
        )
        assert "result" in await ask_modern(client, "/mcp", "tools/call", QUICK, caller="bob")
        server.may_end.set()
        codes = [answer.status_code for answer in await asyncio.gather(*asking)]
        assert codes.count(200) == SHARE
        assert "result" in await ask_modern(client, "/mcp", "tools/call", QUICK, caller=MANY[0])


async def test_calls_of_many_keys_that_wait_for_their_clients_leave_room_for_others(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modern_face, "MAX_HELD_OF_ORG", SHARE)

    server = Slow(modern=False)

    async def asking(server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
        asked = {"jsonrpc": "2.0", "id": "a", "method": "roots/list"}
        writer.write(OK + SSE + b"\r\n" + events(asked).partition(b"\r\n\r\n")[2])
        await writer.drain()
        await server.may_end.wait()
        return b""

    server.answer = asking
    async with attacked(redis, server) as client:
        found = [await ask_modern(client, "/mcp", "tools/call", QUICK, caller=who) for who in MANY]
        assert [each["result"]["resultType"] for each in found[:SHARE]] == ["input_required"] * 4
        said = {each["error"]["message"] for each in found[SHARE:]}
        assert said == {"Too many calls wait for answers"}
        other = await ask_modern(client, "/mcp", "tools/call", QUICK, caller="bob")
        assert other["result"]["resultType"] == "input_required"
        server.may_end.set()


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.sampled_from("xy"))))
def test_places_are_bounded_for_all_for_a_tenant_and_for_a_principal(
    steps: list[tuple[bool, str, str]],
) -> None:
    places, taken = Slots(4, 3, 2), list[tuple[str, str]]()
    for takes, org, key in steps:
        owners = (org, org + key)
        if takes:
            of_org = sum(each[0] == org for each in taken)
            fits = len(taken) < 4 and of_org < 3 and taken.count(owners) < 2
            assert places.take(*owners) == fits
            taken += [owners] * fits
        elif owners in taken:
            places.give_back(*owners)
            taken.remove(owners)
        assert places.is_full == (len(taken) == 4)


class Telling(Attacker):
    """Keeps every stream open that waits for changes, until `may_end`."""

    def __init__(self, *, modern: bool) -> None:
        super().__init__(self.by_result, modern=modern)
        self.listening, self.most_at_once = 0, 0
        self.may_end = asyncio.Event()

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if not head.startswith("get ") and message.get("method") != "subscriptions/listen":
            await super().reply(writer, message, head)
            return
        self.listening += 1
        self.most_at_once = max(self.most_at_once, self.listening)
        writer.write(OK + SSE + b"connection: close\r\n\r\n: here\n\n")
        await writer.drain()
        await self.may_end.wait()
        self.listening -= 1
        writer.close()


@pytest.mark.parametrize("is_modern", [True, False])
async def test_who_listens_takes_no_connection_from_who_calls(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, is_modern: bool
) -> None:
    """Nor does the breaker hear of it: the server did nothing."""
    monkeypatch.setattr(transports, "MAX_STREAMS", SHARE)
    monkeypatch.setattr(transports, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(changes, "FIRST_PAUSE_S", 0.01)
    refused: Counter[str] = Counter()

    def unreachable(self: Any, server: str, reason: str, *more: Any) -> None:
        refused[reason] += 1
        told(self, server, reason, *more)

    told = upstream.Unreachable.__init__
    monkeypatch.setattr(upstream.Unreachable, "__init__", unreachable)
    server = Telling(modern=is_modern)
    async with attacked(redis, server) as client:
        sessions = [await LegacyClient.open(client, "/mcp", caller=who) for who in MANY]
        hearing = [
            asyncio.create_task(client.get("/mcp", headers=each.headers)) for each in sessions
        ]
        while server.listening < SHARE or refused["too_many_streams"] < 3 * (KEYS - SHARE):
            await asyncio.sleep(0.01)
        for _ in range(3):
            found = await ask_modern(client, "/mcp", "tools/call", QUICK, caller=MANY[0])
            assert "result" in found
        assert server.most_at_once == SHARE
        assert set(refused) == {"too_many_streams"}
        client.bridge.begin_drain()
        await asyncio.gather(*hearing)
        server.may_end.set()


async def test_where_all_connections_are_in_use_the_server_is_not_to_blame(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(transports, "MAX_STREAMS", 0)
    monkeypatch.setattr(upstream_http, "POOL_TIMEOUT_S", 0.05)
    server = Slow()
    async with attacked(redis, server) as client:
        asking = asyncio.create_task(ask_modern(client, "/mcp", "tools/call", SLOW))
        await flood(server, [asking])
        for _ in range(5):
            found = await ask_modern(client, "/mcp", "tools/call", QUICK)
            assert found["error"]["data"]["reason"] == "busy"
        monkeypatch.undo()
        server.may_end.set()
        assert "result" in await asking
        assert "result" in await ask_modern(client, "/mcp", "tools/call", QUICK)
