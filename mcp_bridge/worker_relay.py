"""Relays messages between workers: who holds an open call is told what comes for it elsewhere.

Each worker hears one channel of its own and one of all. A channel that nobody hears is one whose
worker is gone; one that says nothing for a while, though it is heard, has an owner whose sign of
life is gone. What is lost here is not done again: who waits asks for its answer again, which is
kept for a while where it was made.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.periodic import Periodic
from foundation.tasks import end_tasks
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, Message, RpcError, from_error

log = logging.getLogger(__name__)

ALIVE_TTL_S = 10
HEARTBEAT_S = 3.0
LOOK_S = 2.0
"""How often who waits for another worker looks whether it is still there."""
RECONNECT_S = 0.5
RETURN_S = 1.0
"""For a worker that lost its connection to Redis and has another one."""
POLL_S = 1.0
MAX_HANDLED = 256
"""Messages of others that are worked at, at once."""
MAX_SERVED = 2048
"""Requests of others that are answered, at once: who listens to a server is one of them."""
MAX_QUEUED = 1024
ANSWER_S = 60.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""For how long, and how much of it, answers are kept that may be asked for again."""
EVERYBODY = "mcp:workers"

Payload = dict[str, Any]
Emit = Callable[[Message], Awaitable[None]]
Handler = Callable[[Payload], Awaitable[None]]
Server = Callable[[Payload, Emit], Awaitable[dict[str, Any]]]


class OwnerGone(RpcError):
    """The worker that held the call is gone; whether the server did what it was asked is unknown,
    and it is not asked again."""

    def __init__(self) -> None:
        super().__init__(
            INTERNAL_ERROR,
            "The worker that held this call is gone; the call was not repeated",
            {"reason": "owner_gone"},
        )


