"""The bridge as a client that does not take its servers' word for everything."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import redis.asyncio

from mcp_bridge.upstream.credentials import CredentialSet, Refusal, UpstreamOwner
from mcp_bridge.upstream.transport import NotSent
from mcp_bridge.upstream.transports.factory import Transports
from tests.mcp_bridge.processes import ask_modern
from tests.mcp_bridge.test_hostile import CALL, Server, bridged, result, whole

REFUSED = {"code": -32022, "message": "?", "data": {"supported": ["2026-07-28"], "requested": "?"}}


class Choosy(Server):
    """Refuses so many times, by a version error, to say what it is."""

    def __init__(self, refusals: int, error: Any) -> None:
        super().__init__(lambda _, __, message: whole(result("done", message["id"])), both=True)
        self.refusals, self.error = refusals, error
        self.methods: list[str] = []

    async def reply(self, writer: asyncio.StreamWriter, message: Any, head: str) -> None:
        self.methods.append(message.get("method", ""))
        if message.get("method") == "server/discover" and self.refusals:
            self.refusals -= 1
            said = {"jsonrpc": "2.0", "id": message["id"], "error": self.error}
            writer.write(whole(said, status=b"400 Bad"))
        else:
            await super().reply(writer, message, head)


async def test_a_server_that_refuses_our_revision_and_names_it_is_asked_again(
    redis: redis.asyncio.Redis,
) -> None:
    server = Choosy(1, REFUSED)
    async with bridged(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["result"]["content"][0]["text"] == "done"
    assert "initialize" not in server.methods


async def test_one_that_goes_on_refusing_it_is_not_asked_without_end(
    redis: redis.asyncio.Redis,
) -> None:
    server = Choosy(100, REFUSED)
    async with bridged(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"]["data"] == {"server": "s", "reason": "version"}
    assert server.methods == ["server/discover"] * 2


@pytest.mark.parametrize(
    "error",
    [
        {"code": -32022, "message": "?", "data": {"supported": ["2025-11-25"]}},
        {"code": -32022, "message": "?"},
        {"code": -32000, "message": "?", "data": {"supported": ["2026-07-28"]}},
        "no session",
    ],
)
async def test_one_that_names_another_is_of_the_older_era(
    redis: redis.asyncio.Redis, error: Any
) -> None:
    server = Choosy(100, error)
    async with bridged(redis, server) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["result"]["content"][0]["text"] == "done"
    assert "initialize" in server.methods


def tool(name: str, header: Any, kind: str = "string") -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": kind, "x-mcp-header": header}}}
    return {"name": name, "inputSchema": schema}


@pytest.mark.parametrize("modern", [True, False])
async def test_a_tool_that_wants_a_header_that_cannot_be_is_left_out(
    redis: redis.asyncio.Redis, modern: bool
) -> None:
    """A server of the newer era offers it; to the older one the keyword means nothing."""
    tools = [
        tool("good", "Region"),
        tool("empty", ""),
        tool("spaced", "My Region"),
        tool("split", "Region\r\nX: y"),
        tool("listed", "Region", "array"),
        tool("worded", 7),
        {"name": "plain", "inputSchema": {"type": "object"}},
    ]

    def listed(server: Server, writer: Any, message: Any) -> bytes:
        return whole({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools}})

    async with bridged(redis, Server(listed, modern=modern)) as client:
        found = await ask_modern(client, "/mcp", "tools/list")
    names = [each["name"] for each in found["result"]["tools"]]
    assert names == (["good", "plain"] if modern else [each["name"] for each in tools])


class Wallet:
    """Credentials with so many to show, one after another."""

    def __init__(self, count: int) -> None:
        self.left = [CredentialSet(f"c{n}", {"authorization": f"Bearer {n}"}) for n in range(count)]
        self.refused: list[Refusal] = []

    async def of(
        self, owner: UpstreamOwner, server: str, refused: Refusal | None = None
    ) -> CredentialSet:
        if refused is not None:
            self.refused.append(refused)
            if refused.is_last or len(self.left) == 1:
                raise NotSent("consent_needed")
            self.left.pop(0)
        return self.left[0]


@pytest.mark.parametrize(
    ("status", "header", "has", "reason"),
    [
        (b"401 No", b'www-authenticate: Bearer scope="a"\r\n', 1, "consent_needed"),
        (b"401 No", b"", 2, "consent_needed"),
        (b"403 No", b"www-authenticate: Bearer error=insufficient_scope\r\n", 1, "consent_needed"),
        (b"403 No", b"", 2, None),
    ],
)
async def test_a_credential_that_is_refused_is_followed_by_one_other(
    redis: redis.asyncio.Redis, status: bytes, header: bytes, has: int, reason: str | None
) -> None:
    def refusing(server: Server, writer: Any, message: Any) -> bytes:
        said = {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -1, "message": "no"}}
        return whole(said, header, status)

    server, wallet = Server(refusing), Wallet(has)
    transports = Transports(credentials=wallet)
    async with bridged(redis, server, transports=transports) as client:
        found = await ask_modern(client, "/mcp", "tools/call", CALL)
    assert found["error"].get("data", {}).get("reason") == reason
    shown = [call["head"].partition("authorization: ")[2][:8] for call in server.calls]
    if reason is None:
        assert shown == ["bearer 0"] and wallet.refused == []
        return
    assert shown == [f"bearer {n}" for n in range(has)]
    last = wallet.refused[-1]
    assert last.is_last is (has == 2) and last.credential.name == f"c{has - 1}"
    assert last.challenge.encode() in header
