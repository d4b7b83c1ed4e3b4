"""The disk tier with its threads: what is put is read back, and a broken disk is nobody's error."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.tiers.disk import NUM_READERS, DiskRead, DiskTier
from engine.tiers.segment_files import FolderInUse, SegmentFile, Write
from tests.engine.tiers.records import FORM, digest_of, payload_of

MAX_BYTES = 8 << 20
Opens = Callable[..., DiskTier]


@pytest.fixture
def open_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    monkeypatch.setattr("engine.tiers.segment_files.PROBE_BYTES", 1)
    tiers: list[DiskTier] = []

    def opens(path: Path = tmp_path / "kv", write: Write = os.pwrite) -> DiskTier:
        tier = DiskTier(
            path,
            max_bytes=MAX_BYTES,
            layout=FORM.layout,
            payload_bytes=FORM.payload_bytes,
            write=write,
        )
        tiers.append(tier)
        return tier

    yield opens
    for tier in tiers:
        tier.close()


def put(tier: DiskTier, numbers: Sequence[int]) -> None:
    buffer = tier.write_buffer()
    assert buffer is not None
    for row, number in zip(tier.payloads(buffer, len(numbers)), numbers, strict=True):
        row[:] = bytearray(payload_of(number))
    tier.put(buffer, [digest_of(n) for n in numbers], lambda: None)


def settle(tier: DiskTier, is_done: Callable[[], bool]) -> None:
    while not is_done():
        tier.signal.wait(10.0)


def read(tier: DiskTier, reading: DiskRead) -> list[bytes]:
    found: list[bytes] = []
    while not reading.is_over:
        arrival = reading.take()
        if arrival is None and not reading.is_over:
            tier.signal.wait(10.0)
        elif arrival is not None:
            found += [bytes(row) for row in arrival.rows]
            arrival.give_back()
    return found


def test_what_is_put_is_read_back_in_order_also_by_the_next_process(open_tier: Opens) -> None:
    tier = open_tier()
    assert tier.takes(digest_of(0)) and not tier.has(digest_of(0))
    put(tier, range(100))
    put(tier, range(100, 120))
    settle(tier, lambda: tier.num_written == 120)
    assert tier.has(digest_of(119)) and not tier.takes(digest_of(119))
    wanted = [digest_of(n) for n in range(125)]
    expected = [payload_of(n) for n in range(120)]
    reading = tier.read(wanted)
    assert reading.num_blocks == 120
    assert read(tier, reading) == expected
    tier.close()
    again = open_tier()
    assert read(again, again.read(wanted)) == expected
    assert again.num_read == 120 and again.num_damaged == 0


def test_many_readings_at_once_need_no_more_than_the_buffers(open_tier: Opens) -> None:
    tier = open_tier()
    for start in range(0, 1000, 100):
        put(tier, range(start, start + 100))
    settle(tier, lambda: tier.num_written == 1000)
    wanted = [digest_of(n) for n in range(0, 1000, 2)]  # nowhere side by side: a run each
    readings = [tier.read(wanted) for _ in range(4)]
    for reading in readings[:3]:
        reading.cancel()  # which hold what the last one waits for
    assert read(tier, readings[3]) == [payload_of(n) for n in range(0, 1000, 2)]
    assert tier.is_on


def test_a_block_that_is_damaged_ends_a_reading_before_it(
    open_tier: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    put(tier, range(10))
    settle(tier, lambda: tier.num_written == 10)
    [path] = tier.folder.glob("*.kv")
    with path.open("r+b") as file:
        file.seek(FORM.offset_of(6) + 500)
        file.write(b"!")
    wanted = [digest_of(n) for n in range(10)]
    with caplog.at_level(logging.WARNING):
        assert read(tier, tier.read(wanted)) == [payload_of(n) for n in range(6)]
    assert "damaged" in caplog.text and tier.num_damaged == 1
    assert tier.read(wanted).num_blocks == 6 and tier.takes(digest_of(6))


def test_a_disk_that_hangs_is_known_to_until_it_answers(
    open_tier: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier, range(10))
    settle(tier, lambda: tier.num_written == 10)
    read_at, goes_on = SegmentFile.read_at, threading.Event()
    hanging = threading.Semaphore(0)

    def hang(segment: SegmentFile, memory: memoryview, offset: int) -> int:
        hanging.release()
        assert goes_on.wait(60.0)
        return read_at(segment, memory, offset)

    monkeypatch.setattr(SegmentFile, "read_at", hang)
    reading = tier.read([digest_of(n) for n in range(10)])
    for _ in range(NUM_READERS):
        assert hanging.acquire(timeout=60.0)
    reading.cancel()
    first_s = tier.costs.latency_s
    while tier.costs.latency_s <= max(first_s, 0.01):
        tier.signal.wait(0.001)
    goes_on.set()
    settle(tier, lambda: max(tier._began_s) == math.inf)
    assert tier.costs.latency_s == tier._learnt.costs.latency_s
    assert read(tier, tier.read([digest_of(9)])) == [payload_of(9)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_turns_the_tier_off_with_one_line(
    open_tier: Opens, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    fails = threading.Event()

    def write(fd: int, data: memoryview, offset: int) -> int:
        if fails.is_set():
            raise OSError(number, os.strerror(number))
        return os.pwrite(fd, data, offset)

    tier = open_tier(write=write)
    put(tier, range(3))
    settle(tier, lambda: tier.num_written == 3)
    fails.set()
    put(tier, range(3, 5))
    put(tier, range(5, 8))
    settle(tier, lambda: not tier.is_on and not tier._pending)
    assert not tier.has(digest_of(0)) and not tier.takes(digest_of(9))
    assert tier.write_buffer() is None and tier.num_blocks == 0
    assert tier.read([digest_of(0)]).is_over
    tier.close()
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "kv_disk" in record.message and os.strerror(number) in record.message


@pytest.mark.parametrize("what", ["write", "read"])
def test_what_nobody_expected_turns_the_tier_off_with_its_trace(
    open_tier: Opens,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """A thread that died in silence would leave prompts waiting for it."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("a mistake")

    tier = open_tier()
    put(tier, range(3))
    settle(tier, lambda: tier.num_written == 3)
    name = {"write": "append", "read": "_read"}[what]
    monkeypatch.setattr(tier._store if what == "write" else tier, name, fail)
    reading = tier.read([digest_of(0)])
    if what == "write":
        assert read(tier, reading) == [payload_of(0)]
        put(tier, range(3, 5))
        settle(tier, lambda: not tier.is_on and not tier._pending)
    else:
        settle(tier, lambda: not tier.is_on)
        assert reading.take() is None and reading.is_over
    assert tier.num_blocks == 0
    tier.close()
    [record] = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "a mistake" in record.message and record.exc_info


