"""A server asks its client again and again: what one call, and one server, may ask is bounded by
count and time in both eras."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from mcp_bridge.protocol import continuation
from mcp_bridge.protocol.continuation import MAX_QUESTIONS, MAX_ROUNDS
from tests.mcp_bridge.attacks.hostile import Attacker, attacked, events
from tests.mcp_bridge.attacks.test_forged_protocol import Noting
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import CALL, OK, SSE, Server, bridged, whole

QUESTION = {"message": "And now?", "requestedSchema": {"type": "object", "properties": {}}}
ASKED = {"method": "elicitation/create", "params": QUESTION}
WANTED = {"again": ASKED}
ANSWER = {"action": "accept", "content": {}}
ANSWERED = {"again": ANSWER}
TOO_OFTEN = "The server asked too often"
TOO_LONG = "It took too long"


def asks(server: Server, writer: Any, message: dict[str, Any]) -> bytes:
    state = f"state-{len(server.calls)}"
    result = {"resultType": "input_required", "inputRequests": WANTED, "requestState": state}
    return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})


class Asking(Attacker):
    """A server of the older era that asks on the stream of a call whenever it was answered.

    `first`: so many at once. `cancelled`: set once it is told that the call is.
    """

    def __init__(self, first: int = 1) -> None:
        super().__init__(self.ask, modern=False)
        self.first, self.asked, self.answers = first, 0, list[Any]()
        self.cancelled = asyncio.Event()
        self.stream: asyncio.StreamWriter | None = None

    async def ask(self, server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
        self.stream = writer
        writer.write(OK + SSE + b"\r\n")
        for _ in range(self.first):
            self.ask_again(ASKED)
        await writer.drain()
        await self.cancelled.wait()
        return b""

    def ask_again(self, question: dict[str, Any]) -> None:
        assert self.stream is not None
        self.asked += 1
        said = events({"jsonrpc": "2.0", "id": self.asked, **question})
        self.stream.write(said.partition(b"\r\n\r\n")[2])

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if message.get("method") == "notifications/cancelled":
            self.cancelled.set()
        elif message and "method" not in message:
            self.answers.append(message)
            self.ask_again(ASKED)
        await super().reply(writer, message, head)


def given(found: dict[str, Any]) -> dict[str, Any]:
    """The parameters with which a call goes on that was answered `found`."""
    answers = dict.fromkeys(found["inputRequests"], ANSWER)
    return {**CALL, "inputResponses": answers, "requestState": found["requestState"]}


async def test_a_server_that_always_asks_once_more_is_given_up(redis: redis.asyncio.Redis) -> None:
    server = Server(asks)
    async with bridged(redis, server) as client:
        params: dict[str, Any] = CALL
        for _ in range(MAX_ROUNDS):
            found = (await ask_modern(client, "/mcp", "tools/call", params))["result"]
            assert found["inputRequests"].keys() == WANTED.keys()
            params = given(found)
        ended = await ask_modern(client, "/mcp", "tools/call", params)
        assert ended["error"]["message"] == TOO_OFTEN
        assert ended["error"]["data"] == {
            "server": "s",
            "reason": "too_many_rounds",
            "limit": MAX_ROUNDS,
        }
        assert len(server.calls) == MAX_ROUNDS + 1
        anew = await ask_modern(client, "/mcp", "tools/call", CALL)
        assert anew["result"]["resultType"] == "input_required", "another call is another one"


async def test_one_of_the_older_era_is_given_up_and_told(redis: redis.asyncio.Redis) -> None:
    server = Asking()
    async with attacked(redis, server) as client:
        params: dict[str, Any] = CALL
        for _ in range(MAX_ROUNDS):
            found = (await ask_modern(client, "/mcp", "tools/call", params))["result"]
            params = given(found)
        ended = await ask_modern(client, "/mcp", "tools/call", params)
        assert ended["error"]["data"]["reason"] == "too_many_rounds"
        async with asyncio.timeout(30):
            await server.cancelled.wait()
        assert not client.bridge.modern._held
    assert len(server.answers) == MAX_ROUNDS


async def test_questions_of_one_round_count_each(redis: redis.asyncio.Redis) -> None:
    many = dict.fromkeys(map(str, range(30)), ASKED)

    def asking(server: Server, writer: Any, message: dict[str, Any]) -> bytes:
        result = {"resultType": "input_required", "inputRequests": many, "requestState": "s"}
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": result})

    async with bridged(redis, Server(asking)) as client:
        params: dict[str, Any] = CALL
        for _ in range(MAX_QUESTIONS // 30):
            found = (await ask_modern(client, "/mcp", "tools/call", params))["result"]
            params = given(found)
        ended = await ask_modern(client, "/mcp", "tools/call", params)
    assert ended["error"]["data"]["reason"] == "too_many_questions"


@pytest.mark.parametrize("newer", [False, True])
async def test_a_client_of_the_older_era_is_asked_so_often(
    redis: redis.asyncio.Redis, newer: bool
) -> None:
    server: Any = Attacker(asks) if newer else Asking()
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        calling = asyncio.create_task(session.ask("/mcp", "tools/call", CALL))
        pending, answered = client.bridge.legacy.questions.pending, set[str]()
        while not calling.done():
            for id_ in set(pending) - answered:
                answered.add(id_)
                said = {"jsonrpc": "2.0", "id": id_, "result": ANSWER}
                await session.send("/mcp", said)
            await asyncio.sleep(0.005)
        assert calling.result()["error"]["message"] == TOO_OFTEN
        if not newer:
            async with asyncio.timeout(30):
                await server.cancelled.wait()
    assert len(answered) == MAX_ROUNDS


async def test_what_is_declined_counts_too(redis: redis.asyncio.Redis) -> None:
    """Each is an answer that goes to the server, which asks again."""
    server = Asking()
    async with attacked(redis, server) as client:
        ended = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities={})
        assert ended["error"]["data"] == {"server": "s0", "reason": "too_many_questions"}
        server.cancelled.set()
    assert len(server.answers) == MAX_QUESTIONS


@pytest.mark.parametrize("newer", [False, True])
async def test_a_call_has_one_hour_with_all_its_rounds(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    """However soon each of them is answered."""
    server: Any = Attacker(asks) if newer else Asking()
    async with attacked(redis, server) as client:
        found = (await ask_modern(client, "/mcp", "tools/call", CALL))["result"]
        monkeypatch.setattr(continuation, "CALL_S", 0.0)
        ended = await ask_modern(client, "/mcp", "tools/call", given(found))
        assert ended["error"]["message"] == TOO_LONG
        if not newer:
            async with asyncio.timeout(30):
                await server.cancelled.wait()
        assert not client.bridge.modern._held


async def test_a_state_is_valid_no_longer_than_its_call() -> None:
    count = continuation.QuestionCount(began_at=1_000.0)
    assert count.answer_by(1_000.0) == 1_000.0 + continuation.TTL_S
    assert count.answer_by(count.ends_at - 1) == count.ends_at
    with pytest.raises(continuation.RpcError, match=TOO_LONG):
        count.answer_by(count.ends_at)


async def test_outside_of_requests_a_server_asks_so_often_a_minute(
    redis: redis.asyncio.Redis,
) -> None:
    more, guard = 6, Noting()
    opened = asyncio.Event()

    class Outside(Asking):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if not head.startswith("get "):
                if message and "method" not in message:
                    self.answers.append(message)
                    return await Attacker.reply(self, writer, message, head)
                return await super().reply(writer, message, head)
            self.stream = writer
            writer.write(OK + SSE + b"\r\n")
            opened.set()
            for _ in range(MAX_QUESTIONS + more):
                self.ask_again({"method": "roots/list"})
            await writer.drain()
            await asyncio.Event().wait()

    server = Outside()
    async with attacked(redis, server, guard=guard) as client:
        session = await LegacyClient.open(client, "/mcp")
        hearing = asyncio.create_task(client.get("/mcp", headers=session.headers))
        pending, answered = client.bridge.legacy.questions.pending, set[str]()
        while len(server.answers) < MAX_QUESTIONS + more:
            for id_ in set(pending) - answered:
                answered.add(id_)
                said = {"jsonrpc": "2.0", "id": id_, "result": {"roots": []}}
                await session.send("/mcp", said)
            await asyncio.sleep(0.005)
        client.bridge.begin_drain()
        heard = await hearing
    assert heard.text.count("roots/list") == len(answered) == MAX_QUESTIONS
    refused = [each["error"]["message"] for each in server.answers if "error" in each]
    assert refused == [TOO_OFTEN] * more
    assert guard.declined == [("roots/list", "", "too_many_questions")]
