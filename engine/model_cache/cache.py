"""The cache of one machine: finds models by their version, brings those that are missing, and
removes what no process uses when another one needs the room.

What a killed process leaves is either a model whole at its place, or files in `partial/`, from
which the next one goes on. Blocks: call it in a thread.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.errors import ConfigError
from engine.model_cache.downloads import download
from engine.model_cache.hub_files import HubAccess, HubFiles
from engine.model_cache.listings import ListedFile, ModelListing
from engine.model_cache.locks import FileLock
from engine.model_cache.remote_files import Part, RemoteModel, SourceAway, choose
from engine.model_cache.s3_files import S3Access, S3Files
from engine.model_cache.sources import VERSION, ModelSource
from engine.model_files import sha256_of, version_of
from engine.text.hub_weights import Tell

log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 * 1024**3
SHOWN_CHARS = len("sha256:") + 12
"""A message shows so much of a version."""
GIB = 1 << 30


class CachedFile(msgspec.Struct, frozen=True):
    """A file of a model as it was when it was verified."""

    sha256: str
    size: int
    inode: int
    changed_ns: int

    def is_at(self, path: Path) -> bool:
        """Tell whether nobody has touched it since. Raises: OSError."""
        found = path.stat()
        return (self.size, self.inode, self.changed_ns) == (
            found.st_size,
            found.st_ino,
            found.st_mtime_ns,
        )


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record beside the folder of a cached model."""

    version: str
    source: str
    state: str
    """The source's, at which it was fetched (`RemoteModel.state`)."""
    part: Part
    files: Mapping[str, CachedFile]

    @property
    def size(self) -> int:
        return sum(each.size for each in self.files.values())


class CachedModel(NamedTuple):
    """A model in the cache, which stays there until `hold` is closed or the process ends."""

    folder: Path
    version: str
    state: str
    hold: FileLock


class CacheEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the cache: a model, or the part of one that has come."""

    version: str
    """Empty: it has not come whole."""
    source: str
    part: Part
    size: int
    """Bytes; of one that has not come whole those that it will have."""
    in_use: bool
    used_at: float
    """Unix seconds at which a process last began to use it."""


class PartialModel(msgspec.Struct, frozen=True, kw_only=True):
    """The record beside the files of a model that has not come whole."""

    source: str
    part: Part
    size: int
    """Bytes of the whole, for which room was made."""


class Access(NamedTuple):
    """How sources are reached."""

    hub: HubAccess = HubAccess()
    s3: S3Access = S3Access()

    def open(self, source: ModelSource, revision: str | None) -> RemoteModel:
        """Raises: ConfigError, SourceAway."""
        if source.kind == "peer":
            raise SourceAway("no other source is known")
        if source.kind == "hf":
            return HubFiles(source, self.hub, revision)
        return S3Files(source, self.s3)


BY_ENVIRONMENT = Access()


class ModelCache:
    """A cache at `root`, which is made when something is fetched. `max_bytes`: of all models in it,
    and of those that come."""

    def __init__(self, root: Path, max_bytes: int, access: Access = BY_ENVIRONMENT) -> None:
        self._root, self._max_bytes, self._access = root, max_bytes, access
        self._models, self._partial = root / "models", root / "partial"

    def fetch(
        self,
        source: ModelSource,
        tell: Tell,
        *,
        part: Part = "model",
        version: str | None = None,
        revision: str | None = None,
        peer: RemoteModel | None = None,
    ) -> CachedModel:
        """Return a model that is in the cache from now on. `version`: that it must be; one that is
        in the cache is taken without a word to the source. `revision`: of a hub's repository, in
        place of that of the source. `peer`: the same model at another machine, which is asked
        first; what it does not give comes from the source.

        Raises: ConfigError, one line; what has come of the model is kept, if it may be of it."""
        try:
            with disk_errors_explained(self._root):
                self._models.mkdir(parents=True, exist_ok=True)
                self._partial.mkdir(exist_ok=True)
                if version is not None and (found := self._find(version)) is not None:
                    return found
            if peer is not None:
                try:
                    with disk_errors_explained(self._root):
                        found = self._found_of(peer, part, version)
                        return found or self._bring(peer, part, version, tell)
                except (ConfigError, SourceAway) as error:
                    if source == peer.source:
                        raise
                    log.warning("%s; it is fetched from %s", error, source)
            remote = self._access.open(source, revision)
            with disk_errors_explained(self._root):
                found = self._found_of(remote, part, version)
                return found or self._bring(remote, part, version, tell)
        except SourceAway as error:
            raise ConfigError(f"{source} cannot be fetched: {error}") from error

    def entries(self) -> list[CacheEntry]:
        """Return what is there, the least recently used first. Raises: ConfigError."""
        with disk_errors_explained(self._root):
            if not self._models.is_dir():
                return []
            with self._lock():
                found = [
                    *(self._entry(each, record) for each, record in self._records()),
                    *(self._partial_entry(each) for each in self._partials()),
                ]
        return sorted(found, key=lambda each: each.used_at)

    def remove(self, version: str) -> int:
        """Remove a model that no process uses; return its size. Raises: ConfigError."""
        with disk_errors_explained(self._root):
            folder = self._folder(version)
            if not self._models.is_dir():
                raise ConfigError(f"{self._root} has no {version}")
            with self._lock():
                record = self._record(folder)
                if record is None:
                    raise ConfigError(f"{self._root} has no {version}")
                if not self._removed(folder):
                    raise ConfigError(f"{version} is in use")
        return record.size

    # ---- finding

    def _find(self, version: str) -> CachedModel | None:
        """Return a model, verified by size and time of its files, or by their content where these
        are others; None: it is not there."""
        folder = self._folder(version)
        with self._lock():
            record = self._record(folder)
            if record is None:
                return None
            hold = FileLock.shared(lock_of(folder))
            os.utime(lock_of(folder))
        try:
            if all(is_whole(folder / name, file) for name, file in record.files.items()):
                return CachedModel(folder, version, record.state, hold)
        except BaseException:
            hold.close()
            raise
        hold.close()
        log.warning("%s is damaged: it is removed", folder)
        with self._lock():
            if not self._removed(folder):
                raise ConfigError(f"{folder} is damaged, and in use: end who uses it")
        return None

    def _found_of(self, remote: RemoteModel, part: Part, version: str | None) -> CachedModel | None:
        """Return what was fetched of a source in this state before. Raises: ConfigError, if that is
        another version."""
        with self._lock():
            records = [record for _, record in self._records()]
        wanted = (str(remote.source), remote.state, part)
        for record in records:
            if (record.source, record.state, record.part) == wanted:
                check_version(remote, record.version, version)
                return self._find(record.version)
        return None

    # ---- bringing

    def _bring(
        self, remote: RemoteModel, part: Part, version: str | None, tell: Tell
    ) -> CachedModel:
        names = choose(remote, part)
        check_before_it_comes(remote, names, version)
        # By its version, so that another source goes on with what one of them has begun.
        what = version or f"{remote.source}\n{remote.state}"
        key = hashlib.sha256(f"{what}\n{part}".encode()).hexdigest()
        folder = self._partial / key
        with self._turn(folder, remote.source):
            found = self._found_of(remote, part, version)
            if found is not None:  # somebody else brought it meanwhile
                return found
            size = sum(remote.files[name].size for name in names)
            self._reserve(folder, PartialModel(source=str(remote.source), part=part, size=size))
            began = time.monotonic()
            log.info("fetching %s: %d files, %.2f GiB", remote.source, len(names), size / GIB)
            hashes = download(remote, names, folder, tell)
            log.info("%s is complete after %.1f s", remote.source, time.monotonic() - began)
            try:
                check_version(remote, version_of(hashes), version)
            except ConfigError:
                shutil.rmtree(folder)
                raise
            return self._publish(folder, remote, part, hashes)

    @contextmanager
    def _turn(self, folder: Path, source: ModelSource) -> Iterator[None]:
        """Be the only one who brings a model."""
        path = lock_of(folder)
        try:
            lock = FileLock.exclusive(path, waits=False)
        except BlockingIOError:
            log.info("waiting for another process that fetches %s", source)
            lock = FileLock.exclusive(path)
        with lock:
            try:
                yield
            finally:
                if not folder.is_dir():
                    path.unlink(missing_ok=True)

    def _reserve(self, folder: Path, partial: PartialModel) -> None:
        """Make room for a model, and say that it comes. Raises: ConfigError, if there is none."""
        with self._lock():
            self._sweep()
            others: list[tuple[Path, CacheEntry]] = [
                *((each, self._entry(each, record)) for each, record in self._records()),
                *((each, self._partial_entry(each)) for each in self._partials() if each != folder),
            ]
            used = sum(entry.size for _, entry in others)
            for each, entry in sorted(others, key=lambda other: other[1].used_at):
                if used + partial.size <= self._max_bytes:
                    break
                if self._removed(each):
                    log.info("removed %s from %s: %s", entry.source, self._root, entry.version)
                    used -= entry.size
            if used + partial.size > self._max_bytes:
                raise ConfigError(
                    f"{partial.source} has {partial.size / GIB:.2f} GiB, and {self._root} may hold "
                    f"{self._max_bytes / GIB:.2f} GiB, of which {used / GIB:.2f} GiB are in use: "
                    "allow it more, or end what uses them"
                )
            folder.mkdir(exist_ok=True)
            write_whole(record_of(folder), msgspec.json.encode(partial))
        came = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        free = shutil.disk_usage(folder).free
        if free < partial.size - came:
            raise ConfigError(
                f"{self._root}: the disk has {free / GIB:.2f} GiB free, and {partial.source} lacks "
                f"{(partial.size - came) / GIB:.2f} GiB"
            )

    def _publish(
        self, partial: Path, remote: RemoteModel, part: Part, hashes: Mapping[str, str]
    ) -> CachedModel:
        """Move a verified model to its place, all at once."""
        version = version_of(hashes)
        folder = self._folder(version)
        files = {}
        for name, sha256 in hashes.items():
            (partial / name).chmod(0o444)
            found = (partial / name).stat()
            files[name] = CachedFile(sha256, found.st_size, found.st_ino, found.st_mtime_ns)
        for each in {partial, *((partial / name).parent for name in hashes)}:
            sync_folder(each)
        record = ModelRecord(
            version=version, source=str(remote.source), state=remote.state, part=part, files=files
        )
        with self._lock():
            hold = FileLock.shared(lock_of(folder))
            if self._record(folder) is None:
                # Before the folder: a record without one is nothing, a folder without one is swept.
                write_whole(record_of(folder), msgspec.json.encode(record))
                partial.rename(folder)
                sync_folder(self._models)
            else:  # the same files from another source
                shutil.rmtree(partial)
            record_of(partial).unlink(missing_ok=True)
        return CachedModel(folder, version, remote.state, hold)

    # ---- what is on the disk; the cache is locked

    def _lock(self) -> FileLock:
        return FileLock.exclusive(self._root / "cache.lock")

    def _folder(self, version: str) -> Path:
        if not VERSION.fullmatch(version):
            raise ConfigError(f"{version!r}: expected sha256: and 64 hex digits")
        return self._models / version.removeprefix("sha256:")

    def _record(self, folder: Path) -> ModelRecord | None:
        """Return the record of a model; None: it is not there."""
        if not folder.is_dir():
            return None
        try:
            return msgspec.json.decode(record_of(folder).read_bytes(), type=ModelRecord)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _records(self) -> Iterator[tuple[Path, ModelRecord]]:
        for path in sorted(self._models.glob("*.json")):
            folder = path.with_suffix("")
            if (record := self._record(folder)) is not None:
                yield folder, record

    def _partials(self) -> list[Path]:
        return sorted(each for each in self._partial.iterdir() if each.is_dir())

    def _entry(self, folder: Path, record: ModelRecord) -> CacheEntry:
        return CacheEntry(
            version=record.version,
            source=record.source,
            part=record.part,
            size=record.size,
            in_use=is_locked(lock_of(folder)),
            used_at=lock_of(folder).stat().st_mtime,
        )

    def _partial_entry(self, folder: Path) -> CacheEntry:
        try:
            partial = msgspec.json.decode(record_of(folder).read_bytes(), type=PartialModel)
        except (FileNotFoundError, msgspec.DecodeError):
            partial = PartialModel(source="", part="model", size=0)
        return CacheEntry(
            version="",
            source=partial.source,
            part=partial.part,
            size=partial.size,
            in_use=is_locked(lock_of(folder)),
            used_at=folder.stat().st_mtime,
        )

    def _removed(self, folder: Path) -> bool:
        """Remove a model, or what has come of one, unless somebody uses it."""
        try:
            lock = FileLock.exclusive(lock_of(folder), waits=False)
        except BlockingIOError:
            return False
        with lock:
            record_of(folder).unlink(missing_ok=True)
            shutil.rmtree(folder)
            lock_of(folder).unlink()
        return True

    def _sweep(self) -> None:
        """Remove what killed processes left half made or half removed."""
        for folder in [each for each in self._models.iterdir() if each.is_dir()]:
            if self._record(folder) is None:
                self._removed(folder)
        for path in [*self._models.glob("*.json"), *self._partial.glob("*.json")]:
            if not path.with_suffix("").is_dir():
                path.unlink()
        for path in [*self._models.glob("*.new"), *self._partial.glob("*.new")]:
            path.unlink()


def lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def record_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def is_cached(folder: Path) -> bool:
    """Tell whether a folder is where a cache has a model."""
    return folder.parent.name == "models" and cache_lock_of(folder).exists()


def cache_lock_of(folder: Path) -> Path:
    return folder.parent.parent / "cache.lock"


def cached_listing(folder: Path) -> ModelListing | None:
    """Return what a model in a cache has, as it was verified; None: it is in none."""
    if not is_cached(folder):
        return None
    try:
        record = msgspec.json.decode(record_of(folder).read_bytes(), type=ModelRecord)
    except (OSError, msgspec.DecodeError):
        return None
    files = {name: ListedFile(each.size, each.sha256) for name, each in record.files.items()}
    return ModelListing(version=record.version, part=record.part, files=files)


def hold_if_cached(folder: Path) -> FileLock | None:
    """Keep a model in its cache for as long as this process lives; None: it is in none. Raises:
    ConfigError, if it was removed meanwhile."""
    if not is_cached(folder):
        return None
    with disk_errors_explained(folder.parent.parent), FileLock.exclusive(cache_lock_of(folder)):
        if not record_of(folder).exists():
            raise ConfigError(f"{folder} was removed from its cache")
        return FileLock.shared(lock_of(folder))


def check_version(remote: RemoteModel, found: str, wanted: str | None) -> None:
    """Raises: ConfigError."""
    if wanted is not None and found != wanted:
        raise ConfigError(f"{remote.source} is version {found}, not {wanted}, which it has to be")


def check_before_it_comes(remote: RemoteModel, names: list[str], version: str | None) -> None:
    """Raises: ConfigError, if the source says that it is another version, or nothing tells what its
    files have to be."""
    sums = {name: remote.files[name].checksum for name in names}
    known = {name: each.digest for name, each in sums.items() if each and each.kind == "sha256"}
    if len(known) == len(names):
        check_version(remote, version_of(known), version)
    for name, checksum in sums.items():
        if version is None and checksum is None:
            raise ConfigError(
                f"{remote.source}: nothing says what {name} has to be: put SHA256SUMS beside it "
                "(`sha256sum * > SHA256SUMS`), or name the version"
            )


def is_whole(path: Path, file: CachedFile) -> bool:
    """Tell whether a file of the cache has the content that was verified."""
    try:
        return file.is_at(path) or sha256_of(path) == file.sha256
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    try:
        FileLock.exclusive(path, waits=False).close()
    except BlockingIOError:
        return True
    return False


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there with all of its content or not at all."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    fresh.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def disk_errors_explained(root: Path) -> Iterator[None]:
    """Turn an error of the disk into a ConfigError of one line."""
    try:
        yield
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise ConfigError(f"model cache {root}: {reason}") from error
