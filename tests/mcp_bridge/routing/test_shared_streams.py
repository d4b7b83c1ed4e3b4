"""A server of the older era asks on the stream of a GET, and reaches those who shall answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from mcp_bridge.caller import Caller
from mcp_bridge.routing import shared_streams
from mcp_bridge.upstream.transports import streamable_http
from tests.mcp_bridge.attacks.hostile import Attacker, Client, attacked
from tests.mcp_bridge.processes import LegacyClient, ask_modern
from tests.mcp_bridge.test_hostile import OK, SSE, result, whole

ASKS, WAITS, PLAIN = ({"name": name, "arguments": {}} for name in ("asks", "waits", "plain"))
ACCEPTED = {"action": "accept", "content": {}}


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for its stream however busy this machine is."""
    monkeypatch.setattr(shared_streams, "OPEN_S", 60.0)


class Outside(Attacker):
    """`asks` asks on the GET stream of its session, and answers with what it was told; `waits`
    waits until it may end."""

    def __init__(self) -> None:
        super().__init__(self.by_name, modern=False)
        self.method = "elicitation/create"
        self.streams: dict[str, asyncio.StreamWriter] = {}
        self.answers: dict[str, asyncio.Future[Any]] = {}
        self.may_end = asyncio.Event()

    @property
    def gets(self) -> list[str]:
        return [head for head, _ in self.heard if head.startswith("get ")]

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if head.startswith("get "):
            self.heard.append((head, message))
            self.streams[session_of(head)] = writer
            writer.write(OK + SSE + b"\r\n: here\n\n")
            await writer.drain()
            await asyncio.Event().wait()
        if message.get("id") in self.answers and "method" not in message:
            self.answers[message["id"]].set_result(message)
        await super().reply(writer, message, head)

    async def by_name(self, server: Any, writer: Any, message: Any) -> bytes:
        session = session_of(self.calls[-1]["head"])
        if message["params"]["name"] == "waits":
            await self.may_end.wait()
        elif message["params"]["name"] == "asks":
            return whole(await self.asked(session, message["id"]))
        return whole(result("done", message["id"]))

    async def asked(self, session: str, call: Any) -> dict[str, Any]:
        id_ = f"question {len(self.answers)}"
        self.answers[id_] = asyncio.get_running_loop().create_future()
        params = {"message": f"of {session}", "requestedSchema": {"type": "object"}}
        question = {"jsonrpc": "2.0", "id": id_, "method": self.method, "params": params}
        self.say(session, question)
        told = await self.answers[id_]
        return result(f"{session}: {told.get('result', told.get('error'))}", call)

    def say(self, session: str, message: Any) -> None:
        body = whole(message).partition(b"\r\n\r\n")[2]
        self.streams[session].write(b"data: " + body + b"\n\n")


def session_of(head: str) -> str:
    return head.partition("mcp-session-id: ")[2].partition("\r\n")[0]


def text_of(answer: dict[str, Any]) -> str:
    found: str = answer["result"]["content"][0]["text"]
    return found


async def ask_and_answer(client: Client, **more: Any) -> tuple[str, str]:
    """Call as a client of the newer era; return what it was asked, and the result."""
    first = await ask_modern(client, "/mcp", "tools/call", ASKS, **more)
    ((key, asked),) = first["result"]["inputRequests"].items()
    state = first["result"]["requestState"]
    again = {**ASKS, "inputResponses": {key: ACCEPTED}, "requestState": state}
    done = await ask_modern(client, "/mcp", "tools/call", again, **more)
    return asked["params"]["message"], text_of(done)


async def answer_when_asked(client: Client, session: LegacyClient) -> None:
    pending = client.bridge.legacy.questions.pending
    while not pending:
        await asyncio.sleep(0.01)
    said = {"jsonrpc": "2.0", "id": next(iter(pending)), "result": ACCEPTED}
    assert (await session.send("/mcp", said)).status_code == 202


def streams_of(client: Client) -> dict[Any, Any]:
    return client.bridge.sessions.streams._open


async def test_the_caller_of_the_newer_era_is_asked(redis: redis.asyncio.Redis) -> None:
    server = Outside()
    async with attacked(redis, server) as client:
        for _ in range(2):
            assert await ask_and_answer(client) == ("of s2", f"s2: {ACCEPTED}")
        assert len(server.gets) == 1, "it stays for the next call"
        methods = [message.get("method", "get") for _, message in server.heard if message]
    heads = [head for head, message in server.heard if message.get("method") == "tools/call"]
    assert methods.count("tools/call") == 2
    order = [head for head, _ in server.heard]
    assert order.index(server.gets[0]) < order.index(heads[0]), "open before the call goes out"


