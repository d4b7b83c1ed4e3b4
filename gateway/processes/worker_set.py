"""The gateway workers of `tollgate up`: as many as the settings say, on one listening socket.

Each is told to read its settings again by SIGHUP, and says through a pipe which it has in force.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from gateway.home import Home
from gateway.logs import last_error
from gateway.processes.child_processes import Child, spawn
from gateway.processes.restarter import Restarter, StartError, together
from gateway.settings.child_environment import worker_environment
from gateway.settings.live import WorkerReport
from gateway.settings.load import SavedSettings, Settings, own_environment, save

log = logging.getLogger(__name__)

WORKER_START_TIMEOUT_S = 60.0
UNREADY_STOP_S = 1.0
"""A worker that accepts no connection yet may take this long to stop: it has nothing to finish."""
WORKER_SHUTDOWN_S = 20.0
"""After the drain: what a worker may take to close its spool and its pools."""
TAKE_UP_TIMEOUT_S = 30.0
"""Bounds the taking up of settings by all workers: it is instant but for a tokenizer to be read."""
LOOK_AGAIN_S = 0.05
MAX_REPORT_BYTES = 64 * 1024


class SettingsRefused(Exception):
    """An error of settings that a worker cannot take up; the old ones are in force again."""


class Reports:
    """The last report of each process, which came through its pipe."""

    def __init__(self) -> None:
        self._last: dict[int, WorkerReport] = {}
        self._unread: dict[int, bytes] = {}
        self._news = asyncio.Event()
        self.on_report: Callable[[], None] = lambda: None

    @property
    def all(self) -> list[WorkerReport]:
        """Return those of the living, also of workers that drain."""
        return list(self._last.values())

    def of(self, descriptor: int | None) -> WorkerReport | None:
        return None if descriptor is None else self._last.get(descriptor)

    def listen(self, descriptor: int) -> None:
        """Read reports until the other end is closed."""
        self._unread[descriptor] = b""
        asyncio.get_running_loop().add_reader(descriptor, self._read, descriptor)

    def stop_listening(self, descriptor: int) -> None:
        if descriptor in self._unread:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
            del self._unread[descriptor]
            self._last.pop(descriptor, None)
            self._tell()

    def hears(self, descriptor: int) -> bool:
        return descriptor in self._unread

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. It is looked at also while nothing is reported: a worker may have
        reported a moment before it counts as the one that runs."""
        while not condition():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._news.wait()

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, MAX_REPORT_BYTES)
        *lines, rest = (self._unread[descriptor] + data).split(b"\n")
        self._unread[descriptor] = rest
        try:
            for line in lines:
                self._last[descriptor] = msgspec.json.decode(line, type=WorkerReport)
        except msgspec.MsgspecError as error:
            log.error("a worker's report cannot be read: %s", error)
            data = b""
        if not data or len(rest) > MAX_REPORT_BYTES:
            self.stop_listening(descriptor)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self.on_report()


