"""Leases uids to servers, so that no server can reach the files or processes of another.

A uid belongs to one key forever, so that files it left behind are never read by another tenant's
server, and to one process at a time: a flock, which the kernel releases when its holder dies, marks
it as in use. So everything under a uid belongs to one server, and one kill(-1) as that uid ends it,
whatever it forked.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import time
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Programs are looked for there, whatever the gateway's own environment says."""
UID_FIRST = 1_900_000_000
"""Above the uids of people, systemd and containers, below 2^31."""
UID_COUNT = 100_000
MAX_OF_ONE_KEY = 16
"""Servers of one key that run at once on one host."""
COUNTER = "next"
USED = b" used"
"""Written behind a uid until its processes are known to be gone."""
KILL_ALL = "kill -KILL -1 2>/dev/null; exit 0"
"""Kills every process that its own uid may signal."""
GONE_WITHIN_S = 0.5
LOOK_AGAIN_S = 0.005
KILL_TIMEOUT_S = 5.0


class NoUid(Exception):
    """No uid can be leased; the text names the bound."""


class UidLease:
    """A lease of a uid, held until `release`."""

    def __init__(self, uid: int, descriptor: int, *, used: bool) -> None:
        self.uid = uid
        self.used = used
        self._descriptor: int | None = descriptor

    def mark(self, *, used: bool) -> None:
        """Record for the next holder whether processes may be left. Raises: OSError."""
        assert self._descriptor is not None
        text = b"%d" % self.uid + (USED if used else b"")
        os.pwrite(self._descriptor, text.ljust(32), 0)
        self.used = used

    def release(self) -> None:
        """Release the uid; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class UidLeases:
    """Leases uids to processes. `folder`: shared by all gateways of the host."""

    def __init__(self, folder: Path, *, first: int = UID_FIRST, count: int = UID_COUNT) -> None:
        self._folder = folder
        self._first, self._count = first, count
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def take(self, key: str) -> UidLease:
        """Lease an unused uid of a key, and kill what a dead gateway left running under it. It
        blocks for some milliseconds. Raises: NoUid, OSError."""
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        for number in range(MAX_OF_ONE_KEY):
            lease = self._open(self._folder / f"{name}-{number}")
            if lease is not None:
                if lease.used:
                    end_all(lease.uid)
                lease.mark(used=True)
                return lease
        raise NoUid(f"{MAX_OF_ONE_KEY} servers of one owner run already")

    def sweep(self) -> int:
        """Kill what dead gateways left running, and return the number of uids; it blocks."""
        count = 0
        for path in sorted(self._folder.glob("*-*")):
            lease = self._open(path)
            if lease is not None and lease.used:
                end_all(lease.uid)
                lease.mark(used=False)
                count += 1
            if lease is not None:
                lease.release()
        return count

    def _open(self, path: Path) -> UidLease | None:
        """Lock a uid; None: it is in use."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        try:
            content = os.pread(descriptor, 32, 0)
            uid = int(content.split()[0]) if content.strip() else self._allocate(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return UidLease(uid, descriptor, used=USED in content)

    def _allocate(self, descriptor: int) -> int:
        """Allocate the next uid. The counter is written first: a crash in between loses a uid and
        never gives one to two keys."""
        counter = os.open(self._folder / COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(counter, fcntl.LOCK_EX)
            given = int(os.pread(counter, 32, 0) or b"0")
            if given >= self._count:
                raise NoUid(f"all {self._count} uids have been given")
            os.pwrite(counter, b"%d" % (given + 1), 0)
            os.fsync(counter)
        finally:
            os.close(counter)
        uid = self._first + given
        os.pwrite(descriptor, b"%d" % uid, 0)
        os.fsync(descriptor)
        return uid


def may_change_uid() -> bool:
    return os.geteuid() == 0


def as_uid(uid: int) -> list[str]:
    """Return options of setpriv(1): uid and gid, no groups, no capabilities, no new privileges."""
    return [
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
        "--ambient-caps=-all",
    ]


def end_all(uid: int) -> None:
    """Send SIGKILL to all processes of a uid, in one system call that no fork escapes.

    It blocks until they have died, or for GONE_WITHIN_S. Raises: OSError,
    subprocess.SubprocessError.
    """
    assert uid > 0
    subprocess.run(
        ["setpriv", *as_uid(uid), "--", "/bin/sh", "-c", KILL_ALL],
        env={"PATH": PATH},  # that uid's processes may read it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=KILL_TIMEOUT_S,
        check=True,
    )
    expires = time.monotonic() + GONE_WITHIN_S
    while runs_as(uid) and time.monotonic() < expires:
        time.sleep(LOOK_AGAIN_S)


def runs_as(uid: int) -> list[int]:
    """Return the running processes of a uid."""
    found = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            try:
                if entry.stat().st_uid == uid:
                    state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in ("Z", "X"):
                        found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found
