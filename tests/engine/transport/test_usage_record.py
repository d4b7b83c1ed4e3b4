"""The record of what was generated, through deaths between any two of its stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.protocol import Usage
from engine.transport import usage_record
from engine.transport.usage_record import Totals, UsageReading, UsageRecord, read, records_of


class Killed(BaseException):
    """A process that is killed: nothing after it runs."""


class MortalCells:
    """Cells of which so many can still be stored."""

    def __init__(self, cells: memoryview, stores: int) -> None:
        self._cells, self._stores = cells, stores

    def __getitem__(self, key: Any) -> Any:
        return self._cells[key]

    def __setitem__(self, key: int, value: int) -> None:
        if not self._stores:
            raise Killed
        self._stores -= 1
        self._cells[key] = value

    def release(self) -> None:
        self._cells.release()


def used(generated: int, *, prompt: int = 10, cached: int = 4) -> Usage:
    return Usage(
        prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated, prefilled=True
    )


def generated(reading: UsageReading) -> int:
    opened = sum(usage.generated_tokens for usage in reading.open.values())
    return opened + reading.acknowledged.generated_tokens


def die(record: UsageRecord) -> None:
    """As the kernel ends a process: nothing is flushed by it, and nothing is lost."""
    record._cells.release()
    record._map.close()
    usage_record.os.close(record._fd)


def test_what_is_acknowledged_moves_to_the_totals(tmp_path: Path) -> None:
    path = tmp_path / "a.record"
    record = UsageRecord(path)
    for request_id, count in (("a", 1), ("b", 2), ("a", 5)):
        record.note(request_id, used(count))
    assert read(path).open == {"a": used(5), "b": used(2)}
    record.fold("a")
    record.fold("a")
    record.fold("unknown")
    assert read(path).open == {"b": used(2)}
    assert read(path).acknowledged == Totals(1, 10, 4, 5)
    assert read(path).recent == {"a": used(5)}
    with pytest.raises(BlockingIOError):
        UsageRecord(path)
    record.close()
    again = UsageRecord(path)
    assert again.left == {"b": used(2)}
    again.fold("b")
    assert read(path).acknowledged == Totals(2, 20, 8, 7)
    again.close()


@pytest.mark.parametrize("stores", range(12))
def test_a_death_between_any_two_stores_counts_nothing_twice(tmp_path: Path, stores: int) -> None:
    path = tmp_path / "a.record"
    record = UsageRecord(path)
    for request_id, count in (("a", 100), ("b", 20), ("c", 3)):
        record.note(request_id, used(count))
    record.fold("c")
    record._cells = MortalCells(record._cells, stores)  # type: ignore[assignment]
    try:
        record.fold("a")
        record.fold("b")
    except Killed:
        pass
    die(record)
    again = UsageRecord(path)
    assert generated(read(path)) == 123
    assert again.left.keys() <= {"a", "b"}
    for request_id in again.left:
        again.fold(request_id)
    assert read(path).acknowledged == Totals(3, 30, 12, 123)
    again.close()


def test_a_record_outlives_its_kernel_only_if_it_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, boot = tmp_path / "a.record", tmp_path / "boot"
    monkeypatch.setattr(usage_record, "BOOT_ID", boot)
    boot.write_text("first\n")
    record = UsageRecord(path)
    record.note("a", used(1))
    record.close()
    boot.write_text("second\n")
    record = UsageRecord(path)
    assert record.left == {"a": used(1)}
    die(record)
    boot.write_text("third\n")
    record = UsageRecord(path)
    assert record.left == {}
    lost, running = map(read, records_of(path))
    assert (lost.is_lost, running.is_lost) == (True, False)
    assert (lost.open, running.open) == ({"a": used(1)}, {})
    assert lost.since < running.since
    record.close()


def test_what_is_no_record_is_put_aside_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.record"
    path.write_bytes(b"\0" * 5000)
    with pytest.raises(ValueError, match="no record of usage"):
        read(path)
    UsageRecord(path).close()
    lost, running = map(read, records_of(path))
    assert (lost.is_lost, lost.since, lost.acknowledged) == (True, 0, Totals())
    assert (running.is_lost, running.acknowledged) == (False, Totals())


def test_what_finds_no_slot_is_counted_when_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_record, "NUM_SLOTS", 1)
    record = UsageRecord(tmp_path / "a.record")
    for request_id in ("a", "b", "x" * 65):
        record.note(request_id, used(7))
    assert read(tmp_path / "a.record").open.keys() == {"a"}
    for request_id in ("b", "x" * 65, "a"):
        record.fold(request_id)
    assert read(tmp_path / "a.record").acknowledged == Totals(3, 30, 12, 21)
    record.note("c", used(1))
    assert read(tmp_path / "a.record").open == {"c": used(1)}, "the slot is free again"
    record.close()
