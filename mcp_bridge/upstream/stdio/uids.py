"""A uid of its own for each server: what one wrote or runs is out of all others' reach.

Knows keys, not what they stand for. A uid is given to one key for good, so that what was left
somewhere is never read by another tenant's server, and to one process at a time: a flock, which the
death of its holder frees, says that it is in use. So all that runs under a uid belongs to one
server, and one kill(-1) as that uid ends it, whatever it forked and however it hid.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import time
from pathlib import Path

UID_FIRST = 1_900_000_000
"""Above what people, systemd and containers are given, below 2^31."""
UID_COUNT = 100_000
MAX_OF_ONE_KEY = 16
"""Servers of one key that run at once, on one host."""
COUNTER = "next"
USED = b" used"
"""Behind a uid: who had it has not said that nothing of it is left."""
EVERYBODY = "kill -KILL -1 2>/dev/null; exit 0"
"""All that who says so may signal: all of its uid."""
GONE_WITHIN_S = 0.5
LOOK_AGAIN_S = 0.005
KILL_TIMEOUT_S = 5.0


class NoUid(Exception):
    """Its text says which bound was reached."""


class UidLease:
    """A lease of a uid, ours until `release`."""

    def __init__(self, uid: int, descriptor: int, *, used: bool) -> None:
        self.uid = uid
        self.used = used
        self._descriptor: int | None = descriptor

    def mark(self, *, used: bool) -> None:
        """Write what the next holder finds, whether we are there then or not. Raises: OSError."""
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
    """Leases uids to processes.

    `folder`: made where it is missing, mode 0700; the same for all gateways of the host.
    """

    def __init__(self, folder: Path, *, first: int = UID_FIRST, count: int = UID_COUNT) -> None:
        self._folder = folder
        self._first, self._count = first, count
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def take(self, key: str) -> UidLease:
        """Return a uid that nobody uses, the same as before where the same key asks again. What
        still runs under it, of a gateway that died, is ended. It blocks for some milliseconds.

        Raises: NoUid, OSError.
        """
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
        """End what gateways that died may have left running; of how many uids. It blocks."""
        looked = 0
        for path in sorted(self._folder.glob("*-*")):
            lease = self._open(path)
            if lease is not None and lease.used:
                end_all(lease.uid)
                lease.mark(used=False)
                looked += 1
            if lease is not None:
                lease.release()
        return looked

    def _open(self, path: Path) -> UidLease | None:
        """Open the lock of a uid; None: somebody else has it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        try:
            written = os.pread(descriptor, 32, 0)
            uid = int(written.split()[0]) if written.strip() else self._new(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return UidLease(uid, descriptor, used=USED in written)

    def _new(self, descriptor: int) -> int:
        """The counter moves before the uid is written: a crash between loses one, and gives none
        to two."""
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
    """Options of setpriv(1): that uid and gid, no group, no capability, and no way back."""
    return [
        f"--reuid={uid}",
        f"--regid={uid}",
        "--clear-groups",
        "--no-new-privs",
        "--inh-caps=-all",
        "--ambient-caps=-all",
    ]


def end_all(uid: int) -> None:
    """Send SIGKILL to all that runs under a uid: one call of the kernel, which no fork escapes. It
    blocks until that has died, or for half a second.

    Raises: OSError, subprocess.SubprocessError.
    """
    assert uid > 0
    subprocess.run(
        ["setpriv", *as_uid(uid), "--", "/bin/sh", "-c", EVERYBODY],
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
    """Processes of a uid that have not ended; kill(-1) itself does not tell."""
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
