"""The quarantine keeps what a spool could not bill, until a person decides on it.

    SPOOLS/quarantine/NAME              bytes that were damaged, or an event that Postgres refuses
    SPOOLS/quarantine/NAME.json         what whole records say of them
    SPOOLS/quarantine/resolved/NAME     those that wait for nobody, with their .json

NAME ends in a checksum of the bytes, so that a later spool in a folder of the same name hides
nothing. Every call blocks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from zlib import crc32

import msgspec

from billing.spool.files import create_anew, read_file, sync_folder
from billing.spool.format import Checkpoint, OpenAttempt

FOLDER = "quarantine"
CONTEXT = ".json"

Outcome = Literal["unresolved", "nothing_lost", "billed", "accepted", "discarded"]
"""`nothing_lost`: whole records say all of it. `billed`: up to the last checkpoint, by itself.
`accepted`, `discarded`: by a person."""
Reason = Literal["damaged", "refused", "missing"]


class Context(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Holds what whole records of the spool say about quarantined bytes."""

    reason: Reason
    outcome: Outcome = "unresolved"
    attempt: OpenAttempt | None = None
    """The attempt that the bytes ended."""
    checkpoint: Checkpoint | None = None
    """The last one of an attempt whose OPEN is damaged."""
    candidates: tuple[str, ...] = ()
    """Requests of which each may be the one that the bytes are about."""
    found_at: float = 0
    """Unix seconds."""


class QuarantinedRecord(NamedTuple):
    name: str
    data: bytes
    context: Context


class Quarantine:
    """The quarantine of all spools below one folder."""

    def __init__(self, spools: Path) -> None:
        self.folder = spools / FOLDER
        self._resolved = self.folder / "resolved"

    def count_unresolved(self) -> int:
        """Return how many wait for a person. Raises: OSError."""
        return len(_names(self.folder))

    def entries(self, *, resolved: bool = False) -> Iterator[QuarantinedRecord]:
        """Yield those that wait for a person, or the others, by name. Raises: OSError."""
        folder = self._resolved if resolved else self.folder
        for name in _names(folder):
            try:
                yield QuarantinedRecord(name, read_file(folder / name), _context(folder, name))
            except FileNotFoundError:
                continue  # it was resolved meanwhile

    def find(self, name: str) -> QuarantinedRecord | None:
        """Return an entry by its name, resolved or not. Raises: OSError."""
        if Path(name).name != name or name.endswith(CONTEXT):
            return None
        for folder in (self.folder, self._resolved):
            if (folder / name).is_file():
                data, context = read_file(folder / name), _context(folder, name)
                if folder == self.folder and context.outcome != "unresolved":
                    context = msgspec.structs.replace(context, outcome="unresolved")
                return QuarantinedRecord(name, data, context)
        return None

    def has(self, name: str) -> bool:
        return (self.folder / name).exists() or (self._resolved / name).exists()

    def context_of(self, name: str) -> Context | None:
        """Return what was found out of an entry; None: nothing yet. Raises: OSError."""
        for folder in (self._resolved, self.folder):
            if (folder / name).exists() and (folder / f"{name}{CONTEXT}").exists():
                return _context(folder, name)
        return None

    def keep(self, name: str, data: bytes, context: Context | None = None) -> None:
        """Keep bytes on disk. Without `context` they wait for a person, and what is known of them
        may follow. One that is resolved stays so. Raises: OSError."""
        if (self._resolved / name).exists() and (self._resolved / f"{name}{CONTEXT}").exists():
            return
        is_resolved = context is not None and context.outcome != "unresolved"
        folder = self._resolved if is_resolved else self.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / name).exists():
            _write_whole(folder / name, data)
        if context is not None:
            found = msgspec.structs.replace(context, found_at=time.time())
            _write_whole(folder / f"{name}{CONTEXT}", msgspec.json.encode(found))
        if is_resolved:
            for left in (name, f"{name}{CONTEXT}"):
                (self.folder / left).unlink(missing_ok=True)

    def resolve(self, entry: QuarantinedRecord, outcome: Outcome) -> None:
        """Take an entry out of those that wait. A repeat finishes what a kill cut short.

        Raises: OSError.
        """
        self._resolved.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = msgspec.structs.replace(entry.context, outcome=outcome)
        _write_whole(self._resolved / f"{entry.name}{CONTEXT}", msgspec.json.encode(known))
        try:
            (self.folder / entry.name).replace(self._resolved / entry.name)
        except FileNotFoundError:
            pass  # a resolution that was cut short had come so far
        (self.folder / f"{entry.name}{CONTEXT}").unlink(missing_ok=True)
        sync_folder(self._resolved)
        sync_folder(self.folder)


def name_of(spool: str, where: str, data: bytes, suffix: str) -> str:
    """Return the name of an entry. `where`: the place in the spool."""
    return f"{spool}-{where}-{crc32(data):08x}.{suffix}"


def _names(folder: Path) -> list[str]:
    try:
        found = [it.name for it in os.scandir(folder) if it.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(name for name in found if not name.endswith((CONTEXT, ".new")))


def _context(folder: Path, name: str) -> Context:
    try:
        return msgspec.json.decode(read_file(folder / f"{name}{CONTEXT}"), type=Context)
    except (FileNotFoundError, msgspec.MsgspecError, ValueError, RecursionError):
        return Context(reason="refused" if name.endswith(".refused") else "damaged")


def _write_whole(path: Path, data: bytes) -> None:
    beside = path.with_name(f"{path.name}.new")
    with open(create_anew(beside), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)
