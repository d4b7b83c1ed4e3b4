"""`tollgate up`: starts the whole process tree from one command, and ends it in order.

    supervisor -- postgres, redis (unless URLs are configured)
               -- one engine per model with a path (unless its engine runs elsewhere)
               -- N workers on one listening socket

It never imports torch or the application. SIGTERM or SIGINT stops everything in order, a second one
at once; SIGHUP replaces the workers one by one without refusing a connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from engine.errors import EngineUnavailable
from engine.transport.client import EngineClient
from foundation.periodic import Periodic
from gateway.home import Home, HomeLock
from gateway.logs import last_error
from gateway.net.listener import base_url, bind, local_address, origin
from gateway.processes.child_processes import Child, cut_log, end_leftovers, spawn, until_readable
from gateway.processes.credentials_file import Credentials
from gateway.processes.embedded_databases import (
    STOP_TIMEOUT_S,
    postgres_url,
    redis_url,
    start_postgres,
    start_redis,
)
from gateway.processes.restarter import Restarter
from gateway.processes.start_view import SERVING, EngineStages, ReadyCard, StartView
from gateway.processes.watchdog import Watchdog
from gateway.settings.child_environment import engine_environment, worker_environment
from gateway.settings.load import SavedSettings, Settings, own_environment, save
from gateway.settings.models import ModelConfig

log = logging.getLogger(__name__)

ENGINE_CANNOT_START = 2
"""Exit status of an engine that cannot start as configured: trying again is of no use."""
WORKER_START_TIMEOUT_S = 60.0
UNREADY_STOP_S = 1.0
"""A worker that accepts no connection yet may take this long to stop: it has nothing to finish."""
WORKER_SHUTDOWN_S = 20.0
"""After the drain: what a worker may take to close its spool and its pools."""
READY_TIMEOUT_S = 900.0
"""Loading a large model's weights is part of it."""
READY_POLL_S = 0.05
SHOW_INTERVAL_S = 0.05
PATIENCE_S = 10.0
"""How often a start that takes long says what it waits for."""
PROBE_TIMEOUT_S = 5.0
MAX_PROBE_BYTES = 64 * 1024
ENGINE_STOP_S = 10.0
"""The workers are gone by then, so there is nothing for an engine to finish."""
HOUSEKEEPING_S = 60.0


class StartError(Exception):
    """An error of something the gateway needs that did not start; one line that names it."""


