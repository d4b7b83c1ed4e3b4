"""The stream of one request of the older era: what is said on it, and how it can be read on.

Until something is said before the answer there is no stream, only an answer. From 2025-11-25 on it
begins with an id; whoever loses it reads on at any worker. Before that, what is said to nobody is
lost.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import deque
from collections.abc import Sequence

import msgspec

from foundation import sse
from foundation.tasks import TaskSet
from mcp_bridge.protocol import rpc
from mcp_bridge.protocol.eras import RESUMABLE_FROM
from mcp_bridge.protocol.rpc import INTERNAL_ERROR, Message, RequestId, RpcError
from mcp_bridge.routing.sessions import FIRST, MAX_KEPT_BYTES, Session, Sessions, StreamHead

log = logging.getLogger(__name__)

RETRY_MS = 500
MAX_QUEUED = 256
"""A reader that is so many events behind is disconnected, and may resume."""
MAX_TOGETHER = 64
"""The most events that are kept in one trip: a reader has as many turns as there are trips."""
READER_PATIENCE_S = 2.0
"""How long a stream waits in all for a reader that is nearly MAX_QUEUED behind."""
MAX_STREAM_NAME = 64
DIGITS = re.compile("[0-9]{1,9}")


class Stream:
    """A stream of events to a client.

    `request_id` None: the stream of a session, outside of requests. `tasks`: of who ends what is
    still being written when it closes.
    """

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        worker: str,
        request_id: RequestId | None,
        tasks: TaskSet,
    ) -> None:
        self.name = secrets.token_hex(8)
        self.answer: Message | None = None
        """The answer, once it is there."""
        self.primed = False
        self.ended = False
        self._sessions, self._session, self._tasks = sessions, session, tasks
        self._head = StreamHead(worker, request_id)
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting: deque[Message] = deque()
        """The messages that are neither kept nor queued yet."""
        self._writing: asyncio.Task[None] | None = None
        self._was_read = asyncio.Event()
        self._patience_s = READER_PATIENCE_S
        self._number = FIRST
        self._kept = 0
        about = session.about
        self._keeps = about.version >= RESUMABLE_FROM and not about.keeps_nothing
        self._has_reader = True
        self._lock = asyncio.Lock()

    @property
    def can_be_heard(self) -> bool:
        """True if what is said reaches the client, now or when it reads on."""
        return self._has_reader or (self.primed and self._keeps)

    async def prime(self) -> None:
        """Begin the stream."""
        async with self._lock:
            await self._prime()

    async def _prime(self) -> None:
        if self.primed:
            return
        self.primed = True
        if self._keeps:
            await self._sessions.begin_stream(self._session, self.name, self._head)
            id_ = event_id(self.name, FIRST)
            self._queue(sse.encode(b"", id=id_, retry_ms=RETRY_MS))

    def say(self, message: Message) -> None:
        """Say something soon, together with what else is said meanwhile. Raises: what kept it from
        being written before."""
        self._waiting.append(message)
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if self._writing is None:
            self._writing = self._tasks.spawn(self._write())

    async def put(self, message: Message) -> None:
        """Say something, and wait until it is kept."""
        self.say(message)
        await self._written()

    async def finish(self, message: Message) -> None:
        """End with the answer. It waits for what was said before it: at most what the bound on
        notifications lets pass, in a few trips."""
        self.ended = True
        try:
            await self._written()
            async with self._lock:
                self.answer = message
                if self.primed:
                    await self._say([message], is_last=True)
        finally:
            self._queue(None)

    async def _written(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        """Write what waits, until nothing does."""
        while self._waiting:
            async with self._lock:
                await self._prime()
                count = min(len(self._waiting), MAX_TOGETHER)
                await self._say([self._waiting.popleft() for _ in range(count)])
            await self._wait_for_reader()

    async def _wait_for_reader(self) -> None:
        """Let the reader catch up, for so long in all: the answer does not wait for a slow one."""
        await asyncio.sleep(0)
        now = asyncio.get_running_loop().time
        while self._has_reader and self._frames.qsize() > MAX_QUEUED - MAX_TOGETHER:
            self._was_read.clear()
            begun = now()
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._was_read.wait()
            except TimeoutError:
                return
            finally:
                self._patience_s = max(0.0, self._patience_s - (now() - begun))

    async def _say(self, messages: Sequence[Message], *, is_last: bool = False) -> None:
        """Store messages, then queue them. The answer, which is the last, is stored whatever its
        size."""
        said: list[tuple[int, bytes]] = []
        kept: dict[int, bytes] = {}
        for message in messages:
            self._number += 1
            data = rpc.encode(message)
            said.append((self._number, data))
            if self._keeps and (is_last or self._kept + len(data) <= MAX_KEPT_BYTES):
                kept[self._number] = data
                self._kept += len(data)
        if kept:
            place = self._session, self.name, self._head
            self._keeps = await self._sessions.keep(*place, kept)
        for number, data in said:
            id_ = event_id(self.name, number) if self._keeps and number in kept else None
            self._queue(sse.encode(data, b"message", id=id_))

    def _queue(self, frame: bytes | None) -> None:
        if not self._has_reader:
            return
        if self._frames.qsize() >= MAX_QUEUED:
            log.info("mcp: a client reads too slowly; its stream is closed")
            self.leave()
            self._frames.put_nowait(None)
        else:
            self._frames.put_nowait(frame)

    async def next(self) -> bytes | None:
        """Return the next event; None: the stream has ended."""
        frame = await self._frames.get()
        self._was_read.set()
        return frame

    def leave(self) -> None:
        """Note that its reader has gone."""
        self._has_reader = False
        self._was_read.set()

    def close(self) -> None:
        """End the stream for its reader."""
        self._frames.put_nowait(None)
        self.leave()


class EventPlace(msgspec.Struct, frozen=True):
    """The place of an event."""

    stream: str
    number: int


def event_id(stream: str, number: int) -> str:
    return f"{stream}_{number}"


def read_event_id(value: str) -> EventPlace | None:
    """Return the place that an event id names; None: it is none of ours."""
    stream, _, number = value.partition("_")
    if not stream.isalnum() or len(stream) > MAX_STREAM_NAME or not DIGITS.fullmatch(number):
        return None
    return EventPlace(stream, int(number))


class EventHead(msgspec.Struct, frozen=True):
    """The members of an event of ours that tell whether it is an answer, and to what."""

    id: RequestId | None = None
    method: str | None = None


def ends(data: bytes, request_id: RequestId) -> bool:
    """True if an event is the answer."""
    head = msgspec.json.decode(data, type=EventHead)
    return head.method is None and head.id == request_id


def forgotten() -> RpcError:
    """Return the error for a stream that had to make room for newer ones of its tenant."""
    said = "Nothing is kept of this stream any more"
    return RpcError(INTERNAL_ERROR, said, {"reason": "forgotten"})
