"""How a change of identity reaches every worker: Redis pub/sub with a heartbeat.

What is announced is the id of a key, or `EVERYTHING`. It does not know what a listener keeps.

Pub/sub forgets: what was published while a listener was away is gone. So a listener says *as of
when* it knows everything. It sends a PING down its subscription's own connection; replies on a
connection keep their order, so when the PONG is back, all that was published before that PING has
been handled. Nothing else proves it: a connection that looks open may be dead, and redis-py
reconnects silently. Each new subscription counts as "everything may have changed".
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from foundation.tasks import LogAndContinue, end_tasks
from gateway.db import tenant
from gateway.tenancy.errors import ChangeNotAnnounced

log = logging.getLogger(__name__)

CHANNEL = "tollgate:identity"
EVERYTHING = "*"
HEARTBEAT_S = 0.2
SILENCE_S = 1.0
"""A connection without a PONG for so long is given up."""
MAX_BACKOFF_S = 1.0
ANNOUNCE_TIMEOUT_S = 2.0
MAX_STALENESS_S = 0.8
"""An older answer is read again: within the promised second, with room for the announcement."""


@asynccontextmanager
async def changing(
    db: AsyncEngine, redis: Redis, subject: str, *, org_id: str
) -> AsyncIterator[AsyncConnection]:
    """A transaction of that org after whose commit `subject` (a key's id or `EVERYTHING`) is
    announced.

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
            await redis.publish(CHANNEL, subject)
    except (RedisError, OSError) as error:  # TimeoutError is an OSError
        raise ChangeNotAnnounced("redis", "the change is saved but was not announced") from error


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
    """Calls `on_change(subject)` for each announcement on `channel`, from one task of its own, in
    order.

    `redis` must not decode responses. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        redis: Redis,
        on_change: Callable[[str], None],
        *,
        channel: str = CHANNEL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.as_of = -math.inf
        """Everything announced before this moment has been handed to `on_change`."""
        self._redis = redis
        self._on_change = on_change
        self._channel = channel
        self._clock = clock
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()

    async def start(self, *, timeout_s: float = 2.0) -> None:
        """Returns once connected, or after `timeout_s` without: it goes on trying."""
        self._task = asyncio.create_task(self._run(), name=f"listen to {self._channel}")
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
            self._task = None

    async def _run(self) -> None:
        backoff_s = HEARTBEAT_S
        log_and_continue = LogAndContinue(log, f"{self._channel}: listener lost")
        while True:
            started = self._clock()
            pubsub = self._redis.pubsub()
            with log_and_continue:
                try:
                    await self._listen(pubsub)
                except (RedisError, OSError) as error:
                    if self._clock() - started > SILENCE_S:
                        backoff_s = HEARTBEAT_S
                    log.warning("%s: listener lost (%s)", self._channel, type(error).__name__)
                finally:
                    await pubsub.aclose()  # type: ignore[no-untyped-call]
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _listen(self, pubsub: PubSub) -> None:
        """Raises TimeoutError after SILENCE_S without a PONG."""
        async with asyncio.timeout(SILENCE_S) as silence:
            await pubsub.subscribe(self._channel)
            ping_at = self._clock()
            while True:
                if (now := self._clock()) >= ping_at:
                    await pubsub.ping(repr(now))
                    ping_at = now + HEARTBEAT_S
                message = await pubsub.get_message(timeout=max(0.0, ping_at - self._clock()))
                if silence.expired():
                    # The library returned what it had instead of being cancelled, as it may after
                    # a stall: nothing would end the next silence.
                    raise TimeoutError
                if message is not None and self._handle(message):
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)

    def _handle(self, message: dict[str, bytes | str | None]) -> bool:
        """True for a PONG of ours."""
        data = message["data"]
        match message["type"]:
            case "subscribe":
                self._on_change(EVERYTHING)
            case "message" if isinstance(data, bytes):
                self._on_change(data.decode())
            case "pong" if isinstance(data, bytes):
                self.as_of = max(self.as_of, float(data))
                self._connected.set()
                return True
        return False
