"""A session, its streams, what it is asked and a call that waits are one caller's and nobody
else's: not another tenant's, nor another person's or application's of the same tenant."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
import redis.asyncio

from tests.mcp_bridge.attacks.hostile import Attacker, answer, attacked, events, note
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import OK, SSE, whole

CALL: dict[str, Any] = {"name": "t", "arguments": {}}
OTHERS = ["mallory", "mallory@alice", "alice+other", "alice#proj_2", "alice@mallory"]
ASKED = {"method": "elicitation/create", "params": {"message": "?", "requestedSchema": {}}}
SEEN = [{"type": "text", "text": "seen"}]


def stolen(session: LegacyClient, who: str) -> LegacyClient:
    return LegacyClient(session.http, session.id, who, "2025-11-25")


@pytest.mark.parametrize("who", OTHERS)
async def test_a_session_is_of_no_use_to_another(redis: redis.asyncio.Redis, who: str) -> None:
    """Each verb says the same as of a session that never was, and ends or changes nothing."""
    async with attacked(redis, Attacker()) as client:
        session = await LegacyClient.open(client, "/mcp")
        thief = stolen(session, who)
        nothing = LegacyClient(client, "no-such-session", who, "2025-11-25")
        for each in (thief, nothing):
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
            cancelled = note("notifications/cancelled", requestId=1)
            said = [
                await each.send("/mcp", call),
                await each.send("/mcp", cancelled),
                await client.get("/mcp", headers=each.headers),
                await client.get("/mcp", headers={**each.headers, "last-event-id": "a_1"}),
                await client.delete("/mcp", headers=each.headers),
            ]
            assert [found.status_code for found in said] == [404] * 5
            assert {found.json()["error"]["message"] for found in said} == {"No such session"}
        assert "result" in await session.ask("/mcp", "tools/call", CALL)


async def test_an_ended_session_stays_ended(redis: redis.asyncio.Redis) -> None:
    async with attacked(redis, Attacker()) as client:
        session = await LegacyClient.open(client, "/mcp")
        assert (await client.delete("/mcp", headers=session.headers)).status_code == 200
        for _ in range(2):  # nor does asking bring it back
            again = {"jsonrpc": "2.0", "id": 1, "method": "logging/setLevel", "params": {}}
            assert (await session.send("/mcp", again)).status_code == 404
        assert (await client.delete("/mcp", headers=session.headers)).status_code == 404


async def test_the_events_of_another_session_are_not_read(redis: redis.asyncio.Redis) -> None:
    """With a session of one's own, and the id of an event that another one got."""

    def noting(server: Any, writer: Any, message: Any) -> bytes:
        return events(note("notifications/message", level="info", data="secret"),
                      answer(message["id"], {"content": [], "secret": 1}))  # fmt: skip

    async with attacked(redis, Attacker(noting)) as client:
        session = await LegacyClient.open(client, "/mcp")
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
        streamed = await session.send("/mcp", call)
        first = streamed.text.partition("id: ")[2].partition("\n")[0]
        assert "_" in first
        for who in ("mallory", "alice"):
            other = await LegacyClient.open(client, "/mcp", caller=who)
            for last in (first, f"{session.id}:{first}", f"../{first}"):
                headers = {**other.headers, "last-event-id": last}
                found = await client.get("/mcp", headers=headers)
                assert found.status_code == 400 and "secret" not in found.text
        own = {**session.headers, "last-event-id": first}
        assert "secret" in (await client.get("/mcp", headers=own)).text


@pytest.mark.parametrize("last", ["a_²", "a_1_²", "a_-1", "a_1e3", "a_", "_", "a_" + "9" * 40])
async def test_an_odd_event_id_is_refused(redis: redis.asyncio.Redis, last: str) -> None:
    async with attacked(redis, Attacker()) as client:
        session = await LegacyClient.open(client, "/mcp")
        headers = {**session.headers, "last-event-id": last.encode("latin-1")}
        found = await client.get("/mcp", headers=headers)
        assert found.status_code == 400 and "last-event-id" in found.json()["error"]["message"]


async def test_a_question_is_answered_by_whom_it_was_put_to(redis: redis.asyncio.Redis) -> None:
    """And a call is cancelled by its own session, though ids are guessed."""
    heard: list[Any] = []

    async def asking(server: Any, writer: Any, message: Any) -> bytes:
        asked = {"jsonrpc": "2.0", "id": 7, **ASKED}
        writer.write(OK + SSE + b"\r\n" + events(asked).partition(b"\r\n\r\n")[2])
        await writer.drain()
        while not (found := [each for _, each in server.heard if each.get("id") == 7]):
            await asyncio.sleep(0.01)
        heard.append(found[0])
        return events(answer(message["id"])).partition(b"\r\n\r\n")[2]

    server = Attacker(asking, modern=False)
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        calling = asyncio.create_task(session.ask("/mcp", "tools/call", CALL))
        bridge_asks = f"{client.bridge.relay.worker}.1"
        while not server.calls:
            await asyncio.sleep(0.01)
        while bridge_asks not in client.bridge.legacy.questions.pending:
            await asyncio.sleep(0.01)
        for who in ("mallory", "mallory@alice", "alice"):
            other = await LegacyClient.open(client, "/mcp", caller=who)
            forged = {"jsonrpc": "2.0", "id": bridge_asks, "result": {"action": "accept"}}
            assert (await other.send("/mcp", forged)).status_code == 400
            for request_id in (1, bridge_asks, "1", True, [1]):
                cancelled = note("notifications/cancelled", requestId=request_id)
                await other.send("/mcp", cancelled)
        assert not calling.done() and not heard
        own = {"jsonrpc": "2.0", "id": bridge_asks, "result": {"action": "decline"}}
        assert (await session.send("/mcp", own)).status_code == 202
        assert "result" in await calling
        assert heard[0]["result"] == {"action": "decline"}
        twice = await session.send("/mcp", own)
        assert twice.status_code == 400


