"""The engine's socket: connections on an asyncio loop around the step thread.

Every request belongs to the connection that submitted it. A lost connection aborts its requests;
what they had cost, and what finished ones had whose usage it did not ack, becomes `OrphanedUsage`,
offered until some gateway acks it. Knows no torch, no text and no tenants.

One bad or slow peer harms itself alone: a malformed frame or a write buffer beyond
`MAX_WRITE_BUFFER_BYTES` ends that connection, and nothing here ever waits for a peer to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import msgspec

from engine.errors import (
    ConfigError,
    EngineError,
    EngineOverloaded,
    EngineStepFailed,
    EngineUnavailable,
    InvalidRequest,
    ProtocolError,
)
from engine.fairness import LANE_WEIGHTS, QueueBound
from engine.protocol import (
    MAX_NAMED,
    Abort,
    ClientMessage,
    EngineOutput,
    EngineRequest,
    LeaseAck,
    LeaseEnded,
    LeaseGranted,
    OrphanedUsage,
    Outputs,
    Pause,
    Rejection,
    ReplicaStatus,
    Resume,
    Submit,
    TakeBack,
    Usage,
    WatchCache,
)
from engine.transport.entrance import Entrance, ListeningEntrance
from engine.transport.frames import FrameReader, encode_frame, keep_alive
from engine.transport.step_loop import CacheNews, Core, Result, StepLoop, refusal_of
from engine.transport.usage_record import UsageRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS = 512
MAX_PREPARING = 64
"""Requests of a lane whose grammars wait to be compiled, one at a time, beside the steps."""
MAX_WRITE_BUFFER_BYTES = 16 * 1024 * 1024
"""Bytes a peer may leave unread beyond what its socket holds."""
REOFFER_S = 30.0
"""A gateway that could not take what it was offered is asked again."""
ABORT_TIMEOUT_S = 10.0
"""Bounds the steps, after the drain, in which the last requests are aborted."""
FLUSH_TIMEOUT_S = 5.0
"""Bounds the time, after the drain, in which peers read their last frames."""


class UnackedItems(dict[str, T]):
    """Items that no gateway has acknowledged, by id, oldest first, and at most `most` of them.
    `what` names one in the log."""

    def __init__(self, what: str, most: int) -> None:
        super().__init__()
        self._what, self._most = what, most

    def offer(self, key: str, offered: T) -> list[str]:
        """Keep one more. Return the ids of those dropped for it, which only the log reports."""
        self[key] = offered
        dropped = []
        while len(self) > self._most:
            oldest = next(iter(self))
            log.error("%s of %s dropped unacknowledged: %s", self._what, oldest, self.pop(oldest))
            dropped.append(oldest)
        return dropped


class _Connection:
    """One peer. `send` never waits; False means the peer is to be dropped."""

    def __init__(self, writer: asyncio.StreamWriter, number: int) -> None:
        self.writer = writer
        self.name = f"gateway-{number}"
        self.unacked: dict[str, Usage] = {}
        """Final usage of finished requests, oldest first, that may not be on its gateway's disk."""

    def send(self, message: msgspec.Struct) -> bool:
        if self.writer.is_closing():
            return False
        try:
            frame = encode_frame(message)
        except ProtocolError as error:
            log.error("%s: cannot send: %s", self.name, error)
            return False
        self.writer.write(frame)
        unread_bytes = self.writer.transport.get_write_buffer_size()
        if unread_bytes > MAX_WRITE_BUFFER_BYTES:
            log.warning("%s does not read: %d bytes are waiting", self.name, unread_bytes)
            return False
        return True


class _LiveRequest:
    """A request between its submission and its last output."""

    def __init__(self, connection: _Connection, log_id: str) -> None:
        self.log_id = log_id
        self.connection: _Connection | None = connection  # None: lost, the request is an orphan
        self.aborting = False
        self.preparing = False
        """Not yet handed to the step thread."""
        self.is_wanted_back = False
        """It was said to the step thread, once."""
        self.is_paused = False
        """The last pause state that its gateway sent."""


