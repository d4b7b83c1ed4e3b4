"""Chooses the transport that a server of the configuration gets.

One object for all servers of a process.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpcore
from redis.asyncio import Redis

from mcp_bridge.upstream.credentials import (
    Credentials,
    CredentialSet,
    CredentialSource,
    NobodysCredentials,
    Refusal,
    UpstreamOwner,
    no_credential,
)
from mcp_bridge.upstream.http import HttpTarget
from mcp_bridge.upstream.http1 import Pool
from mcp_bridge.upstream.stdio.process import Launcher
from mcp_bridge.upstream.stdio.stderr_tail import LastWords
from mcp_bridge.upstream.stdio.transport import StdioTransports
from mcp_bridge.upstream.transport import StreamTransport, Transport
from mcp_bridge.upstream.transports.channel_owners import ConnectionOwners
from mcp_bridge.upstream.transports.channel_transport import ChannelTransport
from mcp_bridge.upstream.transports.legacy_sse import open_sse
from mcp_bridge.upstream.transports.streamable_http import HttpTransport
from mcp_bridge.upstream.upstream import (
    IDLE_S,
    MAX_CONNECTIONS,
    MAX_IDLE_CONNECTIONS,
    MAX_STREAMS,
    Addresses,
    ServerConfig,
)
from mcp_bridge.worker_relay import Relay

if TYPE_CHECKING:
    from mcp_bridge.upstream.openapi.source import DocumentSource

OWN_INFO: dict[str, Any] = {"name": "tollgate", "version": "0"}
"""What we are to a server that many of our clients share."""
NetworkOf = Callable[[Addresses], httpcore.AsyncNetworkBackend]


class Transports:
    """Opens the transports of all servers.

    `network_of`: who dials, and checks where to; None: anywhere. `credentials`: what servers are
    shown of ours. `launcher`: starts those on stdio, made when the first one is asked for; `on_end`
    is told how they ended. To be closed.
    """

    def __init__(
        self,
        *,
        network_of: NetworkOf | None = None,
        trust: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
        launcher: Callable[[], Launcher] | None = None,
        idle_stop_s: float | None = None,
        on_end: Callable[[LastWords], None] | None = None,
    ) -> None:
        self._network_of, self._trust = network_of, trust
        self._credentials = credentials or NobodysCredentials()
        self._open_launcher, self._idle_stop_s = launcher, idle_stop_s
        self._on_end = on_end
        self._shared: tuple[Redis, Relay] | None = None
        self._connections: ConnectionOwners | None = None
        self._processes: StdioTransports | None = None
        self._documents: dict[str, DocumentSource] = {}
        """By the names of servers, which stay."""

    def share(self, redis: Redis, relay: Relay) -> None:
        """Share connections with other workers, of whom one has the connection to a server that
        there is one of. Before anything is opened."""
        self._shared = redis, relay

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()

    def open(self, config: ServerConfig, whose: UpstreamOwner) -> Transport:
        shown = self._shown(config, whose)
        if config.transport in ("stdio", "sse"):
            return ChannelTransport(config, whose, self._all_connections(), shown)
        dialled = HttpTarget(config, self._pool(config), shown)
        if config.transport == "openapi":
            return self._open_api(dialled)
        return HttpTransport(dialled, max_streams=MAX_STREAMS)

    def _open_api(self, dialled: HttpTarget) -> Transport:
        # The SDK's types are loaded with it: only where there is such a server.
        from mcp_bridge.upstream.openapi.source import DocumentSource
        from mcp_bridge.upstream.openapi.transport import OpenApiTransport

        config = dialled.config
        source = self._documents.get(config.name)
        if source is None:
            source = DocumentSource(config, partial(self._pool, config))
            self._documents[config.name] = source
        return OpenApiTransport(dialled, source)

    def _all_connections(self) -> ConnectionOwners:
        if self._connections is None:
            redis, relay = self._shared or (None, None)
            self._connections = ConnectionOwners(
                info=OWN_INFO,
                open_stream=self._open_stream,
                credentials=self._credentials,
                redis=redis,
                relay=relay,
            )
        return self._connections

    def _open_stream(
        self, config: ServerConfig, whose: UpstreamOwner, credential: CredentialSet
    ) -> AbstractAsyncContextManager[StreamTransport]:
        if config.transport == "sse":
            return open_sse(config, self._plain_pool(config), credential)
        if self._processes is None:
            assert self._open_launcher is not None, "a server on stdio, and nothing starts it"
            self._processes = StdioTransports(
                self._open_launcher, idle_stop_s=self._idle_stop_s, on_end=self._on_end
            )
        return self._processes.open(config, whose, credential)

    def _plain_pool(self, config: ServerConfig) -> httpcore.AsyncConnectionPool:
        return httpcore.AsyncConnectionPool(
            ssl_context=self._trust,
            max_connections=MAX_CONNECTIONS,
            keepalive_expiry=IDLE_S,
            network_backend=None if self._network_of is None else self._network_of(config.network),
        )

    def _pool(self, config: ServerConfig, url: str | None = None) -> Pool:
        """Return a pool of connections.

        url: another one than the server's, under the same rules.
        """
        return Pool(
            url or config.url,
            max_connections=MAX_CONNECTIONS + MAX_STREAMS,
            max_idle=MAX_IDLE_CONNECTIONS,
            idle_s=IDLE_S,
            network=None if self._network_of is None else self._network_of(config.network),
            trust=self._trust,
        )

    def _shown(self, config: ServerConfig, whose: UpstreamOwner) -> CredentialSource:
        if config.credential == "none":
            return no_credential

        async def shown(refused: Refusal | None) -> CredentialSet:
            return await self._credentials.of(whose, config.name, refused)

        return shown


def upstream_owner(config: ServerConfig, org_id: str, user_id: str | None) -> UpstreamOwner:
    """Return the owner of what is kept apart: tenants always, users where each is shown as who they
    are."""
    return UpstreamOwner(org_id, user_id if config.credential == "user" else None)
