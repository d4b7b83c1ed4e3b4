"""The folder where one gateway keeps its state: the layout of `TOLLGATE_HOME`, its modes and its
lock.

Knows paths, not what is written under them. Folders made here have mode 0700, but root's own HOME
has 0711, so that the servers it runs as somebody else reach the folder that is theirs; a folder
that was there keeps the mode its owner gave it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import Self
from urllib.parse import quote

MAX_SOCKET_PATH_BYTES = 103
"""sun_path has 108 bytes on Linux and 104 elsewhere, the final NUL included (unix(7))."""
SHORT_SOCKET_ROOT = Path("/tmp")


class HomeBusy(Exception):
    """Another `tollgate up` holds this home."""


class NoHome(Exception):
    """The folder that was named is no home of an installation."""


class RestoreUnfinished(NoHome):
    """A restore into this home has not come to its end."""


class Home:
    """Paths under one home folder. Constructing it creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self.spool = self.root / "spool"
        self.usage = self.root / "usage"
        self.postgres = self.root / "postgres"
        self.redis = self.root / "redis"
        self.lock = self.root / "lock"
        self.secret = self.root / "secret.json"
        self.credentials = self.root / "credentials.json"
        self.audit_witness = self.root / "audit_witness.json"
        self.restore_journal = self.root / "restore.json"
        """There while a restore into this home is not finished (`gateway.backup.restoration`)."""
        self.price_books = self.root / "price_books"
        self.price_drafts = self.root / "price_drafts"
        self.commits = self.root / "commits.json"
        self.worker_settings = self.run / "settings.json"
        self.metrics = self.run / "metrics"

    def places_of(self, *upstream: str | int | None) -> Path:
        """The file whose bytes are the places of an upstream."""
        return self.run / "places" / hashlib.sha256(repr(upstream).encode()).hexdigest()[:32]

    def create(self, *, is_restored: bool = False) -> None:
        """Make the folders that a gateway writes to. `is_restored`: on behalf of a restore.

        Raises: RestoreUnfinished, OSError.
        """
        if not is_restored:
            self._check_restored()
        self.create_root()
        for folder in (self.run, self.logs, self.spool, self.usage):
            folder.mkdir(mode=0o700, exist_ok=True)

    def create_root(self) -> None:
        """Make the home itself, with nothing in it. Raises: OSError."""
        self.root.mkdir(mode=0o711 if os.geteuid() == 0 else 0o700, parents=True, exist_ok=True)

    def check(self) -> None:
        """Raises: NoHome if nothing was ever started here, RestoreUnfinished, OSError."""
        if not self.run.is_dir():
            found = "is not the home of a Tollgate" if self.root.exists() else "does not exist"
            raise NoHome(f"home: {self.root} {found}; `tollgate up` makes one (see --home)")
        self._check_restored()

    def _check_restored(self) -> None:
        if self.restore_journal.exists():
            raise RestoreUnfinished(
                f"home: a restore into {self.root} is not finished; run `tollgate backup restore` "
                "again, with the same arguments"
            )

    def engine_socket(self, position: int) -> Path:
        """The socket of the engine that serves the configuration's model number `position`."""
        name = f"engine-{position}.sock"
        return socket_folder(self.run, name) / name

    def usage_record(self, model: str) -> Path:
        """Return the file in which the engine of `model` keeps what it has generated."""
        return self.usage / f"{quote(model, safe='')}.record"


class HomeLock:
    """An exclusive flock on HOME/lock for as long as the process lives or `release` is called."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, home: Home) -> Self:
        """Raises: HomeBusy if another process holds it, OSError."""
        fd = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise HomeBusy(f"{home.root} is in use by a running `tollgate up`") from None
        return cls(fd)

    def release(self) -> None:
        os.close(self._fd)


def socket_folder(folder: Path, socket_name: str) -> Path:
    """Return `folder`, or where its path is too long for a socket a short stand-in derived from
    it."""
    if len(os.fsencode(folder / socket_name)) <= MAX_SOCKET_PATH_BYTES:
        return folder
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
    return SHORT_SOCKET_ROOT / f"tollgate-{digest}"


def make_private(folder: Path, uid: int, gid: int) -> None:
    """Make `folder` with mode 0700 for `uid`, or check that it already is so.

    Raises: PermissionError if somebody else could have put it there or can enter it.
    """
    try:
        folder.mkdir(mode=0o700)
        os.chown(folder, uid, gid)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
            raise PermissionError(
                f"{folder} must be a folder of user id {uid} with mode 0700"
            ) from None
