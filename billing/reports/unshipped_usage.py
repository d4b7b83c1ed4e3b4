"""Search the spools of this machine for one request, without locking them. Every call blocks.

A spool may be appended to meanwhile: a segment that is deleted has shipped, and a record that is
half written has no valid checksum yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from billing.events import UsageEvent
from billing.spool.format import (
    CloseRecord,
    OpenAttempt,
    OpenRecord,
    SegmentStart,
    apply,
    find_records,
)

MAX_SEARCH_BYTES = 128 * 1024 * 1024
"""Beyond this the oldest segments are skipped, since their events are the next to ship."""
SEGMENTS = "*/" + "[0-9]" * 8 + ".log"


class UnshippedUsage(msgspec.Struct, frozen=True):
    closed: list[UsageEvent]
    open: list[OpenAttempt]


def search(spools: Path, request_id: str, *, max_bytes: int = MAX_SEARCH_BYTES) -> UnshippedUsage:
    """Find a request's events in every spool below `spools`. Raises: OSError."""
    closed: dict[str, UsageEvent] = {}
    running: dict[str, OpenAttempt] = {}
    for data in _segments(spools, max_bytes):
        for record in find_records(data, [request_id.encode()]):
            if isinstance(record, SegmentStart):
                running |= {
                    each.attempt.id: each
                    for each in record.open
                    if each.attempt.request_id == request_id
                }
            elif isinstance(record, CloseRecord) and record.event.attempt.request_id == request_id:
                closed[record.event.id] = record.event
                running.pop(record.event.id, None)
            elif isinstance(record, OpenRecord):
                running.setdefault(record.attempt.id, OpenAttempt(record.attempt))
        for record in find_records(data, [each.encode() for each in running]):
            if not isinstance(record, SegmentStart):
                apply(running, record)
    return UnshippedUsage([*closed.values()], [*running.values()])


def _segments(spools: Path, left: int) -> Iterator[bytes]:
    """Yield the newest segments of each spool, in their order."""
    paths = sorted(spools.glob(SEGMENTS))
    kept: list[Path] = []
    for path in reversed(paths):
        try:
            left -= path.stat().st_size
        except FileNotFoundError:
            continue
        if left < 0:
            break
        kept.append(path)
    for path in reversed(kept):
        try:
            yield path.read_bytes()
        except FileNotFoundError:
            continue
