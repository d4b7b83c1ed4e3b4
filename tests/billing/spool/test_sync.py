"""The spool syncs in the background, and together under load."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from billing.errors import SpoolBroken, SpoolFull
from billing.events import Quantities
from billing.spool.spool import FLUSH_INTERVAL_S, Spool
from billing.spool.sync import BackgroundSync, _finish
from tests.billing.samples import an_attempt, an_event


@pytest.mark.usefixtures("in_threads")
async def test_many_closes_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    real = os.fdatasync

    def counting(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        real(fd)

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", counting)
    events = [an_event() for _ in range(500)]
    await asyncio.gather(*map(spool.close, events))
    assert syncs < 20
    await spool.close(*(an_event() for _ in range(3)))
    assert spool.backlog == 503
    await spool.shutdown()
    again = await Spool.open(tmp_path / "s")
    assert again.backlog == 503
    await again.shutdown()


@pytest.mark.usefixtures("in_threads")
async def test_streams_that_are_open_at_once_share_syncs_however_quick_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them on the event loop, which a disk that hangs would stop."""
    here = threading.get_ident()
    synced_here: list[bool] = []

    def sync(fd: int) -> None:
        synced_here.append(threading.get_ident() == here)

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", sync)

    async def four_requests() -> None:
        for attempt in [an_attempt() for _ in range(4)]:
            spool.attempt_opened(attempt)
            await asyncio.sleep(0)
            await spool.close(an_event(attempt))

    await asyncio.gather(*(four_requests() for _ in range(64)))
    assert len(synced_here) < 64 and not any(synced_here), "of 256 closes"
    assert spool.backlog == 64 * 4
    await spool.shutdown()


