"""The one thread that touches the engine's core: commands in, results out, a step in between.

Knows no sockets, connections or asyncio. torch releases the GIL inside a step, so the main thread
keeps serving sockets meanwhile.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.config import ResolvedConfig
from engine.errors import DeadlineExceeded, EngineError, TakenBack
from engine.fairness import LANE_WEIGHTS, QueueBound
from engine.kv_cache.cache_events import CacheEvents
from engine.protocol import (
    HEARTBEAT_INTERVAL_S,
    Abort,
    CacheChanged,
    CacheSnapshot,
    EngineOutput,
    EngineRequest,
    LeaseEnded,
    LeaseGranted,
    Rejection,
    ReplicaStatus,
    Submit,
    TakeBack,
)

log = logging.getLogger(__name__)

MAX_PENDING_SUBMITS = 4096
"""The bound of each lane's submissions that wait for the step in progress; beyond it `submit`
refuses. Aborts do not count, nor does what is to be taken back: every live request causes at most
one of each."""

MAX_UNDELIVERED = 1024
"""Batches of results the receiver has not dealt with; beyond it the engine waits for it."""

IDLE_CHECK_S = 1.0
"""Idle for this long: the core's integrity is checked, once, unless it was lately."""
INTEGRITY_INTERVAL_S = 60.0
"""Least time between two checks: one looks at every block (0.5 s for two million) and holds the GIL
meanwhile."""

CACHE_INTERVAL_S = 0.1
"""The least time between two tellings of what the prefix cache gained and lost."""

Result = EngineOutput | Rejection | LeaseGranted | LeaseEnded
Command = Submit | Abort | TakeBack
CacheNews = Sequence[CacheSnapshot] | Sequence[CacheChanged]


class Core(Protocol):
    """The interface that the loop needs of an engine. Called from one thread only, but for
    `prepare`.
    """

    @property
    def resolved(self) -> ResolvedConfig: ...

    @property
    def cache_events(self) -> CacheEvents:
        """Return what its prefix cache gains and loses."""

    def prepare(self, request: EngineRequest) -> None:
        """Before `add`, what of it would hold up a step. Safe in any thread. Raises as `add`."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `InvalidRequest` or `EngineOverloaded`."""

    def abort(self, request_id: str) -> list[EngineOutput]:
        """Free what a request holds; a last output for each choice that was still open, none if it
        is not (or no longer) known."""

    def take_back(self, request_id: str) -> bool:
        """End a request of which nothing ran, unbilled, and tell whether it was one."""

    def pause(self, request_id: str) -> None:
        """No step for it until `resume`; ignored when it is paused, unknown or finished."""

    def resume(self, request_id: str) -> None: ...

    def expire(self) -> list[str]:
        """End the requests of which nothing ran before their deadline; their ids. End the leases
        whose time is over."""

    def take_lease_events(self) -> list[LeaseGranted | LeaseEnded]:
        """Return what of prompts is kept, or no longer, since the last call."""

    def step(self) -> list[EngineOutput]:
        """Run one batch."""

    def has_work(self) -> bool:
        """Whether a step would do anything: of what is paused it does nothing."""

    def status(self) -> ReplicaStatus: ...

    def check_integrity(self) -> None:
        """Raises `AssertionError` when a block is leaked or doubly owned."""


def refusal_of(request: EngineRequest, error: EngineError) -> Rejection:
    return Rejection(
        request_id=request.request_id, code=error.code, message=error.message, param=error.param
    )


def _expired(request_id: str) -> Rejection:
    return Rejection(
        request_id=request_id,
        code=DeadlineExceeded.code,
        message="its deadline passed before it was begun",
    )


def _taken_back(request_id: str) -> Rejection:
    return Rejection(
        request_id=request_id, code=TakenBack.code, message="taken back before it was begun"
    )


