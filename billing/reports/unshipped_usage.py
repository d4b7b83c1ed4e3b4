"""Search the spools of this machine for one request: they are read beside their owners, without a
lock.

Every call blocks. An owner may append and drop segments meanwhile: what is gone then has shipped,
and what is half written has no good checksum yet.
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
"""Of segments; of more, the oldest are not looked at: their events are the next to ship."""
SEGMENTS = "*/" + "[0-9]" * 8 + ".log"


class UnshippedUsage(msgspec.Struct, frozen=True):
    closed: list[UsageEvent]
    open: list[OpenAttempt]


def search(spools: Path, request_id: str, *, max_bytes: int = MAX_SEARCH_BYTES) -> UnshippedUsage:
    """In every spool below `spools`. Raises: OSError."""
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
    """Yield the segments of each spool in their order."""
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
