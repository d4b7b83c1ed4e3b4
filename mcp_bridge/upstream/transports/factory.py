"""Opens the transport of each configured server, by its kind."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis

from foundation.http1 import Resolver
from mcp_bridge.upstream.credentials import (
    Credentials,
    CredentialSet,
    CredentialSource,
    Refusal,
    UpstreamOwner,
    no_credential,
)
from mcp_bridge.upstream.http import HttpTarget, ServerPool
from mcp_bridge.upstream.stdio.process import Launcher
from mcp_bridge.upstream.stdio.stderr_tail import LastWords
from mcp_bridge.upstream.stdio.transport import StdioTransports
from mcp_bridge.upstream.transport import StreamTransport, Transport
from mcp_bridge.upstream.transports.channel_owners import ConnectionOwners, OnChange, nobody_told
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
"""Our client info on a connection that many of our clients share."""
ResolverOf = Callable[[Addresses], Resolver]


class Transports:
    """Opens the transports of all servers.

    `resolver_of`: finds the addresses that may be dialled; None: the system does. `credentials`:
    those of the servers. `launcher`: creates the launcher of server processes when the first one
    is needed. `on_end`: is told how each process ended.
    """

    def __init__(
        self,
        *,
        resolver_of: ResolverOf | None = None,
        trust: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
        launcher: Callable[[], Launcher] | None = None,
        idle_stop_s: float | None = None,
        on_end: Callable[[LastWords], None] | None = None,
    ) -> None:
        self._resolver_of, self._trust = resolver_of, trust
        self._credentials = credentials
        self._open_launcher, self._idle_stop_s = launcher, idle_stop_s
        self._on_end = on_end
        self._shared: tuple[Redis, Relay] | None = None
        self._connections: ConnectionOwners | None = None
        self._on_change: OnChange = nobody_told
        self._processes: StdioTransports | None = None
        self._documents: dict[str, DocumentSource] = {}
        """By the names of servers."""

    def share(self, redis: Redis, relay: Relay, on_change: OnChange) -> None:
        """Share connections on stdio and SSE with other workers; call it before `open`.
        `on_change`: is told of a server there that says that its offer changed."""
        self._shared, self._on_change = (redis, relay), on_change

    async def close(self) -> None:
        if self._connections is not None:
            await self._connections.close()
        if self._processes is not None:
            await self._processes.close()

    def forget(self, server: str) -> None:
        """Forget the document of a server whose configuration changed."""
        self._documents.pop(server, None)

    def open(self, config: ServerConfig, owner: UpstreamOwner) -> Transport:
        credentials = self._credential_source(config, owner)
        if config.transport in ("stdio", "sse"):
            return ChannelTransport(config, owner, self._shared_connections(), credentials)
        target = HttpTarget(config, self._pool(config), credentials)
        if config.transport == "openapi":
            return self._open_api(target)
        return HttpTransport(target, max_streams=MAX_STREAMS)

    def _open_api(self, target: HttpTarget) -> Transport:
        # Imported only for such servers, since it loads a YAML parser.
        from mcp_bridge.upstream.openapi.source import DocumentSource
        from mcp_bridge.upstream.openapi.transport import OpenApiTransport

        config = target.config
        source = self._documents.get(config.name)
        if source is None:
            source = DocumentSource(config, partial(self._pool, config))
            self._documents[config.name] = source
        return OpenApiTransport(target, source)

    def _shared_connections(self) -> ConnectionOwners:
        if self._connections is None:
            self._connections = ConnectionOwners(
                info=OWN_INFO,
                open_stream=self._open_stream,
                credentials=self._credentials,
                shared=self._shared,
            )
            self._connections.on_change = self._on_change
        return self._connections

    def _open_stream(
        self, config: ServerConfig, owner: UpstreamOwner, credential: CredentialSet
    ) -> AbstractAsyncContextManager[StreamTransport]:
        if config.transport == "sse":
            return open_sse(config, self._pool(config), credential)
        if self._processes is None:
            assert self._open_launcher is not None, "a server on stdio, and nothing starts it"
            self._processes = StdioTransports(
                self._open_launcher, idle_stop_s=self._idle_stop_s, on_end=self._on_end
            )
        return self._processes.open(config, owner, credential)

    def _pool(self, config: ServerConfig, url: str | None = None) -> ServerPool:
        """Return a pool of connections to `url`, by default the server's, under the server's
        address rules."""
        return ServerPool(
            url or config.url,
            max_connections=MAX_CONNECTIONS + MAX_STREAMS,
            max_idle=MAX_IDLE_CONNECTIONS,
            idle_s=IDLE_S,
            resolve=None if self._resolver_of is None else self._resolver_of(config.network),
            trust=self._trust,
        )

    def _credential_source(self, config: ServerConfig, owner: UpstreamOwner) -> CredentialSource:
        credentials = self._credentials
        if credentials is None or config.credential == "none":
            return no_credential

        async def credential(refused: Refusal | None) -> CredentialSet:
            return await credentials.of(owner, config.name, refused)

        return credential


def upstream_owner(config: ServerConfig, org_id: str, user_id: str | None) -> UpstreamOwner:
    """Return the owner of a server's connections: the tenant, or the user if each has their own
    credential."""
    return UpstreamOwner(org_id, user_id if config.credential == "user" else None)
