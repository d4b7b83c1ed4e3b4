"""Sends commands to Redis in batches: all that are called in one turn of the loop are one write,
and one read brings many answers.

From then on it is ours: redis-py's own way is a task, several timeouts and a stream reader for each
exchange. Commands called while batches are on their way make the next one, so that under load a
connection is never idle and a command costs little more than its packing. It knows no script.

A command that fails is its caller's matter. A connection that fails takes with it all that was sent
over it and all that waits: Redis is away, and who asks next finds out anew.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import hiredis
import msgspec
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import NoScriptError, RedisError, ResponseError

from foundation.request_context import outside_requests

MAX_BATCH = 64
MAX_BATCHES = 2
"""This many batches are on their way at a time: one is answered while the other is read."""
WORTH_A_BATCH = 8
"""Commands that must wait before they go out behind a batch that is not answered yet."""
MAX_QUEUED = 4096
BATCH_TIMEOUT_S = 2.0
"""From asking for a connection, or from a batch's leaving, to its last answer; beyond it Redis
counts as away."""

Command = tuple[Any, ...]
"""Texts, bytes and whole numbers."""
NOT_YET = object()


class CommandAnswer(Protocol):
    """Takes what Redis answers: a future, of one command, or `CommandAnswers`."""

    def done(self) -> bool: ...

    def set_result(self, result: Any, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


class CommandAnswers:
    """Collects the answers of `number` commands that are awaited together."""

    def __init__(self, number: int) -> None:
        self.all: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._found: list[Any] = []
        self._number = number

    def done(self) -> bool:
        return self.all.done()

    def set_result(self, result: Any, /) -> None:
        self._found.append(result)
        if len(self._found) == self._number:
            self.all.set_result(self._found)

    def set_exception(self, error: Exception, /) -> None:
        if isinstance(error, ResponseError):
            self.set_result(error)  # a matter of this command alone
        else:
            self.all.set_exception(error)


class QueueFull(Exception):
    """Says that more commands wait than Redis could answer soon."""


class Pipeline:
    """Batches commands on one connection of `redis`, which must not decode responses; it is kept
    until it fails or `redis` is closed."""

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._queue: deque[tuple[bytes, CommandAnswer]] = deque()
        self._wire: Wire | None = None
        self._lost: AbstractConnection | None = None
        """To be given back before another is asked for."""
        self._connecting: asyncio.Task[None] | None = None

    async def call(self, command: Command) -> Any:
        """The answer. Raises: RedisError (ResponseError: what Redis says of this command), OSError,
        QueueFull."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._send((command,), answer)
        return await answer

    async def call_all(self, commands: Sequence[Command]) -> list[Any]:
        """The answers in order, of a command that fails a ResponseError. All are awaited at once,
        which costs a fraction of as many calls. Raises: RedisError, OSError, QueueFull."""
        if not commands:
            return []
        answers = CommandAnswers(len(commands))
        self._send(commands, answers)
        return await answers.all

    def _send(self, commands: Sequence[Command], answer: CommandAnswer) -> None:
        """Raises: QueueFull."""
        if len(self._queue) + len(commands) > MAX_QUEUED:
            raise QueueFull(f"{len(self._queue)} commands are waiting")
        for each in commands:
            self._queue.append((hiredis.pack_command(each), answer))
        if self._wire is not None:
            self._wire.wake_up()
        elif self._connecting is None:
            self._connecting = asyncio.create_task(
                self._connect(), name="redis pipeline", context=outside_requests()
            )
            self._connecting.add_done_callback(self._on_connected)

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(BATCH_TIMEOUT_S):
                await self._give_back()
                connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            self._wire = Wire(connection, self._queue, self._on_lost)
            self._wire.wake_up()
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            self._fail(NotConnected(str(error)) if isinstance(error, ResponseError) else error)
            await self._pool.disconnect(inuse_connections=False)  # the idle ones are as dead

    def _on_connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if task.cancelled():
            self._fail(ConnectionAbortedError("the pipeline was closed"))
        elif (error := task.exception()) is not None:
            # Of a connection that is closed while it is made redis-py says an AttributeError.
            self._fail(NotConnected(f"not connected: {error!r}"))

    def _fail(self, error: Exception) -> None:
        fail([answer for _, answer in self._queue], error)
        self._queue.clear()

    async def _give_back(self) -> None:
        if self._lost is None:
            return
        lost, self._lost = self._lost, None
        await lost.disconnect(nowait=True)
        await self._pool.release(lost)
        await self._pool.disconnect(inuse_connections=False)

    def _on_lost(self, connection: AbstractConnection) -> None:
        self._wire, self._lost = None, connection


