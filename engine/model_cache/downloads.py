"""Brings the files of a model into a folder: those that have come in part go on where they stopped,
and each is verified while it streams.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

from engine.errors import ConfigError
from engine.model_cache.remote_files import RemoteFile, RemoteModel, RunningHash, SourceAway
from engine.text import hub_weights
from engine.text.hub_weights import AT_ONCE, MAX_ATTEMPTS, PIECE_BYTES, Tell, TransferMeter

log = logging.getLogger(__name__)


def download(remote: RemoteModel, names: list[str], folder: Path, tell: Tell) -> Mapping[str, str]:
    """Bring files into `folder`, synced; return the SHA-256 of each. `tell` is called by any
    thread. Raises: ConfigError, OSError of the disk; what has come stays."""
    meter = TransferMeter(sum(remote.files[name].size for name in names), tell)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        begun = {
            name: pool.submit(download_file, remote, name, folder / name, meter) for name in names
        }
        try:
            done, _ = wait(begun.values(), return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        except BaseException:
            meter.stop()
            for each in begun.values():
                each.cancel()
            raise
    return {name: each.result() for name, each in begun.items()}


def download_file(remote: RemoteModel, name: str, path: Path, meter: TransferMeter) -> str:
    """Bring a file, or what it lacks; return its SHA-256. Raises: ConfigError, OSError."""
    file = remote.files[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    for is_from_the_start in (False, True):
        with path.open("w+b" if is_from_the_start else "a+b") as out:
            running = RunningHash(file)
            came_before = take_what_came(out, file, running)
            meter.have(came_before)
            receive(remote, name, out, came_before, running, meter)
            out.flush()
            os.fsync(out.fileno())
        if running.is_as_expected():
            return running.sha256
        meter.have(-file.size)
        path.unlink()
        if not came_before:
            break
        log.warning("%s: what came of %s before is damaged: it is fetched anew", path, name)
    raise ConfigError(
        f"{remote.source}: {name} is not what its checksum says; nothing of it is kept"
    )


def take_what_came(out: IO[bytes], file: RemoteFile, running: RunningHash) -> int:
    """Hash what there is of a file, and return its size."""
    if out.seek(0, os.SEEK_END) > file.size:
        out.truncate(0)
    out.seek(0)
    size = 0
    while piece := out.read(PIECE_BYTES):
        running.update(piece)
        size += len(piece)
    return size


def receive(
    remote: RemoteModel,
    name: str,
    out: IO[bytes],
    have: int,
    running: RunningHash,
    meter: TransferMeter,
) -> None:
    """Append what is missing behind `have` bytes. A source that is away is asked again, until
    nothing comes several times. Raises: ConfigError, OSError."""
    size, attempts = remote.files[name].size, 0
    while have < size:
        try:
            for piece in remote.read(name, have):
                if have + len(piece) > size:
                    raise ConfigError(f"{remote.source}: {name} is longer than {size} bytes")
                out.write(piece)
                running.update(piece)
                have += len(piece)
                meter.add(len(piece))
                attempts = 0
            if have < size:
                raise SourceAway(f"{name} broke off after {have} bytes")
        except SourceAway as error:
            attempts += 1
            if attempts > MAX_ATTEMPTS:
                raise ConfigError(f"{remote.source} cannot be fetched: {error}") from error
            log.info("%s: %s; the download goes on", remote.source, error)
            time.sleep(hub_weights.RETRY_AFTER_S)