class WorkerSet:
    """The workers. `listen_fd`, `metrics_fd`: of the bound sockets that they share. `on_exit`: is
    told of each that left."""

    def __init__(
        self,
        home: Home,
        listen_fd: int,
        on_exit: Callable[[Child], None],
        metrics_fd: int | None = None,
    ) -> None:
        self.restarters: list[Restarter] = []
        self.reports = Reports()
        self._home, self._listen_fd, self._on_exit = home, listen_fd, on_exit
        self._metrics_fd = metrics_fd
        self._saved: SavedSettings | None = None
        self._pipes: dict[Child, int] = {}

    @property
    def engines_in_use(self) -> frozenset[str]:
        """The addresses of the engines that some worker may still ask."""
        return frozenset(address for each in self.reports.all for address in each.engines)

    async def begin(self, settings: Settings) -> None:
        self._save(settings)
        await self._resize(settings.workers)

    async def take_up(self, settings: Settings) -> None:
        """Have all running workers take up other settings. Raises: SettingsRefused; the old ones
        are in force then."""
        before = self._settings
        self._save(settings)
        problem = await self._told()
        if problem is not None:
            self._save(before)
            if (second := await self._told()) is not None:
                log.error("a worker does not go back to the settings before: %s", second)
            raise SettingsRefused(problem)

    async def replace(self, settings: Settings, say: Callable[[str], None]) -> None:
        """Replace all workers one by one by those that have these settings; as many as they say are
        left. `say`: shows a person what takes its time. Raises: SettingsRefused; the old ones are
        in force then."""
        before = self._settings
        self._save(settings)
        try:
            await self._replace_all(before.drain_timeout_s, say)
            await self._resize(settings.workers)
        except (StartError, OSError) as error:
            self._save(before)
            await self._resize(before.workers)
            if (second := await self._told()) is not None:
                log.error("a worker does not go back to the settings before: %s", second)
            raise SettingsRefused(str(error)) from error

    async def stop(self) -> None:
        if self._saved is not None:
            timeout_s = self._settings.drain_timeout_s + WORKER_SHUTDOWN_S
            await asyncio.gather(*(worker.stop(timeout_s) for worker in self.restarters))

    async def _replace_all(self, drain_timeout_s: float, say: Callable[[str], None]) -> None:
        for position, worker in enumerate(self.restarters, start=1):
            say(f"Replacing worker {position} of {len(self.restarters)}.")
            await worker.replace(drain_timeout_s + WORKER_SHUTDOWN_S)

    @property
    def _settings(self) -> Settings:
        assert self._saved is not None, "not begun"
        return self._saved.settings

    def _save(self, settings: Settings) -> None:
        number = 1 if self._saved is None else self._saved.number + 1
        self._saved = SavedSettings(number=number, settings=settings)
        save(self._saved, self._home.worker_settings)

    async def _resize(self, number: int) -> None:
        fresh = []
        for slot in range(len(self.restarters), number):
            worker = Restarter(f"worker-{slot}", partial(self._start, slot))
            worker.on_exit = self._on_exit
            fresh.append(worker)
        self.restarters += fresh
        await together(*(worker.begin() for worker in fresh))
        gone, self.restarters = self.restarters[number:], self.restarters[:number]
        timeout_s = self._settings.drain_timeout_s + WORKER_SHUTDOWN_S
        await asyncio.gather(*(worker.stop(timeout_s) for worker in gone))

    async def _told(self) -> str | None:
        """Tell all workers to read their settings again; return why one of them refuses, if one
        does."""
        assert self._saved is not None
        number = self._saved.number
        for worker in self.restarters:
            if worker.child is not None:  # else the next one reads them as it starts
                worker.child.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(TAKE_UP_TIMEOUT_S):
                await self.reports.until(lambda: self._is_decided(number))
        except TimeoutError:
            try:
                await self._replace_silent(number)
            except (StartError, OSError) as error:
                return str(error)
        refusals = [each for each in self._reports_now() if each.refused == number]
        return refusals[0].problem if refusals else None

    async def _replace_silent(self, number: int) -> None:
        """Replace those that do not answer: the next reads the settings as it starts. Raises:
        StartError, OSError; the silent one stays then."""
        silent = [each for each in self.restarters if self._number_of(each) != number]
        for worker in silent:
            log.error("%s gives no answer, it is replaced", worker.name)
            await worker.replace(self._settings.drain_timeout_s + WORKER_SHUTDOWN_S)

    def _is_decided(self, number: int) -> bool:
        refused = any(each.refused == number for each in self._reports_now())
        return refused or all(self._number_of(each) == number for each in self.restarters)

    def _reports_now(self) -> Sequence[WorkerReport]:
        found = (self._report_of(each) for each in self.restarters)
        return [each for each in found if each is not None]

    def _report_of(self, worker: Restarter) -> WorkerReport | None:
        return None if worker.child is None else self.reports.of(self._pipes.get(worker.child))

    def _number_of(self, worker: Restarter) -> int:
        report = self._report_of(worker)
        return 0 if report is None else report.number

    async def _start(self, slot: int) -> Child:
        """Returns once it accepts connections. Each incarnation has a spool folder of its own: the
        one before it may still be draining, and what it leaves is adopted.
        """
        incarnation = f"{slot}-{secrets.token_hex(4)}"
        reader, writer = os.pipe()
        settings = self._settings
        shared = (self._metrics_fd,) if self._metrics_fd is not None else ()
        try:
            child = spawn(
                f"worker-{incarnation}",
                [
                    *(sys.executable, "-m", "gateway", "worker", "--id", incarnation),
                    *("--settings", str(self._home.worker_settings)),
                    *("--listen-fd", str(self._listen_fd), "--report-fd", str(writer)),
                    *(each for fd in shared for each in ("--metrics-fd", str(fd))),
                ],
                run=self._home.run,
                log=self._home.logs / f"worker-{slot}.log",
                env=worker_environment(
                    own_environment(),
                    settings,
                    PROMETHEUS_MULTIPROC_DIR=str(self._home.metrics),
                ),
                pass_fds=(self._listen_fd, writer, *shared),
            )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._pipes = {each: it for each, it in self._pipes.items() if self.reports.hears(it)}
        self._pipes[child] = reader
        self.reports.listen(reader)
        try:
            async with asyncio.timeout(WORKER_START_TIMEOUT_S):
                await self.reports.until(
                    lambda: not self.reports.hears(reader) or self.reports.of(reader) is not None
                )
        except BaseException as error:
            await child.stop(UNREADY_STOP_S)
            self.reports.stop_listening(reader)
            if isinstance(error, TimeoutError):
                what = f"worker-{slot} does not accept after {WORKER_START_TIMEOUT_S:.0f} s"
                raise StartError(what) from None
            raise
        if not self.reports.hears(reader):
            status = await child.wait()
            what = last_error(child.log, child.log_start)
            raise StartError(f"worker-{slot} left with status {status}: {what}")
        if self._settings is not settings:  # it may have read those before
            child.send_signal(signal.SIGHUP)
        return child
