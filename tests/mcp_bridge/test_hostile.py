"""Servers that do not behave, before a bridge in this process: what each costs is bounded, each
fails by name, and no request is sent twice."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import redis.asyncio

from bench.tools.ports import free_port
from foundation.json_values import MAX_VALUES
from mcp_bridge.caller import Caller
from mcp_bridge.errors import BridgeError, NameRefused
from mcp_bridge.protocol import rpc
from mcp_bridge.routing import exchanges, sessions
from mcp_bridge.server import http as door
from mcp_bridge.server.allowed_origins import AllowedOrigins
from mcp_bridge.server.bridge import BadServer, Bridge, check_servers
from mcp_bridge.upstream import circuit_breaker, upstream
from mcp_bridge.upstream.transports import streamable_http
from mcp_bridge.upstream.transports.factory import Transports
from mcp_bridge.upstream.upstream import ServerConfig
from tests.mcp_bridge.processes import ALL, LegacyClient, ask_modern, messages_of, modern

KEYS = [b"k" * 32]
CALL = {"name": "anything", "arguments": {}}
OK = b"HTTP/1.1 200 OK\r\n"
JSON, SSE = b"content-type: application/json\r\n", b"content-type: text/event-stream\r\n"


def whole(message: Any, more: bytes = b"", status: bytes = b"200 OK") -> bytes:
    body = msgspec.json.encode(message)
    head = b"HTTP/1.1 " + status + b"\r\n" + JSON + more
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


class Server:
    """Speaks HTTP itself. `answer`: to a call, the bytes; or writes them. `both`: it speaks the
    older era, too."""

    def __init__(self, answer: Any, *, modern: bool = True, both: bool = False) -> None:
        self.answer, self.modern, self.both = answer, modern, both
        self.calls: list[dict[str, Any]] = []
        self.sessions = 0
        self.capabilities: dict[str, Any] = {"tools": {}}
        self.bridge: Any = None
        self.serve: Any = None
        self.left = asyncio.Event()
        self._handling: set[asyncio.Task[Any] | None] = set()
        """Nobody else holds on to one that waits for what never comes."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._handling.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                message = msgspec.json.decode(body) if body else {}
                await self.reply(writer, message, head)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._handling.discard(asyncio.current_task())
            writer.close()

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        method = message.get("method", "")
        if method == "server/discover" and self.modern:
            result: Any = {"supportedVersions": ["2026-07-28"], "capabilities": self.capabilities}
            writer.write(whole({"jsonrpc": "2.0", "id": message["id"], "result": result}))
        elif method == "server/discover":
            writer.write(whole({"jsonrpc": "2.0", "id": None, "error": {}}, status=b"400 Bad"))
        elif method == "initialize" and self.modern and not self.both:
            error = {"code": -32022, "message": "no", "data": {"supported": ["2026-07-28"]}}
            writer.write(whole({"jsonrpc": "2.0", "id": None, "error": error}, status=b"400 Bad"))
        elif method == "initialize":
            self.sessions += 1
            result = {"protocolVersion": "2025-11-25", "capabilities": self.capabilities}
            given = b"mcp-session-id: s%d\r\n" % self.sessions
            answer = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            writer.write(whole(answer, given))
        elif method.startswith("notifications/") or not method:
            writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
        else:
            self.calls.append({**message, "head": head})
            found = self.answer(self, writer, message)
            writer.write(found if isinstance(found, bytes) else await found)


