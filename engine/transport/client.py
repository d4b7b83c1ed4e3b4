"""The gateway's side of the engine's socket: `EngineClient`, and the `Engine` interface it shares
with `fake.FakeEngine`.

One connection carries all requests; it is opened again by itself, with backoff, for as long as the
client lives. Knows token ids, not text, tenants or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol

import msgspec

from engine.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    ProtocolError,
    TakenBack,
)
from engine.protocol import (
    HEARTBEAT_INTERVAL_S,
    PROTOCOL_VERSION,
    Abort,
    CacheChanged,
    CacheSnapshot,
    EngineOutput,
    EngineRequest,
    LeaseAck,
    LeaseEnded,
    LeaseGranted,
    OrphanAck,
    OrphanedUsage,
    Outputs,
    Pause,
    Rejection,
    ReplicaStatus,
    Resume,
    ServerMessage,
    Submit,
    TakeBack,
    WatchCache,
)
from engine.transport.frames import FrameReader, encode_frame, open_connection, parse_address
from engine.transport.output_streams import OutputStreams, Take
from engine.transport.pending_acks import Offers

log = logging.getLogger(__name__)

JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
CONNECT_TIMEOUT_S = 5.0
"""To open the connection, and again for the engine's first status."""
SILENCE_LOOKS = 10
"""An engine's silence is told in so many looks at it, or more, evenly spread: when this process
itself was held up (stopped, or short of processor time), the one look that is late by it condemns
nobody."""
MISSED_HEARTBEATS = 3
"""So many in a row, and an engine is silent."""
LARGEST_STEPS = 2
"""It is not before it was silent for as long as so many of its largest steps take,"""
SILENT_PART = 1 / 20
"""or for this part of the time after which it hangs: it may not have had its longest step yet."""
FAREWELL_S = 1.0
"""Bounds the wait for the engine to read what a client said before it left."""
MAX_WRITE_BUFFER_BYTES = 64 * 1024 * 1024
"""Bytes an engine may leave unread; beyond it `generate` raises `EngineOverloaded`."""
MAX_UNACKED = 10_000
"""Finished requests that may yet be acknowledged; the usage of older ones will be an orphan's."""

OnOrphan = Callable[[OrphanedUsage], Awaitable[bool | None]]
"""Makes one orphan's usage durable, as `Offers.record`."""
OnLease = Callable[[LeaseGranted | LeaseEnded], Awaitable[bool | None]]
"""Makes durable what one lease's beginning or end means. Where the end was not told, be it that the
engine is lost, another `engine_id` says that all of its leases have ended."""

_REJECTIONS: dict[str, type[EngineError]] = {
    kind.code: kind
    for kind in (
        *(InvalidRequest, ContextLengthExceeded, EngineOverloaded, DeadlineExceeded),
        TakenBack,
    )
}


class CacheHearer(Protocol):
    """Hears what is in an engine's prefix cache, for as long as a client is connected."""

    def connected(self, status: ReplicaStatus) -> None:
        """Expect a snapshot of this engine."""

    def heard(self, news: CacheSnapshot | CacheChanged) -> bool:
        """Take in what is told. False: something was missed, another snapshot is needed."""

    def lost(self) -> None:
        """The engine is gone, as far as can be told. Not called when the client is closed."""


class Engine(Protocol):
    """The interface that the gateway needs of an engine."""

    @property
    def connected(self) -> bool: ...

    @property
    def status(self) -> ReplicaStatus:
        """The latest one, also while disconnected. Raises `EngineUnavailable` before the first."""

    async def wait_connected(self, timeout_s: float) -> ReplicaStatus:
        """Raises `EngineUnavailable` when the time is up."""

    def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        """Outputs until one is `finished`. Closing the generator early aborts the request.

        `take`: is offered each output that comes while the next one is waited for; what it takes is
        not yielded. It has to leave the last one. It runs in the context of whoever calls.
        `at_once`: outputs that come soon after one another do not wait to go on together.

        Raises, at the first step of the iteration or later, `InvalidRequest`, `EngineOverloaded`,
        `DeadlineExceeded`, `TakenBack` or `EngineUnavailable`. What was used until then is the
        `usage` of the last output.
        """

    async def abort(self, request_id: str) -> None:
        """End a request early: its stream yields a last output with the final usage. Unknown and
        finished ids are ignored."""

    def take_back(self, request_id: str) -> None:
        """End a request if nothing of it ran: its stream raises `TakenBack` then. Of one that has
        begun nothing changes; unknown and finished ids are ignored, as one that was named before
        may be."""

    async def pause(self, request_id: str) -> None:
        """It takes no step until `resume`, or `abort`; what a step brings that is under way already
        still comes. Unknown and finished ids are ignored, as one that is paused is."""

    async def resume(self, request_id: str) -> None:
        """Ignored unless it is paused."""

    @property
    def is_silent(self) -> bool:
        """Tell whether a connected engine was not heard of for as long as it may be well."""

    def leave(self, request_id: str) -> None:
        """Give a request up at an engine that is silent, or is to end: its stream raises
        `EngineUnavailable` behind what has come of it. The engine aborts it when it hears that, and
        what the request used until then is an orphan's. Unknown and finished ids are ignored."""

    async def acknowledge(self, request_id: str) -> None:
        """The usage of the last output is on disk: the engine may forget it. Never waits. Ignored
        for a stream whose last output was not taken, and while disconnected: the engine then offers
        the final usage as an orphan."""

    async def close(self) -> None:
        """Open streams raise `EngineUnavailable`; the engine aborts them."""


