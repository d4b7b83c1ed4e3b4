"""Sends requests to the worker that owns the one connection to a server on stdio or SSE.

There is one connection for each server, tenant and credential, in one worker: its owner, which is
recorded in Redis while it sends heartbeats. All other workers relay their requests to it. An owner
that is gone before it got a request is replaced; a call that it was working on is lost, and is not
repeated. A server that fails is not reconnected for a while, longer each time; an unused connection
is closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.periodic import Periodic
from foundation.request_context import outside_requests
from foundation.tasks import TaskSet
from mcp_bridge.protocol.eras import SAMPLING_BY
from mcp_bridge.upstream.circuit_breaker import Attempt, Breaker, UpstreamResting
from mcp_bridge.upstream.credentials import NO_CREDENTIAL, Credentials, CredentialSet, UpstreamOwner
from mcp_bridge.upstream.transport import (
    CredentialRefused,
    NotSent,
    StreamTransport,
    TransportFailed,
)
from mcp_bridge.upstream.transports.channel import Channel, ChannelRequest, ChannelResult, Emit
from mcp_bridge.upstream.upstream import ServerConfig, Unreachable
from mcp_bridge.worker_relay import OWNED_HEARTBEAT_S, Ownership, Relay, WorkerGone

log = logging.getLogger(__name__)

KIND = "channel"
IDLE_S = 30.0
"""How long a closed connection stays with its owner before another worker may open it."""
MAX_OWNERS = 1024
MAX_MOVES = 5
CLOSE_S = 15.0

OpenStreamTransport = Callable[
    [ServerConfig, UpstreamOwner, CredentialSet], AbstractAsyncContextManager[StreamTransport]
]


OnChange = Callable[[str, str], None]
"""Takes an org and the name of a server."""


def nobody_told(org_id: str, server: str) -> None:
    """Do nothing."""


class ConnectionKey(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a connection. `credential`: the name of a set. `fingerprint`: that of the
    server's configuration: a connection that was opened with another one ends when it is unused."""

    server: str
    org_id: str
    credential: str
    fingerprint: str = ""

    @property
    def redis_key(self) -> str:
        config = f"{self.server}@{self.fingerprint}" if self.fingerprint else self.server
        return f"mcp:{{{self.org_id}}}:owner:{config}:{self.credential}"


class ConnectionOwner:
    """One connection in the worker that owns it: opened on demand, and again when it has ended."""

    def __init__(
        self,
        config: ServerConfig,
        owner: UpstreamOwner,
        credential: CredentialSet,
        info: dict[str, Any],
        open_stream: OpenStreamTransport,
        on_change: OnChange = nobody_told,
    ) -> None:
        self.config, self.owner, self.credential = config, owner, credential
        self._on_change = partial(on_change, owner.org_id, config.name)
        self.used_at = time.monotonic()
        self._info, self._open_stream = info, open_stream
        self._breaker = Breaker(config.name)
        self._opening = asyncio.Lock()
        self._opened: asyncio.Future[Channel] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def _is_usable(self) -> bool:
        """True if it is open or about to be."""
        opened = self._opened
        if opened is None or not self.is_open:
            return False
        if not opened.done():
            return True
        return opened.exception() is None and not opened.result().has_ended

    async def ask(self, ask: ChannelRequest, emit: Emit) -> ChannelResult:
        """Raises: TransportFailed."""
        channel = await self._ready()
        self.used_at = time.monotonic()
        try:
            return await channel.ask(ask, emit)
        finally:
            self.used_at = time.monotonic()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE_S)
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(TransportFailed("cancelled"))

    async def _ready(self) -> Channel:
        async with self._opening:
            if self._opened is None or not self._is_usable:
                if self._task is not None:
                    await asyncio.wait([self._task])  # the one before is cleaned up first
                try:
                    attempt = self._breaker.attempt()
                except UpstreamResting:
                    raise NotSent("resting") from None
                self._opened = asyncio.get_running_loop().create_future()
                self._opened.add_done_callback(lambda opened: opened.exception())
                holding = self._hold(self._opened, attempt)
                self._task = asyncio.create_task(holding, context=outside_requests())
            # A caller that is cancelled does not cancel the opening.
            return await asyncio.shield(self._opened)

    async def _hold(self, ready: asyncio.Future[Channel], attempt: Attempt) -> None:
        """Hold a connection from its beginning to its end. Never raises."""
        failure: str | None = None
        used = left = False
        try:
            async with self._open_stream(self.config, self.owner, self.credential) as stream:
                sampling = SAMPLING_BY[self.config.sampling]
                channel = Channel(
                    self.config.name,
                    self._info,
                    stream,
                    era=self.config.era,
                    sampling=sampling,
                    on_change=self._on_change,
                )
                running = asyncio.create_task(channel.run())
                try:
                    await until_ready(channel, running)
                    channel.answered = False
                    ready.set_result(channel)
                    await running
                finally:
                    used, left = channel.answered, stream.left
                    running.cancel()
                    await asyncio.gather(running, return_exceptions=True)
        except TransportFailed as error:
            failure = None if left or isinstance(error, CredentialRefused) else error.reason
            if not ready.done():
                ready.set_exception(error)
        except Exception as error:
            log.exception("mcp: %s: its connection broke", self.config.name)
            failure = type(error).__name__
        finally:
            if not ready.done():
                ready.set_exception(TransportFailed(failure or "cancelled"))
            self._report(attempt, used, failure)

    def _report(self, attempt: Attempt, used: bool, failure: str | None) -> None:
        """Report the end to the breaker: a connection that answered before it ended may be reopened
        at once."""
        if used:
            self._breaker.report(attempt, failure=None)
        elif failure is not None:
            self._breaker.report(attempt, failure=failure)
        else:
            self._breaker.give_up(attempt)