async def test_the_caller_of_the_older_era_is_asked_and_its_session_ends_the_stream(
    redis: redis.asyncio.Redis,
) -> None:
    server = Outside()
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        calling = asyncio.create_task(session.ask("/mcp", "tools/call", ASKS))
        await answer_when_asked(client, session)
        assert str(ACCEPTED) in text_of(await calling)
        assert len(streams_of(client)) == 1
        await client.request("DELETE", "/mcp", headers=session.headers)
        while streams_of(client) or await redis.keys("mcp:shared_stream:*"):
            await asyncio.sleep(0.01)


async def test_everybody_is_asked_what_is_of_their_own_session(redis: redis.asyncio.Redis) -> None:
    """Other tenants, and others of the same one: whoever else has a call under way."""
    server = Outside()
    async with attacked(redis, server) as client:
        callers = ["alice", "bob", "bob@alice", "alice+app", "alice#proj_2"]
        waits = [
            asyncio.create_task(ask_modern(client, "/mcp", "tools/call", WAITS, caller=caller))
            for caller in callers[1:]
        ]
        while len(server.calls) < len(waits):
            await asyncio.sleep(0.01)
        asked, text = await ask_and_answer(client, caller="alice")
        assert text == f"{asked.removeprefix('of ')}: {ACCEPTED}"
        server.may_end.set()
        for each in await asyncio.gather(*waits):
            assert text_of(each) == "done"
    called = [session_of(call["head"]) for call in server.calls]
    assert len(set(called)) == len(callers) == len(server.gets)


async def test_with_two_calls_of_one_nobody_is_asked(redis: redis.asyncio.Redis) -> None:
    server = Outside()
    async with attacked(redis, server) as client:
        waits = asyncio.create_task(ask_modern(client, "/mcp", "tools/call", WAITS))
        while not server.calls:
            await asyncio.sleep(0.01)
        refused = await ask_modern(client, "/mcp", "tools/call", ASKS)
        assert "Nobody can be asked this now" in text_of(refused)
        server.may_end.set()
        assert text_of(await waits) == "done"
        session = next(iter(server.streams))
        assert "Nobody can be asked" in str(await server.asked(session, 0)), "with none either"
        server.answers["p"] = asyncio.get_running_loop().create_future()
        server.say(session, {"jsonrpc": "2.0", "id": "p", "method": "ping"})
        assert (await server.answers["p"])["result"] == {}


async def test_who_can_be_asked_nothing_opens_nothing(redis: redis.asyncio.Redis) -> None:
    server = Outside()
    async with attacked(redis, server) as client:
        said = await ask_modern(client, "/mcp", "tools/call", PLAIN, capabilities={})
        assert text_of(said) == "done"
    assert not server.gets


async def test_a_server_without_such_a_stream_is_asked_for_it_once(
    redis: redis.asyncio.Redis,
) -> None:
    server = Attacker(modern=False)  # answers a GET as it does a notification
    async with attacked(redis, server) as client, attacked(redis, server) as other:
        for caller in ("alice", "bob@alice", "alice"):
            said = await ask_modern(client, "/mcp", "tools/call", PLAIN, caller=caller)
            assert text_of(said) == "done"
        for _ in range(2):
            assert text_of(await ask_modern(other, "/mcp", "tools/call", PLAIN)) == "done"
    assert sum(head.startswith("get ") for head, _ in server.heard) == 1


async def test_a_call_in_another_worker_joins_and_takes_over_from_the_dead(
    redis: redis.asyncio.Redis,
) -> None:
    server = Outside()
    async with attacked(redis, server) as first, attacked(redis, server) as second:
        assert text_of(await ask_modern(first, "/mcp", "tools/call", PLAIN)) == "done"
        asked, _ = await ask_and_answer(second)
        assert asked == "of s2" and len(server.gets) == 1
        assert len(streams_of(first)) == 1 and not streams_of(second)
        waits = asyncio.create_task(ask_modern(first, "/mcp", "tools/call", WAITS))
        while len(server.calls) < 3:
            await asyncio.sleep(0.01)
        refused = await ask_modern(second, "/mcp", "tools/call", ASKS)
        assert "Nobody can be asked this now" in text_of(refused), "two calls, in two workers"
        server.may_end.set()
        await waits
        await first.bridge.relay._tasks.close()  # as a killed worker: nobody hears it
        assert (await ask_and_answer(second))[0] == "of s2"
        assert len(server.gets) == 2 and len(streams_of(second)) == 1


async def test_a_client_that_listens_is_asked_there(redis: redis.asyncio.Redis) -> None:
    """And a stream that was opened for its calls makes room: servers allow one."""
    server = Outside()
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        assert text_of(await session.ask("/mcp", "tools/call", PLAIN)) == "done"
        assert len(streams_of(client)) == 1
        hearing = asyncio.create_task(client.get("/mcp", headers=session.headers))
        while len(server.gets) < 2:
            await asyncio.sleep(0.01)
        assert not streams_of(client)
        calling = asyncio.create_task(session.ask("/mcp", "tools/call", ASKS, id=2))
        await answer_when_asked(client, session)
        assert str(ACCEPTED) in text_of(await calling)
        client.bridge.begin_drain()
        assert "elicitation/create" in (await hearing).text
    assert len(server.gets) == 2


