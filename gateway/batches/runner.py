"""Runs batches: each gateway takes lines as it has room, in their orgs' turns, and does what
batches need beside. What is taken is leased for a bounded time and renewed while this gateway
lives; what a dead gateway held is taken by the next."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Mapping

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.errors import SpoolError
from billing.ingestion.shipper import OnBooked
from foundation.periodic import Periodic
from foundation.request_context import LOG_CONTEXT, LogContext, made_by
from foundation.tasks import end_tasks
from foundation.trace_context import TracePolicy
from gateway.auth.bearer.api_keys import principal_of
from gateway.auth.errors import AuthError, MissingScope
from gateway.batches import batches, lines, steward
from gateway.batches.batches import forget_deleted, forget_notes
from gateway.batches.circuit_breaker import CircuitBreakers
from gateway.batches.ending import LineEnder
from gateway.batches.endpoints import (
    LineEndpoint,
)
from gateway.batches.lines import LeasedLine
from gateway.batches.running import LineAccount, LineRun, PutOff, model_of, refused, run
from gateway.batches.sealing import PURPOSE
from gateway.batches.validation import InputBounds
from gateway.db import DATABASE_ERRORS
from gateway.files.store import FileStore
from gateway.http_errors.table import SERVER, http_error
from gateway.ids import uuid7_hex
from gateway.inference.services import GenerationServices
from gateway.lru import Lru
from gateway.permissions import may
from gateway.principal import SCOPE_INFERENCE, Principal
from gateway.request_errors import UnknownModel
from gateway.request_log.answers import Note, NotedAnswer
from gateway.request_log.content_log import ContentLog
from gateway.request_log.writer import RequestLog
from gateway.secret import Cipher
from gateway.settings.load import Settings
from gateway.telemetry.metrics import Telemetry
from gateway.telemetry.request_meter import RequestMeter
from gateway.wire.shared.batch import Batch
from gateway.worker.resources import Resources
from gateway.worker.work_listener import ERASURES

log = logging.getLogger(__name__)
JITTER = random.Random()
"""A generator of its own: it neither follows nor disturbs a seed of the global one."""

POLL_S = 0.5
"""Between two looks while something is under way, or where nobody hears of what is to be done."""
APART_S = 0.01
"""Between two looks at least, however much is heard of."""
LEASE_S = 30.0
SWEEP_INTERVAL_S = 60.0
MAX_ATTENDED = 2
"""Batches that are validated or finished at once."""
MAX_KNOWN_KEYS = 1024
KNOWN_FOR_S = 5.0
"""A key's permissions and limits may be out of date by this much."""
UNREADABLE_LINE = http_error(500, "What this request asked cannot be read any more.", SERVER)
CLOSE_TIMEOUT_S = 5.0
"""Bounds the wait, at the end, for ended lines to come to the books."""


class KeyState(msgspec.Struct, frozen=True):
    principal: Principal
    as_of: float


