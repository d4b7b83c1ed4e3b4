"""Runs one gateway worker: the application under uvicorn, on a socket that somebody else bound.

`tollgate up` runs it as `python -m gateway worker`: the command stands here, since those of the CLI
would take 5 MB of each worker.

Knows signals and sockets, no route. SIGTERM drains: the socket is let go, what is on its way is
taken, readiness goes red, open streams have `drain_timeout_s` to end, then the application shuts
down and what is left is closed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import resource
import signal
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import uvicorn
from litestar import Litestar

from billing.spool.spool import Spool
from foundation.periodic import BEAT_S, next_beat
from gateway import logs
from gateway.app.connection import ClientConnection
from gateway.app.create import create_app
from gateway.app.settings_follower import ReadAgain, SettingsFollower
from gateway.home import Home
from gateway.installation.follower import StoredSettingsFollower
from gateway.installation.model_versions import VersionHistory
from gateway.net.listener import bound_unread, local_address, origin
from gateway.routes.asgi.request_metrics import ACCESS_LOG, note_refused
from gateway.routes.shared.services import Services
from gateway.settings.load import Settings, restore

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75.0
"""How long an idle connection is kept: longer than most clients keep theirs, so that they close
first.
"""
DRAIN_MARGIN_S = 5.0
"""After the application has ended what was still open: for its last bytes to leave."""
BROKEN_SPOOL_STATUS = 3
"""Exit status of a worker that left because its spool broke."""
BACKLOG = 2048
GC_THRESHOLD = 10_000
"""Objects made and not freed before the collector looks at the youngest: a request's are gone by
then."""
SWITCH_INTERVAL_S = 0.0005
"""A thread that computes gives way to the event loop after so long. It asks again after each wait
for events, so with Python's 5 ms a batch that is made ready in a thread stalls answers for 15."""


def bound_stalls() -> None:
    """Bound how long the event loop stands still: for other threads, and for the garbage collector.
    What there is now is taken out of the collector's sight: it stays, and to look through all of it
    takes half a second of every request that waits."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that says when it listens and when it begins to leave, and wakes up once a
    second, for the Date header, instead of ten times."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        on_started: Callable[[], None],
        on_leaving: Callable[[], None],
    ) -> None:
        self._exit = asyncio.Event()
        self._must_exit = False
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(config)
        self._on_started = on_started
        self._on_leaving = on_leaving

    @property
    def should_exit(self) -> bool:
        return self._must_exit

    @should_exit.setter
    def should_exit(self, wanted: bool) -> None:
        self._must_exit = wanted
        if wanted and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._exit.set)  # by a signal or another thread

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat(self._loop.time(), BEAT_S)):
                    await self._exit.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop as uvicorn does, but return instead of dying of the signal once more."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        bound_stalls()
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_leaving()
        await super().shutdown(sockets)


def run(
    settings: Settings,
    listener: socket.socket,
    *,
    worker_id: str,
    metrics: Path | None = None,
    number: int = 0,
    read_again: ReadAgain,
    report_fd: int | None = None,
    metrics_listener: socket.socket | None = None,
    follows_stored: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; at SIGHUP take up what `read_again` returns. `number`: of the
    settings. `report_fd`: gets reports, the first once it accepts connections.

    `worker_id` names its spool folder: no two living workers of a home may share it. `metrics`: the
    folder of prometheus-client's multiprocess mode, where there is one. Raises: SystemExit when the
    spool broke. `metrics_listener`: the one of `[metrics]`, where it is set. `follows_stored`: it
    takes up by itself what operators store beside the settings, for no `tollgate up` does.
    """
    json_lines = settings.logs.format == "json"
    logs.configure(settings.log_level, json_lines=json_lines, process=logs.worker_name(worker_id))
    _raise_file_limit()
    bound_unread(listener, settings.stalled_reader_s)
    if metrics_listener is not None:
        bound_unread(metrics_listener, settings.stalled_reader_s)
    if settings.public_url is None:
        address = origin(*local_address(listener))  # the port too, where any free one was asked for
        settings = msgspec.structs.replace(settings, public_url=address)
    app = create_app(settings, worker_id=worker_id, metrics=metrics)
    connections = ClientConnection.reading_within(settings.stalled_reader_s)
    config = server_config(app, settings, connections)

    def started() -> None:
        services: Services = app.state.services
        access_log = app.state[ACCESS_LOG]
        connections.on_refused = partial(note_refused, services.telemetry, access_log)
        watch.append(asyncio.create_task(leave_when_broken(services.spool, server)))
        if services.configuration is not None:
            stored = stored_follower(services, settings) if follows_stored else None
            complete = None if stored is None else stored.merged_into
            follower = SettingsFollower(
                services.configuration, read_again, number, report_fd, complete
            )
            reading.append(asyncio.create_task(follower.run(), name="follow settings"))
            if stored is not None:
                looking = stored.following(follower.take_up, services.listener)
                reading.append(asyncio.create_task(looking.run(), name="follow stored settings"))

    def leaving() -> None:
        connections.leaving = True
        app.state.begin_drain()

    watch: list[asyncio.Task[None]] = []
    reading: list[asyncio.Task[None]] = []
    server = _UvicornServer(config, on_started=started, on_leaving=leaving)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        sockets = [listener] if metrics_listener is None else [listener, metrics_listener]
        runner.run(server.serve(sockets=sockets))
    if any(task.done() and not task.cancelled() for task in watch):
        sys.exit(BROKEN_SPOOL_STATUS)


