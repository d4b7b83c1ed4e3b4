"""Runs child processes that cannot outlive their parent.

Knows processes and signals, not what they serve. Two nets, because one has a hole: every child asks
the kernel for a signal when its parent dies (PR_SET_PDEATHSIG, prctl(2)), and before that it writes
the boot id and its own /proc/PID/stat line to `run/NAME.pid`. The next start ends whatever still
lives under such a line: boot, pid and start time together name one process and never a stranger.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LEFTOVER_TERM_S = 3.0
"""How long what a dead parent left behind may take to leave by itself."""
KILL_WAIT_S = 5.0

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_REGISTER = (
    f'read -r boot < {BOOT_ID}; read -r stat < /proc/$$/stat; echo "$boot $stat" > "$0"; exec "$@"'
)
"""The child's first act, in its own process: no death of the parent can come between fork and pid
file.
"""


class Child:
    """One running child process, reaped by `poll`, `wait` or `stop`."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        *,
        pid_file: Path,
        log: Path,
        log_start: int,
        stop_signal: int,
    ) -> None:
        self.name = name
        self.log = log
        self.log_start = log_start
        """The offset in `log` at which this child's own output begins, in bytes."""
        self.started_s = time.monotonic()
        self._process = process
        self._pid_file = pid_file
        self._stop_signal = stop_signal

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal that killed it), or None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._pid_file.unlink(missing_ok=True)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal; a child that is gone is left alone."""
        self._process.send_signal(number)

    async def wait(self) -> int:
        """Wait for the exit and return its status."""
        while (status := self.poll()) is None:
            pidfd = os.pidfd_open(self.pid)  # not reaped yet, so the pid is still ours
            try:
                await until_readable(pidfd)
            finally:
                os.close(pidfd)
        return status

    async def stop(self, timeout_s: float) -> int:
        """Ask it to leave, and after `timeout_s` make it. Returns the exit status."""
        self.send_signal(self._stop_signal)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.wait()


async def until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


def spawn(
    name: str,
    argv: Sequence[str],
    *,
    run: Path,
    log: Path,
    env: Mapping[str, str],
    stop_signal: signal.Signals = signal.SIGTERM,
    pass_fds: Sequence[int] = (),
    credentials: Sequence[str] = (),
) -> Child:
    """Start `argv` in a session of its own (a Ctrl-C at the terminal is the parent's alone).

    `credentials` are further options of setpriv(1), for a child that runs as somebody else.
    `stop_signal` is also what the child gets when its parent dies. Call it from a thread that lives
    as long as the process does: the kernel counts the death of the forking thread. Raises: OSError.
    """
    pid_file = run / f"{name}.pid"
    death = stop_signal.name.removeprefix("SIG")
    command = ["setpriv", *credentials, "--pdeathsig", death, "--", *argv]
    with log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            ["/bin/sh", "-c", _REGISTER, str(pid_file), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
    return Child(
        name,
        process,
        pid_file=pid_file,
        log=log,
        log_start=log_start,
        stop_signal=stop_signal,
    )


def end_leftovers(run: Path) -> list[str]:
    """End every child of an earlier parent that still runs; returns their names. Bounded; touches
    no stranger.

    Raises: RuntimeError if one of them will not die.
    """
    pid_files = sorted(run.glob("*.pid"))
    living: dict[int, str] = {}
    for pid_file in pid_files:
        pidfd = _open_registered(pid_file.read_text())
        if pidfd is not None:
            living[pidfd] = pid_file.stem
    names = sorted(living.values())
    try:
        for number, timeout_s in ((signal.SIGTERM, LEFTOVER_TERM_S), (signal.SIGKILL, KILL_WAIT_S)):
            _signal_and_wait(living, number, timeout_s)
        if living:
            raise RuntimeError(f"a child of an earlier start will not die: {names}")
    finally:
        for pidfd in living:
            os.close(pidfd)
    for pid_file in pid_files:
        pid_file.unlink(missing_ok=True)
    return names


def _open_registered(line: str) -> int | None:
    """Return a pidfd of the process that wrote `line`, if it lives; signals through it can reach
    nobody else."""
    boot, _, stat = line.partition(" ")
    if boot != BOOT_ID.read_text().strip():
        return None
    pid, started = _identity(stat)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        same = _identity(Path(f"/proc/{pid}/stat").read_text()) == (pid, started)
    except (FileNotFoundError, ProcessLookupError):
        same = False
    if same and _runs(pidfd):
        return pidfd
    os.close(pidfd)
    return None


def _identity(stat: str) -> tuple[int, int]:
    """Return (pid, start time in clock ticks since boot): fields 1 and 22 of proc_pid_stat(5)."""
    pid, _, rest = stat.partition(" ")
    return int(pid), int(rest.rpartition(")")[2].split()[19])


def _runs(pidfd: int) -> bool:
    """Return whether the process still runs: a pidfd becomes readable when it exits
    (pidfd_open(2)), reaped or not."""
    return not select.select([pidfd], [], [], 0)[0]


def _signal_and_wait(living: dict[int, str], number: int, timeout_s: float) -> None:
    """Drops and closes the pidfds of those that left within `timeout_s`."""
    for pidfd in living:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
    deadline = time.monotonic() + timeout_s
    while living and time.monotonic() < deadline:
        for pidfd in [fd for fd in living if not _runs(fd)]:
            os.close(pidfd)
            del living[pidfd]
        time.sleep(0.02)