class StepLoop:
    """Runs `core` in a thread of its own.

    on_results: the outputs and rejections of one pass, in order. Called in the step thread; the
        receiver calls `delivered()` once per call, from any thread, when it is done with them.
    on_status: a status that differs from the last one reported, before a step, with all that was
        sent by then; at most one per `status_interval_s`, except that going idle is reported at
        once. One that says nothing new
        is reported after HEARTBEAT_INTERVAL_S all the same, as a sign of life.
    on_cache: what is in the prefix cache and what changes there, while it is watched.
    on_failure: the thread is dying of this exception; nothing is called after it.
    """

    def __init__(
        self,
        core: Core,
        *,
        on_results: Callable[[Sequence[Result]], None],
        on_status: Callable[[ReplicaStatus], None],
        on_cache: Callable[[CacheNews], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._on_results = on_results
        self._on_status = on_status
        self._on_cache = on_cache
        self._on_failure = on_failure
        self._status_interval_s = core.resolved.config.status_interval_s
        self._heartbeat_s = min(HEARTBEAT_INTERVAL_S, core.resolved.step_timeout_s / 4)
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._submits = {lane: QueueBound(MAX_PENDING_SUBMITS) for lane in LANE_WEIGHTS}
        self._paused: dict[str, bool] = {}
        """The newest pause state of each request since the last pass: at most one each."""
        self._watch: bool | None = None
        """Whether the cache is to be watched, where that was said since the last pass."""
        self._cache_told_s = -math.inf
        self._stopping = False
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED)
        self._last_status = core.status()
        self._last_status_s = time.monotonic()
        self._last_check_s = -math.inf
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)

    @property
    def first_status(self) -> ReplicaStatus:
        """The status before the first step; later ones go to `on_status`."""
        return self._last_status

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Let the step in progress end and join the thread; False if that took too long."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._undelivered.release(3)  # the receiver may be gone; a pass delivers at most thrice
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: EngineRequest) -> bool:
        """Hand a request over; False when `MAX_PENDING_SUBMITS` of its lane wait already, or its
        tenant's part of them."""
        with self._wake:
            submits = self._submits[request.lane]
            if not submits.has_room(request.tenant):
                return False
            submits.take(request.tenant)
            self._commands.append(Submit(request))
            self._paused.pop(request.request_id, None)  # said of another one with this id
            self._wake.notify()
            return True

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request; applied before the next step."""
        with self._wake:
            self._commands.append(Abort(request_id))
            self._wake.notify()

    def take_back(self, request_id: str) -> None:
        """Ask for the end of a request if nothing of it ran; applied before the next step."""
        with self._wake:
            self._commands.append(TakeBack(request_id))
            self._wake.notify()

    def pause(self, request_id: str, is_paused: bool) -> None:
        """Ask for a pause of a request that was handed over, or its end; before the next step."""
        with self._wake:
            self._paused[request_id] = is_paused
            self._wake.notify()

    def watch_cache(self, is_watched: bool) -> None:
        """Ask for all that is cached and then for what changes, or for no more of it."""
        with self._wake:
            self._watch = is_watched
            self._wake.notify()

    def delivered(self) -> None:
        """The receiver is done with one `on_results`."""
        self._undelivered.release()

    # ---- in the step thread

    def _run(self) -> None:
        try:
            while True:
                said = self._wait_for_work()
                if said is None:
                    return
                self._pass(*said)
        except BaseException as error:  # the thread's last word: it is reported, never lost
            log.critical("the step thread died", exc_info=True)
            self._on_failure(error)

    def _pass(self, commands: list[Command], paused: dict[str, bool]) -> None:
        # What the commands caused is delivered before the step: a refusal or the end of an
        # aborted request does not wait for a batch that it has no part in.
        self._deliver([answer for command in commands for answer in self._apply(command)])
        for request_id, is_paused in paused.items():
            (self._core.pause if is_paused else self._core.resume)(request_id)
        self._expire()
        if self._core.has_work():
            # Before the step, which may take long: of what was sent by now it says everything.
            self._report_status()
            outputs = self._core.step()
            self._deliver([*self._core.take_lease_events(), *outputs])
        self._report_cache()
        if not self._core.has_work():
            self._report_status()

    def _expire(self) -> None:
        expired = [*map(_expired, self._core.expire())]
        self._deliver([*self._core.take_lease_events(), *expired])

    def _apply(self, command: Command) -> Sequence[Result]:
        if isinstance(command, Abort):
            return self._core.abort(command.request_id)
        if isinstance(command, TakeBack):
            is_back = self._core.take_back(command.request_id)
            return [_taken_back(command.request_id)] if is_back else []
        try:
            self._core.add(command.request)
        except EngineError as error:
            return [refusal_of(command.request, error)]
        return []

    def _wait_for_work(self) -> tuple[list[Command], dict[str, bool]] | None:
        """Return what was said since the last pass; None when the loop is to end. Sleeps while
        idle, but for a heartbeat now and then.
        """
        if not self._sleep(min(IDLE_CHECK_S, self._heartbeat_s)):
            if time.monotonic() - self._last_check_s >= INTEGRITY_INTERVAL_S:
                self._core.check_integrity()
                self._last_check_s = time.monotonic()
            self._report_status()
            while not self._sleep(self._heartbeat_s):
                self._expire()  # what is paused may
                self._report_status()
        with self._wake:
            if self._stopping:
                return None
            commands, paused = list(self._commands), self._paused
            self._commands.clear()
            for submits in self._submits.values():
                submits.clear()
            self._paused = {}
            return commands, paused

    def _sleep(self, timeout_s: float) -> bool:
        """Until there is work; False when the time is up. What the last step changed in the cache
        is told meanwhile."""
        if self._core.cache_events.has_changes:
            due_s = max(0.0, self._cache_told_s + CACHE_INTERVAL_S - time.monotonic())
            if self._wait(due_s):
                return True
            self._report_cache()
            timeout_s -= due_s
        return self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> bool:
        with self._wake:
            return self._wake.wait_for(self._has_work, timeout_s)

    def _has_work(self) -> bool:
        said = self._commands or self._paused or self._watch is not None
        return bool(said) or self._stopping or self._core.has_work()

    def _deliver(self, results: Sequence[Result]) -> None:
        if results:
            self._undelivered.acquire()
            self._on_results(results)

    def _report_cache(self) -> None:
        with self._wake:
            watch, self._watch = self._watch, None
        now_s, events = time.monotonic(), self._core.cache_events
        if watch is not None:
            self._cache_told_s = now_s
            if watch:
                self._on_cache(events.watch())
            else:
                events.end_watch()
        elif events.has_changes and now_s - self._cache_told_s >= CACHE_INTERVAL_S:
            self._cache_told_s = now_s
            self._on_cache(events.take_changes())

    def _report_status(self) -> None:
        now_s = time.monotonic()
        if self._core.has_work() and now_s - self._last_status_s < self._status_interval_s:
            return
        status = self._core.status()
        if status != self._last_status or now_s - self._last_status_s >= self._heartbeat_s:
            self._last_status, self._last_status_s = status, now_s
            self._on_status(status)