class RelayAnswers:
    """The answers of late, by the number of their question."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._num_bytes = 0

    def put(self, number: str, answer: bytes) -> None:
        now = time.monotonic()
        self._found[number] = (now, answer)
        self._num_bytes += len(answer)
        while self._num_bytes > MAX_ANSWER_BYTES or self._oldest_s(now) > ANSWER_S:
            _, (_, dropped) = self._found.popitem(last=False)
            self._num_bytes -= len(dropped)

    def get(self, number: str) -> bytes | None:
        return self._found.get(number, (0.0, None))[1]

    def _oldest_s(self, now: float) -> float:
        return now - next(iter(self._found.values()))[0] if self._found else 0.0


class NotHeard(OwnerGone):
    """It was gone before it was told: nothing was done, and another worker may be asked."""


class Relay:
    """Relays messages to other workers.

    `handlers`: by kind, what is done with a message; `servers`: with one that wants an answer, and
    what is said on the way to it.
    """

    def __init__(self, redis: Redis) -> None:
        self.worker = secrets.token_hex(8)
        self.handlers: dict[str, Handler] = {}
        self.servers: dict[str, Server] = {}
        self._redis = redis
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str, asyncio.Queue[Payload]] = {}
        self._serving: dict[str, asyncio.Task[Any]] = {}
        self._answers = RelayAnswers()
        self._heard = asyncio.Event()
        self._beating = Periodic(
            "mcp relay: sign of life",
            HEARTBEAT_S,
            self._beat,
            log=log,
            failure="mcp relay: no sign of life",
            expected=(RedisError,),
            at_once=False,
        )

    async def start(self) -> None:
        await self._beat()
        self._spawn(self._listen())
        self._beating.start()
        await self._heard.wait()

    async def close(self) -> None:
        await self._beating.close()
        await end_tasks(*self._tasks)
        try:
            await self._redis.delete(alive_key(self.worker))
        except RedisError:
            log.warning("mcp relay: the sign of life stays until it ends by itself")

    async def tell(self, worker: str, kind: str, **payload: Any) -> bool:
        """Tell a worker; False: nobody hears it."""
        heard = await self._redis.publish(
            channel(worker), msgspec.json.encode({**payload, "kind": kind})
        )
        return bool(heard)

    async def tell_all(self, kind: str, **payload: Any) -> None:
        await self._redis.publish(EVERYBODY, msgspec.json.encode({**payload, "kind": kind}))

    async def is_alive(self, worker: str) -> bool:
        """True if a worker was heard within the time it takes to come back; a frozen one was
        not."""
        if not await self._is_heard(worker):
            await asyncio.sleep(RETURN_S)
            if not await self._is_heard(worker):
                return False
        return bool(await self._redis.exists(alive_key(worker)))

    async def _is_heard(self, worker: str) -> bool:
        """A killed worker's connection is closed at once, long before its sign of life ends."""
        found = await self._redis.pubsub_numsub(channel(worker))
        return found[0][1] > 0

    async def ask(self, worker: str, kind: str, emit: Emit, **payload: Any) -> dict[str, Any]:
        """Return what that worker answers, once it does; what it says on the way goes to `emit`.

        If who asks leaves, it is told. Raises: RpcError.
        """
        number = secrets.token_hex(8)
        queue = self._waiting[number] = asyncio.Queue(MAX_QUEUED)
        back = {"back": self.worker, "number": number}
        is_open = True
        try:
            if not await self.tell(worker, kind, **payload, **back):
                raise NotHeard
            while True:
                try:
                    said = await asyncio.wait_for(queue.get(), LOOK_S)
                except TimeoutError:
                    if not await self.is_alive(worker):
                        raise OwnerGone from None
                    await self.tell(worker, "again", **back)
                    continue
                if "note" in said:
                    await emit(said["note"])
                    continue
                is_open = False
                if "lost" in said:
                    raise OwnerGone
                if "error" in said:
                    raise from_error(said["error"])
                found: dict[str, Any] = said["result"]
                return found
        finally:
            del self._waiting[number]
            if is_open:
                self._spawn(self._abandon(worker, number))

    async def _abandon(self, worker: str, number: str) -> None:
        await self.tell(worker, "abandoned", number=number)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report)
        return task

    async def _beat(self) -> None:
        await self._redis.set(alive_key(self.worker), 1, ex=ALIVE_TTL_S)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as heard:
                    await heard.subscribe(channel(self.worker), EVERYBODY)
                    while True:
                        found = await heard.get_message(timeout=POLL_S)
                        if found is None:
                            continue
                        if found["type"] == "subscribe":
                            self._heard.set()
                        elif found["type"] == "message":
                            self._take(found["data"])
            except RedisError as error:
                log.warning("mcp relay: not heard for a while: %s", type(error).__name__)
                await asyncio.sleep(RECONNECT_S)

    def _take(self, data: bytes) -> None:
        payload: Payload = msgspec.json.decode(data)
        kind = payload["kind"]
        if kind == "said":
            self._hear(payload)
        elif kind == "abandoned":
            task = self._serving.get(payload["number"])
            if task is not None:
                # Not before it has begun: what it does about being left is its own.
                asyncio.get_running_loop().call_soon(task.cancel)
        elif kind == "again":
            self._spawn(self._say_again(payload["back"], payload["number"]))
        elif kind in self.servers and len(self._serving) >= MAX_SERVED:
            self._spawn(self._refuse(payload))
        elif kind not in self.servers and len(self._tasks) - len(self._serving) >= MAX_HANDLED:
            log.warning("mcp relay: too much to do, %s is dropped", kind)
        elif kind in self.servers:
            number = payload["number"]
            serving = self._serving[number] = self._spawn(self._serve(self.servers[kind], payload))
            serving.add_done_callback(lambda _: self._serving.pop(number, None))
        elif kind in self.handlers:
            self._spawn(self.handlers[kind](payload))

    async def _refuse(self, payload: Payload) -> None:
        error = RpcError(INTERNAL_ERROR, "The worker that would answer has too much to do")
        await self.tell(payload["back"], "said", number=payload["number"], error=error.to_error())

    def _hear(self, said: Payload) -> None:
        """Take a note; of too many notes the oldest is lost; the result never is."""
        queue = self._waiting.get(said["number"])
        if queue is not None:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(said)

    async def _serve(self, server: Server, payload: Payload) -> None:
        back, number = payload["back"], payload["number"]

        async def emit(message: Message) -> None:
            try:
                await self.tell(back, "said", number=number, note=message)
            except RedisError as error:
                log.warning("mcp relay: a note is lost: %s", type(error).__name__)

        said: Payload = {"kind": "said", "number": number}
        try:
            said["result"] = await server(payload, emit)
        except RpcError as error:
            said["error"] = error.to_error()
        except Exception:
            log.exception("mcp relay: %s for another worker failed", payload["kind"])
            failed = RpcError(INTERNAL_ERROR, "The worker that held this call failed at it")
            said["error"] = failed.to_error()
        answer = msgspec.json.encode(said)
        self._answers.put(number, answer)
        await self._answer(back, answer)

    async def _answer(self, back: str, answer: bytes) -> None:
        """Send an answer: who does not hear it asks again."""
        try:
            await self._redis.publish(channel(back), answer)
        except RedisError as error:
            log.warning("mcp relay: an answer waits: %s", type(error).__name__)

    async def _say_again(self, back: str, number: str) -> None:
        if number in self._serving:
            return
        answer = self._answers.get(number)
        lost: Payload = {"kind": "said", "number": number, "lost": True}
        await self._answer(back, answer or msgspec.json.encode(lost))


def report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("mcp: a task failed", exc_info=error)


def channel(worker: str) -> str:
    return f"mcp:worker:{worker}"


def alive_key(worker: str) -> str:
    return f"mcp:alive:{worker}"
