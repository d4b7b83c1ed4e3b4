"""A server on stdio, on the official SDK, behind a whole gateway of two workers: two tenants, a
kill, and what clients see of one that cannot be started any more."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.mcp_bridge.processes import MODERN, ask_modern, last_of, modern, running
from tests.mcp_bridge.upstream.stdio.servers import SDK_SERVER
from tests.stack import Stack
from tests.stack import running as running_stack

pytestmark = pytest.mark.slow
STALE = "tollgate/stale"
MISSING = "bad_launch"
"""The reason given for a process whose variables nobody has set."""
CONFIG = """
[[model]]
name = "b"
upstream = "http://127.0.0.1:1/v1"

[mcp.stdio]
uids = "/tmp/tollgate-test-uids"
scratch = "SCRATCH"

[[mcp.servers]]
name = "shared"
command = "PYTHON"
args = ["-c", '''CODE''']
trust = "all"

[[mcp.servers]]
name = "keyed"
command = "PYTHON"
args = ["-c", '''CODE''']
trust = "all"
credential = "tenant"
credential_names = ["UPSTREAM_KEY"]

[[mcp.servers]]
name = "web"
url = "WEB"
network = "loopback"
trust = "all"
credential = "tenant"

[[mcp.servers]]
name = "pinned"
command = "PYTHON"
args = ["FILE"]
"""


class World(msgspec.Struct, frozen=True, kw_only=True):
    stack: Stack
    script: Path
    key: str

    async def call(self, name: str, key: str | None = None) -> dict[str, Any]:
        """Over a connection of its own, so at whichever worker."""
        params = {"name": name, "arguments": {}}
        headers = {"authorization": f"Bearer {key or self.key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            return await ask_modern(http, f"{self.stack.base_url}/mcp", "tools/call", params)

    async def whereabouts(self, key: str | None = None) -> dict[str, str]:
        """Return what the shared server says of its process, once the asked worker reaches it."""
        async with asyncio.timeout(60):
            while "result" not in (found := await self.call("shared__whereabouts", key)):
                assert found["error"]["data"]["server"] == "shared", found
                await asyncio.sleep(0.05)
        return told(found)

    async def pages(self) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {self.key}"}
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            while True:
                url = f"{self.stack.base_url}/mcp"
                page = (await ask_modern(http, url, "tools/list", params))["result"]
                found.append(page)
                if "nextCursor" not in page:
                    return found
                params = {"cursor": page["nextCursor"]}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="tgmcp-", dir="/tmp"))
    folder.chmod(0o755)
    script = folder / "server.py"
    script.write_text(SDK_SERVER)
    script.chmod(0o644)
    config = CONFIG.replace("PYTHON", sys.executable).replace("CODE", SDK_SERVER)
    config = config.replace("SCRATCH", str(folder / "scratch")).replace("FILE", str(script))
    try:
        with (
            running(("fixture_server", "--era", MODERN)) as (web,),
            running_stack(config=config.replace("WEB", web.url), workers=2) as stack,
        ):
            yield World(stack=stack, script=script, key=stack.create_key("--scope", "mcp:call"))
    finally:
        shutil.rmtree(folder)


async def test_tenants_have_processes_of_their_own(world: World) -> None:
    """Each of its own uid where the gateway may have some; one for each, at both workers."""
    world.stack.run("orgs", "create", "--name", "other")
    other = world.stack.create_key("--org", "other", "--scope", "mcp:call")
    mine = [await world.whereabouts() for _ in range(6)]
    theirs = await world.whereabouts(other)
    assert len({each["cwd"] for each in mine}) == 1, "a process has a folder of its own"
    assert theirs["cwd"] != mine[0]["cwd"]
    if os.geteuid() == 0:
        assert len({mine[0]["uid"], theirs["uid"], "0"}) == 3
    assert theirs["holds"] == "[]"


async def test_a_killed_server_is_started_again(world: World) -> None:
    """Each worker learns of it by itself, and may remember for `recheck_s` that it was down."""
    before = await world.whereabouts()
    (pid,) = [pid for pid in world.stack.pids("MCPServer") if cwd_of(pid) == before["cwd"]]
    os.kill(pid, signal.SIGKILL)
    after = [await world.whereabouts() for _ in range(6)]
    assert len({each["cwd"] for each in after}) == 1, "one for both workers again"
    assert after[0]["cwd"] != before["cwd"]


async def test_one_that_cannot_start_is_listed_as_it_was_approved(world: World) -> None:
    """Marked, and alone: the other one answers."""
    config = world.stack.home.parent / "tollgate.toml"
    said = world.stack.run("mcp", "approve", "pinned", "--all", "--config", str(config))
    assert "approved." in said
    async with asyncio.timeout(60):
        while "result" not in await world.call("pinned__add"):
            await asyncio.sleep(0.05)
    world.script.write_text("raise SystemExit(1)")
    for pid in world.stack.pids(str(world.script)):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while not (
            stale := [
                page for page in await world.pages() if "pinned" in page["_meta"].get(STALE, ())
            ]
        ):
            await asyncio.sleep(0.05)
    assert "pinned__add" in {tool["name"] for tool in stale[0]["tools"]}
    assert (await world.whereabouts())["holds"] == "[]"


async def test_a_server_is_shown_its_own_credential_and_never_the_callers(world: World) -> None:
    """In headers and variables, by whichever worker; not in parameters or `_meta` either."""
    admin = {"authorization": f"Bearer {world.stack.credentials['admin_key']}"}

    async def keep(server: str, values: dict[str, str] | None) -> int:
        url = f"{world.stack.base_url}/v1/mcp/tenant_credentials/{server}"
        async with httpx.AsyncClient(headers=admin, timeout=60) as http:
            if values is None:
                return (await http.delete(url)).status_code
            answer = await http.put(url, json={"values": values})
            assert not set(values.values()) & set(answer.text.split('"')), (
                "what is kept is not told"
            )
            return answer.status_code

    assert (await world.call("keyed__environment"))["error"]["data"]["reason"] == MISSING
    assert await keep("keyed", {"UPSTREAM_KEY": "first-value"}) == 200
    assert await keep("web", {"X-Api-Key": "web-value"}) == 200
    assert await keep("shared", {"A": "b"}) == 404, "it is shown nothing"
    assert await keep("keyed", {"no name": "b"}) == 400
    shown: Any = {}
    async with asyncio.timeout(60):
        while shown.get("UPSTREAM_KEY") != "first-value":
            shown = told(await world.call("keyed__environment"))
    assert world.key not in str(shown)
    async with asyncio.timeout(60):
        while (seen := await echoed(world)).get("x-api-key") != "web-value":
            assert seen.get("x-api-key") != "the-callers", seen
            await asyncio.sleep(0.05)
    assert "authorization" not in seen
    assert world.key not in str(seen)
    assert await keep("keyed", {"UPSTREAM_KEY": "second-value"}) == 200
    async with asyncio.timeout(60):
        while shown.get("UPSTREAM_KEY") != "second-value":
            shown = told(await world.call("keyed__environment"))
    assert await keep("keyed", None) == 200
    assert await keep("keyed", None) == 404
    async with asyncio.timeout(60):
        while "error" not in (found := await world.call("keyed__environment")):
            await asyncio.sleep(0.05)
    assert found["error"]["data"]["reason"] in (MISSING, "catalogue")


async def echoed(world: World) -> dict[str, str]:
    """Return the headers that the server on HTTP got, of a call with odd headers of its own; none
    while the asked worker has no credential for it."""
    message, headers = modern("tools/call", {"name": "web__test_headers", "arguments": {}})
    headers |= {"authorization": f"Bearer {world.key}", "x-api-key": "the-callers"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        answer = await http.post(f"{world.stack.base_url}/mcp", json=message)
    if (result := last_of(answer).get("result")) is None:
        return {}
    found: dict[str, str] = msgspec.json.decode(result["content"][0]["text"])
    return found


def told(answer: dict[str, Any]) -> dict[str, str]:
    found = answer.get("result", {}).get("structuredContent", {})
    shown: dict[str, str] = found.get("result", found)
    return shown


def cwd_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""