class BatchRunner:
    """The runner of one process. `db` acts as the tenant, `system_db` sees all. `cipher`: for the
    purpose of batches. `endpoints`: by path. `on_booked` hears of what was booked. `rest_s`: how
    long to rest where there is nothing to do, given how long otherwise."""

    def __init__(
        self,
        *,
        services: GenerationServices,
        telemetry: Telemetry,
        db: AsyncEngine,
        system_db: AsyncEngine,
        files: FileStore,
        cipher: Cipher,
        bounds: InputBounds,
        endpoints: Mapping[str, LineEndpoint],
        on_booked: OnBooked,
        request_log: RequestLog,
        content_log: ContentLog | None = None,
        max_running: int,
        lease_s: float = LEASE_S,
        poll_s: float = POLL_S,
        rest_s: Callable[[float], float] = lambda poll_s: poll_s,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._services, self._telemetry = services, telemetry
        self._db, self._system_db = db, system_db
        self._files, self.cipher, self.bounds = files, cipher, bounds
        self._endpoints, self._max_running = endpoints, max_running
        self._lease_s, self._poll_s, self._rest_s = lease_s, poll_s, rest_s
        self._holder = uuid7_hex()
        self._ender = LineEnder(
            system_db,
            cipher,
            self._holder,
            services.spool,
            endpoints,
            on_booked,
            request_log,
            telemetry,
            content_log,
        )
        self._known: Lru[str, KeyState] = Lru(MAX_KNOWN_KEYS)
        self._running: dict[asyncio.Task[None], LeasedLine] = {}
        self._attended: dict[asyncio.Task[None], Batch] = {}
        self.breakers = CircuitBreakers(clock)
        self._is_leaving = False
        self._policy: TracePolicy | None = None
        self._renewed_at = time.monotonic()
        self._swept_at = -math.inf
        self._looking = Periodic(
            "run batches",
            self._pause_s,
            self.look,
            log=log,
            failure="batches wait for Postgres",
            expected=DATABASE_ERRORS,
            apart_s=APART_S,
        )
        self._ending: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking.start()
        self._ending = asyncio.create_task(self._ender.end_forever(), name="end lines")

    def tell(self, note: Note, policy: TracePolicy | None) -> None:
        """Tell `note` of each line that ends here. `policy`: which of their traces are recorded."""
        self._ender.note, self._policy = note, policy

    def wake(self) -> None:
        """Look now: there may be something to do."""
        self._looking.wake()

    def erase(self) -> None:
        """Erase now what is no longer to be kept: of a project, say, that is archived."""
        self._swept_at = -math.inf
        self._looking.wake()

    def _pause_s(self) -> float:
        poll_s = self._poll_s * JITTER.uniform(0.8, 1.2)
        if self._running or self._attended:
            return poll_s
        return self._rest_s(poll_s)

    def leave(self) -> None:
        """Begin nothing more here."""
        self._is_leaving = True

    async def close(self) -> None:
        """Book what has ended, if Postgres takes it in time; other gateways do the rest once the
        leases are over."""
        self.leave()
        if self._running and self._ending is not None:
            await asyncio.wait(list(self._running), timeout=CLOSE_TIMEOUT_S)
        await end_tasks(*self._running, *self._attended)
        await self._looking.close()
        if self._ending is not None:
            await end_tasks(self._ending)
            self._ending = None

    # ---- what there is to do

    async def look(self) -> None:
        """Renew what is held, begin what there is room for. Raises: DATABASE_ERRORS."""
        await self._renew()
        if not self._is_leaving:
            await self._attend_to_batches()
            await self._begin_lines()
            await self._sweep()

    async def _renew(self) -> None:
        if time.monotonic() - self._renewed_at < self._lease_s / 3:
            return
        self._renewed_at = time.monotonic()
        db, holder, lease_s = self._system_db, self._holder, self._lease_s
        await lines.renew(db, holder, self._running.values(), lease_s=lease_s)
        ids = [batch.id for batch in self._attended.values()]
        await steward.renew(db, holder, ids, lease_s=lease_s)

    async def _sweep(self) -> None:
        if time.monotonic() - self._swept_at < SWEEP_INTERVAL_S:
            return
        async with self._system_db.begin() as conn:
            await forget_deleted(conn)
            await forget_notes(conn)
        self._swept_at = time.monotonic()

    async def _attend_to_batches(self) -> None:
        while len(self._attended) < MAX_ATTENDED:
            batch = await steward.take(self._system_db, self._holder, lease_s=self._lease_s)
            if batch is None:
                return
            task = asyncio.create_task(self._attend(batch), name=f"attend {batch.id}")
            self._attended[task] = batch
            task.add_done_callback(self._has_attended)

    async def _begin_lines(self) -> None:
        room = self._max_running - len(self._running)
        if room <= 0:
            return
        found = await lines.lease(
            self._system_db,
            self.cipher,
            self._holder,
            limit=room,
            under_way=self._running.values(),
            lease_s=self._lease_s,
            excluded=self.breakers.open_scopes(),
        )
        for line in found:
            task = asyncio.create_task(self._run(line), name=f"line {line.place}")
            self._running[task] = line
            task.add_done_callback(self._has_run)

    def _has_attended(self, task: asyncio.Task[None]) -> None:
        del self._attended[task]
        self.wake()

    def _has_run(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.wake()

    # ---- how it is done

    async def _attend(self, batch: Batch) -> None:
        """Do what a batch needs; what fails is begun anew once its lease is over."""
        try:
            principal = await self._principal(batch.org_id, batch.key_id)
            await steward.attend(
                self._db,
                self.cipher,
                self._files,
                batch,
                lambda model: self._serves(principal, model),
                self.bounds,
                self._holder,
                self._services.limiter.void_lease,
            )
        except Exception as error:
            log.warning("batch %s waits", batch.id, exc_info=error)

    async def _run(self, line: LeasedLine) -> None:
        """Run a line; one that fails here is leased to whoever comes next. What is logged of it, in
        this task of its own, names its request."""
        context = LogContext(line.request_id, (), self._policy, made_by=made_by(line.traceparent))
        LOG_CONTEXT.set(context)
        try:
            await self._run_line(line, context, time.perf_counter())
        except (*DATABASE_ERRORS, SpoolError) as error:
            log.warning("line %s waits (%s)", line.place, type(error).__name__)
        except Exception as error:
            log.error("line %s waits", line.place, exc_info=error)

    async def _run_line(self, line: LeasedLine, context: LogContext, began_at: float) -> None:
        if line.lost_request_id is not None:
            await self._services.limiter.void_lease(line.org_id, line.lost_request_id)
        endpoint = self._endpoints[line.endpoint]
        if not line.is_readable:
            ended = refused(endpoint, line, UNREADABLE_LINE)
            await self._ender.end(ended, LineAccount(), noted(line, context, began_at, None))
            return
        found = await self._principal(line.org_id, line.key_id)
        if isinstance(found, Exception):
            unasked = refused(endpoint, line, endpoint.to_http_error(found))
            await self._ender.end(unasked, LineAccount(), noted(line, context, began_at, None))
            return
        ran = await self._ask(endpoint, found, line)
        if not isinstance(ran.outcome, PutOff):
            if ran.outcome.state == "failed":
                await self._ender.waste(ran.account.events, ran.account)
            answer = noted(line, context, began_at, ran.meter, found)
            await self._ender.end(ran.outcome, ran.account, answer)
            return
        await self._ender.waste(ran.account.events, ran.account)
        await lines.put_off(
            self._system_db,
            self._holder,
            line,
            delay_s=ran.outcome.delay_s * JITTER.uniform(1.0, 1.4),
            is_loss=ran.outcome.is_loss,
        )

    async def _ask(self, endpoint: LineEndpoint, principal: Principal, line: LeasedLine) -> LineRun:
        """Ask for a line, unless its model is away; then one line tries for all."""
        scope = (line.org_id, model_of(line))
        wait_s = self.breakers.wait_s(scope)
        if wait_s > 0:
            return LineRun(PutOff(wait_s), LineAccount())
        try:
            ran = await run(self._services, self._telemetry, endpoint, principal, line)
        finally:
            self.breakers.tried(scope)
        outcome = ran.outcome
        if not isinstance(outcome, PutOff):
            self.breakers.answered(scope)
        elif outcome.is_away:
            delay_s = self.breakers.refused(scope, outcome.delay_s)
            outcome = msgspec.structs.replace(outcome, delay_s=delay_s)
        return LineRun(outcome, ran.account, ran.meter)

    def _serves(self, found: Principal | AuthError | MissingScope, model: str) -> bool:
        """Return whether a model may be asked. If the key is no longer good, the lines say so when
        they run."""
        if not isinstance(found, Principal):
            return True
        try:
            self._services.fleet.resolve(model, found)
        except UnknownModel:
            return False
        return True

    async def _principal(self, org_id: str, key_id: str) -> Principal | AuthError | MissingScope:
        known = self._known.get(key_id)
        if known is not None and time.monotonic() - known.as_of < KNOWN_FOR_S:
            return known.principal
        try:
            async with self._system_db.connect() as conn:
                principal = await principal_of(conn, org_id=org_id, key_id=key_id)
        except AuthError as error:
            return error
        if not may(principal, SCOPE_INFERENCE):
            return MissingScope(SCOPE_INFERENCE)
        self._known.put(key_id, KeyState(principal, time.monotonic()))
        return principal


def noted(
    line: LeasedLine,
    context: LogContext,
    began_at: float,
    meter: RequestMeter | None,
    principal: Principal | None = None,
) -> NotedAnswer:
    """Return a line that has ended now as an answer; its status comes with its end."""
    return NotedAnswer(
        ended_at=time.time(),
        duration_s=time.perf_counter() - began_at,
        method="POST",
        route=line.endpoint,
        status="",
        context=context,
        model=model_of(line),
        principal=principal,
        meter=meter,
        client=None,
        began_at=began_at,
        kind="batch",
    )


def open_batches(
    settings: Settings,
    resources: Resources,
    services: GenerationServices,
    files: FileStore,
    on_booked: OnBooked,
    endpoints: Mapping[str, LineEndpoint],
    request_log: RequestLog,
    content_log: ContentLog,
) -> BatchRunner:
    """Start the runner of batches. `endpoints`: what a line may ask, by its path."""
    runner = BatchRunner(
        services=services,
        telemetry=resources.telemetry,
        db=resources.db,
        system_db=resources.system_db,
        files=files,
        cipher=Cipher(resources.secret, PURPOSE),
        bounds=InputBounds(
            max_lines=settings.max_batch_lines,
            max_file_bytes=settings.max_batch_bytes,
            max_line_bytes=settings.max_body_bytes,
        ),
        endpoints=endpoints,
        on_booked=on_booked,
        request_log=request_log,
        content_log=content_log,
        max_running=settings.batch_concurrency,
        rest_s=resources.listener.rest_s,
    )
    resources.listener.watch(steward.WORK, runner.wake, steward.NEXT_DUE)
    resources.listener.watch(ERASURES, runner.erase, batches.NEXT_FORGOTTEN)
    runner.start()
    resources.stack.push_async_callback(runner.close)
    return runner
