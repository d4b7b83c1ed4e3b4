"""Our bridge as the client of one server of the public conformance suite.

Whatever the server offers is listed and called through a bridge of the scenario's own, with a
vault; where the bridge says that somebody has to sign in at the server, somebody does. The suite
starts a process for each scenario: `SHIM`, which hands it over to the test beside this.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.conformance.mcp_front import Front, LegacyFront, ModernFront, Refused, items
from tests.conformance.mcp_tenant import Lent, Tenant, tenant_of
from tests.mcp_bridge.processes import MODERN

SAMPLES: dict[str, Any] = {
    "number": 1.5,
    "integer": 2,
    "boolean": True,
    "string": "a",
    "array": [],
    "object": {},
    "null": None,
}
TIMEOUT_S = 30.0
SHIM = Path(__file__).with_name("mcp_client_shim.py")
MAX_CONSENTS = 8
"""The test's user consents to everything; a bridge that asks more often than this asks without end.
"""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    url: str
    revision: str
    context: dict[str, Any]


class Signing:
    """A front whose person signs in wherever that is wanted, and asks again."""

    def __init__(self, tenant: Tenant, front: Front) -> None:
        self._tenant, self._front = tenant, front

    async def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        for _ in range(MAX_CONSENTS):
            try:
                return await self._front.ask(method, params)
            except Refused as error:
                await sign_in_for(self._tenant, error)
        raise AssertionError("it wants consents without end")


async def sign_in_for(tenant: Tenant, error: Refused) -> None:
    """Raises: the error, where a consent would not help."""
    data = error.error.get("data")
    if not isinstance(data, dict) or data.get("reason") != "consent_needed":
        raise error
    await tenant.sign_in()


async def open_front(tenant: Tenant, http: httpx.AsyncClient, url: str, revision: str) -> Front:
    if revision == MODERN:
        return Signing(tenant, ModernFront(http, url))
    for _ in range(MAX_CONSENTS):
        try:
            return Signing(tenant, await LegacyFront.open(http, url))
        except Refused as error:
            await sign_in_for(tenant, error)
    raise AssertionError("it wants consents without end")


def arguments(tool: dict[str, Any], context: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments that the scenario wants, or some that the tool's schema takes."""
    wanted = [
        each["arguments"] for each in context.get("toolCalls", ()) if each["name"] == tool["name"]
    ]
    schema = tool["inputSchema"]
    named = {
        name: SAMPLES[schema["properties"][name].get("type", "string")]
        for name in schema.get("required", ())
    }
    return wanted or [named]


async def use(front: Front, context: dict[str, Any], *, everything: bool) -> None:
    """All tools that there are, and on request all else."""
    async for tool in items(front, "tools/list"):
        for each in arguments(tool, context):
            try:
                await front.ask("tools/call", {"name": tool["name"], "arguments": each})
            except Refused as error:
                print(f"{tool['name']}: {error}")
    if everything:
        async for resource in items(front, "resources/list"):
            await front.ask("resources/read", {"uri": resource["uri"]})
        async for prompt in items(front, "prompts/list"):
            await front.ask("prompts/get", {"name": prompt["name"]})


async def run(lent: Lent, asked: Scenario) -> None:
    """Raises whatever went wrong."""
    async with (
        asyncio.timeout(TIMEOUT_S),
        tenant_of(lent, asked.url, asked.context) as tenant,
        httpx.AsyncClient(timeout=TIMEOUT_S) as http,
    ):
        front = await open_front(tenant, http, tenant.url, asked.revision)
        await use(front, asked.context, everything=asked.name == "http-standard-headers")


@asynccontextmanager
async def taking(lent: Lent, path: Path) -> AsyncIterator[tuple[str, dict[str, Exception]]]:
    """Scenarios from a socket: the command with which the suite starts each, and in the end those
    that were not gone through."""
    failed: dict[str, Exception] = {}

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = ""
        asked = msgspec.json.decode(await reader.readline(), type=Scenario)
        try:
            await run(lent, asked)
        except Exception as error:
            failed[asked.name] = error
            said = traceback.format_exc()
        writer.write(said.encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(take, path)
    try:
        yield shlex.join([sys.executable, "-SE", str(SHIM), str(path)]), failed
    finally:
        server.close()