@pytest.mark.parametrize("modern", [True, False])
async def test_a_request_state_is_of_one_request_of_one_caller(
    redis: redis.asyncio.Redis, modern: bool
) -> None:
    """Tampered with, of another caller, with other arguments, for another method, or a state of
    the server's own: each is refused, and the server hears nothing of it."""

    def asking(server: Any, writer: Any, message: Any) -> bytes:
        if message["method"] == "tools/list":
            return whole(answer(message["id"], {"tools": []}))
        if not modern:
            asked = events({"jsonrpc": "2.0", "id": 7, **ASKED}).partition(b"\r\n\r\n")[2]
            return OK + SSE + b"\r\n" + asked
        if "inputResponses" in message["params"]:
            return whole(answer(message["id"], {"content": SEEN}))
        found = {"resultType": "input_required", "inputRequests": {"k": ASKED}}
        return whole(answer(message["id"], {**found, "requestState": "inner"}))

    server = Attacker(asking, modern=modern)
    async with attacked(redis, server) as client:
        first = (await ask_modern(client, "/mcp", "tools/call", CALL))["result"]
        state = first["requestState"]
        assert "inner" not in base64.urlsafe_b64decode(state[3:] + "==").decode("latin-1")
        key = next(iter(first["inputRequests"]))
        given = {"inputResponses": {key: {"action": "accept", "content": {}}}}
        calls = len(server.calls)
        flipped = state[:40] + ("A" if state[40] != "A" else "B") + state[41:]
        wrong: list[tuple[str, str, Any]] = [
            *(("tools/call", who, {**CALL, "requestState": state}) for who in OTHERS),
            ("tools/call", "alice", {**CALL, "requestState": flipped}),
            ("tools/call", "alice", {**CALL, "requestState": state + "="}),
            ("tools/call", "alice", {**CALL, "requestState": state[:-4]}),
            ("tools/call", "alice", {**CALL, "requestState": "inner"}),
            ("tools/call", "alice", {**CALL, "requestState": ""}),
            ("tools/call", "alice", {**CALL, "arguments": {"a": 1}, "requestState": state}),
            ("tools/call", "alice", {**CALL, "name": "u", "requestState": state}),
            ("prompts/get", "alice", {**CALL, "requestState": state}),
        ]
        for method, who, params in wrong:
            found = await ask_modern(client, "/mcp", method, {**params, **given}, caller=who)
            assert found["error"]["code"] == -32602, (method, who)
        asked = [each for each in server.calls[calls:] if each["method"] != "tools/list"]
        assert not asked
        if modern:
            again = {**CALL, **given, "requestState": state}
            assert (await ask_modern(client, "/mcp", "tools/call", again))["result"][
                "content"
            ] == SEEN
            assert server.calls[-1]["params"]["requestState"] == "inner"


async def test_callers_of_a_server_of_the_older_era_share_no_session(
    redis: redis.asyncio.Redis,
) -> None:
    """A server keeps for one principal what it keeps for a session."""
    server = Attacker(modern=False)
    async with attacked(redis, server) as client:
        for who in ("alice", "alice", *OTHERS):
            await ask_modern(client, "/mcp", "tools/call", CALL, caller=who)
    of_calls = [
        each["head"].partition("mcp-session-id: ")[2].partition("\r\n")[0] for each in server.calls
    ]
    assert of_calls[0] == of_calls[1]
    assert len(set(of_calls)) == 1 + len(OTHERS)


async def test_lists_of_one_tenant_are_not_shown_to_another(redis: redis.asyncio.Redis) -> None:
    """A server that says other things to each: what was said to one is nobody else's."""
    heard = 0

    def telling(server: Any, writer: Any, message: Any) -> bytes:
        nonlocal heard
        heard += 1
        tool = {"name": f"secret-{heard}", "inputSchema": {"type": "object"}}
        return whole(answer(message["id"], {"tools": [tool], "ttlMs": 10**9}))

    async with attacked(redis, Attacker(telling)) as client:
        first = await ask_modern(client, "/mcp", "tools/list", caller="alice")
        other = await ask_modern(client, "/mcp", "tools/list", caller="mallory")
    assert first["result"]["tools"] != other["result"]["tools"]
    assert other["result"].get("cacheScope") != "public"