class EngineClient:
    """An `Engine` behind a socket. Make one with `connect`, or with `start` where the engine may
    come up later than the gateway."""

    def __init__(
        self,
        address: str,
        *,
        on_orphan: OnOrphan | None = None,
        on_lease: OnLease | None = None,
        cache_hearer: CacheHearer | None = None,
        interval_s: float = 0.0,
    ) -> None:
        """`cache_hearer`: None: the engine is not asked what it has cached. `interval_s`: see
        `OutputStreams`."""
        parse_address(address)
        self._address = address
        self._orphans: Offers[OrphanedUsage] = Offers(
            "orphaned usage",
            id_of=lambda orphan: orphan.request_id,
            ack=lambda orphans: self._send(OrphanAck([each.request_id for each in orphans])),
        )
        self._leases: Offers[LeaseGranted | LeaseEnded] = Offers(
            "lease",
            id_of=lambda event: f"{event.lease_id}:{type(event).__name__}",
            ack=self._ack_leases,
        )
        self._orphans.record, self._leases.record = on_orphan, on_lease
        self._cache_hearer = cache_hearer
        self.on_status: Callable[[ReplicaStatus], None] | None = None
        """Hears each status as it comes."""
        self._status: ReplicaStatus | None = None
        self._writer: asyncio.StreamWriter | None = None  # while connected
        self._unsent = bytearray()
        """Frames of this turn of the loop, which go out with one system call."""
        self._connected = asyncio.Event()
        self._streams = OutputStreams(
            interval_s, on_enough=lambda request_id: self._send_if_open(Abort(request_id))
        )
        self._unacked: dict[str, None] = {}
        self._why_away = "not started"
        self._silent_s = 0.0
        """As far as it was looked: see `SILENCE_LOOKS`."""
        self._left: set[str] = set()
        """Requests that were given up, and that the engine has not ended yet."""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout_s: float,
        on_orphan: OnOrphan | None = None,
        on_lease: OnLease | None = None,
    ) -> EngineClient:
        """A connected client. Raises `EngineUnavailable` when the time is up."""
        client = cls(address, on_orphan=on_orphan, on_lease=on_lease)
        client.start()
        try:
            await client.wait_connected(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    def start(self) -> None:
        """Begin to connect, in the background, for as long as it takes."""
        self._why_away = "not connected yet"
        self._tasks = [
            asyncio.create_task(self._stay_connected(), name="engine-client"),
            asyncio.create_task(self._orphans.record_forever(), name="engine-client-orphans"),
            asyncio.create_task(self._leases.record_forever(), name="engine-client-leases"),
        ]

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def status(self) -> ReplicaStatus:
        if self._status is None:
            raise self._unavailable()
        return self._status

    async def wait_connected(self, timeout_s: float) -> ReplicaStatus:
        try:
            async with asyncio.timeout(timeout_s):
                await self._connected.wait()
        except TimeoutError:
            raise self._unavailable() from None
        return self.status

    async def generate(
        self, request: EngineRequest, take: Take | None = None, *, at_once: bool = False
    ) -> AsyncGenerator[EngineOutput, None]:
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequest("request_id is in use", param="request_id")
        self._submit(request)
        stream = self._streams.open(request_id, take, at_once=at_once)
        try:
            while not stream.finished:
                output = await stream.next()
                if output.finished and output.usage.prefilled:
                    self._await_ack(request_id)
                yield output
        finally:
            self._streams.close(request_id)
            if not stream.ended:
                self._send(Abort(request_id))

    async def abort(self, request_id: str) -> None:
        self._send_if_open(Abort(request_id))

    def take_back(self, request_id: str) -> None:
        self._send_if_open(TakeBack(request_id))

    async def pause(self, request_id: str) -> None:
        self._send_if_open(Pause(request_id))

    async def resume(self, request_id: str) -> None:
        self._send_if_open(Resume(request_id))

    @property
    def is_silent(self) -> bool:
        if self._writer is None:
            return False
        return self._silent_s >= silence_of(self.status)

    def leave(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and not stream.ended:
            self._send(Abort(request_id))
            self._left.add(request_id)
            stream.fail(
                EngineUnavailable(f"{self._address}: given up, heard of {self._silent_s:.1f} s ago")
            )

    async def acknowledge(self, request_id: str) -> None:
        if request_id in self._unacked:
            del self._unacked[request_id]
            self._send(OrphanAck([request_id]))

    def _await_ack(self, request_id: str) -> None:
        self._unacked[request_id] = None
        if len(self._unacked) > MAX_UNACKED:
            del self._unacked[next(iter(self._unacked))]

    async def close(self) -> None:
        """Leave once the engine has heard all that was said: what it is not told to be recorded it
        offers again."""
        writer = self._part("the client was closed")
        try:
            if writer is not None:
                await hang_up(writer)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- sending

    def _submit(self, request: EngineRequest) -> None:
        if self._writer is None:
            raise self._unavailable()
        unread_bytes = self._writer.transport.get_write_buffer_size() + len(self._unsent)
        if unread_bytes > MAX_WRITE_BUFFER_BYTES:
            raise EngineOverloaded(f"{self._address} does not read: {unread_bytes} bytes wait")
        try:
            self._send(Submit(request))
        except ProtocolError as error:
            raise InvalidRequest(error.message, param="prompt_token_ids") from error

    def _send(self, message: msgspec.Struct) -> None:
        """Never waits. While away nothing is sent: the engine aborted all that was ours."""
        if self._writer is not None:
            frame = encode_frame(message)
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent += frame

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and self._writer is not None:
            self._writer.write(bytes(unsent))

    def _send_if_open(self, message: Abort | TakeBack | Pause | Resume) -> None:
        stream = self._streams.get(message.request_id)
        if stream is not None and not stream.ended:
            self._send(message)

    def _ack_leases(self, events: list[LeaseGranted | LeaseEnded]) -> None:
        ended = (event for event in events if isinstance(event, LeaseEnded))
        if broken := [each.lease_id for each in ended if each.is_broken]:
            self._send(LeaseAck(broken))

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(f"{self._address}: {self._why_away}")

    # ---- the connection

    async def _stay_connected(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            try:
                if await self._attend():
                    backoff_s = BACKOFF_MIN_S
            except (OSError, EngineError) as error:  # TimeoutError is an OSError
                self._why_away = str(error) or type(error).__name__
                log.debug("cannot connect to %s: %s", self._address, self._why_away)
            except Exception as error:  # a bug: told, and no reason to leave the engine for good
                log.exception("the connection to %s failed", self._address)
                self._disconnect(f"the connection failed: {error!r}")
            # Jitter: the gateways of a restarted engine do not all come back at once.
            await asyncio.sleep(backoff_s * JITTER.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _attend(self) -> bool:
        """One connection from its opening to its loss; True if it was good for anything.

        Raises `OSError`, `TimeoutError`, `ProtocolError` or `EngineUnavailable` when it never was.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await open_connection(self._address)
        frames: FrameReader[ServerMessage] = FrameReader(reader, ServerMessage)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                status = self._greet(await frames.read())
            self._writer = writer
            self._hear(status)
            self._connected.set()
            if self._cache_hearer is not None:
                self._cache_hearer.connected(status)
                self._send(WatchCache())
            log.info("connected to %s, model %s", self._address, status.model)
            await self._listen(frames)
        finally:
            writer.transport.abort()
        return True

    def _greet(self, first: ServerMessage | None) -> ReplicaStatus:
        if not isinstance(first, ReplicaStatus):
            raise ProtocolError("the engine did not begin with its status")
        if first.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the engine speaks protocol {first.protocol_version}, not {PROTOCOL_VERSION}"
            )
        if first.silent_s >= first.step_timeout_s:
            raise EngineUnavailable(f"the engine hangs: no step ended in {first.silent_s:.0f} s")
        self._silent_s = first.silent_s
        return first

    async def _listen(self, frames: FrameReader[ServerMessage]) -> None:
        """Until the engine is lost, for whatever reason; all open streams fail then."""
        why = "the engine closed the connection"
        watching = asyncio.create_task(self._notice_silence(), name="engine-client-silence")
        try:
            while (message := await frames.read()) is not None:
                self._receive(message)
        except (OSError, ProtocolError) as error:
            why = f"the connection broke: {error}"
        finally:
            watching.cancel()
        if self._silent_s >= self.status.step_timeout_s:
            why = f"the engine hangs: not heard of for {self.status.step_timeout_s:g} s"
        if self._writer is not None:  # and `close` did not end it
            log.warning("lost %s: %s", self._address, why)
            self._disconnect(why)

    async def _notice_silence(self) -> None:
        """End a connection on which the step loop is not heard of: a process that is stopped, or
        whose step never ends, keeps its sockets open."""
        look_s = min(self.status.step_timeout_s / SILENCE_LOOKS, HEARTBEAT_INTERVAL_S)
        while self._silent_s < self.status.step_timeout_s:
            await asyncio.sleep(look_s)
            self._silent_s += look_s
        if self._writer is not None:
            self._writer.transport.abort()

    def _disconnect(self, why: str) -> None:
        writer = self._part(why)
        if writer is not None:
            writer.transport.abort()
            if self._cache_hearer is not None:
                self._cache_hearer.lost()

    def _part(self, why: str) -> asyncio.StreamWriter | None:
        """Nothing is said from here on, and what is open fails. Returns what was said by."""
        self._why_away = why
        self._connected.clear()
        self._streams.fail(self._unavailable)
        self._left.clear()  # the engine has orphaned them
        self._flush()
        writer, self._writer = self._writer, None
        return writer

    def _receive(self, message: ServerMessage) -> None:
        if isinstance(message, (Outputs, ReplicaStatus)):
            self._silent_s = 0.0  # the others do not come from the step loop
        if isinstance(message, Outputs):
            self._streams.push(self._still_wanted(message.outputs))
        elif isinstance(message, ReplicaStatus):
            self._hear(message)
        elif isinstance(message, Rejection):
            self._left.discard(message.request_id)
            if stream := self._streams.get(message.request_id):
                kind = _REJECTIONS.get(message.code, EngineUnavailable)
                stream.fail(kind(message.message, param=message.param))
        elif isinstance(message, OrphanedUsage):
            self._orphans.take(message)
        elif isinstance(message, (CacheSnapshot, CacheChanged)):
            if self._cache_hearer is not None and not self._cache_hearer.heard(message):
                self._send(WatchCache())
        else:
            self._leases.take(message)

    def _still_wanted(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Return the outputs of requests that were not given up."""
        if not self._left:
            return outputs
        wanted = [each for each in outputs if each.request_id not in self._left]
        for each in outputs:
            if each.request_id in self._left:
                self._drop(each)
        return wanted

    def _drop(self, output: EngineOutput) -> None:
        """Take no more of a request that was given up than what it used in the end."""
        if output.finished:
            self._left.discard(output.request_id)
            if output.usage.prefilled:
                orphan = OrphanedUsage(request_id=output.request_id, usage=output.usage)
                self._orphans.take(orphan)

    def _hear(self, status: ReplicaStatus) -> None:
        self._status = status
        if self.on_status is not None:
            self.on_status(status)


def silence_of(status: ReplicaStatus) -> float:
    """Return for how many seconds an engine is not heard of, by what it said, before it is silent:
    longer than any step of it takes, as far as it has learnt that, and no longer than until it
    hangs. It has learnt from the parts of its steps: one for which it was stopped teaches next to
    nothing."""
    least_s = max(MISSED_HEARTBEATS * HEARTBEAT_INTERVAL_S, SILENT_PART * status.step_timeout_s)
    return min(status.step_timeout_s, max(least_s, LARGEST_STEPS * status.largest_step_s))


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Say that no more will come, while somebody reads on, until the engine ends its side too: to
    break off would lose what it has not read yet."""
    with contextlib.suppress(OSError):  # lost anyway, or an engine that hangs: TimeoutError
        writer.write_eof()
        async with asyncio.timeout(FAREWELL_S):
            await writer.wait_closed()
