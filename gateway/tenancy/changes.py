"""How a change of identity reaches every worker: Redis pub/sub with a heartbeat.

What is announced is the id of what has changed (a key, a project, an organization), or
`EVERYTHING`. It does not know what a listener keeps.

Pub/sub forgets: what was published while a listener was away is gone. So a listener says *as of
when* it knows everything. It sends a PING down its subscription's own connection; replies on a
connection keep their order, so when the PONG is back, all that was published before that PING has
been handled. Nothing else proves it: a connection that looks open may be dead, and redis-py
reconnects silently. Each new subscription counts as "everything may have changed".

A connection that answers may still not be told all: of a Redis that is no longer the one to which
others publish. So each announcement has a number, which Redis counts, and is told of on the
connection, too. Who finds in Redis every NUMBER_S, on another connection, a number that it does not
hear of has lost an announcement: then everything may have changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import ClassVar

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.tasks import LogAndContinue, end_tasks
from gateway.db import tenant
from gateway.tenancy.errors import ChangeNotAnnounced

log = logging.getLogger(__name__)

CHANNEL = "tollgate:identity"
NUMBER = "tollgate:announced"
"""The key of the number of announcements, and the channel on which it is told."""
_PUBLISH = """
    local number = redis.call('INCR', KEYS[1])
    redis.call('PUBLISH', ARGV[1], ARGV[2])
    redis.call('PUBLISH', KEYS[1], number)
"""
EVERYTHING = "*"
HEARTBEAT_S = 0.2
IDLE_HEARTBEAT_S = 0.6
"""While nobody asks as of when everything is known. Whoever asks then finds no older answer than
MAX_STALENESS_S permits."""
SILENCE_S = 1.2
"""A connection without a PONG for so long is given up."""
NUMBER_S = 0.5
LATE_S = 0.1
"""A number may be found before the announcement comes by the other connection."""
MAX_BACKOFF_S = 1.0
ANNOUNCE_TIMEOUT_S = 2.0
MAX_STALENESS_S = 0.8
"""An older answer is read again: within the promised second, with room for the announcement."""


@asynccontextmanager
async def changing(
    db: AsyncEngine, redis: Redis, subject: str, *, org_id: str
) -> AsyncIterator[AsyncConnection]:
    """A transaction of that org after whose commit `subject` (the id of what changes, or
    `EVERYTHING`) is announced.

    Raises: ChangeNotAnnounced when the change is committed and Redis cannot be reached. Workers
    that cannot reach it either re-read their keys within a second by themselves; for the others
    the call must be repeated.
    """
    async with tenant(db, org_id) as conn:
        yield conn
    await announce(redis, subject)


async def announce(redis: Redis, subject: str) -> None:
    """Raises: ChangeNotAnnounced."""
    try:
        async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
            await publish_change(redis, CHANNEL, subject)
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        raise ChangeNotAnnounced("redis", "the change is saved but was not announced") from error


async def publish_change(redis: Redis, channel: str, message: str | bytes) -> None:
    """Publish what a channel's listeners are to hear, and count it. Raises: RedisError, OSError."""
    await redis.eval(_PUBLISH, 1, NUMBER, channel, message)


async def announce_suspensions(redis: Redis) -> None:
    """Announce that somebody may be suspended, or is no longer. Never raises: it is said again.

    Which invoice suspends whom `billing.invoices.suspension` says; each credential is read with it.
    """
    try:
        await announce(redis, EVERYTHING)
    except ChangeNotAnnounced as error:
        log.warning("workers hear of a suspension later: %s", error.message)


def unchecked(_: object) -> None:
    """Allow any change: the default of `check`, which may keep a row, as it is under its lock, from
    being changed (`If-Match`, or a credential that may not)."""