class EngineServer:
    """Serves one core to the gateways that come by one entrance."""

    def __init__(
        self, core: Core, entrance: Entrance | str, record: UsageRecord | None = None
    ) -> None:
        """`entrance`: an address is listened on. `record`: what a kill -9 must not take; the caller
        closes it."""
        self._entrance = ListeningEntrance(entrance) if isinstance(entrance, str) else entrance
        self._core = core
        self._max_orphans = core.resolved.config.max_orphans
        self._step_loop = StepLoop(
            core,
            on_results=functools.partial(self._from_step_thread, self._deliver),
            on_status=functools.partial(self._from_step_thread, self._report),
            on_cache=functools.partial(self._from_step_thread, self._tell_of_cache),
            on_failure=functools.partial(self._from_step_thread, self._fail),
        )
        self._status = self._step_loop.first_status
        self._heard_at_s = 0.0
        """When the step thread last said something, on the loop's clock."""
        self._connections: set[_Connection] = set()
        self._num_accepted = 0
        self._watchers: set[_Connection] = set()
        """Those who are told what is in the prefix cache."""
        self._handlers: set[asyncio.Task[None]] = set()
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="engine-prepare")
        self._preparing: set[asyncio.Task[None]] = set()
        self._preparing_of = {lane: QueueBound(MAX_PREPARING) for lane in LANE_WEIGHTS}
        self._live: dict[str, _LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._record = record
        left = {} if record is None else record.left
        self._orphans: UnackedItems[OrphanedUsage] = UnackedItems(
            "orphaned usage", self._max_orphans
        )
        for request_id, usage in left.items():
            self._orphans[request_id] = OrphanedUsage(request_id=request_id, usage=usage)
        self._broken_leases: UnackedItems[LeaseEnded]
        self._broken_leases = UnackedItems("broken lease", self._max_orphans)
        self._draining = False

    @property
    def address(self) -> str:
        """Return where gateways find it."""
        return self._entrance.address

    async def serve(self, stop: asyncio.Event, *, drain_timeout_s: float) -> None:
        """Serve until `stop` is set, then drain and close.

        Raises `EngineStepFailed`, at once, when the step thread dies; `ConfigError` when the
        entrance cannot be opened, or is closed to it for good.
        """
        await self.start()
        try:
            await self._until(stop)
            if not self._failed.done():
                await self.drain(drain_timeout_s)
        finally:
            await self.close()
        if self._failed.done():
            error = self._failed.exception()
            if isinstance(error, ConfigError):
                raise error
            raise EngineStepFailed("the step thread died") from error

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        await self._entrance.open(self._serve_connection, self._refused)
        self._heard_at_s = self._loop.time()
        self._step_loop.start()
        self._reoffer = asyncio.create_task(self._reoffer_unacked())
        log.info("listening on %s for model %s", self.address, self._status.model)

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, let what runs finish for `timeout_s`, abort the rest."""
        self._draining = True
        self._entrance.shut()
        log.info("draining %d requests", len(self._live))
        await self._until(self._idle, timeout_s)
        for request_id, live in self._live.items():
            self._abort(request_id, live)
        await self._until(self._idle, ABORT_TIMEOUT_S)
        if self._orphans:
            log.warning("%d orphaned usages were not acknowledged", len(self._orphans))

    async def close(self) -> None:
        """Stop the thread, flush and close every connection, free the entrance."""
        self._entrance.shut()
        self._reoffer.cancel()
        self._preparer.shutdown(wait=False, cancel_futures=True)
        preparing = list(self._preparing)
        for task in preparing:
            task.cancel()
        if not self._step_loop.stop(ABORT_TIMEOUT_S):
            log.error("the step in progress did not end in %s s", ABORT_TIMEOUT_S)
        writers = [connection.writer for connection in self._connections]
        if self._handlers and not self._failed.done():
            for writer in writers:
                writer.close()
            await asyncio.wait(self._handlers, timeout=FLUSH_TIMEOUT_S)
        for writer in writers:  # those whose peer did not read in time
            writer.transport.abort()
        rest = (*self._handlers, *preparing, self._reoffer)
        await asyncio.gather(*rest, return_exceptions=True)
        await self._entrance.close()

    async def _until(self, event: asyncio.Event, timeout_s: float | None = None) -> None:
        """Until the event is set, the step thread died or the time is up."""
        waiter = asyncio.create_task(event.wait())
        either: set[asyncio.Future[Any]] = {waiter, self._failed}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()

    # ---- connections

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("refused a connection: %d are open", MAX_CONNECTIONS)
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        keep_alive(writer)
        self._num_accepted += 1
        connection = _Connection(writer, self._num_accepted)
        self._connections.add(connection)
        log.info("%s connected", connection.name)
        silent_s = self._loop.time() - self._heard_at_s
        status = msgspec.structs.replace(self._status, silent_s=silent_s)
        for greeting in (status, *self._orphans.values(), *self._broken_leases.values()):
            self._send(connection, greeting)
        frames: FrameReader[ClientMessage] = FrameReader(reader, ClientMessage)
        try:
            while (message := await frames.read()) is not None:
                self._receive(connection, message)
            log.info("%s left", connection.name)
        except (ProtocolError, OSError) as error:
            log.warning("%s dropped: %s", connection.name, error)
        finally:
            self._lose(connection)
        with contextlib.suppress(OSError):  # it broke while being flushed: lost all the same
            await writer.wait_closed()

    def _send(self, connection: _Connection, message: msgspec.Struct) -> bool:
        sent = connection.send(message)
        if not sent and connection in self._connections:
            connection.writer.transport.abort()
            self._lose(connection)
        return sent

    def _lose(self, connection: _Connection) -> None:
        """Forget a peer, abort what it asked for and orphan what it did not ack. A second call
        changes nothing."""
        self._connections.discard(connection)
        connection.writer.close()
        if connection in self._watchers:
            self._watchers.remove(connection)
            if not self._watchers:
                self._step_loop.watch_cache(False)
        for request_id, live in self._live.items():
            if live.connection is connection:
                live.connection = None
                self._abort(request_id, live)
        while connection.unacked:
            self._orphan_oldest(connection)

    # ---- what peers say

    def _receive(self, connection: _Connection, message: ClientMessage) -> None:
        if isinstance(message, Submit):
            if refusal := self._submit(connection, message.request):
                self._send(connection, refusal)
        elif isinstance(message, Abort | TakeBack | Pause | Resume):
            live = self._live.get(message.request_id)
            if live is None or live.connection is not connection:
                return
            if isinstance(message, Abort):
                self._abort(message.request_id, live)
            elif isinstance(message, TakeBack):
                self._take_back(message.request_id, live)
            else:
                self._pause(message.request_id, live, isinstance(message, Pause))
        elif isinstance(message, LeaseAck):
            for lease_id in message.lease_ids:
                self._broken_leases.pop(lease_id, None)
        elif isinstance(message, WatchCache):
            self._watchers.add(connection)
            self._step_loop.watch_cache(True)
        else:
            for request_id in message.request_ids:
                connection.unacked.pop(request_id, None)
                self._orphans.pop(request_id, None)
                self._fold(request_id)

    def _submit(self, connection: _Connection, request: EngineRequest) -> Rejection | None:
        request_id = request.request_id
        if request_id in self._live or request_id in self._orphans:
            return Rejection(
                request_id=request_id,
                code=InvalidRequest.code,
                message="request_id is in use",
                param="request_id",
            )
        if self._draining:
            return Rejection(
                request_id=request_id, code=EngineUnavailable.code, message="shutting down"
            )
        live = _LiveRequest(connection, request.log_id or request_id)
        if request.sampling.grammar is None:
            refusal = self._hand_over(request)
        else:
            refusal = self._prepare(request, live)
        if refusal is None:
            self._live[request_id] = live
            self._idle.clear()
        return refusal

    def _hand_over(self, request: EngineRequest) -> Rejection | None:
        if self._step_loop.submit(request):
            return None
        message = f"too many requests of lane {request.lane} wait for the step in progress"
        return refusal_of(request, EngineOverloaded(message))

    def _prepare(self, request: EngineRequest, live: _LiveRequest) -> Rejection | None:
        queue = self._preparing_of[request.lane]
        if not queue.has_room(request.tenant):
            message = f"{queue.num_taken} requests of lane {request.lane} wait for their grammars"
            return refusal_of(request, EngineOverloaded(message))
        live.preparing = True
        task = asyncio.create_task(self._submit_prepared(request, live))
        queue.take(request.tenant)
        self._preparing.add(task)

        def prepared(task: asyncio.Task[None]) -> None:
            self._preparing.discard(task)
            queue.give_back(request.tenant)

        task.add_done_callback(prepared)
        return None

    async def _submit_prepared(self, request: EngineRequest, live: _LiveRequest) -> None:
        try:
            await self._loop.run_in_executor(self._preparer, self._core.prepare, request)
            refusal = self._hand_over(request)
            if refusal is not None:  # the core keeps what it prepared until it hears of it
                self._step_loop.abort(request.request_id)
        except EngineError as error:
            refusal = refusal_of(request, error)
        except Exception as error:  # a bug, as in `_guard`
            log.critical("cannot prepare request %s", live.log_id, exc_info=True)
            self._fail(error)
            return
        live.preparing = False
        if refusal is not None:
            del self._live[request.request_id]
            if live.connection is not None:
                self._send(live.connection, refusal)
            if not self._live:
                self._idle.set()
        elif live.aborting:  # what it is answered with, the step thread knows
            self._step_loop.abort(request.request_id)
        elif live.is_paused:
            self._step_loop.pause(request.request_id, True)

    def _pause(self, request_id: str, live: _LiveRequest, is_paused: bool) -> None:
        if live.is_paused != is_paused:
            live.is_paused = is_paused
            if not live.preparing:
                self._step_loop.pause(request_id, is_paused)

    def _abort(self, request_id: str, live: _LiveRequest) -> None:
        if not live.aborting:
            live.aborting = True
            if not live.preparing:
                self._step_loop.abort(request_id)

    def _take_back(self, request_id: str, live: _LiveRequest) -> None:
        """Pass it on, unless that was done, or its grammar is being compiled."""
        if not live.is_wanted_back and not live.preparing and not live.aborting:
            live.is_wanted_back = True
            self._step_loop.take_back(request_id)

    # ---- what the step thread says

    def _from_step_thread(self, receive: Callable[[T], None], what: T) -> None:
        self._loop.call_soon_threadsafe(self._guard, receive, what)

    def _guard(self, receive: Callable[[T], None], what: T) -> None:
        self._heard_at_s = self._loop.time()
        try:
            receive(what)
        except Exception as error:  # a bug here or in the core: the process restarts, see `serve`
            log.critical("cannot deliver what the step thread made", exc_info=True)
            self._fail(error)

    def _deliver(self, results: Sequence[Result]) -> None:
        outputs: dict[_Connection, list[EngineOutput]] = {}
        for result in results:
            if isinstance(result, LeaseGranted | LeaseEnded):
                self._tell_of_lease(result)
                continue
            is_last = isinstance(result, Rejection) or result.finished
            live = self._live.pop(result.request_id) if is_last else self._live[result.request_id]
            if self._record and isinstance(result, EngineOutput) and result.usage.prefilled:
                self._record.note(result.request_id, result.usage)
            if isinstance(result, Rejection):
                if live.connection is not None:
                    self._send(live.connection, result)
            elif live.connection is not None:
                outputs.setdefault(live.connection, []).append(result)
                if result.finished:
                    self._await_ack(live.connection, result)
            elif result.finished and result.usage.prefilled:
                self._orphan(result.request_id, result.usage)
        for connection, batch in outputs.items():
            self._send(connection, Outputs(batch))
        if not self._live:
            self._idle.set()
        self._step_loop.delivered()

    def _report(self, status: ReplicaStatus) -> None:
        self._status = status
        for connection in tuple(self._connections):
            self._send(connection, status)

    def _tell_of_cache(self, news: CacheNews) -> None:
        for connection in tuple(self._watchers):
            for message in news:
                self._send(connection, message)

    def _refused(self, error: ConfigError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _fail(self, error: BaseException) -> None:
        if self._failed.done():
            return
        self._failed.set_exception(error)
        ids = [live.log_id for live in islice(self._live.values(), MAX_NAMED)]
        log.critical(
            "failed with %d requests under way: %s", len(self._live), ", ".join(ids), exc_info=error
        )

    # ---- what is offered until it is acknowledged

    def _await_ack(self, connection: _Connection, last: EngineOutput) -> None:
        """Bytes that were sent are not yet a bill: keep the usage until the gateway has one."""
        if not last.usage.prefilled:
            return
        connection.unacked[last.request_id] = last.usage
        if len(connection.unacked) > self._max_orphans:
            log.warning("%s acks too little, its oldest usage is orphaned", connection.name)
            self._orphan_oldest(connection)

    def _orphan_oldest(self, connection: _Connection) -> None:
        request_id = next(iter(connection.unacked))
        self._orphan(request_id, connection.unacked.pop(request_id))

    def _orphan(self, request_id: str, usage: Usage) -> None:
        orphan = OrphanedUsage(request_id=request_id, usage=usage)
        for dropped in self._orphans.offer(request_id, orphan):
            self._fold(dropped)
        for connection in tuple(self._connections):
            self._send(connection, orphan)

    def _fold(self, request_id: str) -> None:
        if self._record and request_id not in self._live:
            self._record.fold(request_id)

    def _tell_of_lease(self, event: LeaseGranted | LeaseEnded) -> None:
        hearers: tuple[_Connection | None, ...] = tuple(self._connections)
        if isinstance(event, LeaseGranted):
            hearers = (self._live[event.request_id].connection,)
        elif event.is_broken:
            self._broken_leases.offer(event.lease_id, event)
        for connection in hearers:
            if connection is not None:
                self._send(connection, event)

    async def _reoffer_unacked(self) -> None:
        while True:
            await asyncio.sleep(REOFFER_S)
            for offered in (*self._orphans.values(), *self._broken_leases.values()):
                for connection in tuple(self._connections):
                    self._send(connection, offered)
