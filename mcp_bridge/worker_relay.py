"""Relays messages between workers: the worker that holds an open call gets what arrives elsewhere.

Each worker subscribes to a Redis channel of its own and to one of all workers. A channel without
subscribers means that its worker is gone; a worker that is subscribed but does not answer is gone
once its heartbeat key expires. Requests are not repeated: a worker that waits asks for the answer
again, which the other one keeps for a while.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from foundation.periodic import Periodic
from foundation.tasks import TaskSet
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, Message, RpcError, from_error

log = logging.getLogger(__name__)

ALIVE_TTL_S = 10
HEARTBEAT_S = 3.0
LOOK_S = 2.0
"""How often a worker that waits for another one checks that it is alive."""
RECONNECT_S = 0.5
RETURN_S = 1.0
"""How long a worker may take to reconnect to Redis before it counts as gone."""
POLL_S = 1.0
MAX_HANDLED = 256
"""Messages of other workers that are handled at once."""
MAX_SERVED = 2048
"""Requests of other workers that are served at once, open listeners among them."""
MAX_QUEUED = 1024
ANSWER_S = 60.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""How long, and how much in all, answers are kept that may be requested again."""
OWNED_S = 10
OWNED_HEARTBEAT_S = 3.0
EVERYBODY = "mcp:workers"

RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
RENEW = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""

Payload = dict[str, Any]
Emit = Callable[[Message], Awaitable[None]]
Handler = Callable[[Payload], Coroutine[Any, Any, None]]
Server = Callable[[Payload, Emit], Awaitable[dict[str, Any]]]


class OwnerGone(RpcError):
    """The worker that held the call is gone. Whether the server executed the call is unknown, so
    it is not repeated."""

    def __init__(self) -> None:
        super().__init__(
            INTERNAL_ERROR,
            "The worker that held this call is gone; the call was not repeated",
            {"reason": "owner_gone"},
        )


class RelayAnswers:
    """The latest answers, by the number of their request."""

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


class WorkerGone(OwnerGone):
    """The worker was gone before it got the request: nothing was done, another one may do it."""


