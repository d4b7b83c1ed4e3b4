"""A server's stdin and stdout as the streams that the SDK's `ClientSession` takes.

The SDK's `stdio_client` has the same interface; this one caps a line, says by name why a stream
ended, counts what is on its way and leaves when it has been idle for long.

    transport = StdioTransport(launcher, spec, owner, credentials)
    async with transport as (read, write), ClientSession(read, write) as session:
        ...
    transport.failure   # why it ended, where it was not us who ended it
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from types import TracebackType

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import (
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)

from mcp_bridge.upstream.launch_errors import LineTooLong, NotSpeaking, UpstreamEnded
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.stdio.process import READ_BYTES, Launcher, ProcessOwner, ServerProcess

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Of one message, without its newline."""
NEWLINE = b"\n"
BLANK = b" \t\r"


class LineOverflow(Exception):
    """A line is longer than the cap. What came of it is dropped; nothing can follow."""


class Framer:
    """Cuts what a server writes into lines, one message each (MCP 2025-11-25, basic/transports).

    The SDK's own reader keeps a line of any length and copies it with each read; here a line has a
    cap and each byte is looked at once, in whatever pieces it comes. Not usable any more once it
    has raised.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """Return the bytes of a line that is not whole yet; never above the cap."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without newline and blanks around; empty ones are left
        out. Raises: LineOverflow, before anything of such a line is kept; the whole ones before it
        are its only argument.
        """
        lines: list[bytes] = []
        start = 0
        while (end := data.find(NEWLINE, start)) >= 0:
            self._take(data, start, end, lines)
            line = bytes(self._held.strip(BLANK))
            self._held.clear()
            if line:
                lines.append(line)
            start = end + 1
        if start < len(data):
            self._take(data, start, len(data), lines)
        return lines

    def _take(self, data: bytes, start: int, end: int, lines: list[bytes]) -> None:
        """Take bytes into one buffer, not a list of pieces: a server that writes single bytes would
        make each of them an object of its own."""
        if len(self._held) + end - start > self._max_line_bytes:
            self._held.clear()
            raise LineOverflow(lines)
        self._held += memoryview(data)[start:end]


MAX_BAD_LINES = 100
"""Lines in a row that are no JSON-RPC: some servers greet on stdout, none talks there for long."""
IDLE_STOP_S = 300.0
MAX_PENDING = 1024
"""Requests that wait for an answer: what a session does not bound."""
FLUSH_S = 0.5
"""For what was sent before the end."""
AFTER_EXIT_S = 1.0
"""For what it wrote before it left."""

log = logging.getLogger(__name__)

Incoming = SessionMessage | Exception


class PendingRequests:
    """Requests without an answer yet, either way, and since when nothing has happened."""

    def __init__(self) -> None:
        self._ids: set[tuple[bool, str | int]] = set()
        self.last_s = time.monotonic()

    @property
    def count(self) -> int:
        return len(self._ids)

    def note(self, message: JSONRPCMessage, *, ours: bool) -> None:
        """Count a message that went over the transport.

        ours: we sent it. Beyond MAX_PENDING requests are not counted any more.
        """
        self.last_s = time.monotonic()
        if isinstance(message, JSONRPCRequest):
            if self.count < MAX_PENDING:
                self._ids.add((ours, message.id))
        elif isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None:
            self._ids.discard((not ours, message.id))

    def idle_s(self) -> float:
        return 0.0 if self._ids else time.monotonic() - self.last_s


class StdioTransport:
    """The transport to a server on stdio.

    Enter it once. `idle_stop_s`: it ends by itself when nothing was on its way for so long;
    `ended_idle` then says so and `failure` is None: start another one for the next call.
    """

    def __init__(
        self,
        launcher: Launcher,
        spec: LaunchSpec,
        owner: ProcessOwner,
        credentials: Mapping[str, str],
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        idle_stop_s: float = IDLE_STOP_S,
    ) -> None:
        self.failure: UpstreamEnded | None = None
        self.ended_idle = False
        self.process: ServerProcess | None = None
        self._launcher, self._spec = launcher, spec
        self._owner, self._credentials = owner, credentials
        self._framer = Framer(max_line_bytes)
        self._max_line_bytes = max_line_bytes
        self._idle_stop_s = idle_stop_s
        self._pending = PendingRequests()
        self._bad_lines = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(
        self,
    ) -> tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]:
        """Raises: StdioError, as `Launcher.start`."""
        self.process = await self._launcher.start(self._spec, self._owner, self._credentials)
        self._to_session, self._from_server = anyio.create_memory_object_stream[Incoming](0)
        self._from_session, self._to_server = self._outgoing()
        self._writer = asyncio.create_task(self._write(self.process))
        self._tasks = [
            self._writer,
            asyncio.create_task(self._read(self.process)),
            asyncio.create_task(self._watch_idle()),
            asyncio.create_task(self._watch_exit(self.process)),
        ]
        return self._from_server, self._to_server

    def _outgoing(
        self,
    ) -> tuple[MemoryObjectReceiveStream[SessionMessage], MemoryObjectSendStream[SessionMessage]]:
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        return from_session, to_server

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self.process is not None
        self._to_server.close()
        self._from_server.close()
        try:
            await asyncio.wait([self._writer], timeout=FLUSH_S)
        finally:
            for task in self._tasks:
                task.cancel()
            self._closing = asyncio.create_task(self._close(self.process))
            await asyncio.shield(self._closing)

    async def _close(self, process: ServerProcess) -> None:
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in (self._to_session, self._from_session):
            stream.close()
        await process.stop()
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome

    # ---- from the server

    async def _read(self, process: ServerProcess) -> None:
        """Read from a process; nothing is read ahead while a message waits to be taken."""
        try:
            while data := await process.stdout.read(READ_BYTES):
                try:
                    lines = self._framer.feed(data)
                except LineOverflow as overflow:
                    await self._deliver(overflow.args[0])
                    most = self._max_line_bytes
                    raise LineTooLong(process.upstream, f"a line above {most} bytes") from None
                await self._deliver(lines)
            raise UpstreamEnded(process.upstream, "the server has closed its side")
        except UpstreamEnded as failure:
            self.failure = self.failure or failure
            log.warning("%s (%s)", failure, failure.code)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            log.debug("%s: nobody reads any more", process.upstream)
        finally:
            self._to_session.close()

    async def _deliver(self, lines: list[bytes]) -> None:
        """Deliver lines as messages: what is no message goes to the session as an error, as the SDK
        has it; without its text, which a session would log. Raises: NotSpeaking, anyio's errors
        where nobody reads."""
        for line in lines:
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                self._bad_lines += 1
                if self._bad_lines > MAX_BAD_LINES:
                    raise NotSpeaking(self._spec.name, "too many lines are no JSON-RPC") from None
                await self._to_session.send(ValueError(f"{self._spec.name}: no JSON-RPC message"))
                continue
            self._bad_lines = 0
            self._pending.note(message, ours=False)
            await self._to_session.send(SessionMessage(message))

    # ---- to the server

    async def _write(self, process: ServerProcess) -> None:
        try:
            async for outgoing in self._from_session:
                message = outgoing.message
                if self.ended_idle:
                    return  # handed over as the idle stop came: not sent, so it may be tried again
                self._pending.note(message, ours=True)
                line = message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            log.debug("%s: nothing is sent any more", process.upstream)
        except OSError:
            # It may still run: closed, the session sees an end instead of waiting for ever.
            self._fail(UpstreamEnded(process.upstream, "the server reads no more"))

    def _fail(self, failure: UpstreamEnded) -> None:
        self.failure = self.failure or failure
        self._to_session.close()

    # ---- its end

    async def _watch_exit(self, process: ServerProcess) -> None:
        """Watch for the exit of a process: what it left running may hold its pipes open."""
        await process.exited.wait()
        await asyncio.sleep(AFTER_EXIT_S)
        self._fail(UpstreamEnded(process.upstream, f"ended with status {process.returncode}"))

    async def _watch_idle(self) -> None:
        """Both ways at once: what a session sends from then on is refused, not lost."""
        while (left_s := self._idle_stop_s - self._pending.idle_s()) > 0:
            await asyncio.sleep(left_s)
        self.ended_idle = True
        log.info("%s: idle for %.0f s", self._spec.name, self._idle_stop_s)
        self._from_session.close()
        self._to_session.close()
