"""The spool where its machine does not go: full and broken disks, damage, locks, a real kill -9."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from billing.errors import SpoolBroken, SpoolFull
from billing.events import Quantities, UsageEvent
from billing.spool.directory import Position, SpoolDirectory, read_spool
from billing.spool.format import HEADER, MAGIC, CloseRecord, OpenRecord, frame, is_torn, scan
from billing.spool.quarantine import Quarantine
from billing.spool.spool import Spool
from tests.billing.samples import an_attempt, an_event
from tests.pace import LONGEST_S

ROOT = Path(__file__).resolve().parents[3]


async def shipped(directory: Path) -> dict[str, UsageEvent]:
    """Everything a new start finds to ship, by id; each event once."""
    spool = await Spool.open(directory)
    batch = await spool.read_closed(100_000)
    await spool.shutdown()
    assert len({event.id for event in batch.events}) == len(batch.events)
    return {event.id: event for event in batch.events}


@contextmanager
def full_disk(size_bytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow beyond `size_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


async def test_a_close_is_on_disk_when_it_returns(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    event = an_event()
    spool.attempt_opened(event.attempt)
    await spool.close(event)
    on_disk = [placed.record for placed in scan(segments(tmp_path / "s")[0].read_bytes())]
    assert on_disk[1:] == [OpenRecord(event.attempt), CloseRecord(event)]
    assert spool.backlog == 1
    await spool.shutdown()
    assert await shipped(tmp_path / "s") == {event.id: event}


async def test_buffered_records_reach_the_disk_without_a_close(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    attempt = an_attempt()
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, Quantities(output=3), False)
    async with asyncio.timeout(LONGEST_S):
        while len(found := [*scan(segments(tmp_path / "s")[0].read_bytes())]) < 3:
            await asyncio.sleep(0.01)
    assert found[2].record.quantities == Quantities(output=3)
    await spool.shutdown()


async def test_a_close_that_nobody_waits_for_any_more_is_still_written(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    event = an_event()
    closing = asyncio.create_task(spool.close(event))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await spool.shutdown()
    assert event.id in await shipped(tmp_path / "s")


async def test_what_a_full_disk_kept_can_be_replaced_until_there_is_room(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    await spool.close(an_event())
    kept, withheld = an_event(), an_event()
    instead = msgspec.structs.replace(withheld, kind="waste", finish="error")
    for event in (kept, withheld):
        spool.attempt_opened(event.attempt)
    with full_disk(segments(tmp_path / "s")[0].stat().st_size + 100):
        closing = [asyncio.create_task(spool.close(event)) for event in (kept, withheld)]
        for each in closing:
            with pytest.raises(SpoolFull):
                await each
        spool.replace_queued([withheld], [instead])
    await spool.close(last := an_event())
    assert spool.backlog == 4
    await spool.shutdown()
    events = await shipped(tmp_path / "s")
    assert len(events) == 4
    assert [events[event.id] for event in (kept, instead, last)] == [kept, instead, last]


async def test_a_full_disk_refuses_keeps_and_recovers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = await Spool.open(tmp_path / "s")
    before, during, abandoned = an_event(), an_event(), an_event()
    running = an_attempt()
    await spool.close(before)
    spool.attempt_opened(during.attempt)
    spool.attempt_opened(running)
    with full_disk(segments(tmp_path / "s")[0].stat().st_size + 100):
        leaving = asyncio.create_task(spool.close(abandoned))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(SpoolFull):
            await spool.close(during)
        assert not spool.healthy
        with pytest.raises(SpoolFull):
            spool.attempt_opened(an_attempt())
        held = len(spool._buffer)
        spool.checkpoint(running.id, Quantities(output=9), False)
        assert len(spool._buffer) == held  # nothing queues without bound
        later = an_event()
        with pytest.raises(SpoolFull):
            await spool.close(later)
    await spool.close(last := an_event())
    assert spool.healthy and "writing again" in caplog.text
    await spool.shutdown()
    events = await shipped(tmp_path / "s")
    closed = {event.id for event in (before, during, abandoned, later, last)}
    assert events.keys() == closed | {running.id}
    assert events[during.id] == during
    assert caplog.text.count("spool cannot write (spool_full)") == 1


@pytest.mark.usefixtures("in_threads")
async def test_a_disk_that_fails_breaks_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await Spool.open(tmp_path / "s")
    attempt = an_attempt()
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, Quantities(output=4), True)
    await spool.close(kept := an_event())

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    assert not spool.broken.is_set()
    with pytest.raises(SpoolBroken, match="Input/output error"):
        await spool.close(an_event(attempt))
    assert spool.broken.is_set() and not spool.healthy
    with pytest.raises(SpoolBroken):
        await spool.close(an_event())
    with pytest.raises(SpoolBroken):
        spool.attempt_opened(an_attempt())
    spool.checkpoint(attempt.id, Quantities(output=5), True)
    await spool.shutdown()
    monkeypatch.undo()
    events = await shipped(tmp_path / "s")
    assert events.keys() == {kept.id, attempt.id}
    assert events[attempt.id].quantities == Quantities(output=4)


@pytest.mark.usefixtures("in_threads")
async def test_closes_that_queued_behind_a_failing_write_fail_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await Spool.open(tmp_path / "s")
    loop = asyncio.get_running_loop()
    queued: list[asyncio.Task[None]] = []

    def failing(fd: int) -> None:
        def queue_another() -> None:
            queued.append(asyncio.create_task(spool.close(an_event())))

        loop.call_soon_threadsafe(queue_another)
        while not spool._sync_waiters:
            pass
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    with pytest.raises(SpoolBroken):
        await spool.close(an_event())
    with pytest.raises(SpoolBroken):
        await queued[0]
    await spool.shutdown()


async def test_a_segment_that_cannot_begin_leaves_the_old_one_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = await Spool.open(tmp_path / "s", segment_bytes=1)
    blocker = tmp_path / "s" / "00000002.log"
    blocker.write_bytes(b"")
    await spool.close(one := an_event())
    await spool.close(two := an_event())
    assert "cannot begin a segment" in caplog.text
    assert [path.name for path in segments(tmp_path / "s")] == ["00000001.log", "00000002.log"]
    blocker.unlink()
    await spool.close(three := an_event())
    await spool.shutdown()
    assert (await shipped(tmp_path / "s")).keys() == {one.id, two.id, three.id}


def test_a_rotation_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = SpoolDirectory(tmp_path / "s", lock_wait_s=0)
    with full_disk(10), pytest.raises(OSError, match="File too large"):
        files.rotate(b"x" * 100)
    assert len(segments(tmp_path / "s")) == 1
    files.append(frame(CloseRecord(an_event())))
    files.release()


async def test_a_rotation_that_fails_as_nobody_foresaw_breaks_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool acknowledges what was on disk by then; whoever closes later is told, and not
    left."""
    spool = await Spool.open(tmp_path / "s", segment_bytes=1)

    def fails(start: bytes) -> None:
        raise LookupError("unforeseen")

    monkeypatch.setattr(spool._files, "rotate", fails)
    async with asyncio.timeout(30):
        await spool.close(one := an_event())
        await spool.broken.wait()
        with pytest.raises(SpoolBroken, match="unforeseen"):
            await spool.close(an_event())
    assert not spool.healthy
    await spool.shutdown()
    assert (await shipped(tmp_path / "s")).keys() == {one.id}