class Supervisor:
    """One run of `tollgate up`. `view` shows a person what happens."""

    def __init__(self, settings: Settings, view: StartView) -> None:
        self.settings = settings
        self.home = Home(settings.home)
        self._view = view
        self._say = view.say
        self._databases: list[Restarter] = []
        self._engines: list[Restarter] = []
        self._workers: list[Restarter] = []
        self._started = False
        self._stop = asyncio.Event()
        self._roll = asyncio.Event()

    @property
    def _restarters(self) -> list[Restarter]:
        return [*self._workers, *self._engines, *self._databases]

    async def run(self) -> None:
        """Start, serve until asked to stop, stop. No child is left when this returns or raises.

        Raises: HomeBusy, AddressError, StartError, EmbeddedError, OSError, and what
        `database.prepare` raises.
        """
        self.home.create()
        lock = HomeLock.acquire(self.home)
        try:
            self._clean_up()
            listener = bind(self.settings.host, self.settings.port)
            try:
                self._listen_to_signals()
                await self._serve_until_stopped(listener)
            finally:
                listener.close()
        finally:
            self._view.close()
            lock.release()

    async def _serve_until_stopped(self, listener: socket.socket) -> None:
        serving = asyncio.create_task(self._serve(listener), name="serve")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            self._say("Stopping.")
        serving.cancel()
        stopping.cancel()
        failure, _ = await asyncio.gather(serving, stopping, return_exceptions=True)
        await self._stop_everything()
        if isinstance(failure, Exception):
            raise failure

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGHUP, self._roll.set)

    def _asked_to_stop(self) -> None:
        if self._stop.is_set():
            for restarter in self._restarters:
                restarter.kill()
        self._stop.set()

    def _clean_up(self) -> None:
        """End what an earlier start left behind (it may hold the port), and forget its metrics."""
        for name in end_leftovers(self.home.run):
            self._say(f"Ended {name}, left behind by an earlier start.")
        shutil.rmtree(self.home.metrics, ignore_errors=True)
        self.home.metrics.mkdir(mode=0o700)

    async def _serve(self, listener: socket.socket) -> None:
        """Start everything, then keep it until cancelled."""
        known, *_ = await _together(
            self._start(listener), self._end_a_vain_start(), self._show_engines()
        )
        self._view.close()
        self._welcome(base_url(listener), known, await self._capacities())
        await _together(
            self._roll_when_asked(),
            self._cutting_logs().run(),
            *(dog.run() for dog in self._watchdogs()),
        )

    async def _start(self, listener: socket.socket) -> Credentials | None:
        """Start everything at once that can be; return when it is ready."""
        for position, model in enumerate(self.settings.models):
            if model.starts_engine:
                start = partial(self._start_engine, position, model)
                engine = Restarter(f"engine-{position}", start)
                engine.is_final = self._is_vain
                self._engines.append(engine)
        known, *_ = await _together(
            self._start_databases(base_url(listener)),
            *(engine.begin() for engine in self._engines),
        )
        save(SavedSettings(number=1, settings=self.settings), self.home.worker_settings)
        for slot in range(self.settings.workers):
            worker = Restarter(
                f"worker-{slot}", partial(self._start_worker, slot, listener.fileno())
            )
            worker.on_exit = self._forget_metrics
            self._workers.append(worker)
        with self._view.stage("workers"):
            await _together(*(worker.begin() for worker in self._workers))
        await self._until_ready(*local_address(listener))
        self._started = True
        found: Credentials | None = known
        return found

    def _is_vain(self, status: int) -> bool:
        """Return whether an engine that left so ends the start.

        Later in life it is tried again and again: what it lacks, a mounted folder say, may come
        back, and other models are being served.
        """
        return status == ENGINE_CANNOT_START and not self._started

    async def _end_a_vain_start(self) -> None:
        """Returns when all has started. Raises: StartError as soon as an engine never will."""
        while not self._started:
            for engine in self._engines:
                if (left := engine.last_exit) is not None and left.poll() == ENGINE_CANNOT_START:
                    raise StartError(f"{engine.name}: {last_error(left.log, left.log_start)}")
            await asyncio.sleep(READY_POLL_S)

    async def _show_engines(self) -> None:
        """Show what each engine does until all has started."""
        shown = [
            (f"model {model.name}", EngineStages(model.path, model.engine))
            for model in self.settings.models
            if model.starts_engine and model.path is not None and model.engine is not None
        ]
        for name, _ in shown:
            self._view.begin(name)
        while not self._started:
            for (name, stages), engine in zip(shown, self._engines, strict=False):
                if engine.child is not None:
                    step, done, total = stages.look(engine.child.pid)
                    if step == SERVING:
                        self._view.end(name)
                    else:
                        self._view.step(name, step, done, total)
            await asyncio.sleep(SHOW_INTERVAL_S)
        for name, _ in shown:
            self._view.end(name)

    def _watchdogs(self) -> list[Watchdog]:
        started = [model for model in self.settings.models if model.starts_engine]
        return [
            Watchdog(restarter, model.engine, load_timeout_s=READY_TIMEOUT_S)
            for restarter, model in zip(self._engines, started, strict=True)
            if model.engine is not None
        ]

    async def _start_databases(self, address: str) -> Credentials | None:
        """Start the embedded servers that are wanted, and bring Postgres to what this version
        needs."""
        settings = self.settings
        if settings.database_url is None:
            self._databases.append(Restarter("postgres", partial(start_postgres, self.home)))
        if settings.redis_url is None:
            self._databases.append(Restarter("redis", partial(start_redis, self.home)))
        with self._view.stage("databases"):
            await _together(*(server.begin() for server in self._databases))
        # SQLAlchemy and Alembic are a good part of a start: the engines load meanwhile.
        from gateway.processes import database

        database_url = settings.database_url or postgres_url(self.home)
        redis_address = settings.redis_url or redis_url(self.home)
        self.settings = msgspec.structs.replace(
            settings, database_url=database_url, redis_url=redis_address
        )
        with self._view.stage("migrations"):
            return await database.prepare(settings, database_url, redis_address, address)

    async def _start_engine(self, position: int, model: ModelConfig) -> Child:
        """Returns at once: the workers connect when it listens."""
        return spawn(
            f"engine-{position}",
            engine_command(model, self.home, self.settings),
            run=self.home.run,
            log=self.home.logs / f"engine-{position}.log",
            # OpenMP threads that wait by spinning would keep the workers off a small machine.
            env=engine_environment(own_environment(), self.settings, OMP_WAIT_POLICY="PASSIVE"),
        )

    async def _start_worker(self, slot: int, listen_fd: int) -> Child:
        """Returns once it accepts connections. Each incarnation has a spool folder of its own: the
        one before it may still be draining, and what it leaves is adopted.
        """
        incarnation = f"{slot}-{secrets.token_hex(4)}"
        reader, writer = os.pipe()
        try:
            child = spawn(
                f"worker-{incarnation}",
                [
                    *(sys.executable, "-m", "gateway", "worker", "--id", incarnation),
                    *("--settings", str(self.home.worker_settings)),
                    *("--listen-fd", str(listen_fd), "--report-fd", str(writer)),
                ],
                run=self.home.run,
                log=self.home.logs / f"worker-{slot}.log",
                env=worker_environment(
                    own_environment(),
                    self.settings,
                    PROMETHEUS_MULTIPROC_DIR=str(self.home.metrics),
                ),
                pass_fds=(listen_fd, writer),
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            async with asyncio.timeout(WORKER_START_TIMEOUT_S):
                said = await _read_byte(reader)
        except BaseException as error:
            await child.stop(UNREADY_STOP_S)
            if isinstance(error, TimeoutError):
                what = f"worker-{slot} does not accept after {WORKER_START_TIMEOUT_S:.0f} s"
                raise StartError(what) from None
            raise
        finally:
            os.close(reader)
        if not said:
            status = await child.wait()
            what = last_error(child.log, child.log_start)
            raise StartError(f"worker-{slot} left with status {status}: {what}")
        return child

    async def _until_ready(self, host: str, port: int) -> None:
        """Wait for /health/ready. An engine that leaves meanwhile has said why it cannot serve."""
        began = time.monotonic()
        speak_at = began + PATIENCE_S
        while missing := await _probe(host, port):
            for engine in self._engines:
                if (left := engine.last_exit) is not None:
                    raise StartError(f"{engine.name}: {last_error(left.log, left.log_start)}")
            if (now := time.monotonic()) > began + READY_TIMEOUT_S:
                raise StartError(f"not ready after {READY_TIMEOUT_S:.0f} s, missing: {missing}")
            if now > speak_at:
                speak_at = now + PATIENCE_S
                self._say(f"Waiting for: {missing}")
            await asyncio.sleep(READY_POLL_S)

    async def _capacities(self) -> list[str]:
        """Print a line for each engine started here: the size of its KV cache, as it reports it."""
        lines = []
        for model in self.settings.models:
            if model.starts_engine:
                assert model.engine is not None
                try:
                    client = await EngineClient.connect(model.engine, timeout_s=PROBE_TIMEOUT_S)
                except EngineUnavailable as error:  # it was ready: its restarter brings it back
                    log.warning("%s does not say how large it is: %s", model.name, error)
                    continue
                size = client.status
                await client.close()
                blocks = f"{size.num_blocks} KV blocks of {size.block_size} tokens"
                lines.append(f"{model.name}: {blocks}, context of {size.max_model_len}")
        return lines

    def _welcome(self, url: str, known: Credentials | None, capacities: list[str]) -> None:
        models = ", ".join(self.settings.model_names)
        self._say(f"Tollgate is ready on {url} with {models}. State: {self.home.root}")
        for line in capacities:
            self._say(line)
        card = ReadyCard(
            base_url=url,
            model=self.settings.models[0],
            known=known,
            credentials=self.home.credentials,
            shows_key=sys.stdout.isatty(),
        )
        self._view.show(card)

    async def _roll_when_asked(self) -> None:
        while True:
            await self._roll.wait()
            self._roll.clear()
            self._say("Replacing the workers.")
            for worker in self._workers:
                try:
                    await worker.replace(self._drain_s)
                except (StartError, OSError) as error:
                    log.error("%s is not replaced, the old one stays: %s", worker.name, error)
                    break
            else:
                self._say("All workers are new.")

    def _cutting_logs(self) -> Periodic:
        async def cut_logs() -> None:
            for path in self.home.logs.glob("*.log"):
                await asyncio.to_thread(cut_log, path)

        return Periodic(
            "cut logs",
            HOUSEKEEPING_S,
            cut_logs,
            log=log,
            failure="logs are not cut",
            at_once=False,
        )

    @property
    def _drain_s(self) -> float:
        return self.settings.drain_timeout_s + WORKER_SHUTDOWN_S

    async def _stop_everything(self) -> None:
        """Stop workers, then engines, then databases: each still has what it leans on until it is
        gone."""
        for restarters, timeout_s in (
            (self._workers, self._drain_s),
            (self._engines, ENGINE_STOP_S),
            (self._databases, STOP_TIMEOUT_S),
        ):
            await asyncio.gather(*(restarter.stop(timeout_s) for restarter in restarters))

    def _forget_metrics(self, child: Child) -> None:
        """Takes a dead worker's live gauges out of the shared sums, and gives back the disk space
        that its counters did not use."""
        mark_process_dead(child.pid, path=str(self.home.metrics))
        for path in self.home.metrics.glob(f"*_{child.pid}.db"):
            cut_metrics(path)


def cut_metrics(path: Path) -> None:
    """Cut a file of metrics, which nobody writes any more, to the part that is in use."""
    with path.open("r+b") as file:
        (used,) = struct.unpack("i", file.read(4))  # prometheus_client.mmap_dict.MmapedDict
        file.truncate(max(used, 8))


def engine_command(model: ModelConfig, home: Home, settings: Settings) -> list[str]:
    """Return the command line of a model's engine."""
    assert model.path is not None and model.engine is not None
    return [
        *(sys.executable, "-m", "engine", "--model", str(model.path)),
        *("--served-name", model.name, "--listen", model.engine),
        *("--usage-record", str(home.usage_record(model.name))),
        *("--log-level", settings.log_level, "--log-format", settings.logs.format),
        *model.engine_options.to_flags(),
        *(f"--adapter={adapter.name}={adapter.path}" for adapter in model.adapters),
    ]


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Return the results in order.

    The first failure cancels the others, and is raised once they have ended: a start that is
    cancelled cleans up after itself.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _read_byte(descriptor: int) -> bytes:
    """Return the byte that the other end of a pipe wrote; empty if it was closed without one."""
    await until_readable(descriptor)
    return os.read(descriptor, 1)


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
