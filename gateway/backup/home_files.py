"""Reads the files of a home that a backup keeps, while gateways write them, and writes them back.

A backup keeps what cannot be made again: keys, the witness of the audit log, commits of models,
price books, and the spools. Not kept: databases (`snapshot`), the counts of engines (a restored
installation begins new ones), logs, and what is only of running processes.

A spool is read as a crash would leave it. Its cursor is read first, then its segments in order; of
those, all up to one that vanished meanwhile have been shipped, so that Postgres has their events.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from billing.spool.files import read_file
from billing.spool.format import OpenAttempt, VoidRecord, apply, frame, is_torn, scan
from billing.spool.quarantine import FOLDER as QUARANTINE
from gateway.backup.archive import BackedUpFile, Chunk, Manifest, Place, write_whole
from gateway.backup.cutting import MAX_BYTES
from gateway.backup.errors import BackupError
from gateway.home import Home
from gateway.secret import sync_folder

LOCK, CURSOR = "lock", "cursor"
SEGMENTS = "[0-9]" * 8 + ".log"
BESIDE = "restored"
"""The folder of a restored home for files that lay outside of it."""
Put = Callable[[bytes], Chunk]


class OutsideFile(NamedTuple):
    """A file outside of the home, by the name that it gets in `BESIDE`."""

    name: str
    path: Path


def back_up_witness(home: Home, put: Put) -> Iterator[BackedUpFile]:
    """Read the witness of the audit log. It comes before the log: a chain has to reach it."""
    yield from _back_up(home, [home.audit_witness], put)


def back_up_spools(home: Home, put: Put) -> Iterator[BackedUpFile]:
    """Read the spools, with their quarantine. They come before Postgres: what leaves one later is
    there by then, and what is in both counts once."""
    for lock in sorted(home.spool.glob(f"*/{LOCK}")):
        yield from _back_up_spool(home, lock.parent, put)
    quarantine = home.spool / QUARANTINE
    yield from _back_up(home, _files_below(quarantine), put)


def back_up_keys(home: Home, secret_file: Path, put: Put) -> Iterator[BackedUpFile]:
    """Read the secret and the first keys. They come after Postgres' snapshot is taken: all of its
    rows are sealed under a secret that the file has by then."""
    yield BackedUpFile(
        place="secret", path=secret_file.name, chunks=_split(read_file(secret_file), put)
    )
    own = [home.credentials, home.commits]
    own += [*_files_below(home.price_books), *_files_below(home.price_drafts)]
    yield from _back_up(home, own, put)


def back_up_outside(files: Iterable[OutsideFile], put: Put) -> Iterator[BackedUpFile]:
    for name, path in files:
        if path.exists():
            yield BackedUpFile(place="beside", path=name, chunks=_split(path.read_bytes(), put))


def _back_up(home: Home, paths: Iterable[Path], put: Put) -> Iterator[BackedUpFile]:
    for path in paths:
        try:
            data = read_file(path)
        except FileNotFoundError:
            continue
        yield _file(home, path, data, put)


def _back_up_spool(home: Home, folder: Path, put: Put) -> list[BackedUpFile]:
    """Return nothing of a spool that was shipped and removed meanwhile."""
    try:
        cursor: bytes | None = read_file(folder / CURSOR)
    except FileNotFoundError:
        cursor = None  # nothing was shipped yet, or all was and the folder is gone
    segments: list[BackedUpFile] = []
    for path in sorted(folder.glob(SEGMENTS)):
        try:
            segments.append(_file(home, path, read_file(path), put))
        except FileNotFoundError:
            segments.clear()
    if not segments:
        return []
    found = [_file(home, folder / LOCK, b"", put), *segments]
    return found if cursor is None else [*found, _file(home, folder / CURSOR, cursor, put)]


def _file(home: Home, path: Path, data: bytes, put: Put) -> BackedUpFile:
    relative = path.relative_to(home.root).as_posix()
    return BackedUpFile(place="home", path=relative, chunks=_split(data, put))


def _split(data: bytes, put: Put) -> tuple[Chunk, ...]:
    starts = range(0, max(1, len(data)), MAX_BYTES)
    return tuple(put(data[start : start + MAX_BYTES]) for start in starts)


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


# Writing them back.


def place_files(
    manifest: Manifest, home: Home, secret_file: Path, read: Callable[[Chunk], bytes]
) -> None:
    """Write all files of a backup, each whole; a repeat writes them again.

    Raises: BackupError for a path that leads elsewhere or another secret at `secret_file`, OSError.
    """
    roots: dict[Place, Path] = {"home": home.root, "beside": home.root / BESIDE}
    for file in manifest.files:
        data = b"".join(map(read, file.chunks))
        if file.place == "secret":
            path = secret_file
            if path.exists() and path.read_bytes() != data:
                raise BackupError(f"secret_key_file: {path} holds another secret: move it away")
        else:
            path = roots[file.place] / checked(file.path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, data)
        sync_folder(path.parent)


def checked(path: str) -> PurePosixPath:
    """Return a path that stays below the folder it is for. Raises: BackupError."""
    found = PurePosixPath(path)
    if found.is_absolute() or not found.parts or ".." in found.parts or "\0" in path:
        raise BackupError(f"{path[:200]!r} leads out of its folder")
    return found


def open_attempts(home: Home) -> dict[str, Path]:
    """Return the attempts that restored spools show as open, each with its spool's last segment."""
    found: dict[str, Path] = {}
    for lock in sorted(home.spool.glob(f"*/{LOCK}")):
        segments = sorted(lock.parent.glob(SEGMENTS))
        attempts: dict[str, OpenAttempt] = {}
        for path in segments:
            for placed in scan(read_file(path)):
                if placed.record is not None:
                    apply(attempts, placed.record)
        found.update((attempt_id, segments[-1]) for attempt_id in attempts)
    return found


def void_attempts(attempts: Iterable[tuple[str, Path]]) -> None:
    """Record that attempts are over, each in the segment that is named.

    Such an attempt was open when its spool was read, and was closed and booked before the snapshot
    of Postgres was taken. Without it the next gateway would close it again, at its last checkpoint,
    and the books would have the attempt twice with different content. Raises: OSError.
    """
    by_segment: dict[Path, list[str]] = {}
    for attempt_id, path in attempts:
        by_segment.setdefault(path, []).append(attempt_id)
    for path, over in by_segment.items():
        data = _without_torn_end(read_file(path))
        write_whole(path, data + b"".join(frame(VoidRecord(each)) for each in sorted(over)))
        sync_folder(path.parent)


def _without_torn_end(data: bytes) -> bytes:
    """Leave out what was written of a record that nobody was told of."""
    torn = (placed for placed in scan(data) if placed.record is None and is_torn(data, placed))
    return next((data[: placed.start] for placed in torn), data)


def is_empty(home: Home, *but: str) -> bool:
    """Tell whether a home has nothing in it but files of these names."""
    return not home.root.exists() or all(name in but for name in os.listdir(home.root))
