"""Runs a server as a process, and ends it with everything that it started.

Knows bytes, not messages. A server leads a session and process group of its own. When it exits, its
group is killed while its pid is still reserved (by the zombie), then everything left in its cell,
then its folder is removed; what it fetched is kept (`package_caches`). No process outlives `stop`,
even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from asyncio.streams import StreamReaderProtocol
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from foundation.tasks import TaskSet
from mcp_bridge.upstream.launch_errors import StartFailed, StdioError, TooManyProcesses
from mcp_bridge.upstream.launch_spec import LaunchSpec, check_on_disk, filled_environment
from mcp_bridge.upstream.stdio.images import check_images
from mcp_bridge.upstream.stdio.isolation import Cell, Isolation, first_closed_folder
from mcp_bridge.upstream.stdio.package_caches import PackageCache, PackageCaches
from mcp_bridge.upstream.stdio.uids import PATH

MAX_PROCESSES = 64
"""Servers of one gateway process."""
MAX_OF_A_TENANT = 16
READ_BYTES = 64 * 1024
STDERR_TAIL_BYTES = 16 * 1024
"""The end of stderr, kept in memory and in no log."""
STDIN_GRACE_S = 2.0
"""Time to exit after stdin was closed, which is how the protocol ends a server."""
TERM_GRACE_S = 2.0
KILL_WAIT_S = 5.0
STDERR_WAIT_S = 2.0
"""Time to read the rest of stderr, which a process outside of the group may hold open."""
GROUP_LOOKS, LOOK_AGAIN_S = 100, 0.005

Ends = tuple[socket.socket, socket.socket, socket.socket]

log = logging.getLogger(__name__)


class ProcessOwner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a server process. Different owners never share a process or a uid."""

    tenant: str
    credential_set: str
    """The name of the credentials, which reveals no value."""

    def key(self, upstream: str) -> str:
        return repr((self.tenant, upstream, self.credential_set))


