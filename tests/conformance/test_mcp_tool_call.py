"""Official clients from a 401 to a tool's result: where a token is to be had they find out,
somebody says yes once, and nothing else is configured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from gateway.home import Home
from tests.conformance.test_mcp_sdk import Agent, Storage
from tests.conformance.world import CONFIG, HERE, KIT, KITTED, NODE, World, kit_script, populated
from tests.databases import with_cluster
from tests.gateway.processes.test_supervisor import UPSTREAM_ONLY, Up, command
from tests.mcp_bridge.processes import running
from tests.scratch import make_scratch
from tests.stack import ROOT

pytestmark = KITTED
AGENTS = Path(os.environ.get("CLIENTS_PYTHON", ROOT / ".clients" / "bin" / "python"))
EVERYTHING = KIT / "@modelcontextprotocol" / "server-everything" / "dist" / "index.js"
INSPECTOR = KIT / ".bin" / "mcp-inspector"
TOOL, TEXT = "fixture__test_simple_text", "This is a simple text response for testing."
SERVER = """
[[mcp.servers]]
name = "fixture"
url = "URL"
network = "loopback"
trust = "all"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A gateway with one MCP server behind it."""
    with running(("fixture_server",)) as (server,):
        config = CONFIG + SERVER.replace("URL", server.url)
        with populated(tmp_path_factory.mktemp("tool-call"), config) as world:
            yield world


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_the_python_sdk_calls_a_tool(served: World, mode: Any) -> None:
    agent = Agent(served, Storage())
    async with httpx2.AsyncClient(auth=agent.provider, follow_redirects=True) as http:
        transport = streamable_http_client(served.resource, http_client=http)
        async with Client(transport, mode=mode) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            result = await client.call_tool(TOOL, {})
    assert TOOL in names
    assert result.content[0].text == TEXT  # type: ignore[union-attr]
    assert len(agent.asked) == 1, "one consent for all its requests"


async def test_the_typescript_sdk_calls_a_tool(served: World) -> None:
    await call_by(served, str(NODE), str(kit_script("mcp_sdk_client.mjs")))


@pytest.mark.skipif(not AGENTS.exists(), reason="make clients installs openai-agents")
async def test_openai_agents_calls_a_tool(served: World) -> None:
    await call_by(served, str(AGENTS), str(HERE / "with_agents_mcp.py"))


async def call_by(served: World, *program: str) -> None:
    """One that says where to sign in, and is told with what its browser came back."""
    given = {"resource": served.resource, "redirectUri": served.redirect_uri, "tool": TOOL}
    run = await asyncio.create_subprocess_exec(
        *(*program, json.dumps(given)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert run.stdout is not None
    url = (await run.stdout.readline()).decode().strip()
    assert url.startswith(served.issuer), (await run.communicate())[1].decode()
    answer = await asyncio.to_thread(served.allow, url)
    said, wrong = await run.communicate(f"{answer}\n".encode())
    assert run.returncode == 0, wrong.decode()
    found = json.loads(said.splitlines()[-1])
    assert found["refused"] is True and TOOL in found["tools"] and found["text"] == TEXT
    assert "mcp:call" in found["scope"].split()


@pytest.mark.skipif(not INSPECTOR.exists(), reason="make auth-conformance installs the Inspector")
async def test_the_inspector_calls_a_tool(served: World, tmp_path: Path) -> None:
    """On the command line: it says where to sign in, and listens for the browser itself."""
    run = await asyncio.create_subprocess_exec(
        *(INSPECTOR, "--cli", served.resource, "--transport", "http"),
        *("--method", "tools/call", "--tool-name", TOOL, "--callback-url", served.redirect_uri),
        env={
            **os.environ,
            "PATH": f"{NODE.parent}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "BROWSER": "true",
            "MCP_AUTO_OPEN_ENABLED": "true",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert run.stdout is not None
    said = ""
    while line := (await run.stdout.readline()).decode():
        said += line
        found = re.search(re.escape(served.issuer) + r"/oauth/authorize\S+", line)
        if found is not None:
            answer = await asyncio.to_thread(served.allow, found[0])
            async with httpx.AsyncClient() as browser:
                await browser.get(answer)
    assert await run.wait() == 0, said
    assert TEXT in said


@pytest.fixture
def up() -> Iterator[Up]:
    folder: Path = make_scratch()
    up = Up(folder, UPSTREAM_ONLY + '[mcp.stdio]\nisolation = "none"\n')
    with_cluster(Home(up.home))
    yield up
    if up.runs():
        up.end()
    shutil.rmtree(folder)


def test_from_nothing_to_a_call_of_the_everything_server_in_four_commands(up: Up) -> None:
    """The kit's own Node runs what `npx -y PACKAGE@VERSION` of the documentation runs."""
    up.start()
    where = ("--home", str(up.home), "--config", str(up.config))
    for arguments in (
        ("add", "everything", *where, "--", str(NODE), str(EVERYTHING)),
        ("approve", "everything", "--all"),
    ):
        done = command(up, "mcp", *arguments)
        assert done.returncode == 0, done.stderr
    called = command(up, "mcp", "call", "everything", "echo", '{"message": "hello"}')
    assert called.returncode == 0, called.stdout + called.stderr
    assert json.loads(called.stdout)["content"][0]["text"] == "Echo: hello"
