"""The transport to a server on stdio or SSE: requests go to its one shared connection, and the
answers look as those of Streamable HTTP do.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from foundation.tasks import end_tasks
from mcp_bridge.protocol.eras import LIST_CHANGES, SESSION_HEADER
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.upstream.credentials import (
    CredentialSet,
    CredentialSource,
    Refusal,
    UpstreamOwner,
    ask_with_credential,
)
from mcp_bridge.upstream.transport import (
    CredentialRefused,
    ReadCount,
    TransportAnswer,
    TransportFailed,
    TransportRequest,
)
from mcp_bridge.upstream.transports.channel import LISTENING, SENT, ChannelRequest, ChannelResult
from mcp_bridge.upstream.transports.channel_owners import ConnectionOwners
from mcp_bridge.upstream.upstream import DEFAULT_RETRY_MS, READ_TIMEOUT_S, ServerConfig

ENDING_S = 5.0
"""Time to tell the owner of the connection that the caller has left."""
MAX_UNREAD = 64
"""Messages of the server that wait here; further ones wait at the owner of the connection."""


class ChannelAnswer:
    """An answer that came over a channel. `first`: its first message; None: it only has an end."""

    last_id: str | None = None
    retry_ms = DEFAULT_RETRY_MS
    message_bytes: int | None = None

    def __init__(
        self,
        first: Message | None,
        rest: asyncio.Queue[Message],
        ending: asyncio.Task[ChannelResult],
        read_s: float | None,
        on_change: Callable[[], None],
    ) -> None:
        self._first, self._rest, self.ending = first, rest, ending
        self._read_s, self._on_change = read_s, on_change
        result = ending.result() if first is None else None
        self.status = 200 if result is None else result.status
        has_body = result is None or result.message is not None
        self.kind = "text/event-stream" if has_body else ""
        session = None if result is None else result.session
        self.headers: Mapping[str, str] = {} if session is None else {SESSION_HEADER: session}

    @property
    def is_stream(self) -> bool:
        return self.kind == "text/event-stream"

    async def body(self) -> bytes:
        return b""

    async def messages(self, spent: ReadCount | None = None) -> AsyncGenerator[Message | None]:
        found = self._first
        while found is not None:
            if found.get("method") in LIST_CHANGES:
                self._on_change()
            yield None if found == LISTENING else found
            found = await next_of(self._rest, self.ending, self._read_s)
        message = self.ending.result().message
        if message is not None:
            yield message


class ChannelTransport:
    def __init__(
        self,
        config: ServerConfig,
        owner: UpstreamOwner,
        connections: ConnectionOwners,
        credentials: CredentialSource,
    ) -> None:
        self._config, self._owner = config, owner
        self._connections, self._credentials = connections, credentials
        self._asker = secrets.token_hex(8)
        connections.add_config(config)

    async def close(self) -> None:
        """Do nothing: the connection is shared."""

    @asynccontextmanager
    async def ask(self, request: TransportRequest) -> AsyncIterator[TransportAnswer]:
        answer = await ask_with_credential(self._credentials, partial(self._begin, request))
        if isinstance(answer, CredentialRefused):
            raise answer
        try:
            yield answer
        finally:
            await end_tasks(answer.ending, again_s=ENDING_S)

    async def _begin(
        self, request: TransportRequest, credential: CredentialSet
    ) -> tuple[ChannelAnswer | CredentialRefused, Refusal | None]:
        """Raises: TransportFailed, RpcError."""
        asked = ChannelRequest(
            asker=self._asker,
            method=request.method,
            message=request.message,
            session=request.headers.get(SESSION_HEADER),
        )
        read_s = None if request.endless else READ_TIMEOUT_S
        received: asyncio.Queue[Message] = asyncio.Queue(MAX_UNREAD)

        async def emit(message: Message) -> None:
            request.on_sent()
            if message != SENT:
                await received.put(message)

        work = self._connections.ask(self._config, self._owner, credential, asked, emit)
        ending = asyncio.create_task(work)
        try:
            first = await next_of(received, ending, read_s)
        except CredentialRefused as error:
            return error, Refusal(credential, error.status, error.challenge)
        except BaseException:
            await end_tasks(ending, again_s=ENDING_S)
            raise
        return ChannelAnswer(first, received, ending, read_s, request.on_change), None


async def next_of(
    received: asyncio.Queue[Message], ending: asyncio.Task[ChannelResult], read_s: float | None
) -> Message | None:
    """Return the next message; None: `ending` has a result.

    Raises: what `ending` raises; TransportFailed.
    """
    if received.empty() and not ending.done():
        getting = asyncio.create_task(received.get())
        try:
            await asyncio.wait(
                [getting, ending], timeout=read_s, return_when=asyncio.FIRST_COMPLETED
            )
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        if not ending.done():
            raise TransportFailed("ReadTimeout")
    if not received.empty():
        return received.get_nowait()
    ending.result()
    return None
