"""Messages over a server's pipes, and servers that misbehave on theirs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from foundation.tasks import end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.envelope import Envelope
from mcp_bridge.protocol.eras import MODERN
from mcp_bridge.protocol.rpc import MAX_SERVER_VALUES, Message
from mcp_bridge.protocol.translation import to_modern_params
from mcp_bridge.upstream.launch_errors import LineTooLong, NotSpeaking, UpstreamEnded
from mcp_bridge.upstream.stdio.process import STDERR_TAIL_BYTES, Launcher, ServerProcess
from mcp_bridge.upstream.stdio.transport import StdioTransport
from mcp_bridge.upstream.transport import TransportFailed
from mcp_bridge.upstream.transports.channel import Channel
from tests.mcp_bridge.upstream.stdio.servers import OWNER, living, python_spec, sdk_spec

SILENT = "import sys; sys.stdin.read()"


@asynccontextmanager
async def started(transport: StdioTransport) -> AsyncIterator[ServerProcess]:
    process = await transport.start()
    try:
        yield process
    finally:
        await transport.close()


@asynccontextmanager
async def channel_over(transport: StdioTransport) -> AsyncIterator[Channel]:
    """A channel on which the handshake is done."""
    async with started(transport):
        channel = Channel("script", {"name": "test", "version": "0"}, transport)
        running = asyncio.create_task(channel.run())
        try:
            await channel.start()
            yield channel
        finally:
            await end_tasks(running)


async def called(channel: Channel, tool: str, **arguments: object) -> str:
    params = {"name": tool, "arguments": arguments}
    envelope = Envelope(version=MODERN, capabilities={}, info={"name": "test", "version": "0"})
    found = await channel._own("tools/call", to_modern_params(params, envelope))
    text = found["result"]["content"][0]["text"]
    assert isinstance(text, str)
    return text


async def read_all(transport: StdioTransport) -> list[Message]:
    """All messages until the stream ends."""
    found: list[Message] = []
    async with asyncio.timeout(30):
        with pytest.raises(TransportFailed):
            async for message in transport.messages():
                found += [message]
    return found


async def ended(transport: StdioTransport) -> list[Message]:
    async with started(transport):
        return await read_all(transport)


async def test_a_server_of_the_sdk_is_called(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    """And all that it may see is what was named, from an empty folder; what it complains of is
    bounded, and in no log."""
    caplog.set_level(logging.DEBUG, "mcp_bridge")
    secret = "canary-in-the-environment"
    spec = sdk_spec(environment={"MODE": "fixed"}, credential_names=("TOKEN",))
    transport = StdioTransport(launcher, spec, OWNER, {"TOKEN": secret})
    async with channel_over(transport) as session:
        process = transport._process
        assert await called(session, "add", a=2, b=3) == "5"
        found = await called(session, "environment")
        assert '"MODE": "fixed"' in found and secret in found
        names = {"PATH", "HOME", "PWD", "TMPDIR", "LANG", "MODE", "TOKEN"}
        names |= {"XDG_CACHE_HOME", "npm_config_cache", "UV_CACHE_DIR", "PIP_CACHE_DIR"}
        assert set(json.loads(found)) - {"LC_CTYPE"} == names
        assert '"holds": "[]"' in await called(session, "whereabouts")
        answers = await asyncio.gather(*(called(session, "add", a=n, b=1) for n in range(50)))
        assert answers == [str(n + 1) for n in range(50)]
        assert await called(session, "complain", size=1_000_000) == "said"
    assert transport.failure is None
    assert process.returncode is not None
    assert process.stderr_bytes >= 1_000_000
    assert len(process.stderr_tail) == STDERR_TAIL_BYTES
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
    assert await ended(transport) == [{"jsonrpc": "2.0", "method": "a"}]
    assert isinstance(transport.failure, LineTooLong)


async def test_a_line_of_too_many_values_ends_the_upstream_by_name(launcher: Launcher) -> None:
    """It may be the answer that a call waits for."""
    script = f"""
import sys
sys.stdout.write('{{"jsonrpc":"2.0","id":1,"result":[0' + ',0' * {MAX_SERVER_VALUES} + ']}}\\n')
sys.stdout.flush()
sys.stdin.read()
"""
    transport = StdioTransport(launcher, python_spec(script, name="counter"), OWNER, {})
    assert await ended(transport) == []
    assert isinstance(transport.failure, LineTooLong)
    assert str(transport.failure) == "counter: a line of more than 500000 values"


async def test_a_chatterer_is_ended_and_its_words_go_nowhere(
    launcher: Launcher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    script = "import sys\nfor _ in range(9999): print('secret chatter', flush=True)"
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})
    assert await ended(transport) == []
    assert isinstance(transport.failure, NotSpeaking)
    assert "chatter" not in caplog.text


async def test_a_greeting_is_skipped(launcher: Launcher) -> None:
    script = 'for _ in range(100): print(\'hello\')\nprint(\'{"jsonrpc":"2.0","method":"a"}\')'
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})
    assert await ended(transport) == [{"jsonrpc": "2.0", "method": "a"}]
    assert str(transport.failure) == "script: the server has closed its side"


async def test_a_call_in_flight_fails_when_the_server_dies(launcher: Launcher) -> None:
    transport = StdioTransport(launcher, python_spec("import sys; sys.stdin.readline()"), OWNER, {})
    async with started(transport):
        await transport.send(rpc.request(1, "ping"))
        assert await read_all(transport) == []
        with pytest.raises(TransportFailed, match="upstream_ended"):
            await transport.send(rpc.request(2, "ping"))
    assert isinstance(transport.failure, UpstreamEnded)


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
    assert transport.left
    assert transport.failure is None
    assert launcher.num_running == 0


async def test_one_that_owes_an_answer_is_not_idle(launcher: Launcher) -> None:
    """However long it takes; what is written meanwhile is what ends the wait."""
    script = "import sys, time; sys.stdin.readline(); time.sleep(0.4); sys.exit(3)"
    transport = StdioTransport(launcher, python_spec(script), OWNER, {}, idle_stop_s=0.1)
    async with started(transport):
        await transport.send(rpc.request(1, "ping"))
        await read_all(transport)
    assert not transport.left
    assert transport.failure is not None


async def test_who_is_cancelled_leaves_nothing(launcher: Launcher) -> None:
    mark = f"left-over-of-{os.getpid()}"
    script = f"import sys, signal\nsignal.signal(15, signal.SIG_IGN)\nsys.stdin.read() # {mark}"
    transport = StdioTransport(launcher, python_spec(script), OWNER, {})

    runs = asyncio.Event()

    async def hold() -> None:
        async with started(transport):
            runs.set()
            await anext(transport.messages())

    task = asyncio.create_task(hold())
    async with asyncio.timeout(30):
        await runs.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert living(mark) == []
    assert launcher.num_running == 0