async def until_ready(channel: Channel, running: asyncio.Task[None]) -> None:
    """Raises: TransportFailed."""
    starting = asyncio.create_task(channel.start())
    try:
        await asyncio.wait([starting, running], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await running
        await starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


class ConnectionOwners:
    """The connections of one worker. `shared` None: no other worker is asked."""

    def __init__(
        self,
        *,
        info: dict[str, Any],
        open_stream: OpenStreamTransport,
        credentials: Credentials | None,
        shared: tuple[Redis, Relay] | None = None,
    ) -> None:
        self._info, self._open_stream, self._credentials = info, open_stream, credentials
        self._relay = None if shared is None else shared[1]
        self._worker = "" if self._relay is None else self._relay.worker
        self._ownership = None if shared is None else Ownership(shared[0], self._worker)
        self.on_change: OnChange = nobody_told
        """Is told of a server that says that its offer changed."""
        self._configs: dict[tuple[str, str], ServerConfig] = {}
        """By name and fingerprint."""
        self._connections: dict[ConnectionKey, ConnectionOwner] = {}
        self._locks: WeakValueDictionary[ConnectionKey, asyncio.Lock] = WeakValueDictionary()
        self._heartbeat = Periodic(
            "mcp: heartbeats of connections",
            OWNED_HEARTBEAT_S,
            self._renew_all,
            log=log,
            failure="mcp: no heartbeats of connections",
            at_once=False,
        )
        self._tasks = TaskSet()
        self._renewing: dict[ConnectionKey, asyncio.Task[None]] = {}
        if self._relay is not None:
            self._relay.servers[KIND] = self._serve

    def add_config(self, config: ServerConfig) -> None:
        """Allow a server: a worker opens only servers of its own settings for other workers."""
        used = {(key.server, key.fingerprint) for key in self._connections}
        self._configs = {
            key: it for key, it in self._configs.items() if key[0] != config.name or key in used
        }
        self._configs[config.name, config.fingerprint] = config

    async def close(self) -> None:
        await self._heartbeat.close()
        if renewing := self._renewing.values():  # one of them may be closing a connection
            await asyncio.wait(renewing, timeout=CLOSE_S)
        await self._tasks.close()
        await asyncio.gather(*(self._close(key) for key in list(self._connections)))

    async def ask(
        self,
        config: ServerConfig,
        owner: UpstreamOwner,
        credential: CredentialSet,
        ask: ChannelRequest,
        emit: Emit,
    ) -> ChannelResult:
        """Send a request to the worker that owns the connection. Raises: TransportFailed,
        RpcError."""
        key = ConnectionKey(
            server=config.name,
            org_id=owner.org_id,
            credential=credential.name,
            fingerprint=config.fingerprint,
        )
        for _ in range(MAX_MOVES):
            async with self._lock(key):
                worker = await self._owning_worker(key)
                is_here = worker == self._worker
                connection = self._connection(key, owner, credential) if is_here else None
            if connection is not None:
                return await connection.ask(ask, emit)
            assert self._relay is not None and self._ownership is not None
            try:
                found = await self._relay.ask(
                    worker,
                    KIND,
                    emit,
                    place=msgspec.to_builtins(key),
                    user_id=owner.user_id,
                    ask=msgspec.to_builtins(ask),
                )
            except WorkerGone:
                await self._ownership.release(key.redis_key, worker)
                continue
            if "refused" in found:
                raise CredentialRefused(**found["refused"])
            if "moved" not in found:
                return msgspec.convert(found, ChannelResult)
        raise NotSent("no_owner")

    async def _owning_worker(self, key: ConnectionKey) -> str:
        if self._ownership is None:
            return self._worker
        return await self._ownership.owner(key.redis_key)

    def _lock(self, key: ConnectionKey) -> asyncio.Lock:
        """Return the lock under which the owner of a connection is read and changed."""
        return self._locks.setdefault(key, asyncio.Lock())

    def _connection(
        self, key: ConnectionKey, owner: UpstreamOwner, credential: CredentialSet
    ) -> ConnectionOwner:
        """Return a connection of this worker, under its lock. Raises: NotSent."""
        connection = self._connections.get(key)
        if connection is None:
            if len(self._connections) >= MAX_OWNERS:
                raise NotSent("too_many_connections")
            config = self._configs[key.server, key.fingerprint]
            connection = ConnectionOwner(
                config, owner, credential, self._info, self._open_stream, self.on_change
            )
            self._connections[key] = connection
            if not self._heartbeat.is_running and self._relay is not None:
                self._heartbeat.start()
        connection.used_at = time.monotonic()
        return connection

    async def _serve(self, payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
        """Serve a request of another worker. The credential is read again: none is relayed."""
        key = msgspec.convert(payload["place"], ConnectionKey)
        config = self._configs.get((key.server, key.fingerprint))
        if config is None:
            raise Unreachable(key.server, "unknown_here")
        owner = UpstreamOwner(key.org_id, payload["user_id"])
        try:
            credential = await self._credential(config, owner)
            if credential.name != key.credential:
                # As the server would: the other worker looks for the newer credential.
                raise CredentialRefused(401, "")
            async with self._lock(key):
                is_here = key in self._connections
                if not is_here and await self._owning_worker(key) != self._worker:
                    return {"moved": True}
                connection = self._connection(key, owner, credential)
            result = await connection.ask(msgspec.convert(payload["ask"], ChannelRequest), emit)
        except CredentialRefused as error:
            return {"refused": {"status": error.status, "challenge": error.challenge}}
        except TransportFailed as error:
            raise Unreachable(key.server, error.reason) from error
        found: dict[str, Any] = msgspec.to_builtins(result)
        return found

    async def _credential(self, config: ServerConfig, owner: UpstreamOwner) -> CredentialSet:
        """Raises: TransportFailed."""
        if self._credentials is None or config.credential == "none":
            return NO_CREDENTIAL
        return await self._credentials.of(owner, config.name)

    # Heartbeats, and ends.

    async def _renew_all(self) -> None:
        """Renew each connection in its own task, since closing one may take long."""
        for key, connection in list(self._connections.items()):
            if key not in self._renewing:
                self._renewing[key] = self._tasks.spawn(self._renew(key, connection))

    async def _renew(self, key: ConnectionKey, connection: ConnectionOwner) -> None:
        """Keep the ownership of a connection, or close it."""
        try:
            is_current = await self._is_credential_current(key, connection)
            async with self._lock(key):
                if not is_current or not await self._stays(key, connection):
                    await self._close(key)
        except RedisError as error:
            log.warning("mcp: no heartbeat of a connection: %s", type(error).__name__)
        finally:
            del self._renewing[key]

    async def _is_credential_current(self, key: ConnectionKey, connection: ConnectionOwner) -> bool:
        try:
            current = await self._credential(connection.config, connection.owner)
        except TransportFailed:
            return False
        return current.name == key.credential

    async def _stays(self, key: ConnectionKey, connection: ConnectionOwner) -> bool:
        """True if the connection is in use and still owned by this worker."""
        assert self._ownership is not None
        if not connection.is_open and time.monotonic() > connection.used_at + IDLE_S:
            return False
        if not await self._ownership.renew(key.redis_key):
            log.warning("mcp: %s: another worker has its connection now", key.server)
            return False
        return True

    async def _close(self, key: ConnectionKey) -> None:
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        await connection.close()
        if self._ownership is not None:
            try:
                await self._ownership.release(key.redis_key)
            except RedisError:
                log.warning("mcp: %s: its ownership is not released; it expires", key.server)
