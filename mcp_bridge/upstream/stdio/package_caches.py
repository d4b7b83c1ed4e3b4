"""Keeps what servers fetch (packages of npx, uvx, pipx) between their starts.

A cache belongs to one owner's server under one uid, so that nobody runs what somebody else fetched
or changed. What outgrows its bound is removed whole, as is what was not used for a month.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

MAX_CACHE_BYTES = 1024**3
MAX_CACHE_FILES = 200_000
UNUSED_S = 30 * 86_400.0
MAX_OF_ONE_KEY = 4
"""Servers of one owner that run at once without a uid of their own; others start with no cache."""


class PackageCache(msgspec.Struct, frozen=True, kw_only=True):
    """The folder of one running server. `lock`: a descriptor that says it is in use."""

    folder: Path
    lock: int

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables by which package managers and the rest find it."""
        return {
            "XDG_CACHE_HOME": str(self.folder),
            "npm_config_cache": str(self.folder / "npm"),
            "UV_CACHE_DIR": str(self.folder / "uv"),
            "PIP_CACHE_DIR": str(self.folder / "pip"),
        }


class PackageCaches:
    """The caches of one home. Raises: OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._folder = folder.resolve()

    def take(self, key: str, uid: int | None) -> PackageCache | None:
        """Return the cache of a server whose owner is `key` and which runs under `uid`; None: it
        runs too often at once. It may block for milliseconds. Raises: OSError."""
        name = hashlib.sha256(key.encode()).hexdigest()[:40]
        numbers = range(MAX_OF_ONE_KEY) if uid is None else (uid,)
        for number in numbers:
            lock = os.open(
                self._folder / f"{name}-{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            folder = self._folder / f"{name}-{number}"
            try:
                self._open(folder, uid)
            except BaseException:
                os.close(lock)
                raise
            return PackageCache(folder=folder, lock=lock)
        return None

    def give_back(self, cache: PackageCache) -> None:
        """Keep it for the next start, if it is not too large. Blocks. Raises: OSError."""
        try:
            if not fits(cache.folder):
                log.warning("%s has outgrown its bound, and is removed", cache.folder)
                shutil.rmtree(cache.folder)
        finally:
            os.close(cache.lock)

    def remove_unused(self) -> None:
        """Remove what nobody used for a month. Blocks. Raises: OSError."""
        for lock_file in sorted(self._folder.glob("*.lock")):
            if time.time() - lock_file.stat().st_mtime < UNUSED_S:
                continue
            with lock_file.open("r+b") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                lock_file.unlink()

    def _open(self, folder: Path, uid: int | None) -> None:
        os.utime(folder.with_name(f"{folder.name}.lock"))
        folder.mkdir(mode=0o700, exist_ok=True)
        wanted = os.geteuid() if uid is None else uid
        if folder.lstat().st_uid != wanted:
            # It is ours and empty, as it was made; nobody's files change their owner here.
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
            os.chown(folder, wanted, wanted)


def fits(folder: Path) -> bool:
    """Tell whether a folder is within its bounds. Follows no link."""
    num_files = num_bytes = 0
    for path, folders, files in os.walk(folder):
        num_files += len(folders) + len(files)
        for name in files:
            try:
                num_bytes += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue
        if num_files > MAX_CACHE_FILES or num_bytes > MAX_CACHE_BYTES:
            return False
    return True