@pytest.mark.usefixtures("in_threads")
async def test_what_a_failed_sync_left_in_doubt_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a failed sync once: the next one says that all is well."""
    real, failures = os.fdatasync, [OSError(errno.EIO, "Input/output error")]

    def fails_once(fd: int) -> None:
        if failures:
            raise failures.pop()
        real(fd)

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", fails_once)
    with pytest.raises(SpoolBroken):
        await spool.close(an_event())
    assert failures == []
    await asyncio.sleep(2 * FLUSH_INTERVAL_S)
    assert spool.broken.is_set() and not spool.healthy
    with pytest.raises(SpoolBroken):
        await spool.close(an_event())
    await spool.shutdown()
    again = await Spool.open(tmp_path / "s")
    assert again.backlog == 0, "who closed was told that it is not on disk"
    await again.shutdown()


async def test_a_close_after_the_end_is_refused_and_writes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await Spool.open(tmp_path / "s")
    await spool.shutdown()
    others = [(tmp_path / str(number)).open("wb") for number in range(8)]  # have its descriptors
    with pytest.raises(SpoolBroken):
        await asyncio.wait_for(spool.close(an_event()), timeout=30)
    for other in others:
        other.close()
        assert Path(other.name).read_bytes() == b""


@pytest.mark.usefixtures("in_threads")
async def test_what_has_begun_survives_a_kill_before_it_is_synced_and_a_power_cut_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may_sync = os.fdatasync, threading.Event()

    def held(fd: int) -> None:
        assert may_sync.wait(30)
        real(fd)

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", held)
    attempt, price = an_attempt(), Quantities(tool_call=1)
    on_disk = await spool.attempt_begun(attempt, price)
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    assert not on_disk.done()
    durable = spool._files.durable_end.offset
    may_sync.set()
    await on_disk
    assert spool._files.durable_end.offset > durable
    spool.close_buffered(event := an_event(attempt, price))
    await spool.shutdown()
    monkeypatch.undo()
    killed = await Spool.open(tmp_path / "killed")
    assert [(each.id, each.quantities) for each in killed.recovered] == [(attempt.id, price)]
    await killed.shutdown()
    again = await Spool.open(tmp_path / "s")
    assert (await again.read_closed(9)).events == [event]
    await again.shutdown()


@pytest.mark.usefixtures("in_threads")
async def test_who_began_on_a_disk_that_fails_is_told_and_billed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", full)
    attempt = an_attempt()
    on_disk = await spool.attempt_begun(attempt, Quantities(tool_call=1))
    with pytest.raises(SpoolFull):
        await on_disk
    await spool.void(attempt.id)
    with pytest.raises(SpoolFull):
        await spool.attempt_begun(an_attempt(), Quantities(tool_call=1))
    monkeypatch.undo()
    async with asyncio.timeout(30):
        while not spool.healthy:
            await asyncio.sleep(0.01)
    await spool.close(event := an_event())
    await spool.shutdown()
    again = await Spool.open(tmp_path / "s")
    assert again.recovered == [] and (await again.read_closed(9)).events == [event]
    await again.shutdown()


@pytest.mark.usefixtures("in_threads")
async def test_who_begins_amid_a_sync_is_in_the_file_at_once_and_shares_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, may_sync, syncs = os.fdatasync, threading.Semaphore(0), 0

    def held(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        assert may_sync.acquire(timeout=30)
        real(fd)

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", held)
    price = Quantities(tool_call=1)
    attempts = [an_attempt() for _ in range(5)]
    first, *later = [await spool.attempt_begun(attempt, price) for attempt in attempts]
    shutil.copytree(tmp_path / "s", tmp_path / "killed")
    may_sync.release()
    await first
    assert not any(each.done() for each in later)
    may_sync.release()
    await asyncio.gather(*later)
    assert syncs == 2
    assert spool._files.durable_end.offset == spool._files._segment_path(1).stat().st_size
    monkeypatch.undo()
    await spool.shutdown()
    for name in ("killed", "s"):
        again = await Spool.open(tmp_path / name)
        assert {each.attempt.id for each in again.recovered} == {each.id for each in attempts}
        await again.shutdown()


@pytest.mark.usefixtures("in_threads")
async def test_a_sync_that_finds_no_room_takes_along_what_was_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is written once, not twice, as soon as there is room."""
    real, may_fail, failures = os.fdatasync, threading.Event(), [OSError(errno.ENOSPC, "full")]

    def fails_once(fd: int) -> None:
        if failures:
            assert may_fail.wait(30)
            raise failures.pop()
        real(fd)

    spool = await Spool.open(tmp_path / "s")
    monkeypatch.setattr(os, "fdatasync", fails_once)
    price = Quantities(tool_call=1)
    refused, kept = an_attempt(), an_attempt()
    first = await spool.attempt_begun(refused, price)
    second = await spool.attempt_begun(kept, price)
    may_fail.set()
    with pytest.raises(SpoolFull):
        await first
    await spool.void(refused.id)
    await second
    assert spool.healthy
    await spool.close(event := an_event())
    await spool.shutdown()
    names = Path(tmp_path / "s").glob("*.log")
    written = b"".join(name.read_bytes() for name in names)
    assert written.count(kept.id.encode()) == 2, "begun, and its price"
    again = await Spool.open(tmp_path / "s")
    assert [each.attempt.id for each in again.recovered] == [kept.id]
    assert event in (await again.read_closed(9)).events
    await again.shutdown()


async def test_the_kernel_syncs_by_itself_and_says_why_it_cannot(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        background = BackgroundSync(threads)
        if not background.is_by_kernel:
            pytest.skip("the kernel refuses here")
        with (tmp_path / "file").open("wb") as file:
            file.write(b"written")
            assert isinstance(await synced(background, file.fileno()), float)
        assert background.is_by_kernel
        read, write = os.pipe()
        found = await synced(background, write)  # no file; and no thread can sync it either
        assert isinstance(found, OSError) and found.errno == errno.EINVAL
        assert not background.is_by_kernel, "what refused is not asked again"
        for fd in (read, write):
            os.close(fd)
        with (tmp_path / "file").open("ab") as file:
            assert isinstance(await synced(background, file.fileno()), float)
        background.close()


async def synced(background: BackgroundSync, fd: int) -> float | Exception:
    found: asyncio.Future[float | Exception] = asyncio.get_running_loop().create_future()
    background.sync(fd, found.set_result)
    return await asyncio.wait_for(found, timeout=30)


def test_what_the_kernel_says_is_told_as_an_error_of_its_own() -> None:
    heard: list[float | Exception] = []
    _finish(heard.append, time.perf_counter(), 2**64 - errno.ENOSPC)
    _finish(heard.append, time.perf_counter(), 0)
    failed, took_s = heard
    assert isinstance(failed, OSError) and failed.errno == errno.ENOSPC
    assert isinstance(took_s, float)