def stored_follower(services: Services, settings: Settings) -> StoredSettingsFollower:
    home, configuration = Home(settings.home).name, services.configuration
    stored = StoredSettingsFollower(services.system_db, home, settings.secret_key_file)
    if configuration is not None:
        history = VersionHistory()
        stored.versions = lambda: history.of(configuration.settings.models)
    return stored


def server_config(
    app: Litestar, settings: Settings, connections: type[ClientConnection]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=connections,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout_s + DRAIN_MARGIN_S),
    )


async def leave_when_broken(spool: Spool, server: uvicorn.Server) -> None:
    """Drain as at SIGTERM when the spool breaks: a worker that can never account for anything again
    gives way to the next, which recovers the spool."""
    await spool.broken.wait()
    log.critical("the spool is broken: draining, to be started again")
    server.should_exit = True


def _raise_file_limit() -> None:
    """Raise the soft limit of file descriptors, which is often 1024: every stream needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def worker_process(
    worker_id: str, settings_file: Path, listen_fd: int, report_fd: int, metrics_fd: int | None
) -> None:
    """Run a worker of `tollgate up`, which alone calls this."""
    try:
        saved = restore(settings_file)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        sys.stderr.write(f"tollgate: --settings: {reason}\n")
        sys.exit(2)
    run(
        saved.settings,
        socket.socket(fileno=listen_fd),
        worker_id=worker_id,
        metrics=Home(saved.settings.home).metrics,
        number=saved.number,
        read_again=partial(restore, settings_file),
        report_fd=report_fd,
        metrics_listener=None if metrics_fd is None else socket.socket(fileno=metrics_fd),
    )


def main() -> None:
    parser = ArgumentParser("tollgate worker", description=worker_process.__doc__)
    parser.add_argument("--id", required=True, help="the name of its spool folder")
    parser.add_argument("--settings", type=Path, required=True, help="the settings, resolved")
    parser.add_argument("--listen-fd", type=int, required=True, help="descriptor of a bound socket")
    parser.add_argument("--report-fd", type=int, required=True, help="it gets what is reported")
    parser.add_argument("--metrics-fd", type=int, help="descriptor of the socket of metrics, bound")
    given = parser.parse_args(sys.argv[2:])
    worker_process(given.id, given.settings, given.listen_fd, given.report_fd, given.metrics_fd)
