"""A server's stdin and stdout as a `StreamTransport`: one line is one message.

Caps the length of a line, names why a stream ended, and stops a server that is idle for long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager

from foundation.tasks import TaskSet, end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message, RpcError
from mcp_bridge.upstream.credentials import CredentialSet, UpstreamOwner
from mcp_bridge.upstream.launch_errors import LineTooLong, NotSpeaking, StdioError, UpstreamEnded
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.stdio.process import READ_BYTES, Launcher, ProcessOwner, ServerProcess
from mcp_bridge.upstream.stdio.stderr_tail import LastWords, ending_of, lines_of, secrets_of
from mcp_bridge.upstream.transport import StreamTransport, TransportFailed
from mcp_bridge.upstream.upstream import ServerConfig

MAX_LINE_BYTES = 4 * 1024 * 1024
"""Bytes of one message without its newline."""
NEWLINE = b"\n"
BLANK = b" \t\r"
MAX_BAD_LINES = 100
"""Lines in a row that are no JSON-RPC. Some servers print a greeting on stdout."""
IDLE_STOP_S = 300.0
MAX_PENDING = 1024
"""Requests without an answer that are counted."""
AFTER_EXIT_S = 1.0
"""Time to read what a process wrote before it exited."""

log = logging.getLogger(__name__)


class LineOverflow(Exception):
    """A line is longer than the cap. What came of it is dropped; nothing can follow."""


class Framer:
    """Cuts what a server writes into lines, one message each (MCP 2025-11-25, basic/transports).

    Each byte is looked at once, in whatever pieces it comes. Unusable once it has raised.
    """

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._held = bytearray()

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the unfinished line; never above the cap."""
        return len(self._held)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, stripped, without empty ones.

        Raises: LineOverflow, with the complete lines before the long one as its only argument.
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
        # One buffer, not a list of pieces: a server may write single bytes.
        if len(self._held) + end - start > self._max_line_bytes:
            self._held.clear()
            raise LineOverflow(lines)
        self._held += memoryview(data)[start:end]


class PendingRequests:
    """The requests without an answer, in both directions, and the time of the last message."""

    def __init__(self) -> None:
        self._ids: set[tuple[bool, rpc.RequestId]] = set()
        self._last_s = time.monotonic()

    def note(self, message: Message, *, ours: bool) -> None:
        """Count a message. `ours`: we sent it. Requests beyond MAX_PENDING are not counted."""
        self._last_s = time.monotonic()
        if rpc.is_request(message):
            if len(self._ids) < MAX_PENDING:
                self._ids.add((ours, message["id"]))
        elif rpc.is_response(message):
            self._ids.discard((not ours, message.get("id", "")))

    def idle_s(self) -> float:
        return 0.0 if self._ids else time.monotonic() - self._last_s


