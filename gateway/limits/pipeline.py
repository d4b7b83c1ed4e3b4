"""Redis commands of one loop tick in one write, and their answers in one go.

Above: `scripts`. Below: redis-py's pool and connections; its own commands and pipelines cost
several times as much. What is called while a batch is on its way makes the next one, so that under
load a connection is never idle and a command costs little more than its packing. It knows no
script.

A command that fails is its caller's matter. A connection that fails takes with it all that was sent
over it and all that waits: Redis is away, and who asks next finds out anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

MAX_BATCH = 64
MAX_CONNECTIONS = 2
"""One is answered while the other is read."""
BATCHES_PER_CONNECTION = 8
"""Commands that must wait before the second connection is worth its cost."""
MAX_QUEUED = 4096
BATCH_TIMEOUT_S = 2.0
"""From taking a connection to the last answer; beyond it Redis counts as away."""

Command = tuple[Any, ...]
"""Texts, bytes and whole numbers."""


class QueueFull(Exception):
    """More commands wait than Redis could answer soon."""


class Pipeline:
    """On the connections of `redis`, which must not decode responses."""

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._queue: deque[tuple[bytes, asyncio.Future[Any]]] = deque()
        self._drivers: set[asyncio.Task[None]] = set()
        self._driving: set[asyncio.Task[None] | None] = set()
        """Those of them that will yet look into the queue."""

    async def call(self, command: Command) -> Any:
        """The answer. Raises: RedisError (ResponseError: what Redis says of this command), OSError,
        QueueFull."""
        if len(self._queue) >= MAX_QUEUED:
            raise QueueFull(f"{MAX_QUEUED} commands are waiting")
        answer = asyncio.get_running_loop().create_future()
        self._queue.append((pack_command(command), answer))
        wanted = 1 if len(self._queue) < BATCHES_PER_CONNECTION else MAX_CONNECTIONS
        if len(self._driving) < wanted:
            driver = asyncio.create_task(self._drive(), name="redis pipeline")
            self._drivers.add(driver)
            self._driving.add(driver)
            driver.add_done_callback(self._drivers.discard)
        return await answer

    async def _drive(self) -> None:
        """Until nothing waits."""
        sent: list[asyncio.Future[Any]] = []
        try:
            async with asyncio.timeout(BATCH_TIMEOUT_S) as deadline:
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
                try:
                    while self._queue:
                        deadline.reschedule(asyncio.get_running_loop().time() + BATCH_TIMEOUT_S)
                        sent.clear()
                        await self._exchange(connection, sent)
                    # At once: who calls from now on needs another driver.
                    self._driving.discard(asyncio.current_task())
                finally:
                    await self._pool.release(connection)
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            self._fail(sent, error)
            await self._pool.disconnect(inuse_connections=False)  # the idle ones are as dead
        except asyncio.CancelledError:
            self._fail(sent, ConnectionAbortedError("the pipeline was closed"))
            raise

    def _fail(self, sent: list[asyncio.Future[Any]], error: Exception) -> None:
        """Whoever waits, and the driver is gone."""
        self._driving.discard(asyncio.current_task())
        for answer in [*sent, *(answer for _, answer in self._queue)]:
            if not answer.done():
                answer.set_exception(error)
        self._queue.clear()

    async def _exchange(
        self, connection: AbstractConnection, sent: list[asyncio.Future[Any]]
    ) -> None:
        """One batch; `sent` is told whose commands are in it."""
        batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        sent += [answer for _, answer in batch]
        packed = b"".join([command for command, _ in batch])
        await connection.send_packed_command(packed, check_health=False)
        for answer in sent:
            await read_into(answer, connection)


async def read_into(answer: asyncio.Future[Any], connection: AbstractConnection) -> None:
    """The next answer on `connection`, which may be nobody's any more."""
    try:
        found = await connection.read_response(disable_decoding=True, disconnect_on_error=True)
    except ResponseError as error:
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(found)