class ChangeListener:
    """Calls `on_change(subject)` for each announcement on `channel`, in order.

    All listeners of one Redis client hear on one connection, by one task (`Subscription`). `redis`
    must not decode responses. `clock`: monotonic seconds. `on_lost` is called when what is
    announced may be missed from now on.
    """

    def __init__(
        self,
        redis: Redis,
        on_change: Callable[[str], None],
        *,
        channel: str = CHANNEL,
        clock: Callable[[], float] = time.monotonic,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel, self.on_change, self.on_lost = channel, on_change, on_lost
        self.clock = clock
        self.heard_at = -math.inf
        """The same as `as_of`, for who does not mind how old it is."""
        self._redis = redis
        self._subscription: Subscription | None = None
        self._connected = asyncio.Event()

    @property
    def as_of(self) -> float:
        """Everything announced before this moment has been handed to `on_change`. While somebody
        asks for it, it is renewed every HEARTBEAT_S, else every IDLE_HEARTBEAT_S."""
        if self._subscription is not None:
            self._subscription.is_used = True
        return self.heard_at

    async def start(self, *, timeout_s: float = 2.0) -> None:
        """Returns once connected, or after `timeout_s` without: it goes on trying."""
        self._subscription = Subscription.of(self._redis)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._subscription.add(self)
                await self._connected.wait()

    async def close(self) -> None:
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.remove(self)

    def prove(self, moment: float) -> None:
        """Note that everything announced before a moment was handed on."""
        self.heard_at = max(self.heard_at, moment)
        self._connected.set()


class Subscription:
    """The connection on which all listeners of one Redis client hear."""

    _of: ClassVar[dict[Redis, Subscription]] = {}

    def __init__(self, redis: Redis) -> None:
        self.is_used = True
        """Somebody asked since the last heartbeat as of when everything is known."""
        self._redis = redis
        self._listeners: list[ChangeListener] = []
        self._pubsub: PubSub | None = None
        self._asked: set[str] = set()
        """The channels that this connection was told to subscribe to."""
        self._subscribed: set[str] = set()
        """Those of which it was confirmed."""
        self._num_pings = 0
        self._pings: dict[int, list[tuple[ChangeListener, float]]] = {}
        """By the number of a PING under way, whom its PONG proves to have heard all before when."""
        self.num_heard = 0
        """Announcements that this connection has heard of."""
        self._number: int | None = None
        """The number of the last announcement of which this connection knows; None: of none yet."""
        self._numbered_at = -math.inf
        self._comparing: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, redis: Redis) -> Subscription:
        """Return the one of a client; it is made for its first listener."""
        return cls._of.setdefault(redis, cls(redis))

    async def add(self, listener: ChangeListener) -> None:
        self._listeners.append(listener)
        channel = listener.channel
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name="listen for changes")
        elif channel in self._subscribed:
            listener.on_change(EVERYTHING)
        elif self._pubsub is not None:
            with suppress(RedisError, OSError):  # then the next connection subscribes to it
                await self._subscribe(self._pubsub)

    async def remove(self, listener: ChangeListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
        if not self._listeners:
            self._of.pop(self._redis, None)
            await end_tasks(*(each for each in (self._task, self._comparing) if each is not None))

    async def run(self) -> None:
        backoff_s = HEARTBEAT_S
        log_and_continue = LogAndContinue(log, "announcements: listener lost")
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # the library may have lost it, see `_listen`
            started = time.monotonic()
            pubsub = self._redis.pubsub()
            with log_and_continue:
                try:
                    await self._listen(pubsub)
                except (RedisError, OSError) as error:
                    if time.monotonic() - started > SILENCE_S:
                        backoff_s = HEARTBEAT_S
                    log.warning("announcements: listener lost (%s)", type(error).__name__)
                finally:
                    self._forget()
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _forget(self) -> None:
        self._pubsub = None
        self._asked, self._subscribed, self._pings = set(), set(), {}
        self._number = None
        for each in tuple(self._listeners):
            each.on_lost()

    async def _listen(self, pubsub: PubSub) -> None:
        """Raises TimeoutError after SILENCE_S without a PONG."""
        task = asyncio.current_task()
        assert task is not None
        async with asyncio.timeout(SILENCE_S) as silence:
            await self._subscribe(pubsub)
            self._pubsub = pubsub
            ping_at = time.monotonic()
            while True:
                await self._subscribe(pubsub)  # to those that came while it was connected
                if (now := time.monotonic()) >= ping_at:
                    await self._ping(pubsub)
                    self._compare_now_and_then(now)
                    ping_at = now + (HEARTBEAT_S if self.is_used else IDLE_HEARTBEAT_S)
                    self.is_used = False
                message = await pubsub.get_message(timeout=max(0.0, ping_at - time.monotonic()))
                # The library may return what it had instead of being cancelled, since `wait_for` of
                # Python 3.11 loses a cancellation that comes with the result: nothing would end the
                # next silence, or this task.
                if silence.expired():
                    raise TimeoutError
                if task.cancelling():
                    raise asyncio.CancelledError
                if message is not None and self._handle(message):
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)

    async def _subscribe(self, pubsub: PubSub) -> None:
        new = {NUMBER, *(each.channel for each in self._listeners)} - self._asked
        if new:
            self._asked |= new
            await pubsub.subscribe(*new)

    async def _ping(self, pubsub: PubSub) -> None:
        self._num_pings += 1
        self._pings[self._num_pings] = [
            (each, each.clock()) for each in self._listeners if each.channel in self._asked
        ]
        await pubsub.ping(str(self._num_pings))

    def _compare_now_and_then(self, now: float) -> None:
        if now - self._numbered_at >= NUMBER_S and (not self._comparing or self._comparing.done()):
            self._numbered_at = now
            self._comparing = asyncio.create_task(self._compare(), name="count announcements")

    async def _compare(self) -> None:
        """Find out whether an announcement was lost. A Redis that is away is noticed otherwise."""
        pubsub, known = self._pubsub, self._number
        try:
            found = int(await self._redis.get(NUMBER) or 0)
            if known is not None and found > known:
                await asyncio.sleep(LATE_S)
        except (RedisError, OSError):
            return
        if self._pubsub is not pubsub:
            return  # another connection, which begins with everything
        if known is None or self._number is None:
            self._number = found if self._number is None else self._number
        elif found < known or self._number < found:
            log.warning("announcements may be lost: Redis counts %d, heard were %d", found, known)
            self._number = found
            self.suppose_everything()

    def suppose_everything(self) -> None:
        """Let all listeners suppose that everything has changed."""
        for each in tuple(self._listeners):
            each.on_change(EVERYTHING)

    def _handle(self, message: dict[str, bytes | str | None]) -> bool:
        """True for a PONG of ours."""
        data, channel = message["data"], message.get("channel")
        name = channel.decode() if isinstance(channel, bytes) else channel
        hearing = [each for each in self._listeners if each.channel == name]
        match message["type"]:
            case "subscribe" if name is not None:
                self._subscribed.add(name)
                for each in hearing:
                    each.on_change(EVERYTHING)
            case "message" if isinstance(data, bytes) and name == NUMBER:
                self._number = int(data)
            case "message" if isinstance(data, bytes):
                self.num_heard += 1
                for each in hearing:
                    each.on_change(data.decode())
            case "pong" if isinstance(data, bytes):
                for listener, moment in self._pings.pop(int(data), ()):
                    listener.prove(moment)
                return True
        return False