async def test_a_spool_that_holds_too_much_admits_nothing_new(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s", segment_bytes=500, max_bytes=3000)
    attempt = an_attempt()
    spool.attempt_opened(attempt)
    while spool.healthy:
        await spool.close(an_event())
    with pytest.raises(SpoolFull, match="not shipped"):
        spool.attempt_opened(an_attempt())
    await spool.close(an_event(attempt))
    while spool.backlog:
        await spool.commit(await spool.read_closed(100))
    assert spool.healthy
    await spool.shutdown()


async def test_voids_alone_do_not_fill_the_disk(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s", segment_bytes=2000, max_bytes=20_000)
    for _ in range(10):
        for _ in range(10):
            attempt = an_attempt()
            spool.attempt_opened(attempt)
            await spool.void(attempt.id)
        await spool.wait_readable()
        await spool.commit(await spool.read_closed(10))
    assert spool.healthy and len(segments(tmp_path / "s")) <= 2
    await spool.shutdown()


async def test_damage_in_the_middle_is_kept_and_alarmed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = await Spool.open(tmp_path / "s")
    events = [an_event() for _ in range(5)]
    for event in events:
        await spool.close(event)
    await spool.shutdown()
    segment = segments(tmp_path / "s")[0]
    data = bytearray(segment.read_bytes())
    third = frame(CloseRecord(events[2]))
    start = data.index(third)
    data[start + 4] ^= 0xFF  # its length: what follows must be found all the same
    segment.write_bytes(data)
    for _ in range(2):
        found = await shipped(tmp_path / "s")
        assert found.keys() == {event.id for event in events} - {events[2].id}
    [kept] = Quarantine(tmp_path).entries()
    assert kept.data == bytes(data[start : start + len(third)])
    assert "could not be billed" in caplog.text


@pytest.mark.parametrize("cut", [1, HEADER.size, HEADER.size + 1, -1])
async def test_a_torn_end_is_cut(tmp_path: Path, cut: int) -> None:
    spool = await Spool.open(tmp_path / "s")
    await spool.close(event := an_event())
    await spool.shutdown()
    segment = segments(tmp_path / "s")[0]
    whole = segment.read_bytes()
    segment.write_bytes(whole + frame(CloseRecord(an_event()))[:cut])
    assert (await shipped(tmp_path / "s")).keys() == {event.id}
    assert segment.read_bytes() == whole
    assert not (tmp_path / "quarantine").exists()


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 40, b"\xf5TX", b"?" + MAGIC * 3, frame(CloseRecord(an_event()))[:-1] + b"!"],
)
async def test_an_end_that_was_not_torn_is_kept(tmp_path: Path, garbage: bytes) -> None:
    spool = await Spool.open(tmp_path / "s")
    await spool.close(event := an_event())
    await spool.shutdown()
    segment = segments(tmp_path / "s")[0]
    segment.write_bytes(segment.read_bytes() + garbage)
    assert (await shipped(tmp_path / "s")).keys() == {event.id}
    [kept] = Quarantine(tmp_path).entries()
    assert kept.data == garbage


