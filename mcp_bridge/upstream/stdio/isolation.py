"""Isolates a server from the product's files, from other tenants' servers, and within bounds.

Makes command lines, starts nothing. Everything is set by programs that run before the server's own
command, in its own process: nothing is done between fork and exec, and nothing afterwards, when the
server could have done something already.

- `OwnUid`, where we are root: a uid that is nobody else's. Files of the product are 0700 and 0600.
- `Bubblewrap`: a mount namespace in which the product's files are not, and a pid namespace that
  dies as a whole with its first process.
- `NoIsolation`: for development alone; nothing but limits. An operator has to ask for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from mcp_bridge.upstream.launch_errors import CannotIsolate
from mcp_bridge.upstream.launch_spec import LaunchSpec, ProcessLimits
from mcp_bridge.upstream.stdio.uids import (
    NoUid,
    UidLease,
    UidLeases,
    as_uid,
    end_all,
    may_change_uid,
)

IsolationName = Literal["auto", "uid", "bubblewrap", "none"]
TRIAL_TIMEOUT_S = 10.0
STILL_THERE = '[ "$PPID" -eq "$0" ] || exit 1; exec "$@"'
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/group",
    "/etc/hosts",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/ssl",
)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The isolation that one start is given. `argv` begins with a program's absolute path."""

    argv: tuple[str, ...]
    uid: int | None
    """Whose its folder must be; None: ours."""
    lease: UidLease | None = None


class Isolation(Protocol):
    name: str

    def cell(self, spec: LaunchSpec, owner: str, folder: Path) -> Cell:
        """Return the cell for a server of `owner` with `folder` as its own. It may block for
        milliseconds.

        Raises: CannotIsolate.
        """
        ...

    def end(self, cell: Cell) -> None:
        """End all that is left of a cell, when its process group is gone.

        It may block for milliseconds; it comes once for each cell.
        """
        ...


def within_limits(limits: ProcessLimits, *, own_uid: bool) -> list[str]:
    """RLIMIT_NPROC counts all that a uid runs: of a uid that is ours too it would count us."""
    processes = [f"--nproc={limits.processes}"] if own_uid else []
    return [
        program("prlimit"),
        f"--as={limits.address_space_bytes}",
        f"--data={limits.data_bytes}",
        f"--cpu={limits.cpu_s}",
        f"--nofile={limits.open_files}",
        f"--fsize={limits.file_bytes}",
        "--core=0",
        *processes,
        "--",
    ]


def dying_with_us(*options: str) -> list[str]:
    """The kernel ends it when the thread that started it dies (PR_SET_PDEATHSIG, prctl(2)). One
    that died before the kernel was asked is no longer the parent then."""
    asked = [program("setpriv"), *options, "--pdeathsig=KILL", "--"]
    return [*asked, "/bin/sh", "-c", STILL_THERE, str(os.getpid())]


class OwnUid:
    """Raises: CannotIsolate where we may not become somebody else."""

    name = "uid"

    def __init__(self, leases: UidLeases) -> None:
        if not may_change_uid():
            raise CannotIsolate("stdio", "another uid: only root may start servers under one")
        self.leases = leases

    def cell(self, spec: LaunchSpec, owner: str, folder: Path) -> Cell:
        try:
            lease = self.leases.take(owner)
        except (NoUid, OSError, subprocess.SubprocessError) as error:
            raise CannotIsolate(spec.name, f"no uid for it: {error}") from error
        argv = (
            *dying_with_us(*as_uid(lease.uid)),
            *within_limits(spec.limits, own_uid=True),
            spec.command,
            *spec.args,
        )
        return Cell(argv=argv, uid=lease.uid, lease=lease)

    def end(self, cell: Cell) -> None:
        assert cell.lease is not None
        try:
            end_all(cell.lease.uid)
            cell.lease.mark(used=False)
        finally:
            cell.lease.release()


class Bubblewrap:
    """Raises: CannotIsolate where bwrap(1) is not there, or may not do it."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self._bwrap = program("bwrap")
        trial = [self._bwrap, *self._sandbox(network=False), "--", "/bin/sh", "-c", "exit 0"]
        try:
            subprocess.run(
                trial,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TRIAL_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CannotIsolate("stdio", f"bubblewrap does not work here: {error}") from error

    def _sandbox(self, *, network: bool) -> list[str]:
        options = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
        if network:
            options.append("--share-net")
        for path in (*SYSTEM, *SYSTEM_FILES):
            options += ["--ro-bind-try", path, path]
        return [*options, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]

    def cell(self, spec: LaunchSpec, owner: str, folder: Path) -> Cell:
        options = self._sandbox(network=spec.network)
        for path in (spec.command, *spec.readable):
            options += ["--ro-bind", path, path]
        options += ["--bind", str(folder), str(folder), "--chdir", str(folder)]
        argv = (
            *dying_with_us(),
            self._bwrap,
            *options,
            "--",
            *within_limits(spec.limits, own_uid=True),
            spec.command,
            *spec.args,
        )
        return Cell(argv=argv, uid=None)

    def end(self, cell: Cell) -> None:
        """Its pid namespace has ended with its process."""


class NoIsolation:
    """It reads what we read."""

    name = "none"

    def cell(self, spec: LaunchSpec, owner: str, folder: Path) -> Cell:
        limits = within_limits(spec.limits, own_uid=False)
        return Cell(argv=(*dying_with_us(), *limits, spec.command, *spec.args), uid=None)

    def end(self, cell: Cell) -> None:
        """There is nothing that would find what left its process group."""


def chosen(name: IsolationName, uids: Path) -> Isolation:
    """Return the isolation of that name; `auto`: another uid where we are root, else bubblewrap.
    uids: the folder for `UidLeases`, of all gateways of this host, whatever their home: two that
    know nothing of each other would give one uid twice, and end each other's servers. It blocks for
    as long as a trial takes.

    Raises: CannotIsolate, where there is neither.
    """
    if name == "none":
        return NoIsolation()
    if name == "uid" or (name == "auto" and may_change_uid()):
        try:
            return OwnUid(UidLeases(uids))
        except OSError as error:
            raise CannotIsolate("stdio", f"{uids}: {error.strerror}") from error
    return Bubblewrap()


def program(name: str) -> str:
    """Its absolute path. Raises: CannotIsolate."""
    found = shutil.which(name)
    if found is None:
        raise CannotIsolate("stdio", f"{name}(1) is not installed")
    return os.path.abspath(found)


def traversable(folder: Path) -> Path | None:
    """The first of it and its parents that others may not go through; None: all may be."""
    for each in (folder, *folder.parents):
        if not each.stat().st_mode & 0o001:
            return each
    return None
