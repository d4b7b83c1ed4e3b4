"""The format of a spool segment: records, their framing, and how damage is told from data. Pure.

A frame is MAGIC, the payload's length and the CRC-32 of length and payload (both 32-bit big-endian)
and the payload, one msgpack record. After damage, `scan` goes on at the next frame that is whole:
the magic is there so that a broken length cannot hide what follows it.

Knows no file and no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

import msgspec

from billing.events import Attempt, Quantities, UsageEvent

FORMAT_VERSION = 1
MAGIC = b"\xf5TG\x9c"
HEADER = struct.Struct(">4sII")


class OpenRecord(msgspec.Struct, frozen=True, tag_field="t", tag="open"):
    """Admitted. Alone it bills nothing."""

    attempt: Attempt


class Checkpoint(msgspec.Struct, frozen=True, tag_field="t", tag="checkpoint"):
    """Cumulative, input included: what the attempt costs if nothing more is ever heard of it."""

    attempt_id: str
    quantities: Quantities
    estimated: bool
    at: float
    """Unix seconds."""


class CloseRecord(msgspec.Struct, frozen=True, tag_field="t", tag="close"):
    event: UsageEvent


class VoidRecord(msgspec.Struct, frozen=True, tag_field="t", tag="void"):
    attempt_id: str


class OpenAttempt(msgspec.Struct, frozen=True):
    """An attempt that is neither closed nor void, at its last checkpoint."""

    attempt: Attempt
    checkpoint: Checkpoint | None = None

    def recovered(self) -> UsageEvent:
        """The bill of an attempt whose gateway is gone. Without a checkpoint it is for nothing:
        such an event costs nobody anything, and tells `reconcile` whose attempt it was."""
        last = self.checkpoint
        return UsageEvent(
            attempt=self.attempt,
            quantities=last.quantities if last else Quantities(),
            occurred_at=last.at if last else self.attempt.admitted_at,
            estimated=last.estimated if last else False,
            finish="recovered",
        )


class SegmentStart(msgspec.Struct, frozen=True, tag_field="t", tag="start"):
    """First in every segment: all attempts open at that point, so that older segments may go."""

    open: list[OpenAttempt]
    version: int = FORMAT_VERSION


Record = OpenRecord | Checkpoint | CloseRecord | VoidRecord | SegmentStart

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class PlacedRecord(NamedTuple):
    """Bytes [start, end) of a segment: a record, or damage (None)."""

    start: int
    end: int
    record: Record | None


def frame(record: Record) -> bytes:
    payload = _encoder.encode(record)
    length = len(payload)
    return HEADER.pack(MAGIC, length, _checksum(length, payload)) + payload


def scan(data: bytes, start: int = 0) -> Iterator[PlacedRecord]:
    """Every record from `start` on, and every stretch that is none, in order and without gaps."""
    position = start
    while position < len(data):
        placed = _frame_at(data, position)
        if placed is None:
            resumed = _next_frame(data, position + 1)
            placed = PlacedRecord(position, resumed, None)
        yield placed
        position = placed.end


def holding(data: bytes, needles: Sequence[bytes]) -> Iterator[Record]:
    """Whole records in which one of `needles` stands, in their order; far cheaper than a scan."""
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
    """Whether `damage` is the beginning of a last frame and nothing more: what a crash leaves of a
    write that nobody was told of."""
    rest = len(data) - damage.start
    if rest < HEADER.size:
        return MAGIC.startswith(data[damage.start : damage.start + len(MAGIC)])
    magic, length, _ = HEADER.unpack_from(data, damage.start)
    return bool(damage.end == len(data) and magic == MAGIC and HEADER.size + length > rest)


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
    try:
        return PlacedRecord(position, end, _decoder.decode(payload))
    except msgspec.MsgspecError:
        # Whole but not understood (written by a newer version): kept as damage, never guessed at.
        return None


def _next_frame(data: bytes, position: int) -> int:
    """Return where the next whole record begins, or the end."""
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
            # Unknown when damage took its OPEN; the damage has raised its alarm already.
            if known := open_attempts.get(attempt_id):
                open_attempts[attempt_id] = OpenAttempt(known.attempt, record)
        case CloseRecord(event=event):
            open_attempts.pop(event.id, None)
        case _:
            open_attempts.pop(record.attempt_id, None)