class ServerProcess:
    """A process that `Launcher.start` started; `stop` must be called even if it has exited."""

    def __init__(self, upstream: str, popen: subprocess.Popen[bytes], cleaning: Cleanup) -> None:
        self.upstream = upstream
        self.stdout = asyncio.StreamReader(limit=READ_BYTES)
        self.exited = asyncio.Event()
        self.returncode: int | None = None
        """The exit status; negative: the signal that ended it."""
        self.sent: int | None = None
        """The last signal that we sent."""
        self.stderr_bytes = 0
        self._popen = popen
        self._cleaning = cleaning
        self._started_s = time.monotonic()
        self._stderr = asyncio.StreamReader(limit=READ_BYTES)
        self._tail = bytearray()
        self._stop_task: asyncio.Task[None] | None = None
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def stderr_tail(self) -> bytes:
        """Return the end of stderr, unsanitized (see `stderr_tail`)."""
        return bytes(self._tail)

    async def open(self, ends: Ends) -> None:
        """Open our ends of stdin, stdout and stderr; called once, first."""
        loop = asyncio.get_running_loop()
        stdin, stdout, stderr = ends
        unread = asyncio.StreamReader(limit=READ_BYTES)
        transport, protocol = await loop.create_unix_connection(
            lambda: StreamReaderProtocol(unread), sock=stdin
        )
        self.stdin = asyncio.StreamWriter(transport, protocol, unread, loop)
        self._out, _ = await loop.create_unix_connection(
            lambda: StreamReaderProtocol(self.stdout), sock=stdout
        )
        self._err, _ = await loop.create_unix_connection(
            lambda: StreamReaderProtocol(self._stderr), sock=stderr
        )
        self._stderr_task = asyncio.create_task(self._read_stderr())

    async def stop(self) -> None:
        """Ask the process to exit, kill it if it does not, and clean up. Idempotent; continues if
        the caller is cancelled."""
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._stop())
        await asyncio.shield(self._stop_task)

    async def _stop(self) -> None:
        drain = asyncio.create_task(self._drain())
        try:
            self.stdin.close()
            for grace_s, number in (
                (STDIN_GRACE_S, signal.SIGTERM),
                (TERM_GRACE_S, signal.SIGKILL),
                (KILL_WAIT_S, None),
            ):
                if await self._left_within(grace_s):
                    break
                if number is not None:
                    self.sent = number
                    self._signal_group(number)
            else:
                log.error("%s: process %d cannot be killed", self.upstream, self.pid)
            await self._group_gone()
        finally:
            await _end(drain)
            await self._cleaning.run(self.upstream)
            await asyncio.wait([self._stderr_task], timeout=STDERR_WAIT_S)
            await _end(self._stderr_task)
            for pipe in (self._out, self._err):
                pipe.close()
        log.info(
            "%s: process %d ended with status %s after %.1f s; it wrote %d bytes to stderr",
            self.upstream,
            self.pid,
            self.returncode,
            time.monotonic() - self._started_s,
            self.stderr_bytes,
        )

    async def _left_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()
        return self.exited.is_set()

    async def _group_gone(self) -> None:
        """Wait until the process group is gone. No signal is sent: the number may belong to another
        group by now."""
        for _ in range(GROUP_LOOKS):
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    def _on_exit(self) -> None:
        """Kill the group before the process is reaped, after which its number may be reused."""
        self._signal_group(signal.SIGKILL)
        self.returncode = self._popen.wait()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exited.set()

    def _signal_group(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    async def _read_stderr(self) -> None:
        while data := await self._stderr.read(READ_BYTES):
            self.stderr_bytes += len(data)
            self._tail += data[-STDERR_TAIL_BYTES:]
            del self._tail[:-STDERR_TAIL_BYTES]

    async def _drain(self) -> None:
        """Drain stdout: a process that blocks on writing does not notice that stdin was closed."""
        while await self.stdout.read(READ_BYTES):
            continue


class Cleanup:
    """Removes, once, what a server leaves behind."""

    def __init__(self, launcher: Launcher, owner: ProcessOwner, folder: Path) -> None:
        self._launcher = launcher
        self._owner = owner
        self._folder = folder
        self.cell: Cell | None = None
        self.cache: PackageCache | None = None

    async def run(self, upstream: str) -> None:
        """Kill what is left of the cell, and remove the folder; failures are only logged."""
        try:
            await asyncio.to_thread(self._remove, upstream)
        finally:
            self._launcher._give_back(self._owner)

    def _remove(self, upstream: str) -> None:
        try:
            if self.cell is not None:
                self._launcher.isolation.end(self.cell)
        except (OSError, subprocess.SubprocessError) as error:
            log.error("%s: its remaining processes could not be killed: %s", upstream, error)
        try:
            shutil.rmtree(self._folder)
        except OSError as error:
            log.error("%s: its folder could not be removed: %s", upstream, error.strerror)
        try:
            if self.cache is not None:
                self._launcher.caches.give_back(self.cache)
        except OSError as error:
            log.error("%s: its cache could not be looked at: %s", upstream, error.strerror)


class Launcher:
    """Starts a bounded number of servers. `scratch`: the folder of their folders, which other uids
    must be able to traverse."""

    def __init__(
        self,
        isolation: Isolation,
        scratch: Path,
        *,
        max_processes: int = MAX_PROCESSES,
        max_of_a_tenant: int = MAX_OF_A_TENANT,
    ) -> None:
        self.isolation = isolation
        self._max_processes = max_processes
        self._max_of_a_tenant = max_of_a_tenant
        self._running: Counter[str] = Counter()
        scratch.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._scratch = scratch.resolve()
        self.caches = PackageCaches(self._scratch / "caches")
        self.caches.remove_unused()
        if isolation.name == "uid" and (closed := first_closed_folder(self._scratch)) is not None:
            raise StartFailed("stdio", f"{closed}: other users may not traverse it (mode 0711)")

    @property
    def num_running(self) -> int:
        return self._running.total()

    async def start(
        self, spec: LaunchSpec, owner: ProcessOwner, credentials: Mapping[str, str]
    ) -> ServerProcess:
        """Start a server for `owner` in an empty folder, with the spec's environment and no other.

        Raises: StdioError: BadLaunch, DigestMismatch, CannotIsolate, TooManyProcesses, StartFailed.
        """
        environment = filled_environment(spec, credentials)
        self._take(spec.name, owner)
        starting = asyncio.create_task(self._start(spec, owner, environment))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The start completes, so that it can be cleaned up.
            starting.add_done_callback(_stop_unwanted)
            raise

    async def _start(
        self, spec: LaunchSpec, owner: ProcessOwner, environment: Mapping[str, str]
    ) -> ServerProcess:
        cleaning: Cleanup | None = None
        try:
            await asyncio.to_thread(check_on_disk, spec)
            folder = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._scratch))
            cleaning = Cleanup(self, owner, folder)
            key = owner.key(spec.name)
            cell = await asyncio.to_thread(self.isolation.cell, spec, key, cleaning._folder)
            cleaning.cell = cell
            if cell.uid is not None:
                os.chown(folder, cell.uid, cell.uid)
            cache = await asyncio.to_thread(self.caches.take, key, cell.uid)
            if cache is not None:
                cleaning.cache = cache
                cell = self.isolation.with_folder(cell, cache.folder)
                environment = {**cache.variables, **environment}
            await asyncio.to_thread(
                check_images, spec, cell.argv, folder, full_environment(folder, spec.environment)
            )
            process, ends = self._spawn(spec, cell, folder, environment, cleaning)
        except BaseException as error:
            if cleaning is None:
                self._give_back(owner)
            else:
                await cleaning.run(spec.name)
            if isinstance(error, OSError):
                raise StartFailed(spec.name, f"could not be started: {error.strerror}") from error
            raise
        await process.open(ends)
        log.info("%s: process %d started", spec.name, process.pid)
        return process

    def _spawn(
        self,
        spec: LaunchSpec,
        cell: Cell,
        folder: Path,
        environment: Mapping[str, str],
        cleaning: Cleanup,
    ) -> tuple[ServerProcess, Ends]:
        """Start the process in the loop's own thread, since it dies with the thread that forks it.

        Its ends are sockets, as those of libuv's children, not pipes: uvloop closes a pipe's
        descriptor twice, and another thread may have opened it again in between.
        """
        with ExitStack() as undone:
            ours, theirs = [], []
            for _ in range(3):
                here, there = socket.socketpair()
                ours.append(undone.enter_context(here))
                theirs.append(undone.enter_context(there))
            popen = subprocess.Popen(
                cell.argv,
                stdin=theirs[0].fileno(),
                stdout=theirs[1].fileno(),
                stderr=theirs[2].fileno(),
                cwd=folder,
                env=full_environment(folder, environment),
                start_new_session=True,
                umask=0o077,
            )
            undone.pop_all()
        for each in theirs:
            each.close()
        for each in ours:
            each.setblocking(False)
        return ServerProcess(spec.name, popen, cleaning), (ours[0], ours[1], ours[2])

    def _take(self, upstream: str, owner: ProcessOwner) -> None:
        if self.num_running >= self._max_processes:
            raise TooManyProcesses(upstream, f"{self._max_processes} servers run already")
        if self._running[owner.tenant] >= self._max_of_a_tenant:
            most = self._max_of_a_tenant
            raise TooManyProcesses(upstream, f"{most} servers of this tenant run already")
        self._running[owner.tenant] += 1

    def _give_back(self, owner: ProcessOwner) -> None:
        self._running[owner.tenant] -= 1
        if not self._running[owner.tenant]:
            del self._running[owner.tenant]


def full_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a process."""
    own = dict.fromkeys(("HOME", "PWD", "TMPDIR"), str(folder))
    return {"PATH": PATH, "LANG": "C.UTF-8", **own, **environment}


_stopping = TaskSet()


def _stop_unwanted(starting: asyncio.Task[ServerProcess]) -> None:
    """Stop a process whose caller was cancelled during its start."""
    error = None if starting.cancelled() else starting.exception()
    if isinstance(error, StdioError):
        log.info("%s", error)
    elif error is None and not starting.cancelled():
        _stopping.spawn(starting.result().stop())


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("a pipe broke: %s", type(error).__name__)