def test_a_disk_that_takes_only_a_part_is_full(open_tier: Opens) -> None:
    room = [1 << 30]
    tier = open_tier(write=lambda fd, data, offset: os.pwrite(fd, data[: room[0]], offset))
    room[0] = 2 * FORM.record_bytes
    put(tier, range(3))
    settle(tier, lambda: not tier.is_on)


def test_engines_that_share_a_path_have_folders_of_their_own(
    open_tier: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_tier(), open_tier()
    put(second, [7])
    settle(second, lambda: second.num_written == 1)
    assert not first.has(digest_of(7))
    names = [tier.folder.name for tier in (first, second)]
    assert names == [f"{FORM.layout.hex()[:16]}-{number}" for number in (0, 1)]
    second.close()
    assert open_tier().has(digest_of(7)), "the next one has what it left"
    monkeypatch.setattr("engine.tiers.segment_files.MAX_FOLDERS", 2)
    with pytest.raises(FolderInUse, match="2 other engines use it"):
        open_tier()


def test_what_no_engine_used_for_a_day_is_removed(open_tier: Opens) -> None:
    tier = open_tier()
    unused = tier.path / ("0" * 16 + "-0")
    unused.mkdir()
    (unused / "0000000001.kv").write_bytes(b"")
    for folder in (unused, tier.folder):
        (folder / "lock").touch()
        os.utime(folder / "lock", (0, 0))
    (tier.path / "notes").mkdir()
    again = open_tier()
    assert again.folder != tier.folder, "it is in use, however long it has been"
    assert {path.name for path in tier.path.iterdir()} == {
        *("notes", tier.folder.name, again.folder.name)
    }


def test_a_folder_that_cannot_be_removed_stays(open_tier: Opens, tmp_path: Path) -> None:
    lock = tmp_path / "kv" / ("0" * 16 + "-0") / "lock"
    lock.mkdir(parents=True)  # which nobody can lock
    os.utime(lock, (0, 0))
    assert open_tier().is_on and lock.exists()


def test_an_engine_that_was_killed_after_days_finds_what_it_wrote(open_tier: Opens) -> None:
    """Its lock is as old as its start, or as its last segment."""
    tier = open_tier()
    put(tier, [7])
    settle(tier, lambda: tier.num_written == 1)
    folder = tier.folder
    tier.close()
    os.utime(folder / "lock", (0, 0))
    again = open_tier()
    assert again.folder == folder and again.has(digest_of(7))


def test_asks_for_a_folder_that_can_be_used(open_tier: Opens, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        open_tier(tmp_path / "file" / "kv")

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device"):
        open_tier(write=full)
    open_tier().close()  # the folder is not locked any more
    with pytest.raises(
        ConfigError, match=r"kv_disk_bytes is 4096: a sequence of 1 blocks takes \d+"
    ):
        DiskTier(tmp_path / "small", max_bytes=4096, layout=FORM.layout, payload_bytes=3000)
    assert not (tmp_path / "small").exists()
