"""The official SDK's session over our pipes, and servers that misbehave on theirs."""

from __future__ import annotations

import asyncio
import json
import logging
import os

import pytest
from mcp.client.session import ClientSession
from mcp.shared.exceptions import MCPError
from mcp_types import TextContent

from mcp_bridge.upstream.launch_errors import LineTooLong, NotSpeaking, UpstreamEnded
from mcp_bridge.upstream.stdio.process import STDERR_TAIL_BYTES, Launcher
from mcp_bridge.upstream.stdio.transport import StdioTransport
from tests.mcp_bridge.upstream.stdio.servers import OWNER, living, python_spec, sdk_spec

SILENT = "import sys; sys.stdin.read()"


async def called(session: ClientSession, tool: str, **arguments: object) -> str:
    result = await session.call_tool(tool, arguments)
    content = result.content[0]
    assert isinstance(content, TextContent)
    return content.text


async def ended(transport: StdioTransport) -> None:
    """Until the stream is over, with whatever it brought thrown away."""
    async with asyncio.timeout(30), transport as (read, _):
        async for _ in read:
            pass


async def test_a_server_of_the_sdk_is_called(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    """And all that it may see is what was named, from an empty folder; what it complains of is
    bounded, and in no log."""
    caplog.set_level(logging.DEBUG, "mcp_bridge")
    secret = "canary-in-the-environment"
    spec = sdk_spec(environment={"MODE": "fixed"}, credential_names=("TOKEN",))
    transport = StdioTransport(launcher, spec, OWNER, {"TOKEN": secret})
    async with transport as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        assert await called(session, "add", a=2, b=3) == "5"
        found = await called(session, "environment")
        assert '"MODE": "fixed"' in found and secret in found
        names = {"PATH", "HOME", "PWD", "TMPDIR", "LANG", "MODE", "TOKEN"}
        assert set(json.loads(found)) - {"LC_CTYPE"} == names
        assert '"holds": "[]"' in await called(session, "whereabouts")
        answers = await asyncio.gather(*(called(session, "add", a=n, b=1) for n in range(50)))
        assert answers == [str(n + 1) for n in range(50)]
        assert await called(session, "complain", size=1_000_000) == "said"
    assert transport.failure is None
    assert transport.process is not None and transport.process.returncode is not None
    assert transport.process.stderr_bytes >= 1_000_000
    assert len(transport.process.stderr_tail) == STDERR_TAIL_BYTES
    assert "zzzz" not in caplog.text and secret not in caplog.text
    assert "bytes to stderr" in caplog.text
    assert launcher.num_running == 0


async def test_a_line_without_end_ends_the_upstream_by_name(launcher: Launcher) -> None:
    """64 MiB, of which no more is kept than the cap."""
    flood = "import sys\nfor _ in range(1024): sys.stdout.write('x' * 65536)\nsys.stdin.read()"
    transport = StdioTransport(
        launcher, python_spec(flood, name="flooder"), OWNER, {}, max_line_bytes=1024 * 1024
    )
    await ended(transport)
    assert isinstance(transport.failure, LineTooLong)
    assert str(transport.failure) == "flooder: a line above 1048576 bytes"


async def test_what_came_before_a_line_too_long_is_delivered(launcher: Launcher) -> None:
    script = """
import sys
sys.stdout.write('{"jsonrpc":"2.0","method":"a"}\\n' + 'x' * 5000)
sys.stdout.flush()
sys.stdin.read()
"""
    transport = StdioTransport(launcher, python_spec(script), OWNER, {}, max_line_bytes=4096)
    async with transport as (read, _):
        messages = [each async for each in read]
    assert [getattr(each, "message", None) is not None for each in messages] == [True]
    assert isinstance(transport.failure, LineTooLong)


async def test_a_chatterer_is_ended_and_its_words_go_nowhere(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    script = "import sys\nfor _ in range(9999): print('secret chatter', flush=True)"
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})
    async with asyncio.timeout(30), transport as (read, _):
        errors = [each async for each in read]
    assert isinstance(transport.failure, NotSpeaking)
    assert len(errors) == 100
    assert all("chatter" not in str(each) for each in errors)
    assert "chatter" not in caplog.text


async def test_a_call_in_flight_fails_when_the_server_dies(launcher: Launcher) -> None:
    script = """
import json, sys
line = json.loads(sys.stdin.readline())
answer = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}},
          "serverInfo": {"name": "x", "version": "1"}}
print(json.dumps({"jsonrpc": "2.0", "id": line["id"], "result": answer}), flush=True)
sys.stdin.readline()  # initialized
sys.stdin.readline()  # the call
"""
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})
    async with transport as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        with pytest.raises(MCPError):
            await session.send_ping()
    assert isinstance(transport.failure, UpstreamEnded)
    assert transport.failure.code == "upstream_ended"


async def test_an_orphan_that_holds_the_pipe_does_not_keep_the_stream_open(
    launcher: Launcher,
) -> None:
    script = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(20)
"""
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})
    await ended(transport)
    assert str(transport.failure) == "script: ended with status 0"


async def test_an_idle_server_leaves_by_itself(launcher: Launcher) -> None:
    transport = StdioTransport(launcher, python_spec(SILENT), OWNER, {}, idle_stop_s=0.05)
    await ended(transport)
    assert transport.ended_idle
    assert transport.failure is None
    assert launcher.num_running == 0


async def test_one_that_owes_an_answer_is_not_idle(launcher: Launcher) -> None:
    """However long it takes; what is written meanwhile is what ends the wait."""
    script = "import sys, time; sys.stdin.readline(); time.sleep(0.4); sys.exit(3)"
    transport = StdioTransport(launcher, python_spec(script), OWNER, {}, idle_stop_s=0.1)
    async with transport as (read, write), ClientSession(read, write) as session:
        with pytest.raises(MCPError):
            await session.send_ping()
    assert not transport.ended_idle
    assert transport.failure is not None


async def test_who_is_cancelled_leaves_nothing(launcher: Launcher) -> None:
    mark = f"left-over-of-{os.getpid()}"
    script = f"import sys, signal\nsignal.signal(15, signal.SIG_IGN)\nsys.stdin.read() # {mark}"
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})

    async def hold() -> None:
        async with transport as (read, _):
            await read.receive()

    task = asyncio.create_task(hold())
    while transport.process is None:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert living(mark) == []
    assert launcher.num_running == 0
