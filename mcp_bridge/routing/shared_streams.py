"""Leads what a server of the older era asks outside of requests to the one call it can be about.

Such a server may ask on the stream of a GET, where nothing says for which call. Of each of our
sessions there one worker has that stream open while a call of somebody who can be asked is under
way, and somewhat longer: its owner, written down in Redis. Calls in other workers join there. A
session is one principal's, so what comes is asked of nobody else; with several calls under way it
is asked of none.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.periodic import Periodic
from foundation.request_context import outside_requests
from foundation.tasks import end_tasks
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import LIST_CHANGES, RESOURCE_UPDATED
from mcp_bridge.protocol.rpc import METHOD_NOT_FOUND, Message, RpcError
from mcp_bridge.upstream.transport import ReadCount
from mcp_bridge.upstream.upstream import (
    MAX_RECONNECTS,
    SessionEnded,
    Unreachable,
    Upstream,
    UpstreamSession,
    as_object,
    legacy_headers,
)
from mcp_bridge.worker_relay import (
    OWNED_HEARTBEAT_S,
    Emit,
    Ownership,
    Payload,
    Relay,
    WorkerGone,
)

log = logging.getLogger(__name__)

KIND = "shared"
OPEN_S = 2.0
"""How long a call waits for the stream before it goes out all the same."""
IDLE_S = 30.0  # without a call
MUTE_S = 300.0
"""How long a server that has no such stream is not asked for it again."""
MAX_OPEN = 256  # streams per worker
MAX_OPEN_AT_ONE = 16
"""Streams at one server of a tenant: each takes one of its connections."""
DROPPED_S = 30.0
"""How long a session that was dropped is left alone: whoever reads its stream now has it alone."""
MAX_HEARD = 32  # messages of one call that are not taken yet
MAX_MOVES = 8
"""How often one call follows its stream to another worker, or opens it again."""
TOO_MUCH = ("too_much", "too_long", rpc.TOO_MANY_VALUES)
MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 30.0
JOINED: Message = {}
"""The first message to another worker: from now on it listens."""

MessageQueue = asyncio.Queue[Message]
Take = Callable[[Message], Awaitable[None]]
Key = tuple[str, str, str]
"""The owner of the session, the server, and the id of the session there."""


class SharedStream:
    """One stream, in the worker that owns it. `calls`: what each one hears goes there."""

    def __init__(self, upstream: Upstream, session: UpstreamSession) -> None:
        self.upstream, self.session = upstream, session
        self.calls: list[Take] = []
        self.used_at = self.began_at = time.monotonic()
        self.tried = asyncio.Event()
        """Set once the stream is open, or will not be soon."""
        self.ended = asyncio.Event()
        self.is_mute = False
        """True if the stream has ended and another try is useless for long."""
        self.was_left = False
        """True if it ended because no call listened any more."""
        self.task: asyncio.Task[None] | None = None
        self._spent = ReadCount()
        """Counts what was read since the last call began."""

    def is_over(self, now: float) -> bool:
        if self.is_mute:
            return self.began_at + MUTE_S < now
        return self.ended.is_set() or (not self.calls and self.used_at + IDLE_S < now)

    async def hear(self, take: Take, ready: asyncio.Event) -> bool:
        """Listen until the stream ends, and return whether another one may be opened at once."""
        self.calls.append(take)
        self._spent.bytes = self._spent.messages = 0
        try:
            await self.tried.wait()
            if not self.ended.is_set():
                ready.set()
            await self.ended.wait()
        finally:
            self.calls.remove(take)
            self.used_at = time.monotonic()
        return self.was_left and not self.is_mute

    async def close(self) -> None:
        if self.task is not None:
            await end_tasks(self.task)
        self._has_ended()  # one that had not begun says nothing

    def _has_ended(self) -> None:
        self.tried.set()
        self.ended.set()

    async def run(self) -> None:
        """Read the stream until it ends. Never raises, unless it is cancelled."""
        try:
            await self._read()
        except asyncio.CancelledError:
            self.was_left = True
            raise
        except SessionEnded:
            log.info("mcp: %s: a session ended, and its stream", self.upstream.name)
        except Exception:
            log.exception("mcp: %s: a stream broke", self.upstream.name)
        finally:
            self._has_ended()

    async def _read(self) -> None:
        last_id: str | None = None
        failures = 0
        while failures < MAX_RECONNECTS:
            failures, pause_s = failures + 1, MIN_PAUSE_S * 2**failures
            try:
                headers = legacy_headers(self.session, last_id)
                async with self.upstream.ask("GET", None, headers, endless=True) as answer:
                    if answer.status == 200 and answer.is_stream:
                        self.tried.set()
                        async with aclosing(answer.messages(self._spent)) as messages:
                            async for found in messages:
                                failures = 0
                                if found is not None:
                                    await self._take(found)
                        last_id = answer.last_id or last_id
                        pause_s = answer.retry_ms / 1000
                    elif answer.status != 409:  # there is another one, perhaps just left
                        self._found_mute(answer.status)
                        return
            except Unreachable as error:
                log.info("mcp: %s: a stream broke: %s", self.upstream.name, error.data)
                if as_object(error.data).get("reason") in TOO_MUCH:
                    self.is_mute = True
                    return
            self.tried.set()
            if not self.calls:
                self.was_left = True
                return
            await asyncio.sleep(min(max(pause_s, MIN_PAUSE_S), MAX_PAUSE_S))

    def _found_mute(self, status: int) -> None:
        self.is_mute = True
        if status < 300 or status == 405:
            self.upstream.mute_until = time.monotonic() + MUTE_S

    async def _take(self, message: Message) -> None:
        only = self.calls[0] if len(self.calls) == 1 else None
        if rpc.is_request(message):
            if message["method"] == "ping":
                await reply(self.upstream, self.session, rpc.result(message["id"], {}))
            elif only is None:
                await refuse(self.upstream, self.session, message)
            else:
                await only(message)
        elif rpc.is_notification(message) and only is not None:
            if message["method"] not in LIST_CHANGES and message["method"] != RESOURCE_UPDATED:
                await only(message)


async def refuse(upstream: Upstream, session: UpstreamSession, message: Message) -> None:
    error = RpcError(METHOD_NOT_FOUND, "Nobody can be asked this now")
    await reply(upstream, session, rpc.failure(message["id"], error))


async def reply(upstream: Upstream, session: UpstreamSession, message: Message) -> None:
    """Send a reply, as far as it is taken. Raises: SessionEnded."""
    try:
        await upstream.notify(session, message)
    except Unreachable as error:
        log.info("mcp: %s: an answer is not taken: %s", upstream.name, error.data)


class SharedStreams:
    """The shared streams of one worker. To be closed."""

    def __init__(self, redis: Redis, relay: Relay) -> None:
        self._relay, self._ownership = relay, Ownership(redis, relay.worker)
        self._closing: dict[Key, asyncio.Event] = {}
        self._open: dict[Key, SharedStream] = {}
        self._dropped: dict[str, float] = {}
        self._heartbeat = Periodic(
            "mcp: heartbeats of streams",
            OWNED_HEARTBEAT_S,
            self._renew_all,
            log=log,
            failure="mcp: no heartbeats of streams",
            expected=(RedisError,),
            at_once=False,
        )
        relay.servers[KIND] = self._serve

    async def close(self) -> None:
        await self._heartbeat.close()
        await asyncio.gather(*(self._close(key) for key in list(self._open)))

    async def drop(self, whose: str) -> None:
        """Close all streams of those sessions: they ended, or somebody listens there from now
        on."""
        self._dropped.pop(whose, None)
        self._dropped[whose] = time.monotonic()
        while not self._was_dropped(next(iter(self._dropped))):
            del self._dropped[next(iter(self._dropped))]
        for key, shared in list(self._open.items()):
            if key[0] == whose:
                shared.is_mute = True
                await self._close(key)

    @asynccontextmanager
    async def joined(
        self, whose: str, upstream: Upstream, session: UpstreamSession
    ) -> AsyncIterator[MessageQueue | None]:
        """Yield what the server asks and says outside of requests, while one call is under way.

        None: nothing is heard. `whose`: what tells the session's principal from all others.
        """
        may_ask = session.id is not None and upstream.config.transport == "http"
        is_well = upstream.breaker.state == "closed"
        if not may_ask or not is_well or upstream.mute_until > time.monotonic():
            yield None
            return
        heard: MessageQueue = asyncio.Queue(MAX_HEARD)
        ready = asyncio.Event()
        key = (whose, upstream.name, session.id or "")
        staying = asyncio.create_task(self._stay(key, upstream, session, heard, ready))
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    await ready.wait()
            except TimeoutError:
                log.info("mcp: %s: its stream is not there in time", upstream.name)
            yield None if staying.done() else heard
        finally:
            await end_tasks(staying)

    async def _stay(
        self,
        key: Key,
        upstream: Upstream,
        session: UpstreamSession,
        heard: MessageQueue,
        ready: asyncio.Event,
    ) -> None:
        """Listen until it is cancelled, or there is nothing to be heard."""

        async def take(message: Message) -> None:
            if not heard.full():
                heard.put_nowait(message)
            elif rpc.is_request(message):
                await refuse(upstream, session, message)

        try:
            for _ in range(MAX_MOVES):
                owner = await self._owner(key)
                if owner == self._relay.worker:
                    shared = await self._begin(key, upstream, session)
                    goes_on = shared is not None and await shared.hear(take, ready)
                else:
                    goes_on = await self._hear_elsewhere(owner, key, upstream, take, ready)
                if not goes_on:
                    return
        except (RpcError, RedisError, SessionEnded) as error:
            log.info("mcp: %s: its stream is not heard: %s", upstream.name, type(error).__name__)
        finally:
            ready.set()

    async def _hear_elsewhere(
        self, owner: str, key: Key, upstream: Upstream, take: Take, ready: asyncio.Event
    ) -> bool:
        async def emit(message: Message) -> None:
            if message == JOINED:
                ready.set()
            else:
                await take(message)

        try:
            found = await self._relay.ask(owner, KIND, emit, key=list(key))
        except WorkerGone:
            await self._ownership.release(redis_key(key), owner)
            return True
        if found["mute_s"]:
            upstream.mute_until = time.monotonic() + found["mute_s"]
        return bool(found["goes_on"])

    async def _serve(self, payload: Payload, emit: Emit) -> dict[str, Any]:
        """Serve a call of another worker.

        The stream is only ever opened by who has a call of its own there: what it needs does not
        travel.
        """
        whose, server, session = payload["key"]
        key = (whose, server, session)
        shared = self._open.get(key)
        if shared is None:
            await self._ownership.release(redis_key(key))
            return {"goes_on": True, "mute_s": 0.0}

        async def take(message: Message) -> None:
            try:
                await emit(message)
            except RedisError:
                if rpc.is_request(message):
                    await refuse(shared.upstream, shared.session, message)

        ready = asyncio.Event()
        telling = asyncio.create_task(tell_when(ready, emit))
        try:
            goes_on = await shared.hear(take, ready)
        finally:
            await end_tasks(telling)
        mute_s = max(0.0, shared.upstream.mute_until - time.monotonic())
        return {"goes_on": goes_on, "mute_s": mute_s}

    async def _begin(
        self, key: Key, upstream: Upstream, session: UpstreamSession
    ) -> SharedStream | None:
        """Open the stream, or return the open one; None: there are too many, or another worker
        reads it."""
        while True:
            if self._was_dropped(key[0]):
                await self._disown(key)
                return None
            shared = self._open.get(key)
            if shared is not None and (shared.is_mute or not shared.ended.is_set()):
                return shared
            there = [each for each, found in self._open.items() if found.upstream is upstream]
            if len(there) < MAX_OPEN_AT_ONE:
                there = list(self._open) if len(self._open) >= MAX_OPEN else []
            if not there:
                break
            idle = [each for each in there if not self._open[each].calls]
            if not idle:
                log.info("mcp: %s: too many streams are open", upstream.name)
                await self._disown(key)
                return None
            await self._close(min(idle, key=lambda each: self._open[each].used_at))
        shared = self._open[key] = SharedStream(upstream, session)
        shared.task = asyncio.create_task(shared.run(), context=outside_requests())
        if not self._heartbeat.is_running:
            self._heartbeat.start()
        return shared

    async def _owner(self, key: Key) -> str:
        """Return the worker that owns it; ours, where it was nobody's."""
        while key in self._closing:
            await self._closing[key].wait()
        if key in self._open:
            return self._relay.worker
        return await self._ownership.owner(redis_key(key))

    def _was_dropped(self, whose: str) -> bool:
        return self._dropped.get(whose, -math.inf) + DROPPED_S > time.monotonic()

    # Heartbeats, and ends.

    async def _renew_all(self) -> None:
        for key, shared in list(self._open.items()):
            if shared.is_over(time.monotonic()):
                await self._close(key)
            elif not await self._ownership.renew(redis_key(key)):
                log.warning("mcp: %s: another worker has its stream now", shared.upstream.name)
                await self._close(key)

    async def _close(self, key: Key) -> None:
        shared = self._open.pop(key, None)
        if shared is None:
            return
        self._closing[key] = asyncio.Event()
        try:
            await shared.close()
            await self._disown(key)
        finally:
            self._closing.pop(key).set()

    async def _disown(self, key: Key) -> None:
        try:
            await self._ownership.release(redis_key(key))
        except RedisError:
            log.warning("mcp: the ownership of a stream is not released; it expires")


async def tell_when(ready: asyncio.Event, emit: Emit) -> None:
    await ready.wait()
    await emit(JOINED)


def redis_key(key: Key) -> str:
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return f"mcp:shared_stream:{digest}"