def test_whatever_bit_of_the_end_flips_nothing_else_is_lost_and_nothing_is_made_up() -> None:
    before, last = CloseRecord(an_event()), frame(CloseRecord(an_event()))
    intact = frame(before)
    for bit in range(8 * len(last)):
        flipped = bytearray(last)
        flipped[bit // 8] ^= 1 << bit % 8
        found = [placed.record for placed in scan(intact + bytes(flipped))]
        assert [record for record in found if record is not None] == [before], bit


def test_a_record_of_a_later_version_is_damage() -> None:
    payload = msgspec.msgpack.encode({"t": "refund", "amount": 5})
    known = frame(CloseRecord(an_event()))
    checksum = crc32(payload, crc32(len(payload).to_bytes(4, "big")))
    later = HEADER.pack(known[:4], len(payload), checksum) + payload
    found = list(scan(known + later + known))
    assert [placed.record is None for placed in found] == [False, True, False]
    assert not is_torn(known + later, found[1])


async def test_a_checkpoint_whose_open_was_damaged_bills_nothing(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    attempt = an_attempt()
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, Quantities(output=3), False)
    await spool.shutdown()
    segment = segments(tmp_path / "s")[0]
    segment.write_bytes(segment.read_bytes().replace(b"org_a", b"org_X"))
    assert await shipped(tmp_path / "s") == {}
    [kept] = Quarantine(tmp_path).entries()
    assert kept.context.checkpoint is not None
    assert kept.context.checkpoint.quantities == Quantities(output=3)


async def test_a_missing_segment_is_an_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = await Spool.open(tmp_path / "s", segment_bytes=1)
    events = [an_event() for _ in range(3)]
    for event in events:
        await spool.close(event)
    await spool.shutdown()
    segments(tmp_path / "s")[1].unlink()
    assert (await shipped(tmp_path / "s")).keys() == {events[0].id, events[2].id}
    assert "segment 2 is missing" in caplog.text


PLACES = ("00000001.log", "00000002.log", "cursor", "lock")
STRANGERS: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a spool": lambda path: path.symlink_to(copied(path)),
}


def copied(path: Path) -> Path:
    """Return a good segment, outside of the spool."""
    other = path.parent.parent / "elsewhere"
    other.write_bytes(frame(CloseRecord(an_event())))
    return other