@asynccontextmanager
async def bridged(
    store: redis.asyncio.Redis,
    server: Server,
    others: Sequence[ServerConfig] = (),
    transports: Transports | None = None,
    **caller: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    config = ServerConfig(
        name="s",
        url=f"http://127.0.0.1:{port}/mcp",
        namespace="identity",
        credential="none" if transports is None else "tenant",
    )
    info = {"name": "t", "version": "1"}
    bridge = Bridge([*others, config], store, KEYS, info=info, transports=transports)
    await bridge.start()
    server.bridge = bridge
    made, allowed = door.HttpEndpoint(bridge), AllowedOrigins(public_url="http://localhost")

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        who = Caller(org_id="org_a", project_id="p", subject="s", client="c", **caller)
        await made.serve(who, None, allowed, (), scope, receive, send)

    server.serve = asgi
    transport = httpx.ASGITransport(app=asgi)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client
    finally:
        await bridge.close()
        listening.close()
        await listening.wait_closed()


def result(text: str, id: Any) -> dict[str, Any]:
    found = {"content": [{"type": "text", "text": text}]}
    return {"jsonrpc": "2.0", "id": id, "result": found}


async def endless(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    """Write small notifications, for as long as somebody reads."""
    writer.write(OK + SSE + b"\r\n")
    said = b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{}}\n\n'
    while not writer.is_closing():
        writer.write(said * 100)
        await writer.drain()
    return b""


async def progressing(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    writer.write(OK + SSE + b"\r\n")
    said = b'data: {"jsonrpc":"2.0","method":"notifications/progress","params":{"progress":1}}\n\n'
    try:
        while not writer.is_closing():
            writer.write(said)
            await writer.drain()
            await asyncio.sleep(0)
    finally:
        server.left.set()
    return b""


def long_line(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    return OK + SSE + b"connection: close\r\n\r\ndata: " + b"x" * 70_000


def gzipped(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    body = gzip.compress(b"[" + b" " * 1_000_000 + b"]")
    head = OK + JSON + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


def padded(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    return whole(result("x" * 70_000, message["id"]))


def redirect(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    head = b"HTTP/1.1 307 Go\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
    return head


def garbage(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    return OK + JSON + b"content-length: 3\r\n\r\n{]}"


def broken(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    writer.write(OK + SSE + b"content-length: 1000\r\n\r\n")
    writer.close()
    return b""


def failing(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    return b"HTTP/1.1 503 Later\r\ncontent-length: 0\r\n\r\n"


def zeros(count: int) -> bytes:
    return b"[0" + b",0" * (count - 1) + b"]"


def many_values(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
    written = msgspec.Raw(zeros(rpc.MAX_SERVER_VALUES))
    return whole({"jsonrpc": "2.0", "id": message["id"], "result": {"content": written}})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test reaches soon."""
    monkeypatch.setattr(streamable_http, "MAX_MESSAGE_BYTES", 65_536)
    monkeypatch.setattr(streamable_http, "MAX_EXCHANGE_MESSAGES", 1000)


@pytest.mark.parametrize("modern", [True, False])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (endless, "too_much"),
        (long_line, "too_long"),
        (gzipped, "content_coding"),
        (padded, "too_long"),
        (redirect, "no_json_rpc"),
        (garbage, "no_json_rpc"),
        (broken, "RemoteProtocolError"),
        (failing, "status_503"),
    ],
)
async def test_a_server_that_misbehaves_fails_by_name_and_is_asked_once(
    redis: redis.asyncio.Redis, small: None, modern: bool, answer: Callable[..., Any], reason: str
) -> None:
    server = Server(answer, modern=modern)
    async with bridged(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"]["data"] == {"server": "s", "reason": reason}
    assert len(server.calls) == 1


@pytest.mark.parametrize("modern", [True, False])
async def test_a_message_of_half_a_million_values_is_not_read(
    redis: redis.asyncio.Redis, modern: bool
) -> None:
    async with bridged(redis, Server(many_values, modern=modern)) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"]["data"] == {"server": "s", "reason": "too_many_values"}


async def test_a_clients_message_has_as_many_values_as_a_body(redis: redis.asyncio.Redis) -> None:
    server = Server(lambda server, writer, message: whole(result("done", message["id"])))
    async with bridged(redis, server) as client:
        message, headers = modern("tools/call", CALL)
        for count, status in ((MAX_VALUES, 400), (MAX_VALUES - 100, 200)):
            arguments = {"numbers": msgspec.Raw(zeros(count))}
            params = {**message["params"], "arguments": arguments}
            body = msgspec.json.encode({**message, "params": params})
            headers["content-type"] = "application/json"
            answer = await client.post("/mcp", content=body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 400:
                error = answer.json()["error"]
                assert error["message"].endswith("more than 100000 values in arrays and objects")
    assert [call["method"] for call in server.calls].count("tools/call") == 1


async def test_a_session_that_a_server_forgot_is_made_anew_and_the_call_sent_then(
    redis: redis.asyncio.Redis,
) -> None:
    """It said that it did nothing: of all that can be sent again, this alone is."""

    def forgetful(server: Server, writer: Any, message: Any) -> bytes:
        if f"mcp-session-id: s{server.sessions}" not in server.calls[-1]["head"] or (
            len(server.calls) == 2
        ):
            return b"HTTP/1.1 404 Gone\r\ncontent-length: 0\r\n\r\n"
        return whole(result("done", message["id"]))

    server = Server(forgetful, modern=False)
    async with bridged(redis, server) as client:
        for _ in range(2):
            found = await ask_modern(client, "/mcp", "tools/call", CALL)
            assert found["result"]["content"][0]["text"] == "done"
    ids = [call["id"] for call in server.calls]
    assert len(ids) == 3 and ids[1] == ids[2]


async def test_what_a_forgotten_session_was_told_the_next_one_is(
    redis: redis.asyncio.Redis,
) -> None:
    def forgetful(server: Server, writer: Any, message: Any) -> bytes:
        if message["method"] == "tools/call" and server.sessions == 2:
            return b"HTTP/1.1 404 Gone\r\ncontent-length: 0\r\n\r\n"
        return whole(result("done", message["id"]))

    server = Server(forgetful, modern=False)
    server.capabilities |= {"resources": {"subscribe": True}, "logging": {}}
    async with bridged(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        await session.ask("/mcp", "resources/subscribe", {"uri": "a:b"})
        await session.ask("/mcp", "logging/setLevel", {"level": "info"})
        found = await session.ask("/mcp", "tools/call", CALL)
        assert found["result"]["content"][0]["text"] == "done"
    again = [call["method"] for call in server.calls if "session-id: s3" in call["head"]]
    assert again == ["resources/subscribe", "logging/setLevel", "tools/call"]


async def test_a_dead_server_is_left_alone_and_the_others_are_there(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three tries; one that hangs, as one that refuses."""
    monkeypatch.setattr(upstream, "SETUP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(circuit_breaker, "COOL_DOWN_MIN_S", circuit_breaker.COOL_DOWN_MAX_S)
    tried = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1
        await reader.read()
        writer.close()

    hanging = await asyncio.start_server(hang, "127.0.0.1", 0)
    dead = f"http://127.0.0.1:{hanging.sockets[0].getsockname()[1]}/mcp"
    closed = ServerConfig(name="closed", url=f"http://127.0.0.1:{free_port()}/mcp")
    tools = {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}
    server = Server(
        lambda _, __, message: whole({"jsonrpc": "2.0", "id": message["id"], "result": tools})
    )
    others = [ServerConfig(name="hangs", url=dead), closed]
    async with hanging, bridged(redis, server, others=others) as client:
        for _ in range(5):
            first = await ask_modern(client, "/mcp", "tools/list")
            assert [tool["name"] for tool in first["result"]["tools"]] == ["s__t"]
        for name in ("hangs", "closed"):
            params = {"name": f"{name}__t", "arguments": {}}
            found = await ask_modern(client, "/mcp", "tools/call", params)
            assert found["error"]["data"] == {"server": name, "reason": "resting"}
    assert tried == 3


async def test_who_takes_nothing_is_given_up(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the server's endless answer with it."""
    monkeypatch.setattr(door, "STALLED_READER_S", 0.05)
    server = Server(progressing)
    message, headers = modern("tools/call", CALL)
    request = {"type": "http.request", "body": msgspec.json.encode(message)}
    scope = {
        "method": "POST",
        "headers": [
            (name.encode(), value.encode())
            for name, value in {
                **headers,
                "host": "localhost",
                "content-type": "application/json",
            }.items()
        ],
    }
    came = iter([request])

    async def receive() -> Any:
        return next(came, None) or await asyncio.Event().wait()

    async def send(event: Any) -> None:
        if event["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with bridged(redis, server):
        async with asyncio.timeout(30):
            await server.serve(scope, receive, send)
            await server.left.wait()


async def test_who_waits_for_changes_is_sent_away_when_a_worker_leaves(
    redis: redis.asyncio.Redis,
) -> None:
    """And a call that is under way is not."""
    going = asyncio.Event()

    async def slow(server: Server, writer: Any, message: Any) -> bytes:
        if message["method"] != "tools/call":
            said = {"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged"}
            writer.write(OK + SSE + b"\r\ndata: " + msgspec.json.encode(said) + b"\n\n")
            going.set()
            await asyncio.Event().wait()
        await going.wait()
        return whole(result("done", message["id"]))

    server = Server(slow)
    async with bridged(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp")
        calling = asyncio.create_task(ask_modern(client, "/mcp", "tools/call", CALL))
        filter_ = {"notifications": {"toolsListChanged": True}}
        listening = asyncio.create_task(
            ask_modern(client, "/mcp", "subscriptions/listen", filter_, id=5)
        )
        hearing = asyncio.create_task(client.get("/mcp", headers=session.headers))
        while len(server.calls) < 3:
            await asyncio.sleep(0.01)
        server.bridge.begin_drain()
        meta = (await listening)["result"]["_meta"]
        assert meta["io.modelcontextprotocol/subscriptionId"] == 5
        assert (await hearing).status_code == 200
        assert "result" in await calling


async def test_one_that_asks_without_end_is_left(redis: redis.asyncio.Redis) -> None:
    def asking(server: Server, writer: Any, message: Any) -> bytes:
        asked = {"k": {"method": "roots/list", "params": {}}}
        found = {"resultType": "input_required", "inputRequests": asked}
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": found})

    server = Server(asking)
    async with bridged(redis, server) as client:
        session = await LegacyClient.open(client, "/mcp", capabilities={})
        refused = await session.ask("/mcp", "tools/call", CALL)
        assert refused["error"]["code"] == -32021, "nobody is asked for what they cannot"
        many = dict.fromkeys(map(str, range(exchanges.MAX_ASKED + 1)))
        server.answer = lambda *_: whole(
            {
                "jsonrpc": "2.0",
                "id": server.calls[-1]["id"],
                "result": {
                    "resultType": "input_required",
                    "inputRequests": dict.fromkeys(many, {"method": "roots/list"}),
                },
            }
        )
        found = await ask_modern(client, "/mcp", "tools/call", CALL, capabilities=ALL)
        assert found["error"]["data"]["reason"] == "too_many_requests"


async def test_sessions_of_a_tenant_are_bounded(
    redis: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    server = Server(padded)
    async with bridged(redis, server) as client:
        opened = [await LegacyClient.open(client, "/mcp") for _ in range(2)]
        with pytest.raises(AssertionError, match="Too many sessions"):
            await LegacyClient.open(client, "/mcp")
        await client.request("DELETE", "/mcp", headers=opened[0].headers)
        await LegacyClient.open(client, "/mcp")


async def test_where_nothing_is_kept_a_stream_has_no_ids(redis: redis.asyncio.Redis) -> None:
    def noting(server: Server, writer: Any, message: Any) -> bytes:
        note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1}}
        said = (note, result("the answer", message["id"]))
        events = b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in said)
        return OK + SSE + b"content-length: %d\r\n\r\n" % len(events) + events

    for keeps_nothing in (False, True):
        async with bridged(redis, Server(noting), keeps_nothing=keeps_nothing) as client:
            session = await LegacyClient.open(client, "/mcp")
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
            answer = await session.send("/mcp", message)
        assert b"the answer" in answer.content
        assert (b"id: " in answer.content) != keeps_nothing
        assert bool(await redis.keys("mcp:{org_a}:events:*")) != keeps_nothing
        await redis.flushdb()


@pytest.mark.parametrize("version", ["2025-06-18", "2025-03-26", "2024-10-07"])
async def test_older_clients_are_served_as_the_older_era(
    redis: redis.asyncio.Redis, version: str
) -> None:
    server = Server(lambda _, __, message: whole(result("served", message["id"])))
    async with bridged(redis, server) as client:
        message = {
            "jsonrpc": "2.0",
            "id": 0,
            "method": "initialize",
            "params": {
                "protocolVersion": version,
                "capabilities": {},
                "clientInfo": {"name": "old", "version": "1"},
            },
        }
        answer = await client.post("/mcp", json=message)
        agreed = answer.json()["result"]["protocolVersion"]
        assert agreed == (version if version != "2024-10-07" else "2025-11-25")
        headers = {"mcp-session-id": answer.headers["mcp-session-id"]}
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}
        served = await client.post("/mcp", json=call, headers=headers)
        assert served.json()["result"]["content"][0]["text"] == "served"
        wrong = {**headers, "mcp-protocol-version": "2024-11-05"}
        assert (await client.post("/mcp", json=call, headers=wrong)).status_code == 400


@pytest.mark.parametrize(
    ("servers", "error"),
    [
        ([("A", "http://h", None)], NameRefused),
        ([("a", "http://h", None)] * 2, BadServer),
        ([("a", "ftp://h", None)], BadServer),
        ([("a", "http://h", "x__y")], BadServer),
        ([(f"a{n}", "http://h", None) for n in range(65)], BadServer),
    ],
)
def test_servers_that_cannot_be_are_refused(
    servers: list[tuple[str, str, str | None]], error: type[BridgeError]
) -> None:
    with pytest.raises(error):
        check_servers(ServerConfig(name=n, url=url, namespace=space) for n, url, space in servers)


async def test_what_is_asked_at_once_goes_out_together_and_nothing_said_between_is_lost(
    redis: redis.asyncio.Redis,
) -> None:
    """Also what comes with it: a note is passed on, a result is the answer."""

    async def asking(server: Server, writer: asyncio.StreamWriter, message: Any) -> bytes:
        said: list[dict[str, Any]] = [
            {"jsonrpc": "2.0", "id": "a", "method": "roots/list"},
            {"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1}},
            {"jsonrpc": "2.0", "id": "b", "method": "roots/list"},
        ]
        if message["params"]["name"] == "quick":
            said.append(result("done already", message["id"]))
        writer.write(OK + SSE + b"\r\n")
        writer.write(b"".join(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in said))
        await writer.drain()
        await server.left.wait()
        return b"data: " + msgspec.json.encode(result("done", message["id"])) + b"\n\n"

    server = Server(asking, modern=False)
    async with bridged(redis, server) as client:
        message, headers = modern("tools/call", CALL)
        first = messages_of(await client.post("/mcp", json=message, headers=headers))
        assert first[0]["method"] == "notifications/progress"
        asked = first[1]["result"]["inputRequests"]
        assert [each["method"] for each in asked.values()] == ["roots/list"] * 2
        answers = dict.fromkeys(asked, {"roots": []})
        state = first[1]["result"]["requestState"]
        server.left.set()
        params = {**CALL, "requestState": state, "inputResponses": answers}
        done = await ask_modern(client, "/mcp", "tools/call", params)
        assert done["result"]["content"][0]["text"] == "done"
        at_once = {**CALL, "name": "quick"}
        found = await ask_modern(client, "/mcp", "tools/call", at_once)
        assert found["result"]["content"][0]["text"] == "done already"
