"""A Carrier to a server that knows no HTTP: asks go to the one connection that there is, and what
comes of it is an answer as Streamable HTTP would have given.
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
from mcp_bridge.upstream.credentials import CredentialSet, CredentialSource, Refusal, UpstreamOwner
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
"""For telling the owner of the connection that nobody waits any more."""
MAX_UNREAD = 64
"""Of what the server says: behind that it waits at the owner."""


class ChannelAnswer:
    """An answer that came over a channel. `first`: what came first; None: the end was first."""

    last_id: str | None = None
    retry_ms = DEFAULT_RETRY_MS

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
        told = ending.result() if first is None else None
        self.status = 200 if told is None else told.status
        has_body = told is None or told.message is not None
        self.kind = "text/event-stream" if has_body else ""
        session = None if told is None else told.session
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
        whose: UpstreamOwner,
        connections: ConnectionOwners,
        shown: CredentialSource,
    ) -> None:
        self._config, self._whose, self._connections, self._shown = (
            config,
            whose,
            connections,
            shown,
        )
        self._asker = secrets.token_hex(8)
        connections.knows(config)

    async def close(self) -> None:
        """The connection is everybody's."""

    @asynccontextmanager
    async def ask(self, request: TransportRequest) -> AsyncIterator[TransportAnswer]:
        begin = partial(self._begin, request)
        credential = await self._shown(None)
        try:
            answer = await begin(credential)
        except CredentialRefused as error:
            again = await self._shown(Refusal(credential, error.status, error.challenge))
            if again is credential:
                raise
            # Refused before anything was done: a newer token may be taken.
            try:
                answer = await begin(again)
            except CredentialRefused as error:
                await self._shown(Refusal(again, error.status, error.challenge, is_last=True))
                raise
        try:
            yield answer
        finally:
            await end_tasks(answer.ending, again_s=ENDING_S)

    async def _begin(self, request: TransportRequest, credential: CredentialSet) -> ChannelAnswer:
        """Raises: TransportFailed, RpcError."""
        asked = ChannelRequest(
            asker=self._asker,
            method=request.method,
            message=request.message,
            session=request.headers.get(SESSION_HEADER),
        )
        read_s = None if request.endless else READ_TIMEOUT_S
        said: asyncio.Queue[Message] = asyncio.Queue(MAX_UNREAD)

        async def emit(message: Message) -> None:
            request.on_sent()
            if message != SENT:
                await said.put(message)

        work = self._connections.ask(self._config, self._whose, credential, asked, emit)
        ending = asyncio.create_task(work)
        try:
            first = await next_of(said, ending, read_s)
        except BaseException:
            await end_tasks(ending, again_s=ENDING_S)
            raise
        return ChannelAnswer(first, said, ending, read_s, request.on_change)


async def next_of(
    said: asyncio.Queue[Message], ending: asyncio.Task[ChannelResult], read_s: float | None
) -> Message | None:
    """Return the next message; None: it has ended, and how is known.

    Raises: what it ended with; TransportFailed.
    """
    if said.empty() and not ending.done():
        getting = asyncio.create_task(said.get())
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
    if not said.empty():
        return said.get_nowait()
    ending.result()
    return None