@pytest.mark.parametrize("make", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_refused_by_its_path(
    tmp_path: Path, place: str, make: Callable[[Path], object]
) -> None:
    spool = tmp_path / "spool" / "w"
    spool.mkdir(parents=True)
    make(spool / place)
    if place == "lock" and (spool / place).is_fifo():
        return  # it locks as well as a file
    with pytest.raises(OSError, match=str(spool)):
        SpoolDirectory(spool, lock_wait_s=0)
    if place != "lock":
        with pytest.raises(OSError, match=str(spool)):
            list(read_spool(spool))


@pytest.mark.parametrize("name", ["cursor.new", "repaired.new"])
@pytest.mark.parametrize("make", [os.mkfifo, STRANGERS["a link to a spool"]])
def test_what_lies_where_a_file_is_made_gives_way(
    tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    spool = tmp_path / "spool" / "w"
    spool.mkdir(parents=True)
    (spool / "00000001.log").write_bytes(frame(CloseRecord(an_event())))
    make(spool / name)
    directory = SpoolDirectory(spool, lock_wait_s=0)
    directory.commit(directory.read_closed(10, directory.durable_end))
    directory.release()
    assert (spool / "cursor").is_file() and not (spool / "cursor").is_symlink()


def test_a_record_that_is_nested_too_deep_is_damage() -> None:
    payload = b"\x82\xa1t\xa5close\xa1z" + b"\x91" * 200_000 + b"\xc0"
    length = len(payload)
    head = HEADER.pack(MAGIC, length, crc32(payload, crc32(length.to_bytes(4, "big"))))
    good = frame(CloseRecord(an_event()))
    records = [placed.record is None for placed in scan(head + payload + good)]
    assert records == [True, False]


@pytest.mark.parametrize("cursor", [b"[1,-5]", b"[-1,0]", b"[1,%d]" % 2**70, b"[" * 100_000])
def test_a_cursor_in_no_file_ships_again(tmp_path: Path, cursor: bytes) -> None:
    spool = tmp_path / "spool" / "w"
    spool.mkdir(parents=True)
    (spool / "00000001.log").write_bytes(frame(CloseRecord(an_event())))
    (spool / "cursor").write_bytes(cursor)
    directory = SpoolDirectory(spool, lock_wait_s=0)
    assert len(directory.read_closed(10, directory.durable_end).events) == 1
    directory.release()


async def test_a_cursor_that_cannot_be_read_ships_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = await Spool.open(tmp_path / "s")
    await spool.close(event := an_event())
    await spool.commit(await spool.read_closed(10))
    assert spool.backlog == 0
    await spool.shutdown()
    assert await shipped(tmp_path / "s") == {}
    (tmp_path / "s" / "cursor").write_bytes(b"{")
    assert (await shipped(tmp_path / "s")).keys() == {event.id}
    assert "unreadable cursor" in caplog.text


async def test_recovery_survives_being_torn_itself(tmp_path: Path) -> None:
    """A crash while the recovered bills are written: the next start finds the attempts again."""
    spool = await Spool.open(tmp_path / "s")
    attempt = an_attempt()
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, Quantities(output=3), False)
    await spool.shutdown()
    recovered = await shipped(tmp_path / "s")
    second = segments(tmp_path / "s")[1]
    whole = second.read_bytes()
    for cut in range(0, len(whole), 31):
        for later in segments(tmp_path / "s")[2:]:
            later.unlink()
        second.write_bytes(whole[:cut])
        assert await shipped(tmp_path / "s") == recovered


async def test_segments_that_outlived_their_shipping_are_not_shipped_again(tmp_path: Path) -> None:
    """A crash between the saving of the cursor and the end of the clearing up."""
    spool = await Spool.open(tmp_path / "s")
    await spool.close(an_event())
    await spool.shutdown()
    first = segments(tmp_path / "s")[0]
    content = first.read_bytes()
    spool = await Spool.open(tmp_path / "s")
    await spool.commit(await spool.read_closed(10))
    await spool.shutdown()
    assert not first.exists()
    first.write_bytes(content)
    spool = await Spool.open(tmp_path / "s")
    assert spool.backlog == 0
    await spool.close(event := an_event())
    batch = await spool.read_closed(10)
    assert batch.events == [event]
    await spool.commit(batch)
    assert not first.exists()
    await spool.shutdown()


async def test_only_what_is_empty_is_removed(tmp_path: Path) -> None:
    spool = await Spool.open(tmp_path / "s")
    await spool.close(an_event())
    with pytest.raises(AssertionError, match="in use"):
        await spool.remove()
    await spool.shutdown()


async def test_a_directory_that_cannot_be_made_is_let_go(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "00000001.log").mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="not a regular file"):
            await Spool.open(tmp_path / "s", lock_wait_s=0)
    assert Position(1, 5) < Position(2, 0)


KILLED = """
import asyncio, sys
from billing.events import Quantities
from billing.spool.quarantine import Quarantine
from billing.spool.spool import Spool
from tests.billing.samples import an_attempt, an_event
from tests.pace import LONGEST_S

async def one(spool, number):
    attempt = an_attempt()
    spool.attempt_opened(attempt)
    spool.checkpoint(attempt.id, Quantities(output=number), False)
    await asyncio.sleep(0)
    await spool.close(an_event(attempt, Quantities(output=number + 1)))
    sys.stdout.write(f"{attempt.id} {number + 1}\\n")
    sys.stdout.flush()

async def main():
    spool = await Spool.open(sys.argv[1], segment_bytes=20_000)
    number = 0
    async def stream():
        nonlocal number
        while True:
            number += 1
            await one(spool, number)
    await asyncio.gather(*(stream() for _ in range(16)))

asyncio.run(main())
"""


async def test_kill_minus_nine_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged: dict[str, int] = {}
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "s")], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(200)]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        for line in lines:
            event_id, _, output = line.decode().partition(" ")
            if output.endswith("\n"):
                acknowledged[event_id] = int(output)
    events = await shipped(tmp_path / "s")
    assert len(acknowledged) >= 600
    for event_id, output in acknowledged.items():
        assert (events[event_id].quantities.output, events[event_id].finish) == (output, "done")
    for event_id in events.keys() - acknowledged.keys():
        assert events[event_id].finish in ("done", "recovered")
