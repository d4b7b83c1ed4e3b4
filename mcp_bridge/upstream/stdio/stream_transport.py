"""A server's stdin and stdout as a `StreamTransport`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from mcp_bridge.protocol.rpc import Message
from mcp_bridge.upstream.credentials import CredentialSet, UpstreamOwner
from mcp_bridge.upstream.launch_errors import StdioError
from mcp_bridge.upstream.launch_spec import LaunchSpec
from mcp_bridge.upstream.stdio.process import Launcher, ProcessOwner
from mcp_bridge.upstream.stdio.stderr_tail import LastWords, ending_of, lines_of, secrets_of
from mcp_bridge.upstream.stdio.transport import IDLE_STOP_S, StdioTransport
from mcp_bridge.upstream.transport import StreamTransport, TransportFailed
from mcp_bridge.upstream.upstream import ServerConfig


class StdioStreamTransport:
    legacy_only = False

    def __init__(self, transport: StdioTransport, reading: Any, writing: Any) -> None:
        self._transport, self._reading, self._writing = transport, reading, writing

    @property
    def left(self) -> bool:
        return self._transport.ended_idle

    async def send(self, message: Message) -> None:
        try:
            await self._writing.send(
                SessionMessage(jsonrpc_message_adapter.validate_python(message))
            )
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            raise TransportFailed(self._reason) from error
        except ValueError as error:
            raise TransportFailed("no_json_rpc") from error

    async def messages(self) -> AsyncIterator[Message]:
        async for found in self._reading:
            if not isinstance(found, Exception):
                yield found.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        raise TransportFailed(self._reason)

    @property
    def _reason(self) -> str:
        failure = self._transport.failure
        return "upstream_ended" if failure is None else failure.code


class StdioTransports:
    """Opens the stdio transports of servers.

    `open_launcher` makes what starts them all; it is asked again where it could not. `on_end`: for
    who asks what is wrong, told of each that ran when it has left.
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
        self._turn = asyncio.Lock()
        self._idle_stop_s = idle_stop_s or IDLE_STOP_S

    async def _ready(self) -> Launcher:
        async with self._turn:
            if self._launcher is None:
                self._launcher = await asyncio.to_thread(self._open_launcher)
            return self._launcher

    @asynccontextmanager
    async def open(
        self, config: ServerConfig, whose: UpstreamOwner, credential: CredentialSet
    ) -> AsyncIterator[StreamTransport]:
        """Raises: TransportFailed."""
        assert config.launch is not None
        owner = ProcessOwner(tenant=whose.org_id, credential_set=credential.name)
        try:
            transport = StdioTransport(
                await self._ready(),
                config.launch,
                owner,
                credential.values,
                idle_stop_s=self._idle_stop_s,
            )
            try:
                async with transport as (reading, writing):
                    yield StdioStreamTransport(transport, reading, writing)
            finally:
                await self._tell(transport, config.launch, credential.values.values())
        except StdioError as error:
            raise TransportFailed(error.code) from error

    async def _tell(
        self, transport: StdioTransport, spec: LaunchSpec, credentials: Iterable[str]
    ) -> None:
        process = transport.process
        if self._on_end is None or process is None:
            return
        await process.stop()
        tail = process.stderr_tail
        words = LastWords(
            server=spec.name,
            ended=ending_of(process.returncode, process.sent),
            lines=lines_of(
                tail, secrets_of(spec, credentials), is_cut=process.stderr_bytes > len(tail)
            ),
        )
        self._on_end(words)
