"""Remembers the engines that joined a home, by the certificates that it signed for them. One
process writes the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # X.509, which who reads the file does not need
    from gateway.fleet.joining.authority import SignedCertificate


RECORDS, PRESENT = "engines.json", "present.json"
MAX_SERIALS = 2
"""The certificate of an engine, and the one before it, which connections may still have."""
MAX_ENGINES = 10_000


class JoinRecord(msgspec.Struct, kw_only=True):
    """An engine that joined. Times are Unix seconds."""

    serials: list[str]
    token_id: str
    model: str
    cell: str = ""
    """The other cell that lends it; empty: it is of this home."""
    host: str
    joined_at: int
    expires_at: int
    """The end of its certificate."""
    replica: str = ""
    """The one that it is, or was last."""
    seen_at: int = 0


Present = dict[str, JoinRecord]


class JoinRecords:
    """The records in the file `path`. `clock`: Unix seconds."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Raises: OSError, msgspec.DecodeError."""
        self._path, self._clock = path, clock
        self._records = _read(path)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def is_full(self) -> bool:
        self._forget_expired()
        return len(self._records) >= MAX_ENGINES

    def find(self, serial: str) -> JoinRecord | None:
        return next((each for each in self._records if serial in each.serials), None)

    def has(self, record: JoinRecord) -> bool:
        """Tell whether an engine is still known."""
        return any(each is record for each in self._records)

    def num_of(self, token_id: str) -> int:
        """Return how many engines joined by a token."""
        return sum(each.token_id == token_id for each in self._records)

    def add(
        self, signed: SignedCertificate, *, token_id: str, model: str, host: str, cell: str = ""
    ) -> None:
        record = JoinRecord(
            serials=[signed.serial],
            token_id=token_id,
            model=model,
            cell=cell,
            host=host,
            joined_at=int(self._clock()),
            expires_at=signed.expires_at,
        )
        self._records.append(record)
        self.write()

    def renew(self, record: JoinRecord, signed: SignedCertificate) -> None:
        record.serials = [*record.serials, signed.serial][-MAX_SERIALS:]
        record.expires_at = signed.expires_at
        self.write()

    def remove_all_of(self, token_ids: set[str]) -> None:
        """Forget who joined by one of these tokens, for good."""
        left = [each for each in self._records if each.token_id not in token_ids]
        if len(left) != len(self._records):
            self._records = left
            self.write()

    def write(self) -> None:
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.write_bytes(msgspec.json.encode(self._records))
        fresh.rename(self._path)

    def _forget_expired(self) -> None:
        now = self._clock()
        self._records = [each for each in self._records if each.expires_at > now]


def records_in(folder: Path) -> list[JoinRecord]:
    """Return who has joined a home, of which `folder` is that of its joining, as last written.
    Raises: OSError, msgspec.DecodeError."""
    return _read(folder / RECORDS)


def _read(path: Path) -> list[JoinRecord]:
    kept = path.read_bytes() if path.exists() else b"[]"
    return msgspec.json.decode(kept, type=list[JoinRecord])


def write_present(folder: Path, joined: Mapping[str, JoinRecord]) -> None:
    """Let others read who is there. Raises: OSError."""
    fresh = folder / f"{PRESENT}.new"
    fresh.write_bytes(msgspec.json.encode(joined))
    fresh.rename(folder / PRESENT)


def present_in(folder: Path) -> dict[str, JoinRecord]:
    """Return who was there, by replica, when the relay of a home last ran. Raises: OSError,
    msgspec.DecodeError."""
    path = folder / PRESENT
    return msgspec.json.decode(path.read_bytes() if path.exists() else b"{}", type=Present)
