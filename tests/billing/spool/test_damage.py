"""Damage at any byte of a spool: what was acknowledged is billed, or waits for a person by name.

Each byte of each file is changed in turn (a part of them by day), while the process is dead or
while it runs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from billing.events import Attempt, DisputedUsage, Quantities, UsageEvent
from billing.spool.directory import SpoolDirectory
from billing.spool.format import CloseRecord, frame
from billing.spool.quarantine import Quarantine, QuarantinedRecord
from billing.spool.spool import Spool
from tests.billing.samples import an_attempt, an_event
from tests.budget import NIGHTLY, examples

SEGMENT_BYTES = 2500
SOME = Quantities(uncached_input=100, output=3)
STEP = 7 if NIGHTLY else 251
"""Every so manieth byte is damaged; a prime, so that all kinds of bytes are met."""


class Written(NamedTuple):
    """A spool of a process that died, and what it had told its clients."""

    folder: Path
    acknowledged: list[UsageEvent]
    checkpointed: set[str]
    voided: set[str]
    open: dict[str, Quantities]
    """Attempts of the dead process, with what they had used."""


def a_request(name: str) -> Attempt:
    return msgspec.structs.replace(an_attempt(), request_id=name)


async def write(folder: Path) -> Written:
    """Write segments with records of every kind, some of which span segments."""
    spool = await Spool.open(folder / "w", segment_bytes=SEGMENT_BYTES)
    written = Written(folder, [], set(), set(), {})
    long, left = a_request("req_long"), a_request("req_left")
    for attempt in (long, left):
        spool.attempt_opened(attempt)
        spool.checkpoint(attempt.id, SOME, False)
        written.checkpointed.add(attempt.id)
    for number in range(3):
        whole, called, short = (a_request(f"req_{kind}_{number}") for kind in "wcs")
        for attempt in (whole, called, short):
            spool.attempt_opened(attempt)
        for attempt in (whole, called):
            spool.checkpoint(attempt.id, SOME, False)
        written.checkpointed.add(whole.id)
        await spool.void(called.id)
        written.voided.add(called.id)
        waste = an_event(a_request(f"req_waste_{number}"), kind="waste")  # never opened
        for event in (an_event(whole), an_event(short), waste):
            await spool.close(event)
            written.acknowledged.append(event)
    await spool.close(event := an_event(long))
    written.acknowledged.append(event)
    spool.attempt_opened(alone := a_request("req_alone"))
    await spool.shutdown()
    written.open[left.id] = SOME
    written.open[alone.id] = Quantities()
    return written


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "w").glob("*.log"))


def ship(path: Path) -> dict[str, UsageEvent]:
    """Start twice, as after a crash, and ship everything."""
    SpoolDirectory(path, lock_wait_s=0).release()
    files = SpoolDirectory(path, lock_wait_s=0)
    found: dict[str, UsageEvent] = {}
    while files.cursor < files.durable_end:
        batch = files.read_closed(5, files.durable_end)
        for event in batch.events:
            assert event.id not in found, "it ships once"
            found[event.id] = event
        files.commit(batch)
    assert files.unshipped == len(found)
    files.remove()
    return found


def names_of(entry: QuarantinedRecord) -> str:
    return " ".join((entry.data.decode("latin1"), repr(entry.context)))


def check(
    written: Written, billed: dict[str, UsageEvent], entries: list[QuarantinedRecord]
) -> None:
    for event in written.acknowledged:
        found = billed.pop(event.id, None)
        if found == event:
            continue
        if event.id in written.checkpointed:
            assert found is not None, "it is billed up to its checkpoint"
            assert (found.quantities, found.finish) == (SOME, "recovered")
        else:
            assert found is None or found.quantities == Quantities()
            assert entries, f"{event.attempt.request_id} is lost and nobody is told"
            named = (event.id, event.attempt.request_id)
            assert any(it in names_of(each) for it in named for each in entries)
    for attempt_id in written.voided:
        assert billed.pop(attempt_id, None) is None, "what was void costs nothing"
    for attempt_id, used in written.open.items():
        found = billed.pop(attempt_id, None)
        assert entries or (found is not None and found.quantities == used)
    assert not billed, "nothing is made up"


def damages(folder: Path) -> Iterator[tuple[Path, int]]:
    place = 0
    for path in segments(folder):
        for offset in range(path.stat().st_size):
            place += 1
            if place % STEP == 0:
                yield path, offset


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Without syncs, which are not what is shown here and take most of the time."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)
    found = asyncio.run(write(tmp_path / "written"))
    assert len(segments(found.folder)) > 3
    return found


def test_no_damaged_byte_loses_what_was_acknowledged(written: Written, tmp_path: Path) -> None:
    for path, offset in damages(written.folder):
        folder = tmp_path / "damaged"
        shutil.copytree(written.folder, folder)
        flip(folder / "w" / path.name, offset)

        try:
            check(written, ship(folder / "w"), list(Quarantine(folder).entries()))
        except AssertionError as error:
            raise AssertionError(f"{path.name} at {offset}") from error
        shutil.rmtree(folder)


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    hits=st.lists(
        st.tuples(st.integers(0, 2**16), st.integers(0, 2**16), st.binary(min_size=1, max_size=40)),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_is_overwritten_no_loss_is_silent(
    written: Written, hits: list[tuple[int, int, bytes]]
) -> None:
    folder = written.folder.with_name("overwritten")
    shutil.copytree(written.folder, folder)
    for number, offset, garbage in hits:
        path = segments(folder)[number % len(segments(folder))]
        data = bytearray(path.read_bytes())
        start = offset % len(data)
        data[start : start + len(garbage)] = garbage
        path.write_bytes(data)
    billed = ship(folder / "w")
    unresolved = list(Quarantine(folder).entries())
    shutil.rmtree(folder)
    for event in written.acknowledged:
        found = billed.pop(event.id, None)
        is_known = event.id in written.checkpointed
        full_or_so_far = found == event or (is_known and found and found.quantities == SOME)
        assert full_or_so_far or unresolved, f"{event.attempt.request_id} is lost in silence"
    assert billed.keys() <= written.voided | written.open.keys()


@pytest.mark.parametrize("commits_late", [False, True])
@pytest.mark.parametrize("claimed", [None, DisputedUsage("up/0", 9, 0)])
async def test_damage_under_a_running_process_is_billed_once_its_segment_is_sealed(
    tmp_path: Path, claimed: DisputedUsage | None, commits_late: bool
) -> None:
    """Nothing is sent meanwhile: the damage itself has the segment sealed. `claimed`: a claim of an
    upstream alone says nothing of what was used. `commits_late`: the segment is sealed before the
    batch is committed in which the damage was found."""
    spool = await Spool.open(tmp_path / "w")
    known, unknown, whole = (a_request(f"req_{name}") for name in ("known", "unknown", "whole"))
    for attempt in (known, unknown, whole):
        spool.attempt_opened(attempt)
    spool.checkpoint(known.id, SOME, False)
    if claimed is not None:
        spool.checkpoint(unknown.id, Quantities(), False, claimed)
    for attempt in (known, unknown, whole):
        await spool.close(an_event(attempt))
    (segment,) = segments(tmp_path)
    for attempt in (known, unknown):
        close = frame(CloseRecord(an_event(attempt)))
        flip(segment, segment.read_bytes().index(close) + len(close) - 3)
    billed, lost = dict[str, UsageEvent](), 0
    for _ in range(2):
        async with asyncio.timeout(30):
            await spool.wait_readable()
        batch = await spool.read_closed(10)
        billed |= {event.id: event for event in batch.events}
        lost += batch.lost
        while commits_late and len(segments(tmp_path)) < 2:
            await asyncio.sleep(0.001)
        await spool.commit(batch)
    assert billed.keys() == {known.id, whole.id} and lost == 2
    assert (billed[known.id].quantities, billed[known.id].finish) == (SOME, "recovered")
    (entry,) = Quarantine(tmp_path).entries()
    assert entry.context.attempt is not None and entry.context.attempt.attempt == unknown
    assert entry.context.attempt.recovered().disputed == (claimed or UNSET)
    assert spool.backlog == 0
    await spool.remove()


async def test_a_damaged_start_of_the_live_segment_hides_no_lost_end(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "w", segment_bytes=1)
    attempt = a_request("req_ended")
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, SOME, False)
    await spool.close(an_event(attempt))
    async with asyncio.timeout(30):
        while len(segments(tmp_path)) < 2 or spool._synced.segment < 2:
            await asyncio.sleep(0.01)
    first, live = segments(tmp_path)
    flip(first, first.stat().st_size - 3)
    flip(live, 20)
    batch = await spool.read_closed(10)
    assert [(it.id, it.quantities) for it in batch.events] == [(attempt.id, SOME)]
    await spool.shutdown()


async def test_a_missing_segment_bills_what_was_open_before_it(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "w", segment_bytes=1)
    attempt = a_request("req_ended")
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, SOME, False)
    await spool.close(an_event())
    await spool.close(an_event(attempt))
    await spool.close(an_event())
    await spool.shutdown()
    records = {it: it.read_bytes() for it in segments(tmp_path)}
    close = frame(CloseRecord(an_event(attempt)))
    next(path for path, data in records.items() if close in data).unlink()
    billed = ship(tmp_path / "w")
    assert billed[attempt.id].quantities == SOME and len(billed) == 3
    (entry,) = Quarantine(tmp_path).entries()
    assert entry.context.reason == "missing"


def test_a_cursor_with_a_changed_digit_skips_nothing(written: Written) -> None:
    path = written.folder / "w"
    files = SpoolDirectory(path, lock_wait_s=0)
    files.commit(files.read_closed(3, files.durable_end))
    files.release()
    stored = (path / "cursor").read_bytes()
    digits = [place for place, byte in enumerate(stored) if chr(byte).isdigit()]
    for place in digits:
        changed = bytearray(stored)
        changed[place] = ord("9") if stored[place] != ord("9") else ord("1")
        (path / "cursor").write_bytes(changed)
        files = SpoolDirectory(path, lock_wait_s=0)
        assert files.cursor == (0, 0), "all of it ships again, and is booked once"
        files.release()