class Wire(asyncio.Protocol):
    """A connection of redis-py's, taken over. `queue` is sent; answers come in its order."""

    def __init__(
        self,
        connection: AbstractConnection,
        queue: deque[tuple[bytes, CommandAnswer]],
        on_lost: Callable[[AbstractConnection], None],
    ) -> None:
        self._connection, self._queue, self._on_lost = connection, queue, on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=to_error, notEnoughData=NOT_YET)
        self._sent: deque[CommandAnswer] = deque()
        self._batches: deque[CommandBatch] = deque()
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception = NotConnected("the connection to Redis was lost")
        writer = connection._writer  # no public way leads to it
        assert writer is not None, "redis-py has just connected"
        self._transport = writer.transport
        self._theirs = self._transport.get_protocol()
        self._transport.set_protocol(self)

    def wake_up(self) -> None:
        """Schedule a write: something was put into the queue; what else is in this turn of the loop
        goes with it."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._is_due = False
        num_out, num_queued = len(self._batches), len(self._queue)
        if not num_queued or num_out >= MAX_BATCHES or (num_out and num_queued < WORTH_A_BATCH):
            return
        taken = [self._queue.popleft() for _ in range(min(MAX_BATCH, num_queued))]
        self._sent.extend([answer for _, answer in taken])
        self._batches.append(CommandBatch(self._loop.time() + BATCH_TIMEOUT_S, len(taken)))
        if self._timer is None:
            self._timer = self._loop.call_later(BATCH_TIMEOUT_S, self._look)
        self._transport.write(b"".join([packed for packed, _ in taken]))
        if self._queue:
            self.wake_up()

    def _look(self) -> None:
        """Look whether the first batch is late, and look again later. There is one timer for all
        batches."""
        self._timer = None
        if not self._batches:
            return
        expires = self._batches[0].expires
        if self._loop.time() < expires:
            self._timer = self._loop.call_at(expires, self._look)
        else:
            self._error = TimeoutError("Redis did not answer")
            self._transport.abort()

    # asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (found := self._reader.gets(False)) is not NOT_YET:
                if not isinstance(found, hiredis.PushNotification):
                    self._answer(found)
        except (hiredis.ProtocolError, IndexError) as error:  # no answer, or one too many
            self._error = NotConnected(f"not Redis: {type(error).__name__}")
            self._transport.abort()
        if self._queue:
            self.wake_up()

    def _answer(self, found: Any) -> None:
        answer = self._sent.popleft()
        batch = self._batches[0]
        batch.num_left -= 1
        if not batch.num_left:
            self._batches.popleft()
        if answer.done():
            return  # nobody waits for it any more
        if isinstance(found, RedisError):
            answer.set_exception(found)
        else:
            answer.set_result(found)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost(self._connection)
        fail([*self._sent, *(answer for _, answer in self._queue)], self._error)
        self._queue.clear()
        self._theirs.connection_lost(exc)  # who closes it waits for that


class CommandBatch(msgspec.Struct):
    expires: float
    """By the loop's clock."""
    num_left: int


def fail(answers: Iterable[CommandAnswer], error: Exception) -> None:
    for answer in answers:
        if not answer.done():
            answer.set_exception(error)


def to_error(text: str) -> RedisError:
    """Make an error of its text, as redis-py would."""
    return NoScriptError(text) if text.startswith("NOSCRIPT") else ResponseError(text)