class Relay:
    """Relays messages to other workers.

    `handlers`: by kind of message, those without an answer; `servers`: those that answer, and may
    emit messages before that.
    """

    def __init__(self, redis: Redis) -> None:
        self.worker = secrets.token_hex(8)
        self.handlers: dict[str, Handler] = {}
        self.servers: dict[str, Server] = {}
        self._redis = redis
        self._tasks = TaskSet()
        self._waiting: dict[str, asyncio.Queue[Payload]] = {}
        self._serving: dict[str, asyncio.Task[Any]] = {}
        self._answers = RelayAnswers()
        self._is_subscribed = asyncio.Event()
        self._heartbeat = Periodic(
            "mcp relay: heartbeat",
            HEARTBEAT_S,
            self._beat,
            log=log,
            failure="mcp relay: no heartbeat",
            expected=(RedisError,),
            at_once=False,
        )

    async def start(self) -> None:
        await self._beat()
        self._tasks.spawn(self._listen())
        self._heartbeat.start()
        await self._is_subscribed.wait()

    async def close(self) -> None:
        await self._heartbeat.close()
        await self._tasks.close()
        try:
            await self._redis.delete(alive_key(self.worker))
        except RedisError:
            log.warning("mcp relay: the heartbeat key is not deleted; it expires by itself")

    async def tell(self, worker: str, kind: str, **payload: Any) -> bool:
        """Send a message to a worker; False: it is not subscribed."""
        message = msgspec.json.encode({**payload, "kind": kind})
        return bool(await self._redis.publish(channel(worker), message))

    async def tell_all(self, kind: str, **payload: Any) -> None:
        await self._redis.publish(EVERYBODY, msgspec.json.encode({**payload, "kind": kind}))

    async def is_alive(self, worker: str) -> bool:
        """True if a worker is subscribed, after a moment to reconnect, and its heartbeat is fresh,
        which that of a frozen worker is not."""
        if not await self._is_connected(worker):
            await asyncio.sleep(RETURN_S)
            if not await self._is_connected(worker):
                return False
        return bool(await self._redis.exists(alive_key(worker)))

    async def _is_connected(self, worker: str) -> bool:
        # A killed worker's connection closes at once, long before its heartbeat expires.
        found = await self._redis.pubsub_numsub(channel(worker))
        return found[0][1] > 0

    async def ask(self, worker: str, kind: str, emit: Emit, **payload: Any) -> dict[str, Any]:
        """Return the answer of a worker; messages before it go to `emit`.

        A cancelled caller cancels the work there. Raises: RpcError.
        """
        number = secrets.token_hex(8)
        queue = self._waiting[number] = asyncio.Queue(MAX_QUEUED)
        back = {"back": self.worker, "number": number}
        is_open = True
        try:
            if not await self.tell(worker, kind, **payload, **back):
                raise WorkerGone
            while True:
                try:
                    reply = await asyncio.wait_for(queue.get(), LOOK_S)
                except TimeoutError:
                    if not await self.is_alive(worker):
                        raise OwnerGone from None
                    await self.tell(worker, "again", **back)
                    continue
                if "note" in reply:
                    await emit(reply["note"])
                    continue
                is_open = False
                if "lost" in reply:
                    raise OwnerGone
                if "error" in reply:
                    raise from_error(reply["error"])
                found: dict[str, Any] = reply["result"]
                return found
        finally:
            del self._waiting[number]
            if is_open:
                self._tasks.spawn(self.tell(worker, "abandoned", number=number))

    async def _beat(self) -> None:
        await self._redis.set(alive_key(self.worker), 1, ex=ALIVE_TTL_S)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as subscriber:
                    await subscriber.subscribe(channel(self.worker), EVERYBODY)
                    while True:
                        found = await subscriber.get_message(timeout=POLL_S)
                        if found is None:
                            continue
                        if found["type"] == "subscribe":
                            self._is_subscribed.set()
                        elif found["type"] == "message":
                            self._dispatch(found["data"])
            except RedisError as error:
                log.warning("mcp relay: disconnected from Redis: %s", type(error).__name__)
                await asyncio.sleep(RECONNECT_S)

    def _dispatch(self, data: bytes) -> None:
        payload: Payload = msgspec.json.decode(data)
        kind = payload["kind"]
        if kind == "said":
            self._take_reply(payload)
        elif kind == "abandoned":
            task = self._serving.get(payload["number"])
            if task is not None:
                # Cancelled only once it has begun, so that its own cleanup runs.
                asyncio.get_running_loop().call_soon(task.cancel)
        elif kind == "again":
            self._tasks.spawn(self._answer_again(payload["back"], payload["number"]))
        elif kind in self.servers and len(self._serving) >= MAX_SERVED:
            self._tasks.spawn(self._refuse(payload))
        elif kind not in self.servers and self._num_handled >= MAX_HANDLED:
            log.warning("mcp relay: too many messages, %s is dropped", kind)
        elif kind in self.servers:
            number = payload["number"]
            task = self._tasks.spawn(self._serve(self.servers[kind], payload))
            self._serving[number] = task
            task.add_done_callback(lambda _: self._serving.pop(number, None))
        elif kind in self.handlers:
            self._tasks.spawn(self.handlers[kind](payload))

    @property
    def _num_handled(self) -> int:
        return self._tasks.num_running - len(self._serving)

    async def _refuse(self, payload: Payload) -> None:
        error = RpcError(INTERNAL_ERROR, "The worker that would answer has too much to do")
        await self.tell(payload["back"], "said", number=payload["number"], error=error.to_error())

    def _take_reply(self, reply: Payload) -> None:
        """Queue a note or the answer. A full queue drops its oldest note, never the answer."""
        queue = self._waiting.get(reply["number"])
        if queue is not None:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(reply)

    async def _serve(self, server: Server, payload: Payload) -> None:
        back, number = payload["back"], payload["number"]

        async def emit(message: Message) -> None:
            try:
                await self.tell(back, "said", number=number, note=message)
            except RedisError as error:
                log.warning("mcp relay: a note is lost: %s", type(error).__name__)

        reply: Payload = {"kind": "said", "number": number}
        try:
            reply["result"] = await server(payload, emit)
        except RpcError as error:
            reply["error"] = error.to_error()
        except Exception:
            log.exception("mcp relay: %s for another worker failed", payload["kind"])
            failed = RpcError(INTERNAL_ERROR, "The worker that held this call failed at it")
            reply["error"] = failed.to_error()
        answer = msgspec.json.encode(reply)
        self._answers.put(number, answer)
        await self._answer(back, answer)

    async def _answer(self, back: str, answer: bytes) -> None:
        """Send an answer; a worker that misses it asks again."""
        try:
            await self._redis.publish(channel(back), answer)
        except RedisError as error:
            log.warning("mcp relay: an answer is not sent yet: %s", type(error).__name__)

    async def _answer_again(self, back: str, number: str) -> None:
        if number in self._serving:
            return
        answer = self._answers.get(number)
        lost: Payload = {"kind": "said", "number": number, "lost": True}
        await self._answer(back, answer or msgspec.json.encode(lost))


class Ownership:
    """Records in Redis which worker owns what, for OWNED_S after the owner's last heartbeat."""

    def __init__(self, redis: Redis, worker: str) -> None:
        self._redis, self._worker = redis, worker
        self._renew = redis.register_script(RENEW)
        self._release = redis.register_script(RELEASE)

    async def owner(self, key: str) -> str:
        """Return the worker that owns a key: this one, if nobody did."""
        while not await self._redis.set(key, self._worker, nx=True, ex=OWNED_S):
            found: Any = await self._redis.get(key)
            if found is not None:
                return str(found.decode())
        return self._worker

    async def renew(self, key: str) -> bool:
        """Own a key for another OWNED_S; False: another worker owns it."""
        return bool(await self._renew(keys=[key], args=[self._worker, OWNED_S]))

    async def release(self, key: str, owner: str | None = None) -> None:
        """Delete the ownership of a worker, by default of this one."""
        await self._release(keys=[key], args=[owner or self._worker])


def channel(worker: str) -> str:
    return f"mcp:worker:{worker}"


def alive_key(worker: str) -> str:
    return f"mcp:alive:{worker}"
