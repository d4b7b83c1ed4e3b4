"""Streamable HTTP to a server: the transport whose words all carriers speak.

Nothing of a caller's travels but what a message holds: the headers are the server's own, and those
of the credential that is its. Redirects are not followed, and no content coding is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.rpc import Message
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, CredentialSet, Refusal
from mcp_bridge.upstream.transports.http1 import Headers, Pool, Response
from mcp_bridge.upstream.transports.transport import Carried, NotSent
from mcp_bridge.upstream.upstream import (
    ACCEPT,
    CONNECT_TIMEOUT_S,
    PLACE_TIMEOUT_S,
    READ_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    Answer,
    ServerConfig,
)

FRAMING = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding")
)

Shown = Callable[[Refusal | None], Awaitable[CredentialSet]]
"""The credential for a request; where one was refused, another."""


async def shows_nothing(_refused: Refusal | None) -> CredentialSet:
    return NO_CREDENTIAL


class Dialled(msgspec.Struct, frozen=True):
    """A server that is asked over HTTP. `pool`: of one carrier alone, which closes it."""

    config: ServerConfig
    pool: Pool
    shown: Shown


class HttpCarrier:
    """`max_streams`: without an end, of its connections: whoever listens takes none from who
    calls."""

    def __init__(self, dialled: Dialled, *, max_streams: int) -> None:
        self._streams = asyncio.Semaphore(max_streams)
        self._config, self._pool, self._shown = dialled.config, dialled.pool, dialled.shown
        self._url = urlsplit(dialled.config.url)

    async def close(self) -> None:
        await self._pool.aclose()

    def ask(
        self,
        method: str,
        body: Message | None,
        headers: Mapping[str, str],
        *,
        endless: bool,
        on_change: Callable[[], None],
        on_sent: Callable[[], None],
    ) -> AbstractAsyncContextManager[Carried]:
        ask = self._ask_endless if endless else self._ask
        return ask(method, body, headers, endless, on_change, on_sent)

    @asynccontextmanager
    async def _ask_endless(self, *asked: Any) -> AsyncIterator[Carried]:
        if self._streams.locked():
            raise NotSent("too_many_streams")
        async with self._streams, self._ask(*asked) as answer:
            yield answer

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        body: Message | None,
        headers: Mapping[str, str],
        endless: bool,
        on_change: Callable[[], None],
        on_sent: Callable[[], None],
    ) -> AsyncIterator[Carried]:
        content = b"" if body is None else rpc.encode(body)
        fixed = {
            "host": self._url.netloc.rpartition("@")[2],
            "accept": ACCEPT,
            "accept-encoding": "identity",
            "user-agent": "tollgate",
            **self._config.headers,
            **headers,
        }
        if body is not None:
            fixed["content-type"] = "application/json"
        if method == "POST":
            fixed["content-length"] = str(len(content))
        read_s = None if endless else READ_TIMEOUT_S
        limits = {"connect": CONNECT_TIMEOUT_S, "read": read_s, "write": WRITE_TIMEOUT_S}
        extensions = {"timeout": {**limits, "pool": PLACE_TIMEOUT_S}, "on_sent": on_sent}
        credential = await self._shown(None)
        async with self._once(method, fixed, credential, content, extensions) as response:
            refused = refusal_of(response.status, response.headers, credential)
            again = credential if refused is None else await self._shown(refused)
            if again is credential:
                yield Answer(self._config.name, response, endless=endless, on_change=on_change)
                return
        # Refused before anything was done: a newer token may be taken.
        async with self._once(method, fixed, again, content, extensions) as response:
            refused = refusal_of(response.status, response.headers, again)
            if refused is not None:
                await self._shown(msgspec.structs.replace(refused, is_last=True))
            yield Answer(self._config.name, response, endless=endless, on_change=on_change)

    @asynccontextmanager
    async def _once(
        self,
        method: str,
        fixed: Mapping[str, str],
        credential: CredentialSet,
        content: bytes,
        extensions: Mapping[str, Any],
    ) -> AsyncIterator[Response]:
        """What frames a message is never a credential's to say."""
        own = {name.lower(): value for name, value in credential.values.items()}
        sent = {**fixed, **{name: own[name] for name in own if name not in FRAMING}}
        async with self._pool.stream(
            method,
            self._config.url,
            headers=[(name.encode(), value.encode()) for name, value in sent.items()],
            content=content,
            extensions=extensions,
        ) as response:
            yield response


def refusal_of(status: int, headers: Headers, credential: CredentialSet) -> Refusal | None:
    """None: whatever the answer is, another credential would not change it."""
    if status not in (401, 403):
        return None
    said = [
        value.decode("latin-1") for name, value in headers if name.lower() == b"www-authenticate"
    ]
    challenge = ", ".join(said)
    if status == 401 or "insufficient_scope" in challenge:
        return Refusal(credential, status, challenge)
    return None
