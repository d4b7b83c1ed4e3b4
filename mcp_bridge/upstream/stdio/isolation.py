"""Isolates a server process from the product's files and other tenants' servers, and bounds it.

Builds command lines and starts nothing. Programs that run before the server's command, in its own
process, set everything up: nothing happens between fork and exec, and nothing after the server has
begun to run.

- `OwnUid`, if we are root: a uid of its own. Files of the product have modes 0700 and 0600.
- `Bubblewrap`: a mount namespace without the product's files, and a pid namespace that dies as a
  whole with its first process.
- `NoIsolation`: limits only, for development. The operator has to configure it.
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
    PATH,
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
    """The isolation of one process. `argv` begins with a program's absolute path."""

    argv: tuple[str, ...]
    uid: int | None
    """The owner of its folder; None: our own uid."""
    lease: UidLease | None = None


class Isolation(Protocol):
    name: str

    def cell(self, spec: LaunchSpec, owner: str, folder: Path) -> Cell:
        """Return the cell for a server of `owner` that has `folder`; it may block for milliseconds.

        Raises: CannotIsolate.
        """
        ...

    def with_folder(self, cell: Cell, folder: Path) -> Cell:
        """Return a cell that reaches another folder, of its uid, to write to."""
        ...

    def end(self, cell: Cell) -> None:
        """Kill what is left of a cell after its process group is gone; called once for each cell.

        It may block for milliseconds.
        """
        ...


def within_limits(limits: ProcessLimits, *, own_uid: bool) -> list[str]:
    """Return the command prefix that sets limits."""
    # RLIMIT_NPROC counts all processes of a uid: without an own uid, also those of the product.
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
    """Return the command prefix that has the kernel kill the process with the thread that started
    it (PR_SET_PDEATHSIG, prctl(2)), and checks that this thread had not died before."""
    setpriv = [program("setpriv"), *options, "--pdeathsig=KILL", "--"]
    return [*setpriv, "/bin/sh", "-c", STILL_THERE, str(os.getpid())]


class OwnUid:
    """Runs servers under uids of their own. Raises: CannotIsolate, if we are not root."""

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

    def with_folder(self, cell: Cell, folder: Path) -> Cell:
        return cell

    def end(self, cell: Cell) -> None:
        assert cell.lease is not None
        try:
            end_all(cell.lease.uid)
            cell.lease.mark(used=False)
        finally:
            cell.lease.release()


class Bubblewrap:
    """Runs servers in sandboxes of bwrap(1). Raises: CannotIsolate, if that does not work here."""

    name = "bubblewrap"

    def __init__(self) -> None:
        self._bwrap = program("bwrap")
        trial = [self._bwrap, *self._sandbox(network=False), "--", "/bin/sh", "-c", "exit 0"]
        try:
            subprocess.run(
                trial,
                env={"PATH": PATH},
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

    def with_folder(self, cell: Cell, folder: Path) -> Cell:
        at = cell.argv.index("--chdir")
        argv = (*cell.argv[:at], "--bind", str(folder), str(folder), *cell.argv[at:])
        return msgspec.structs.replace(cell, argv=argv)

    def end(self, cell: Cell) -> None:
        """Do nothing: the pid namespace ended with its first process."""


class NoIsolation:
    """Runs servers under our own uid."""

    name = "none"

    def cell(self, spec: LaunchSpec, owner: str, folder: Path) -> Cell:
        limits = within_limits(spec.limits, own_uid=False)
        return Cell(argv=(*dying_with_us(), *limits, spec.command, *spec.args), uid=None)

    def with_folder(self, cell: Cell, folder: Path) -> Cell:
        return cell

    def end(self, cell: Cell) -> None:
        """Do nothing: processes that left the group cannot be found."""


def choose_isolation(name: IsolationName, uids: Path) -> Isolation:
    """Return the isolation of that name; `auto`: own uids if we are root, else bubblewrap.

    `uids`: the folder for `UidLeases`, shared by all gateways of this host, since two that did not
    share it would lease one uid twice and kill each other's servers. It blocks for a trial run.
    Raises: CannotIsolate.
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
    """Return the absolute path of a program. Raises: CannotIsolate."""
    found = shutil.which(name)
    if found is None:
        raise CannotIsolate("stdio", f"{name}(1) is not installed")
    return os.path.abspath(found)


def first_closed_folder(folder: Path) -> Path | None:
    """Return the first of a folder and its parents that other users may not traverse, if any."""
    for each in (folder, *folder.parents):
        if not each.stat().st_mode & 0o001:
            return each
    return None
