"""The format of a spool segment: records, their frames, and how damage is found. Pure.

A frame is MAGIC, the payload's length and the CRC-32 of length and payload (both 32-bit big-endian)
and the payload, one msgpack record. After damage, `scan` goes on at the next valid frame, which it
finds by its magic even if a length is broken.

Knows no file and no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import msgspec
from msgspec import UNSET, UnsetType

from billing.events import Attempt, DisputedUsage, Quantities, UsageEvent

FORMAT_VERSION = 1
MAGIC = b"\xf5TG\x9c"
HEADER = struct.Struct(">4sII")


class OpenRecord(msgspec.Struct, frozen=True, tag_field="t", tag="open"):
    """The admission of an attempt; without a checkpoint or a close it bills nothing."""

    attempt: Attempt


class Checkpoint(msgspec.Struct, frozen=True, tag_field="t", tag="checkpoint"):
    """The usage of an attempt so far, input included: it is billed if nothing follows."""

    attempt_id: str
    quantities: Quantities
    estimated: bool
    at: float
    """Unix seconds."""
    disputed: DisputedUsage | UnsetType = UNSET
    """The claims of the upstream beyond it, by now."""


class CloseRecord(msgspec.Struct, frozen=True, tag_field="t", tag="close"):
    event: UsageEvent


class VoidRecord(msgspec.Struct, frozen=True, tag_field="t", tag="void"):
    attempt_id: str


class OpenAttempt(msgspec.Struct, frozen=True):
    """An attempt that is neither closed nor void, at its last checkpoint."""

    attempt: Attempt
    checkpoint: Checkpoint | None = None

    @property
    def has_usage(self) -> bool:
        """Tell whether its last checkpoint bills anything: one may only say what is disputed."""
        return self.checkpoint is not None and self.checkpoint.quantities != Quantities()

    def recovered(self) -> UsageEvent:
        """Return the event of an attempt whose gateway died. Without a checkpoint its quantities
        are zero; it tells `reconcile` the attempt's org."""
        last = self.checkpoint
        return UsageEvent(
            attempt=self.attempt,
            quantities=last.quantities if last else Quantities(),
            occurred_at=last.at if last else self.attempt.admitted_at,
            estimated=last.estimated if last else False,
            finish="recovered",
            disputed=last.disputed if last else UNSET,
        )


class SegmentStart(msgspec.Struct, frozen=True, tag_field="t", tag="start"):
    """The first record of a segment: the attempts that are open, so that older segments can be
    deleted."""

    open: list[OpenAttempt]
    version: int = FORMAT_VERSION


Record = OpenRecord | Checkpoint | CloseRecord | VoidRecord | SegmentStart

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class PlacedRecord(NamedTuple):
    """The bytes [start, end) of a segment: a record, or damage (None)."""

    start: int
    end: int
    record: Record | None


def frame(record: Record) -> bytes:
    payload = _encoder.encode(record)
    length = len(payload)
    return HEADER.pack(MAGIC, length, _checksum(length, payload)) + payload


def scan(data: bytes, start: int = 0) -> Iterator[PlacedRecord]:
    """Yield every record and every span of damage from `start` on, in order and without gaps."""
    position = start
    while position < len(data):
        placed = _frame_at(data, position)
        if placed is None:
            resumed = _next_frame(data, position + 1)
            placed = PlacedRecord(position, resumed, None)
        yield placed
        position = placed.end


def find_records(data: bytes, needles: Sequence[bytes]) -> Iterator[Record]:
    """Yield the valid records that contain one of `needles`, in order; much faster than a scan."""
    starts = set[int]()
    for needle in needles:
        position = -1
        while (position := data.find(needle, position + 1)) >= 0:
            starts.add(data.rfind(MAGIC, 0, position))
    for start in sorted(starts - {-1}):
        placed = _frame_at(data, start)
        if placed is not None and placed.record is not None:
            yield placed.record


def is_torn(data: bytes, damage: PlacedRecord) -> bool:
    """True if `damage` is the first part of the last frame, as a crash during a write leaves it:
    nobody was told that it is on disk."""
    rest = len(data) - damage.start
    if rest < HEADER.size:
        return MAGIC.startswith(data[damage.start : damage.start + len(MAGIC)])
    magic, length, _ = HEADER.unpack_from(data, damage.start)
    if damage.end < len(data) or magic != MAGIC or HEADER.size + length <= rest:
        return False
    try:
        msgspec.msgpack.decode(data[damage.start + HEADER.size : damage.end], type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return str(error).startswith("Input data was truncated")
    return False  # a whole record, whose length is damaged


def _frame_at(data: bytes, position: int) -> PlacedRecord | None:
    body = position + HEADER.size
    if body > len(data):
        return None
    magic, length, checksum = HEADER.unpack_from(data, position)
    end = body + length
    if magic != MAGIC or end > len(data):
        return None
    payload = data[body:end]
    if _checksum(length, payload) != checksum:
        return None
    # A valid frame that cannot be decoded (written by a newer version) is kept as damage.
    record = decode_payload(payload)
    return None if record is None else PlacedRecord(position, end, record)


def decode_payload(payload: bytes) -> Record | None:
    """Return the record that a payload holds, whatever its checksum; None: it holds none."""
    try:
        record: Record = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, AssertionError, RecursionError):
        return None
    return record


def _next_frame(data: bytes, position: int) -> int:
    """Return the start of the next valid record, or the end of `data`."""
    while (position := data.find(MAGIC, position)) >= 0:
        if _frame_at(data, position) is not None:
            return position
        position += 1
    return len(data)


def _checksum(length: int, payload: bytes) -> int:
    return crc32(payload, crc32(length.to_bytes(4, "big")))


def apply(open_attempts: dict[str, OpenAttempt], record: Record) -> None:
    """Advance the set of open attempts by one record."""
    match record:
        case SegmentStart(open=carried):
            open_attempts.clear()
            open_attempts.update((each.attempt.id, each) for each in carried)
        case OpenRecord(attempt=attempt):
            open_attempts[attempt.id] = OpenAttempt(attempt)
        case Checkpoint(attempt_id=attempt_id):
            # Without a known attempt its OPEN was damaged, which has raised an alarm already.
            if known := open_attempts.get(attempt_id):
                open_attempts[attempt_id] = OpenAttempt(known.attempt, record)
        case CloseRecord(event=event):
            open_attempts.pop(event.id, None)
        case _:
            open_attempts.pop(record.attempt_id, None)
