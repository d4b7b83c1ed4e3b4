"""A server forges the protocol: it names states, result types, questions and capabilities that are
not its to name, or of the era that it does not speak."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import redis.asyncio

from mcp_bridge.routing.guard import Guard
from mcp_bridge.server import elicitation
from tests.mcp_bridge.attacks.hostile import Attacker, answer, attacked, events, note
from tests.mcp_bridge.processes import (
    LegacyClient,
    ask_modern,
    messages_of,
    modern,
)
from tests.mcp_bridge.test_hostile import CALL, whole
from tests.mcp_bridge.trust.test_read_permit import new_world
from tests.mcp_bridge.trust.test_trust import URL, bridge_of

URL_QUESTION: dict[str, Any] = {
    "method": "elicitation/create",
    "params": {"mode": "url", "message": "Sign in", "url": "https://evil.example/"},
}
FORM_QUESTION = {
    "method": "elicitation/create",
    "params": {"message": "Your name?", "requestedSchema": {"type": "object", "properties": {}}},
}
SAMPLE = {"messages": [{"role": "user", "content": {"type": "text", "text": "Hi"}}], "maxTokens": 9}
TOOL_SAMPLE = {**SAMPLE, "tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
FORGED = {
    "resultType": "input_required",
    "inputRequests": {"k": URL_QUESTION},
    "requestState": "x",
    "ttlMs": 10**9,
    "cacheScope": "public",
    "task": {"taskId": "1"},
    "_meta": {
        "io.modelcontextprotocol/subscriptionId": 1,
        "io.modelcontextprotocol/serverInfo": {"name": "bank", "version": "1"},
        "com.mcp/anything": 1,
        "tollgate/stale": ["bank"],
        "progressToken": 5,
        "own": "kept",
    },
}
PLAIN = {"content": [{"type": "text", "text": "done"}]}


class Noting(Guard):
    """A guard that keeps what was declined."""

    def __init__(self) -> None:
        self.declined: list[tuple[str, str, str]] = []

    async def note_declined(
        self, caller: Any, upstream: Any, method: str, name: str, reason: str
    ) -> None:
        self.declined.append((method, name, reason))


@pytest.mark.parametrize("method", ["tools/call", "resources/read", "resources/list"])
async def test_an_older_server_forges_no_state_of_the_newer_era(
    redis: redis.asyncio.Redis, method: str
) -> None:
    server = Attacker(modern=False)
    server.result = {**PLAIN, "contents": [], "resources": [], **FORGED}
    params = {"tools/call": CALL, "resources/read": {"uri": "a:b"}, "resources/list": {}}[method]
    async with attacked(redis, server) as client:
        found = (await ask_modern(client, "/mcp", method, params, capabilities={}))["result"]
    assert found["resultType"] == "complete"
    assert found.keys() <= {
        *("resultType", "_meta", "content", "contents", "resources"),
        *(("ttlMs", "cacheScope") if method != "tools/call" else ()),
    }
    assert found.get("ttlMs", 0) == 0 and found.get("cacheScope", "private") == "private"
    assert found["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "t"
    assert found["_meta"].keys() == {"io.modelcontextprotocol/serverInfo", "own"}


async def test_a_newer_server_forges_no_state_for_an_older_client(
    redis: redis.asyncio.Redis,
) -> None:
    server = Attacker()
    server.result = {**PLAIN, **FORGED, "resultType": "complete"}
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp", capabilities={})
        found = (await session.ask("/mcp", "tools/call", CALL))["result"]
    assert found == {**PLAIN, "_meta": {"own": "kept"}}


@pytest.mark.parametrize("kind", ["task", "INPUT_REQUIRED", 7, None])
async def test_a_result_type_that_is_unknown_is_no_result(
    redis: redis.asyncio.Redis, kind: Any
) -> None:
    server = Attacker()
    server.result = {**PLAIN, "resultType": kind}
    async with attacked(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"]["data"] == {"server": "s0", "reason": "result_type"}


async def test_a_list_asks_nothing(redis: redis.asyncio.Redis) -> None:
    """It would be asked for without end."""
    server = Attacker()
    server.result = {"resultType": "input_required", "inputRequests": {}, "requestState": "x"}
    async with attacked(redis, server) as client:
        found = (await ask_modern(client, "/mcp", "resources/list"))["result"]
        named = await ask_modern(client, "/mcp", "prompts/list")
    assert (found["resources"], found["_meta"]["tollgate/stale"]) == ([], ["s0"])
    assert named["error"]["data"] == {"server": "s0", "reason": "result_type"}
    assert len(server.calls) == 2


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-32020, -32603),
        (-32022, -32603),
        (-32030, -32603),
        (-32031, -32603),
        (-32032, -32603),
        (-32800, -32603),
        (-32042, -32603),
        (True, -32603),
        (10**30, -32603),
        (-32050, -32050),
        (7, 7),
    ],
)
async def test_an_error_says_nothing_that_is_the_gateways_to_say(
    redis: redis.asyncio.Redis, newer: bool, code: Any, told: int
) -> None:
    data = {"supported": ["2024-11-05"], "approvalId": "a", "elicitations": 1}

    def failing(server: Any, writer: Any, message: Any) -> bytes:
        error = {"code": code, "message": "no", "data": data}
        return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})

    async with attacked(redis, Attacker(failing, modern=newer)) as client:
        found = (await ask_modern(client, "/mcp", "tools/call", CALL))["error"]
        session = await LegacyClient.open(client, "/mcp")
        older = (await session.ask("/mcp", "tools/call", CALL))["error"]
    assert found["code"] == older["code"] == told
    assert ("data" in found) == ("data" in older) == (code in (-32050, 7))


@pytest.mark.parametrize("newer", [False, True])
async def test_a_client_lacks_a_capability_only_if_it_does(
    redis: redis.asyncio.Redis, newer: bool
) -> None:
    wanted = {"sampling": {"tools": {}, "x": {}}, "tasks": {}, "roots": {}}

    def failing(server: Any, writer: Any, message: Any) -> bytes:
        error = {"code": -32021, "message": "no", "data": {"requiredCapabilities": wanted}}
        return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})

    async with attacked(redis, Attacker(failing, modern=newer)) as client:
        for can, lacks in (
            ({}, {"sampling": {"tools": {}}, "roots": {}}),
            ({"sampling": {}, "roots": {}}, {"sampling": {"tools": {}}}),
            ({"sampling": {"tools": {}}, "roots": {}}, None),
        ):
            found = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities=can)
            error = found["error"]
            assert error["code"] == (-32603 if lacks is None else -32021)
            assert error.get("data") == (lacks and {"requiredCapabilities": lacks})


def asking(*requests: dict[str, Any]) -> Any:
    """A server of the older era that asks, and says what it was answered."""
    came: list[Any] = []

    class Asking(Attacker):
        async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
            if "method" not in message and message:
                came.append(message)
            await super().reply(writer, message, head)

    async def ask(server: Any, writer: asyncio.StreamWriter, message: Any) -> bytes:
        asked = [
            {"jsonrpc": "2.0", "id": f"q{number}", **request}
            for number, request in enumerate(requests)
        ]
        said = events(*asked).partition(b"\r\n\r\n")[2]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + said)
        await writer.drain()
        while len(came) < len(requests):
            await asyncio.sleep(0.005)
        told = msgspec.json.encode(sorted(came, key=lambda each: str(each["id"]))).decode()
        last = answer(message["id"], {"content": [{"type": "text", "text": told}]})
        writer.write(events(last).partition(b"\r\n\r\n")[2])
        await writer.drain()
        writer.close()
        return b""

    return Asking(ask, modern=False)


def text_of(found: dict[str, Any]) -> Any:
    return msgspec.json.decode(found["result"]["content"][0]["text"])


SAMPLING = {"method": "sampling/createMessage"}
UNDECLARED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"elicitation": {}}, URL_QUESTION, "elicitation.url"),
    ({"elicitation": {"form": {}}}, URL_QUESTION, "elicitation.url"),
    ({"elicitation": {"url": {}}}, FORM_QUESTION, "elicitation.form"),
    ({}, FORM_QUESTION, "elicitation"),
    ({}, {"method": "roots/list"}, "roots"),
    ({"roots": {}}, {**SAMPLING, "params": SAMPLE}, "sampling"),
    (
        {"sampling": {}},
        {"method": "sampling/createMessage", "params": TOOL_SAMPLE},
        "sampling.tools",
    ),
]


@pytest.mark.parametrize(("declared", "question", "missing"), UNDECLARED)
async def test_a_client_is_asked_only_what_it_declared(
    redis: redis.asyncio.Redis,
    declared: dict[str, Any],
    question: dict[str, Any],
    missing: str,
) -> None:
    """Before servers and clients of either era; why not is on record."""
    reason = f"undeclared:{missing}"
    newer = Attacker()
    newer.result = {"resultType": "input_required", "inputRequests": {"k": question}}
    for server in (asking(question), newer):
        for era in ("older", "newer"):
            guard = Noting()
            async with attacked(redis, server, guard=guard) as client:
                if era == "newer":
                    message, headers = modern("tools/call", CALL, capabilities=declared)
                    said = messages_of(await client.post("/mcp", json=message, headers=headers))
                else:
                    session = await LegacyClient.open(client, "/mcp", capabilities=declared)
                    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
                    said = messages_of(await session.send("/mcp", call))
            assert len(said) == 1, "nothing was asked"
            if server is newer:
                assert said[0]["error"]["code"] == -32021
                name, _, mode = missing.partition(".")
                wanted = {name: {mode: {}} if mode else {}}
                assert said[0]["error"]["data"] == {"requiredCapabilities": wanted}
            else:
                (told,) = text_of(said[0])[-1:]
                assert told["error"]["code"] in (-32601, -32602)
                assert missing in told["error"]["message"]
            assert guard.declined == [(question["method"], "anything", reason)]


async def test_what_is_asked_has_the_members_of_the_clients_era(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elicitation, "ANSWER_S", 0.05)
    forged = {"task": {"ttl": 1}, "resultType": "complete", "_meta": {"tollgate/x": 1, "own": 1}}
    asked = {**URL_QUESTION, "params": {**URL_QUESTION["params"], **forged}, "requestState": "x"}
    newer = Attacker()
    newer.result = {"resultType": "input_required", "inputRequests": {"k": asked}}
    declared = {"elicitation": {"url": {}}}
    async with attacked(redis, newer) as client:
        session = await LegacyClient.open(client, "/mcp", capabilities=declared)
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
        (message, _) = messages_of(await session.send("/mcp", call))
        params = message["params"]
        assert isinstance(params.pop("elicitationId"), str), "2025-11-25 wants one"
        assert params == {**URL_QUESTION["params"], "_meta": {"own": 1}}
        assert message.keys() == {"jsonrpc", "id", "method", "params"}
    older = asking({**asked, "params": {**asked["params"], "elicitationId": "e"}})
    async with attacked(redis, older) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities=declared)
    params = {**URL_QUESTION["params"], "_meta": {"own": 1}}
    assert found["result"]["inputRequests"] == {
        "request-1": {"method": "elicitation/create", "params": params}
    }


async def test_a_notification_is_rebuilt(redis: redis.asyncio.Redis) -> None:
    forged = {"_meta": {"io.modelcontextprotocol/subscriptionId": 3}, "requestState": "x"}
    progress = {**note("notifications/progress", progress=1, **forged), "result": {}, "error": {}}
    strange = note("notifications/tasks/status", taskId="1")

    def noting(server: Any, writer: Any, message: Any) -> bytes:
        return events(strange, progress, answer(message["id"], PLAIN))

    for newer in (False, True):
        async with attacked(redis, Attacker(noting, modern=newer)) as client:
            message, headers = modern("tools/call", CALL)
            to_newer = messages_of(await client.post("/mcp", json=message, headers=headers))
            session = await LegacyClient.open(client, "/mcp")
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
            to_older = [each for each in messages_of(await session.send("/mcp", call)) if each]
        for said in (to_newer, to_older):
            assert said[:-1] == [note("notifications/progress", progress=1)]


async def test_an_older_client_brings_no_state_of_the_newer_era(
    redis: redis.asyncio.Redis,
) -> None:
    """Nor a task, nor anything else that the method does not have."""
    server = Attacker()
    params = {**CALL, "requestState": "s", "inputResponses": {"k": {}}, "task": {"ttl": 1}, "x": 1}
    async with attacked(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        await session.ask("/mcp", "tools/call", params)
        await ask_modern(client, "/mcp", "tools/call", {**CALL, "task": {"ttl": 1}, "x": 1})
    for sent in server.calls:
        assert sent["params"].keys() == {"name", "arguments", "_meta"}


async def test_a_newer_server_hears_of_capabilities_that_can_be_met(
    redis: redis.asyncio.Redis,
) -> None:
    server = Attacker()
    ui = {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html"]}}
    made_up = {
        "elicitation": {"form": {}, "url": {}, "x": {}},
        "tasks": {"requests": {}},
        "experimental": {"y": {}},
        "extensions": {**ui, "io.modelcontextprotocol/tasks": {}},
    }
    async with attacked(redis, server) as client:
        await ask_modern(client, "/mcp", "tools/call", CALL, capabilities=made_up)
    said = server.calls[0]["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"]
    assert said == {"elicitation": {"form": {}, "url": {}}, "extensions": ui}


async def test_an_url_that_an_older_server_wants_opened_is_asked_for_as_the_client_knows_it(
    redis: redis.asyncio.Redis,
) -> None:
    wanted = {
        "mode": "url",
        "message": "Sign in",
        "url": "https://as.example/",
        "elicitationId": "e",
    }

    def failing(server: Any, writer: Any, message: Any) -> bytes:
        error = {"code": -32042, "message": "no", "data": {"elicitations": [{**wanted, "x": 1}]}}
        return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})

    guard = Noting()
    urls = {"elicitation": {"url": {}}}
    async with attacked(redis, Attacker(failing, modern=False), guard=guard) as client:
        found = (await ask_modern(client, "/mcp", "tools/call", CALL, capabilities=urls))["result"]
        asked = {name: each for name, each in wanted.items() if name != "elicitationId"}
        assert found["resultType"] == "input_required" and "requestState" not in found
        assert list(found["inputRequests"].values()) == [
            {"method": "elicitation/create", "params": asked}
        ]
        answered = {
            **CALL,
            "inputResponses": {key: {"action": "accept"} for key in found["inputRequests"]},
        }
        again = await ask_modern(client, "/mcp", "tools/call", answered, capabilities=urls)
        assert again["error"]["code"] == -32603, "it is asked once"
        session = await LegacyClient.open(client, "/mcp", capabilities=urls)
        older = (await session.ask("/mcp", "tools/call", CALL))["error"]
        assert (older["code"], older["data"]) == (-32042, {"elicitations": [wanted]})
        assert guard.declined == []
        for capabilities in ({}, {"elicitation": {}}):
            refused = await ask_modern(
                client, "/mcp", "tools/call", CALL, capabilities=capabilities
            )
            session = await LegacyClient.open(client, "/mcp", capabilities=capabilities)
            older = await session.ask("/mcp", "tools/call", CALL)
            assert refused["error"]["code"] == older["error"]["code"] == -32021
            assert "evil" not in str(refused) and "as.example" not in str(older)
    assert {reason for _, _, reason in guard.declined} == {
        "undeclared:elicitation",
        "undeclared:elicitation.url",
    }


NOT_OF_THE_WEB = [
    *("javascript:alert(1)", "file:///etc/passwd", "data:text/html,x", "vscode://x/y", "//a/b"),
    *("https:///x", "https://a b", "https://a\r\nb", "https://a\\@b", "", 7, None, "a" * 9000),
]


@pytest.mark.parametrize("url", NOT_OF_THE_WEB)
async def test_nobody_is_asked_to_open_what_is_not_of_the_web(
    redis: redis.asyncio.Redis, url: Any
) -> None:
    """A script, a file, a program; in each way in which a server of either era asks for it."""
    params = {"mode": "url", "message": "Sign in", "url": url, "elicitationId": "e"}
    question = {"method": "elicitation/create", "params": params}

    def failing(server: Any, writer: Any, message: Any) -> bytes:
        error = {"code": -32042, "message": "no", "data": {"elicitations": [params]}}
        return whole({"jsonrpc": "2.0", "id": message["id"], "error": error})

    newer = Attacker()
    newer.result = {"resultType": "input_required", "inputRequests": {"k": question}}
    declared = {"elicitation": {"url": {}, "form": {}}}
    message, headers = modern("tools/call", CALL, capabilities=declared)
    for server in (Attacker(failing, modern=False), newer, asking(question)):
        async with attacked(redis, server) as client:
            (said,) = messages_of(await client.post("/mcp", json=message, headers=headers))
        assert said.get("result", {}).get("resultType") != "input_required"
        assert "elicitations" not in str(said)


@pytest.mark.parametrize("forged", [{}, {"inputRequests": {}}, {"requestState": 5}])
async def test_who_asks_nothing_is_not_answered(redis: redis.asyncio.Redis, forged: Any) -> None:
    """A client would ask again for nothing, round after round."""
    server = Attacker()
    server.result = {"resultType": "input_required", **forged}
    async with attacked(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert "result" not in found and len(server.heard) < 5


@pytest.mark.parametrize("other", [999, "1", "wrong"])
@pytest.mark.parametrize("is_modern", [True, False])
async def test_an_answer_on_another_id_is_none(
    redis: redis.asyncio.Redis, other: Any, is_modern: bool
) -> None:
    def answering(server: Any, writer: Any, message: Any) -> bytes:
        forged = {"content": [{"type": "text", "text": "forged"}]}
        own = {**forged, "content": PLAIN["content"]}
        found = str(message["id"]) if other == "1" else other
        return events(answer(found, forged), answer(message["id"], own))

    async with attacked(redis, Attacker(answering, modern=is_modern)) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["result"]["content"] == PLAIN["content"]


async def test_a_question_that_is_not_asked_is_on_record(redis: redis.asyncio.Redis) -> None:
    """As a denial, once for each reason of a call."""
    world = new_world()
    world.result = {"resultType": "input_required", "inputRequests": {"k": URL_QUESTION}}
    async with bridge_of(world, redis):
        await world.approve()
        call = {"name": "weather", "arguments": {"city": "Rome"}}
        declared = {"elicitation": {"form": {}}}
        message, headers = modern("tools/call", call, capabilities=declared)
        said = messages_of(await world.client.post(URL, json=message, headers=headers))
    assert said[-1]["error"]["code"] == -32021
    (denial,) = world.records.denials
    assert (denial.method, denial.name, denial.reason) == (
        "elicitation/create",
        "weather",
        "undeclared:elicitation.url",
    )