class Writer:
    """A model."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def sample(self, caller: Caller, server: str, params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((caller.subject, server))
        return {"role": "assistant", "content": {"type": "text", "text": "written"}, "model": "m"}


async def test_our_model_is_asked_of_who_listens_and_of_who_does_not(
    redis: redis.asyncio.Redis,
) -> None:
    """By callers that can be asked nothing: amid a call, and on the stream of a session, where a
    server is answered so often."""
    server, writer = Outside(), Writer()
    server.method = "sampling/createMessage"
    given: Any = {"sampler": writer, "sampling": "engine", "max_samples": 2}
    async with attacked(redis, server, **given) as client:
        said = await ask_modern(client, "/mcp", "tools/call", ASKS, capabilities={})
        assert "written" in text_of(said)
        session = await LegacyClient.open(client, "/mcp", capabilities={})
        hearing = asyncio.create_task(client.get("/mcp", headers=session.headers))
        while len(server.gets) < 2:
            await asyncio.sleep(0.01)
        told = [text_of(await session.ask("/mcp", "tools/call", ASKS, id=id)) for id in (2, 3, 4)]
        assert ["written" in each for each in told] == [True, True, False]
        assert "too_many_samples" in told[2]
        client.bridge.begin_drain()
        assert "sampling" not in (await hearing).text, "the client hears nothing of it"
    assert writer.asked == [("alice", "s0")] * 3


@pytest.mark.parametrize("capabilities", [{}, {"sampling": {}}])
async def test_a_server_may_be_told_that_no_model_can_be_asked(
    redis: redis.asyncio.Redis, capabilities: dict[str, Any]
) -> None:
    server = Outside()
    server.method = "sampling/createMessage"
    async with attacked(redis, server, sampling="off") as client:
        session = await LegacyClient.open(client, "/mcp", capabilities=capabilities)
        hearing = asyncio.create_task(client.get("/mcp", headers=session.headers))
        while not server.gets:
            await asyncio.sleep(0.01)
        assert "does not declare sampling" in text_of(
            await session.ask("/mcp", "tools/call", ASKS, id=2)
        )
        client.bridge.begin_drain()
        assert "sampling" not in (await hearing).text
    opened = [said for _, said in server.heard if said.get("method") == "initialize"]
    assert opened and all("sampling" not in each["params"]["capabilities"] for each in opened)


async def test_what_is_idle_is_closed(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_streams, "OWNED_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(shared_streams, "IDLE_S", 0.0)
    server = Outside()
    async with attacked(redis, server) as client:
        assert (await ask_and_answer(client))[0] == "of s2"
        while streams_of(client) or await redis.keys("mcp:shared_stream:*"):
            await asyncio.sleep(0.01)


async def test_at_one_server_they_are_few(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle ones make room; where all are used, a call goes out without."""
    monkeypatch.setattr(shared_streams, "MAX_OPEN_AT_ONE", 2)
    server = Outside()
    async with attacked(redis, server) as client:
        for number in range(3):
            who = f"u{number}@alice"
            assert text_of(await ask_modern(client, "/mcp", "tools/call", PLAIN, caller=who))
        assert len(server.gets) == 3 and len(streams_of(client)) == 2
        waits = [
            asyncio.create_task(ask_modern(client, "/mcp", "tools/call", WAITS, caller=who))
            for who in ("u1@alice", "u2@alice")
        ]
        while len(server.calls) < 5:
            await asyncio.sleep(0.01)
        said = await ask_modern(client, "/mcp", "tools/call", PLAIN, caller="u3@alice")
        assert text_of(said) == "done" and len(server.gets) == 3
        server.may_end.set()
        await asyncio.gather(*waits)


async def test_what_is_said_there_during_a_call_is_bounded(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the stream is closed, and the call goes on without."""
    monkeypatch.setattr(streamable_http, "MAX_EXCHANGE_MESSAGES", 100)
    server = Outside()
    async with attacked(redis, server) as client:
        waits = asyncio.create_task(ask_modern(client, "/mcp", "tools/call", WAITS))
        while not server.calls:
            await asyncio.sleep(0.01)
        (shared,) = streams_of(client).values()
        (session,) = server.streams
        for _ in range(101):
            server.say(session, {"jsonrpc": "2.0", "method": "notifications/message"})
        await shared.ended.wait()
        server.may_end.set()
        assert text_of(await waits) == "done"
        assert text_of(await ask_modern(client, "/mcp", "tools/call", PLAIN)) == "done"
    assert len(server.gets) == 1