class StdioTransport:
    """The `StreamTransport` to one process, which runs between `start` and `close`.

    `idle_stop_s`: it ends by itself after so long without messages and open requests; then `left`
    is True and `failure` stays None.
    """

    legacy_only = False

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
        self.left = False
        self._launcher, self._spec = launcher, spec
        self._owner, self._credentials = owner, credentials
        self._framer = Framer(max_line_bytes)
        self._max_line_bytes = max_line_bytes
        self._idle_stop_s = idle_stop_s
        self._pending = PendingRequests()
        self._ended = asyncio.Event()
        self._sending = asyncio.Lock()
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> ServerProcess:
        """Raises: StdioError."""
        self._process = process = await self._launcher.start(
            self._spec, self._owner, self._credentials
        )
        self._watching = [
            asyncio.create_task(self._watch_idle()),
            asyncio.create_task(self._watch_exit()),
        ]
        return process

    async def close(self) -> None:
        """Stop the process; a cancelled caller leaves it to stop by itself."""
        self._ended.set()
        for task in self._watching:
            task.cancel()
        await self._process.stop()

    async def send(self, message: Message) -> None:
        """Raises: TransportFailed."""
        try:
            line = rpc.encode(message)
        except ValueError as error:
            raise TransportFailed("no_json_rpc") from error
        async with self._sending:
            if self._ended.is_set():
                raise TransportFailed(self._reason)
            self._pending.note(message, ours=True)
            try:
                self._process.stdin.write(line + NEWLINE)
                await self._process.stdin.drain()
            except OSError as error:
                # The process may still run: ended, the stream tells its readers.
                self._fail(UpstreamEnded(self._spec.name, "the server reads no more"))
                raise TransportFailed(self._reason) from error

    async def messages(self) -> AsyncGenerator[Message]:
        """Yield messages until the process or its stdout ends; nothing is read ahead of the
        consumer. Raises: TransportFailed."""
        bad_lines = 0
        async with aclosing(self._lines()) as lines:
            async for line in lines:
                try:
                    message = rpc.decode(line)
                except RpcError as error:
                    if rpc.unread_reason(error) == rpc.TOO_MANY_VALUES:  # as one that is too long
                        most = f"a line of more than {rpc.MAX_SERVER_VALUES} values"
                        self._fail(LineTooLong(self._spec.name, most))
                        break
                    bad_lines += 1
                    if bad_lines > MAX_BAD_LINES:
                        self._fail(NotSpeaking(self._spec.name, "too many lines are no JSON-RPC"))
                        break
                    continue
                bad_lines = 0
                self._pending.note(message, ours=False)
                yield message
        raise TransportFailed(self._reason)

    async def _lines(self) -> AsyncGenerator[bytes]:
        ended = asyncio.create_task(self._ended.wait())
        reading: asyncio.Task[bytes] | None = None
        try:
            while not ended.done():
                reading = asyncio.create_task(self._process.stdout.read(READ_BYTES))
                await asyncio.wait([reading, ended], return_when=asyncio.FIRST_COMPLETED)
                data = reading.result() if reading.done() else b""
                try:
                    lines, is_cut = self._framer.feed(data), False
                except LineOverflow as overflow:
                    lines, is_cut = overflow.args[0], True
                for line in lines:
                    yield line
                if is_cut:
                    most = self._max_line_bytes
                    self._fail(LineTooLong(self._spec.name, f"a line above {most} bytes"))
                elif not data:
                    self._fail(UpstreamEnded(self._spec.name, "the server has closed its side"))
        finally:
            await end_tasks(ended, *([] if reading is None else [reading]))

    @property
    def _reason(self) -> str:
        return "upstream_ended" if self.failure is None else self.failure.code

    def _fail(self, failure: UpstreamEnded) -> None:
        if not self._ended.is_set():
            self.failure = failure
            self._ended.set()
            log.warning("%s (%s)", failure, failure.code)

    async def _watch_exit(self) -> None:
        """End the stream when the process has exited: its children may hold its pipes open."""
        await self._process.exited.wait()
        await asyncio.sleep(AFTER_EXIT_S)
        status = self._process.returncode
        self._fail(UpstreamEnded(self._spec.name, f"ended with status {status}"))

    async def _watch_idle(self) -> None:
        while (left_s := self._idle_stop_s - self._pending.idle_s()) > 0:
            await asyncio.sleep(left_s)
        if not self._ended.is_set():
            self.left = True
            log.info("%s: idle for %.0f s", self._spec.name, self._idle_stop_s)
            self._ended.set()


class StdioTransports:
    """Opens the transports to server processes.

    `open_launcher`: creates the launcher for the first one, and is called again after a failure.
    `on_end`: is told how each process ended.
    """

    def __init__(
        self,
        open_launcher: Callable[[], Launcher],
        *,
        idle_stop_s: float | None = None,
        on_end: Callable[[LastWords], None] | None = None,
    ) -> None:
        self._open_launcher, self._on_end = open_launcher, on_end
        self._launcher: Launcher | None = None
        self._lock = asyncio.Lock()
        self._idle_stop_s = idle_stop_s or IDLE_STOP_S
        self._endings = TaskSet()

    async def _ready(self) -> Launcher:
        async with self._lock:
            if self._launcher is None:
                self._launcher = await asyncio.to_thread(self._open_launcher)
            return self._launcher

    @asynccontextmanager
    async def open(
        self, config: ServerConfig, owner: UpstreamOwner, credential: CredentialSet
    ) -> AsyncIterator[StreamTransport]:
        """Raises: TransportFailed."""
        assert config.launch is not None
        try:
            transport = StdioTransport(
                await self._ready(),
                config.launch,
                ProcessOwner(tenant=owner.org_id, credential_set=credential.name),
                credential.values,
                idle_stop_s=self._idle_stop_s,
            )
            process = await transport.start()
        except StdioError as error:
            raise TransportFailed(error.code) from error
        try:
            yield transport
        finally:
            ending = self._end(transport, process, config.launch, credential)
            await asyncio.shield(self._endings.spawn(ending))

    async def _end(
        self,
        transport: StdioTransport,
        process: ServerProcess,
        spec: LaunchSpec,
        credential: CredentialSet,
    ) -> None:
        await transport.close()
        if self._on_end is not None:
            self._on_end(last_words(process, spec, credential.values.values()))

    async def close(self) -> None:
        """Wait until processes that are being stopped are gone, also those whose users did not
        wait for it."""
        await self._endings.wait()


def last_words(process: ServerProcess, spec: LaunchSpec, credentials: Iterable[str]) -> LastWords:
    """Return how a stopped process ended and what it wrote to stderr last."""
    tail = process.stderr_tail
    is_cut = process.stderr_bytes > len(tail)
    return LastWords(
        server=spec.name,
        ended=ending_of(process.returncode, process.sent),
        lines=lines_of(tail, secrets_of(spec, credentials), is_cut=is_cut),
    )
