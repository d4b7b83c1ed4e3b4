"""A client tells the bridge alone: nothing of its headers and of `_meta` travels on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from foundation.request_context import LOG_CONTEXT, LogContext
from foundation.trace_context import TracePolicy
from tests.mcp_bridge.attacks.hostile import Attacker, Client, answer, attacked, events
from tests.mcp_bridge.processes import LegacyClient, last_of, modern
from tests.mcp_bridge.test_hostile import OK, SSE, whole

CANARY = "canary-5f0c"
HEADERS = dict.fromkeys(
    ("authorization", "cookie", "proxy-authorization", "traceparent", "tracestate", "baggage")
    + ("x-own", "x-forwarded-for", "forwarded", "user-agent", "referer"),
    CANARY,
)
META = {
    "token": CANARY,
    "authorization": f"Bearer {CANARY}",
    "traceparent": f"00-{CANARY}",
    "com.example/anything": {"deep": [CANARY]},
    CANARY: 1,
    "io.modelcontextprotocol/unknown": CANARY,
    "progressToken": "progress-7",
}
ACCEPTED = {"action": "accept", "content": {}, "_meta": META}
ASKED = {
    "method": "elicitation/create",
    "params": {"message": "?", "requestedSchema": {"type": "object"}},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "tools/list": {},
    "prompts/get": {"name": "p"},
    "resources/read": {"uri": "test://r"},
    "completion/complete": {
        "ref": {"type": "ref/prompt", "name": "p"},
        "argument": {"name": "a", "value": "v"},
    },
    "tools/call": {"name": "t", "arguments": {"x": 1}},
}


class Curious(Attacker):
    """Asks in each call, and keeps all that it hears."""

    def __init__(self, *, modern: bool) -> None:
        super().__init__(self.ask, modern=modern)
        self.capabilities |= {"completions": {}}
        self.answered = asyncio.Event()

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        if message.get("id") == "question" and "method" not in message:
            self.answered.set()
        await super().reply(writer, message, head)

    async def ask(self, server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
        done = {**self.result, "contents": [], "messages": [], "tools": []}
        done |= {"completion": {"values": []}}
        if message["method"] != "tools/call" or "inputResponses" in message["params"]:
            return whole(answer(message["id"], done))
        if self.modern:
            asks = {"resultType": "input_required", "inputRequests": {"question": ASKED}}
            return whole(answer(message["id"], asks))
        asked = {"jsonrpc": "2.0", "id": "question", **ASKED}
        writer.write(OK + SSE + b"connection: close\r\n\r\n" + body_of(asked))
        await self.answered.wait()
        writer.write(body_of(answer(message["id"], done)))
        await writer.drain()
        writer.close()
        return b""


def body_of(message: Any) -> bytes:
    return events(message).partition(b"\r\n\r\n")[2]


async def say_all_modern(client: Client) -> None:
    for method, params in REQUESTS.items():
        message, headers = modern(method, params)
        message["params"]["_meta"] |= META
        headers = {**HEADERS, **headers}
        found = last_of(await client.post("/mcp", json=message, headers=headers))
        result = found["result"]
        if result["resultType"] == "input_required":
            message["params"]["inputResponses"] = dict.fromkeys(result["inputRequests"], ACCEPTED)
            if "requestState" in result:
                message["params"]["requestState"] = result["requestState"]
            found = last_of(await client.post("/mcp", json=message, headers=headers))
            assert found["result"]["resultType"] == "complete"


async def say_all_legacy(client: Client) -> None:
    session = await LegacyClient.open(client, "/mcp")
    session.headers = {**HEADERS, **session.headers}
    pending = client.bridge.legacy.questions.pending
    asked = [*REQUESTS.items(), ("resources/subscribe", {"uri": "test://r"})]
    for method, params in asked:
        asking = asyncio.create_task(session.ask("/mcp", method, {**params, "_meta": META}))
        while method == "tools/call" and not pending:
            await asyncio.sleep(0.01)
        if pending:
            said = {"jsonrpc": "2.0", "id": next(iter(pending)), "result": ACCEPTED}
            assert (await session.send("/mcp", said)).status_code == 202
        assert "result" in await asking, method
    await client.request("DELETE", "/mcp", headers=session.headers)


@pytest.mark.parametrize("is_modern", [True, False])
@pytest.mark.parametrize("say_all", [say_all_modern, say_all_legacy])
async def test_nothing_that_is_told_us_alone_travels_on(
    redis: redis.asyncio.Redis, say_all: Any, is_modern: bool
) -> None:
    server = Curious(modern=is_modern)
    async with attacked(redis, server) as client:
        await say_all(client)
    heard = "\n".join(f"{head} {message}" for head, message in server.heard)
    assert CANARY not in heard
    called = [message for _, message in server.heard if message.get("method") == "tools/call"]
    assert all(each["params"]["_meta"]["progressToken"] == "progress-7" for each in called)
    methods = {message.get("method") for _, message in server.heard}
    assert methods >= REQUESTS.keys()
    assert all("bearer servers-own" in head for head, _ in server.heard)


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("is_modern", [True, False])
async def test_a_server_that_may_know_it_hears_of_the_trace_and_of_nothing_else(
    redis: redis.asyncio.Redis, is_modern: bool
) -> None:
    """The context is of the gateway's own call, whatever a client says beside its trace."""
    server = Curious(modern=is_modern)
    sent = {
        "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01",
        "tracestate": "a=1",
        "baggage": CANARY,
    }
    async with attacked(redis, server) as client:
        for send_to in ((), ("mcp/another",), ("mcp/*",)):
            policy = TracePolicy(
                ratio=1, client_sampled_per_s=9, trusts_clients=True, send_to=send_to
            )
            LOG_CONTEXT.set(context := LogContext("req_" + "1" * 32, (), policy))
            message, headers = modern("prompts/get", {"name": "p"})
            message["params"]["_meta"] |= sent
            assert "result" in last_of(await client.post("/mcp", json=message, headers=headers))
            assert context.trace == TRACE, "as the message names it"
    LOG_CONTEXT.set(None)
    asked = [each for each in server.heard if each[1].get("method") == "prompts/get"]
    assert [
        {"traceparent", "tracestate"} & each["params"].get("_meta", {}).keys() for _, each in asked
    ] == [set(), set(), {"traceparent", "tracestate"}]
    [message, stage] = context.stages
    assert (message.name, message.about) == ("mcp_message", "prompts/get p")
    expected = f"00-{TRACE}-{stage.span_id:016x}-01"
    head, told = asked[-1]
    assert told["params"]["_meta"]["traceparent"] == expected
    assert f"traceparent: {expected}" in head and "tracestate: a=1" in head
    assert CANARY not in "".join(f"{head} {message}" for head, message in server.heard)
