"""The folder where one gateway keeps its state: the layout of `TOLLGATE_HOME`, its modes and its
lock.

Knows paths, and little of what is written under them. Folders made here have mode 0700, but root's
own HOME has 0711, so that the servers it runs as somebody else reach the folder that is theirs; a
folder that was there keeps the mode its owner gave it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

import msgspec

MAX_SOCKET_PATH_BYTES = 103
"""sun_path has 108 bytes on Linux and 104 elsewhere, the final NUL included (unix(7))."""
SHORT_SOCKET_ROOT = Path("/tmp")
CONTROL_SOCKET = "control.sock"
LONGEST_SOCKET = "engine-99999.sock"
RECORD_SUFFIX = ".record"
RECORD_NAME = re.compile(r"(?P<record>(?P<model>[^@]+)(?:@\d+)?\.record)(?:\.\d+\.lost)?")


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
        self.pinned_weights = self.root / "weights.json"
        """The version that each source of the model cache was when it was first served."""
        self.model_cache = self.root / "models"
        self.file_hashes = self.root / "model_files.json"
        self.worker_settings = self.run / "settings.json"
        self.metrics = self.run / "metrics"
        self.drain_marks = self.run / "drain_marks"
        self.join = self.root / "join"
        """The authority, the tokens and the records of engines that join from other machines."""
        self.join_config = self.run / "join.json"
        self.lending = self.root / "lending"
        """The keys and certificates with which engines are lent to other cells."""
        self.lending_config = self.run / "lending.json"
        self.round_trips = self.run / "round_trips"
        """The seconds to engines that other cells lend (`gateway.fleet.joining.round_trips`)."""
        self.ray_plan = self.run / "ray.json"
        """The plan of what runs on Ray (`gateway.processes.launching`)."""
        self.kv_index = self.run / "kv_index"
        """The table of what each engine has cached (`gateway.fleet.kv_index`)."""
        self.planner_view = self.run / "planner.json"
        """The last decisions of the planner (`gateway.fleet.planner`)."""
        self.planner_learnt = self.root / "planner_learnt.json"
        """The lessons of its processes before."""

    @property
    def name(self) -> str:
        """Return its name among the homes of one database."""
        return f"{socket.gethostname()}:{self.root}"

    def places_of(self, *upstream: str | int | None) -> Path:
        """The file whose bytes are the places of an upstream."""
        return self.run / "places" / hashlib.sha256(repr(upstream).encode()).hexdigest()[:32]

    def sent_to(self, address: str) -> Path:
        """The file in which workers count what they send the engine at an address."""
        return self.run / "sent" / hashlib.sha256(address.encode()).hexdigest()[:32]

    def asked_of(self, model: str) -> Path:
        """The file in which workers count what is asked of a model, for the planner."""
        return self.run / "asked" / hashlib.sha256(model.encode()).hexdigest()[:32]

    def create(self, *, is_restored: bool = False) -> None:
        """Make the folders that a gateway writes to. `is_restored`: on behalf of a restore.

        Where the path of sockets would be too long, this also makes the stand-in for their folder.

        Raises: RestoreUnfinished, OSError.
        """
        if not is_restored:
            self._check_restored()
        self.create_root()
        for folder in (self.run, self.logs, self.spool, self.usage):
            folder.mkdir(mode=0o700, exist_ok=True)
        sockets = socket_folder(self.run, LONGEST_SOCKET)
        if sockets != self.run:
            make_private(sockets, os.geteuid(), os.getegid())

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

    def engine_socket(self, number: int) -> Path:
        """Return the socket of the engine of that number: at the start, its model's position; the
        further ones of a model come behind all of those."""
        name = f"engine-{number}.sock"
        return socket_folder(self.run, name) / name

    @property
    def control_socket(self) -> Path:
        """The socket on which `tollgate up` takes requests of commands."""
        return socket_folder(self.run, CONTROL_SOCKET) / CONTROL_SOCKET

    def usage_record(self, model: str, number: int = 1) -> Path:
        """Return the file in which an engine of `model` keeps what it has generated. `number`: an
        engine that runs beside another one of its model has the next."""
        beside = "" if number == 1 else f"@{number}"
        return self.usage / f"{quote(model, safe='')}{beside}{RECORD_SUFFIX}"

    def names_sold(self, model: str) -> frozenset[str]:
        """Return the names under which what engines of `model` counted was ever sold: its own and
        those of its adapters. Raises: OSError, msgspec.DecodeError."""
        path = self._names_sold(model)
        noted = msgspec.json.decode(path.read_bytes(), type=list[str]) if path.exists() else []
        return frozenset({model, *noted})

    def note_names_sold(self, model: str, names: Iterable[str]) -> None:
        """Note under which names an engine of `model` is sold, besides those before: its adapters',
        and those of models that it is a version of. Raises: OSError, msgspec.DecodeError."""
        fresh = self._names_sold(model).with_suffix(f".{os.getpid()}.new")
        known = sorted(self.names_sold(model) | set(names))
        fresh.write_bytes(msgspec.json.encode(known))
        fresh.rename(self._names_sold(model))

    def _names_sold(self, model: str) -> Path:
        return self.usage / f"{quote(model, safe='')}.names.json"

    def usage_records(self) -> dict[str, list[Path]]:
        """Return the files of all engines that there have been here, by model; also of those that
        were put aside and have nothing at their place."""
        found: dict[str, set[Path]] = {}
        for path in self.usage.glob(f"*{RECORD_SUFFIX}*"):
            if (match := RECORD_NAME.fullmatch(path.name)) is not None:
                found.setdefault(unquote(match["model"]), set()).add(self.usage / match["record"])
        return {model: sorted(paths) for model, paths in sorted(found.items())}


def engine_number(address: str) -> int:
    """Return the number of an engine that listens on an `engine_socket`."""
    return int(address.removesuffix(".sock").rpartition("-")[2])


def peer_address(address: str) -> str:
    """Return where an engine that listens on an `engine_socket` lets others read its KV."""
    folder, _, _ = address.rpartition("/")
    return f"{folder}/kv-{engine_number(address)}.sock"


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
