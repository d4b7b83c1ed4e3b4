"""`tollgate up`: starts the whole process tree from one command, and ends it in order.

    supervisor -- postgres, redis (unless URLs are configured)
               -- the engines of each model with a path (unless its engine runs elsewhere)
               -- N workers on one listening socket

It never imports torch or the application. SIGTERM or SIGINT stops everything in order, a second one
at once; SIGHUP reloads the settings and replaces the workers one by one without refusing a
connection.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from gateway.home import Home, HomeLock
from gateway.logs import SUPERVISOR_FILE, KeptLogs, write_log_file
from gateway.net.listener import base_url, bind, bind_metrics, local_address, origin
from gateway.processes.child_processes import Child, end_leftovers
from gateway.processes.control_socket import ReloadRequest, control_socket
from gateway.processes.credentials_file import Credentials
from gateway.processes.embedded_databases import (
    STOP_TIMEOUT_S,
    postgres_url,
    redis_url,
    start_postgres,
    start_redis,
)
from gateway.processes.engine_set import (
    ENGINE_STOP_S,
    READY_POLL_S,
    READY_TIMEOUT_S,
    EngineSet,
    capacities,
)
from gateway.processes.reload import ReadSettings, Reload
from gateway.processes.restarter import Restarter, StartError, together
from gateway.processes.start_view import SERVING, ReadyCard, StartView
from gateway.processes.worker_set import WorkerSet
from gateway.settings.file import SettingsError
from gateway.settings.load import Settings

if TYPE_CHECKING:  # SQLAlchemy: loaded while the engines load
    from sqlalchemy.ext.asyncio import AsyncEngine

    from gateway.fleet.planner.view import PlannedChange
    from gateway.installation.follower import StoredSettingsFollower

log = logging.getLogger(__name__)

SHOW_INTERVAL_S = 0.05
PATIENCE_S = 10.0
"""How often a start that takes long says what it waits for."""
PROBE_TIMEOUT_S = 5.0
MAX_PROBE_BYTES = 64 * 1024


class Supervisor:
    """One run of `tollgate up`. `read`: reads the settings again. `view` shows a person what
    happens. `in_force`: is called when a reload has put settings in force."""

    def __init__(
        self,
        settings: Settings,
        read: ReadSettings,
        view: StartView,
        in_force: Callable[[Settings], None] = lambda settings: None,
    ) -> None:
        self.settings = settings
        self.home = Home(settings.home)
        self._as_read, self._read, self._in_force = settings, read, in_force
        self._view = view
        self._say = view.say
        self._stored: StoredSettingsFollower | None = None
        self._db: AsyncEngine | None = None
        self._databases: list[Restarter] = []
        self._engines = EngineSet(self.home)
        self._json_lines = settings.logs.format == "json"
        self._logs = KeptLogs(
            self.home.logs,
            max_bytes=settings.logs.max_bytes,
            keep=settings.logs.keep,
            json_lines=self._json_lines,
            copies=settings.logs.stdout,
        )
        self._workers: WorkerSet | None = None
        self._metrics_listener: socket.socket | None = None
        self._started = False
        self._stop = asyncio.Event()
        self._reload = asyncio.Event()

    @property
    def _restarters(self) -> list[Restarter]:
        workers = [] if self._workers is None else self._workers.restarters
        return [*workers, *self._engines.restarters, *self._databases]

    async def run(self) -> None:
        """Start, serve until asked to stop, stop. No child is left when this returns or raises.

        Raises: HomeBusy, AddressError, StartError, EmbeddedError, OSError, and what
        `database.prepare` raises.
        """
        self.home.create()
        lock = HomeLock.acquire(self.home)
        try:
            self._clean_up()
            self._logs.cut()
            write_log_file(self.home.logs / SUPERVISOR_FILE, json_lines=self._json_lines)
            with ExitStack() as sockets:
                listener = sockets.enter_context(bind(self.settings.host, self.settings.port))
                own = self.settings.metrics
                self._metrics_listener = bind_metrics(own.host, own.port, listener)
                if self._metrics_listener is not None:
                    sockets.enter_context(self._metrics_listener)
                self._listen_to_signals()
                await self._serve_until_stopped(listener)
        finally:
            self._view.close()
            lock.release()

    async def _serve_until_stopped(self, listener: socket.socket) -> None:
        copying = self._logs.copying()
        if self.settings.logs.stdout:
            self._logs.start()
            copying.start()
        serving = asyncio.create_task(self._serve(listener), name="serve")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            self._say("Stopping.")
        serving.cancel()
        stopping.cancel()
        failure, _ = await asyncio.gather(serving, stopping, return_exceptions=True)
        await self._stop_everything()
        if copying.is_running:
            await copying.close()
            self._logs.close()
        if isinstance(failure, Exception):
            raise failure

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            for restarter in self._restarters:
                restarter.kill()
        self._stop.set()

    def _clean_up(self) -> None:
        """End what an earlier start left behind (it may hold the port), and forget its metrics and
        which of its engines were drained."""
        for name in end_leftovers(self.home.run):
            self._say(f"Ended {name}, left behind by an earlier start.")
        shutil.rmtree(self.home.metrics, ignore_errors=True)
        self.home.metrics.mkdir(mode=0o700)
        self.home.drain_marks.unlink(missing_ok=True)

    async def _serve(self, listener: socket.socket) -> None:
        """Start everything, then keep it until cancelled."""
        own = self._metrics_listener
        workers = WorkerSet(
            *(self.home, listener.fileno(), self._forget_metrics),
            metrics_fd=None if own is None else own.fileno(),
        )
        known, *_ = await together(
            self._start(listener, workers), self._end_a_vain_start(), self._show_engines()
        )
        self._view.close()
        self._engines.watch(self.settings.models)
        site = self.settings.public_url or base_url(listener).removesuffix("/v1")
        sign_in = await self._make_sign_in_link(site) if sys.stdout.isatty() else (None, True)
        lines = await capacities(self.settings.models)
        self._welcome(base_url(listener), known, lines, site, sign_in)
        assert self._stored is not None
        reload = Reload(
            self._read,
            self._stored.merged_into,
            as_read=self._as_read,
            settings=self.settings,
            engines=self._engines,
            workers=workers,
            say=self._say,
            in_force=self._in_force,
        )
        async with control_socket(self.home, reload.answer):
            await together(
                self._plan(reload),
                self._reload_when_asked(reload),
                self._logs.cutting().run(),
                self._follow_stored(self._stored, reload),
            )

    async def _start(self, listener: socket.socket, workers: WorkerSet) -> Credentials | None:
        """Start everything at once that can be; return when it is ready."""
        await self._engines.let_join(self.settings)
        known, _ = await together(
            self._start_databases(base_url(listener)), self._engines.begin(self.settings)
        )
        self._workers = workers
        with self._view.stage("workers"):
            await workers.begin(self.settings)
        await self._until_ready(*local_address(listener))
        # A worker is ready with one replica of each model; here all that can serve are waited for.
        await self._engines.until_ready(self._engines.all)
        self._started = True
        found: Credentials | None = known
        return found

    async def _end_a_vain_start(self) -> None:
        """Returns when all has started. Raises: StartError as soon as an engine never will."""
        while not self._started:
            for engine in self._engines.all:
                if engine.will_never_start:
                    raise StartError(engine.failure)
            await asyncio.sleep(READY_POLL_S)

    async def _show_engines(self) -> None:
        """Show what each engine does until all has started."""
        shown = [
            f"model {model.replica_name(address)}"
            for model in self.settings.models
            for address in model.started
        ]
        for name in shown:
            self._view.begin(name)
        while not self._started:
            for engine in self._engines.all:
                name, (step, done, total) = f"model {engine.name}", engine.stage()
                if step == SERVING:
                    self._view.end(name)
                else:
                    self._view.step(name, step, done, total)
            await asyncio.sleep(SHOW_INTERVAL_S)
        for name in shown:
            self._view.end(name)

    async def _start_databases(self, address: str) -> Credentials | None:
        """Start the embedded servers that are wanted, and bring Postgres to what this version
        needs."""
        settings = self.settings
        if settings.database_url is None:
            self._databases.append(Restarter("postgres", partial(start_postgres, self.home)))
        if settings.redis_url is None:
            self._databases.append(Restarter("redis", partial(start_redis, self.home)))
        with self._view.stage("databases"):
            await together(*(server.begin() for server in self._databases))
        # SQLAlchemy and Alembic are a good part of a start: the engines load meanwhile.
        from gateway.processes import database

        database_url = settings.database_url or postgres_url(self.home)
        redis_address = settings.redis_url or redis_url(self.home)
        self.settings = msgspec.structs.replace(
            settings, database_url=database_url, redis_url=redis_address
        )
        with self._view.stage("migrations"):
            known = await database.prepare(settings, database_url, redis_address, address)
        await self._add_stored(database_url)
        return known

    async def _add_stored(self, database_url: str) -> None:
        """Add what operators stored beside the file. What does not fit the file keeps nobody from
        starting."""
        from gateway.db import ROLE_SYSTEM, create_engine
        from gateway.installation.follower import StoredSettingsFollower

        # One connection to ask, and one on which changes are heard of.
        self._db = create_engine(database_url, role=ROLE_SYSTEM, pool_size=2)
        secret_file = self.settings.secret_key_file
        self._stored = StoredSettingsFollower(self._db, self.home.name, secret_file)
        try:
            self._as_read = await self._stored.merged_into(self._as_read)
        except SettingsError as error:
            self._say(f"Stored settings are not in force, the file's are: {error}")
            self._stored.note(str(error))
            return
        self.settings = msgspec.structs.replace(
            self.settings, models=self._as_read.models, mcp=self._as_read.mcp
        )
        self._stored.note("")

    async def _follow_stored(self, stored: StoredSettingsFollower, reload: Reload) -> None:
        """Reload when operators change what is stored, and report what runs, until cancelled."""
        from gateway.worker.work_listener import WorkListener

        async def reload_all() -> str:
            await reload.answer(ReloadRequest())
            return reload.problem

        assert self._db is not None
        reload.on_outcome = stored.note
        stored.versions = reload.versions
        self._engines.on_change = stored.reporting.wake
        listener = WorkListener(self._db)
        looking = stored.following(reload_all, listener)
        listener.start()
        try:
            await together(looking.run(), stored.reporting.run())
        finally:
            await listener.close()

    async def _plan(self, reload: Reload) -> None:
        """Decide how many engines models have whose range lets it, until cancelled."""
        from gateway.fleet.planner.planner import Planner

        planner = Planner(
            self.home,
            lambda: reload.settings,
            reload,
            self._note_planned,
            self._engines.machine(),
        )
        await planner.run()

    async def _note_planned(self, change: PlannedChange) -> None:
        """Put a decision of the planner into the operator's audit log."""
        from gateway.audit.log import PLANNER, record
        from gateway.tenancy.orgs import find_operator

        assert self._db is not None
        async with self._db.begin() as conn:
            operator = await find_operator(conn)
            if operator is not None:
                await record(
                    conn,
                    org_id=operator,
                    actor=PLANNER,
                    action="model.scaled" if change.is_done else "model.not_scaled",
                    target=change.model,
                    before={"replicas": change.before},
                    after={"replicas": change.after, "why": change.why},
                )

    async def _until_ready(self, host: str, port: int) -> None:
        """Wait for /health/ready. An engine that leaves meanwhile has said why it cannot serve."""
        began = time.monotonic()
        speak_at = began + PATIENCE_S
        while missing := await _probe(host, port):
            for engine in self._engines.all:
                if (failure := engine.failure) is not None:
                    raise StartError(failure)
            if (now := time.monotonic()) > began + READY_TIMEOUT_S:
                raise StartError(f"not ready after {READY_TIMEOUT_S:.0f} s, missing: {missing}")
            if now > speak_at:
                speak_at = now + PATIENCE_S
                self._say(f"Waiting for: {missing}")
            await asyncio.sleep(READY_POLL_S)

    async def _make_sign_in_link(self, site: str) -> tuple[str | None, bool]:
        """Make a link that signs the first owner in, and tell whether there is one: else it makes
        one. None: there is nobody to sign in, or no Redis to keep it, which is told elsewhere."""
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        from gateway.audit.log import FIRST_START
        from gateway.auth.login.sign_in_links import first_owner, make_link, to_link
        from gateway.secret import Secret
        from gateway.tenancy.errors import NotFound

        assert self._db is not None and self.settings.redis_url is not None
        redis = Redis.from_url(self.settings.redis_url)
        secret = Secret.load(self.settings.secret_key_file)
        try:
            async with self._db.begin() as conn:
                owner = await first_owner(conn)
                token = await make_link(conn, redis, owner, secret=secret, actor=FIRST_START)
        except (NotFound, RedisError, OSError) as error:
            log.warning("no link to sign in with was made: %s", error)
            return None, True
        finally:
            await redis.aclose()
        return to_link(site, token), owner.user_id is not None

    def _welcome(
        self,
        url: str,
        known: Credentials | None,
        capacities: list[str],
        site: str,
        sign_in: tuple[str | None, bool],
    ) -> None:
        models = ", ".join(self.settings.model_names)
        self._say(f"Tollgate is ready on {url} with {models}. State: {self.home.root}")
        for line in capacities:
            self._say(line)
        if self._metrics_listener is not None:
            host, port = local_address(self._metrics_listener)
            self._say(f"Metrics and health: {origin(host, port)}/metrics")
        card = ReadyCard(
            base_url=url,
            model=self.settings.models[0],
            known=known,
            credentials=self.home.credentials,
            shows_key=sys.stdout.isatty(),
            console=f"{site}/console",
            sign_in=sign_in[0],
            has_owner=sign_in[1],
        )
        self._view.show(card)

    async def _reload_when_asked(self, reload: Reload) -> None:
        """Reload at each SIGHUP. Workers are replaced in any case then, as for a new version."""
        while True:
            await self._reload.wait()
            self._reload.clear()
            await reload.answer(ReloadRequest(replaces_workers=True))

    async def _stop_everything(self) -> None:
        """Stop workers, then engines, then databases: each still has what it leans on until it is
        gone."""
        if self._workers is not None:
            await self._workers.stop()
        if self._db is not None:
            await self._db.dispose()
        await self._engines.stop(ENGINE_STOP_S)
        await asyncio.gather(*(each.stop(STOP_TIMEOUT_S) for each in self._databases))

    def _forget_metrics(self, child: Child) -> None:
        """Takes a dead worker's live gauges out of the shared sums, and gives back the disk space
        that its counters did not use."""
        mark_process_dead(child.pid, path=str(self.home.metrics))
        for path in self.home.metrics.glob(f"*_{child.pid}.*"):
            cut_metrics(path)


def cut_metrics(path: Path) -> None:
    """Cut a file of metrics, which nobody writes any more, to the part that is in use. Both kinds
    (`gateway.telemetry.shared_files`, `.histograms`) begin with how many bytes that is."""
    with path.open("r+b") as file:
        (used,) = struct.unpack("i", file.read(4))
        file.truncate(max(used, 8))


async def _probe(host: str, port: int) -> str:
    """Return what /health/ready misses, in words; empty when it is ready."""
    authority = origin(host, port).removeprefix("http://")
    request = f"GET /health/ready HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n"
    answer = b""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request.encode())
                while len(answer) < MAX_PROBE_BYTES and (data := await reader.read(4096)):
                    answer += data
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        return f"a worker that answers ({type(error).__name__})"
    head, _, body = answer.partition(b"\r\n\r\n")
    return "" if head.split(b" ")[1:2] == [b"200"] else body.decode(errors="replace")
