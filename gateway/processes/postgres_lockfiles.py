"""Removes the lock files of a Postgres that died together with its machine's other processes.

Knows the first line of postmaster.pid, a pid, and nothing of children or sockets. Postgres takes
over the lock of a pid that is gone; one that is still there it believes to live, and a zombie is
there for as long as its parent reaps it not: for good where a container's PID 1 never does. A pid
may also be somebody else's by now.

A lock is removed only when its postmaster is known to be dead. Should a backend of it outlive it
for a moment, Postgres finds its shared memory in use and refuses to start by itself.
"""

from __future__ import annotations

from pathlib import Path

LOCK = "postmaster.pid"
DEAD = "ZX"
"""States of proc_pid_stat(5): a zombie, and what is about to be none."""


def remove_stale_locks(data: Path, socket_lock: Path) -> None:
    """Remove the cluster's lock and its socket's, each unless the postmaster it names lives.

    Raises: OSError.
    """
    for lock in (data / LOCK, socket_lock):
        try:
            first, _, _ = lock.read_text(errors="replace").partition("\n")
        except FileNotFoundError:
            continue
        # An empty one was being written when the machine stopped: Postgres says so itself.
        if first.strip().isdecimal() and not lives(int(first), data):
            lock.unlink(missing_ok=True)


def lives(pid: int, data: Path) -> bool:
    """Return whether `pid` is a postmaster of `data`; in doubt it is."""
    process = Path(f"/proc/{pid}")
    try:
        state = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        arguments = process.joinpath("cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    if state in DEAD or Path(arguments[0].decode(errors="replace")).name != "postgres":
        return False
    if b"-D" not in arguments[:-1]:
        return True
    folder = Path(arguments[arguments.index(b"-D") + 1].decode(errors="replace"))
    return not folder.is_absolute() or folder.resolve() == data.resolve()
