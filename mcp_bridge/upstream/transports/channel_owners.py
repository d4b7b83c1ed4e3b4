"""Finds the worker that has the one connection to a server that knows no HTTP, and asks it there.

There is one connection for each server, tenant and credential, in one worker: its owner, written
down in Redis for as long as it says that it is alive. All other workers ask it. An owner that is
gone before it was told is replaced; with one that goes while it works a call is lost, and not made
again. A server that fails rests, longer each time; one that nobody asks is let go.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.periodic import Periodic
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
from mcp_bridge.worker_relay import Relay, WorkerGone

log = logging.getLogger(__name__)

KIND = "channel"
OWNED_S = 10
"""Without a sign of life."""
SIGN_S = 3.0
IDLE_S = 30.0
"""Of a host without a connection, until another worker may have it."""
MAX_OWNERS = 1024
MAX_MOVES = 5
CLOSE_S = 15.0

GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

OpenStreamTransport = Callable[
    [ServerConfig, UpstreamOwner, CredentialSet], AbstractAsyncContextManager[StreamTransport]
]


class ConnectionKey(msgspec.Struct, frozen=True, kw_only=True):
    """The key of a connection of its own. `credential`: the name of a set."""

    server: str
    org_id: str
    credential: str

    @property
    def key(self) -> str:
        return f"mcp:{{{self.org_id}}}:owner:{self.server}:{self.credential}"


class ConnectionOwner:
    """The connection of one place, in its owner: opened when it is asked for, opened again when it
    has ended."""

    def __init__(
        self,
        config: ServerConfig,
        whose: UpstreamOwner,
        credential: CredentialSet,
        info: dict[str, Any],
        open_stream: OpenStreamTransport,
    ) -> None:
        self.config, self.whose, self.credential = config, whose, credential
        self.used_at = time.monotonic()
        self._info, self._open_stream = info, open_stream
        self._breaker = Breaker(config.name)
        self._turn = asyncio.Lock()
        self._opened: asyncio.Future[Channel] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def _is_of_use(self) -> bool:
        """True if it is open, or about to be."""
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
        async with self._turn:
            if self._opened is None or not self._is_of_use:
                if self._task is not None:
                    await asyncio.wait([self._task])  # one at a time: what has ended is cleared up
                try:
                    attempt = self._breaker.attempt()
                except UpstreamResting:
                    raise NotSent("resting") from None
                self._opened = asyncio.get_running_loop().create_future()
                self._opened.add_done_callback(lambda opened: opened.exception())
                self._task = asyncio.create_task(self._hold(self._opened, attempt))
            # Who leaves meanwhile takes nothing from who comes next.
            return await asyncio.shield(self._opened)

    async def _hold(self, ready: asyncio.Future[Channel], attempt: Attempt) -> None:
        """Hold a connection from its beginning to its end. Never raises."""
        failure: str | None = None
        used = left = False
        try:
            async with self._open_stream(self.config, self.whose, self.credential) as stream:
                sampling = SAMPLING_BY[self.config.sampling]
                channel = Channel(self.config.name, self._info, stream, sampling=sampling)
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
        """Report the end to the breaker: one that was of use before it ended is opened again at
        once."""
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
    """The connections of one worker.

    `redis` and `relay` None: nobody else is asked, for a look at a server.
    """

    def __init__(
        self,
        *,
        info: dict[str, Any],
        open_stream: OpenStreamTransport,
        credentials: Credentials,
        redis: Redis | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._info, self._open_stream, self._credentials = info, open_stream, credentials
        self._redis, self._relay = redis, relay
        self._mine = "" if relay is None else relay.worker
        self._configs: dict[str, ServerConfig] = {}
        self._connections: dict[ConnectionKey, ConnectionOwner] = {}
        self._turns: WeakValueDictionary[ConnectionKey, asyncio.Lock] = WeakValueDictionary()
        self._signing = Periodic(
            "mcp: signs of life of connections",
            lambda: SIGN_S,
            self._sign_all,
            log=log,
            failure="mcp: no sign of life of hosts",
            at_once=False,
        )
        self._tasks = TaskSet()
        self._signs: dict[ConnectionKey, asyncio.Task[None]] = {}
        if redis is not None:
            self._give_up = redis.register_script(GIVE_UP)
        if relay is not None:
            relay.servers[KIND] = self._serve

    def knows(self, config: ServerConfig) -> None:
        """Note a configuration: only what this worker's own settings have is ever opened."""
        self._configs[config.name] = config

    async def close(self) -> None:
        await self._signing.close()
        if signs := self._signs.values():  # one of them may be ending a connection
            await asyncio.wait(signs, timeout=CLOSE_S)
        await self._tasks.close()
        places = list(self._connections)
        await asyncio.gather(*(self._let_go(place) for place in places))

    async def ask(
        self,
        config: ServerConfig,
        whose: UpstreamOwner,
        credential: CredentialSet,
        ask: ChannelRequest,
        emit: Emit,
    ) -> ChannelResult:
        """Ask at the owner, wherever it is. Raises: TransportFailed, RpcError."""
        place = ConnectionKey(server=config.name, org_id=whose.org_id, credential=credential.name)
        for _ in range(MAX_MOVES):
            async with self._turn(place):
                owner = await self._owner(place)
                connection = (
                    self._connection(place, whose, credential) if owner == self._mine else None
                )
            if connection is not None:
                return await connection.ask(ask, emit)
            assert self._relay is not None
            try:
                found = await self._relay.ask(
                    owner,
                    KIND,
                    emit,
                    place=msgspec.to_builtins(place),
                    user_id=whose.user_id,
                    ask=msgspec.to_builtins(ask),
                )
            except WorkerGone:
                await self._disown(place, owner)
                continue
            if "refused" in found:
                raise CredentialRefused(**found["refused"])
            if "moved" not in found:
                return msgspec.convert(found, ChannelResult)
        raise NotSent("no_owner")

    async def _owner(self, place: ConnectionKey) -> str:
        """Return the worker that owns it; ours, where it was nobody's."""
        if self._redis is None:
            return self._mine
        while True:
            if await self._redis.set(place.key, self._mine, nx=True, ex=OWNED_S):
                return self._mine
            found: Any = await self._redis.get(place.key)
            if found is not None:
                return str(found.decode())

    async def _disown(self, place: ConnectionKey, owner: str) -> None:
        if self._redis is not None:
            await self._give_up(keys=[place.key], args=[owner])

    def _turn(self, place: ConnectionKey) -> asyncio.Lock:
        """Return the lock of a connection: its owner does not change while somebody goes by it."""
        return self._turns.setdefault(place, asyncio.Lock())

    def _connection(
        self, place: ConnectionKey, whose: UpstreamOwner, credential: CredentialSet
    ) -> ConnectionOwner:
        """Return the connection that is ours, at its turn. Raises: NotSent."""
        connection = self._connections.get(place)
        if connection is None:
            if len(self._connections) >= MAX_OWNERS:
                raise NotSent("too_many_connections")
            config = self._configs[place.server]
            connection = ConnectionOwner(config, whose, credential, self._info, self._open_stream)
            self._connections[place] = connection
            if not self._signing.is_running and self._relay is not None:
                self._signing.start()
        connection.used_at = time.monotonic()
        return connection

    async def _serve(self, payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
        """Serve a request of another worker.

        The credential is had anew: none travels between workers.
        """
        place = msgspec.convert(payload["place"], ConnectionKey)
        config = self._configs.get(place.server)
        if config is None:
            raise Unreachable(place.server, "unknown_here")
        whose = UpstreamOwner(place.org_id, payload["user_id"])
        try:
            credential = await self._current(config, whose)
            if credential.name != place.credential:
                raise CredentialRefused(
                    401, ""
                )  # as the server would: who asks looks for the newer one
            async with self._turn(place):
                if place not in self._connections and await self._owner(place) != self._mine:
                    return {"moved": True}
                connection = self._connection(place, whose, credential)
            told = await connection.ask(msgspec.convert(payload["ask"], ChannelRequest), emit)
        except CredentialRefused as error:
            return {"refused": {"status": error.status, "challenge": error.challenge}}
        except TransportFailed as error:
            raise Unreachable(place.server, error.reason) from error
        found: dict[str, Any] = msgspec.to_builtins(told)
        return found

    async def _current(self, config: ServerConfig, whose: UpstreamOwner) -> CredentialSet:
        """Raises: TransportFailed."""
        if config.credential == "none":
            return NO_CREDENTIAL
        return await self._credentials.of(whose, config.name)

    # Signs of life, and ends.

    async def _sign_all(self) -> None:
        for place, connection in list(self._connections.items()):
            if place not in self._signs:
                self._signs[place] = self._tasks.spawn(self._sign(place, connection))

    async def _sign(self, place: ConnectionKey, connection: ConnectionOwner) -> None:
        """Sign one connection by itself: one that takes long to end costs no other its sign of
        life."""
        try:
            is_shown = await self._is_shown(place, connection)
            async with self._turn(place):
                if not is_shown or not await self._keeps(place, connection):
                    await self._let_go(place)
        except RedisError as error:
            log.warning("mcp: no sign of life of a host: %s", type(error).__name__)
        finally:
            del self._signs[place]

    async def _is_shown(self, place: ConnectionKey, connection: ConnectionOwner) -> bool:
        """True if its credential is in use."""
        try:
            current = await self._current(connection.config, connection.whose)
        except TransportFailed:
            return False
        return current.name == place.credential

    async def _keeps(self, place: ConnectionKey, connection: ConnectionOwner) -> bool:
        """True if it stays ours: it is used, and nobody else has it."""
        assert self._redis is not None
        if not connection.is_open and time.monotonic() > connection.used_at + IDLE_S:
            return False
        if await self._owner(place) != self._mine:
            log.warning("mcp: %s: another worker has its connection now", place.server)
            return False
        await self._redis.expire(place.key, OWNED_S)
        return True

    async def _let_go(self, place: ConnectionKey) -> None:
        connection = self._connections.pop(place, None)
        if connection is None:
            return
        await connection.close()
        if self._relay is not None:
            try:
                await self._disown(place, self._relay.worker)
            except RedisError:
                log.warning("mcp: %s: stays ours until its time is over", place.server)
