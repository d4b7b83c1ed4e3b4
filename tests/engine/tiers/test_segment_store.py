"""The store against a model of what was written: reopened, cut, damaged, and out of room."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.tiers.segment_files import FolderInUse, SegmentFolder
from engine.tiers.segment_store import SegmentStore
from engine.tiers.segments import HEAD_BYTES, SegmentFormat
from tests.budget import NIGHTLY, examples
from tests.engine.tiers.records import ENCRYPTED, FORM, digest_of, payload_of, records_of

CAPACITY, MAX_SEGMENTS = 4, 5
MAX_BYTES = MAX_SEGMENTS * FORM.sealed_bytes(CAPACITY)


def open_store(
    path: Path, form: SegmentFormat = FORM, *, capacity: int = CAPACITY, max_bytes: int = MAX_BYTES
) -> SegmentStore:
    return SegmentStore(
        *(SegmentFolder(path, form), form),
        capacity=capacity,
        max_segments=MAX_SEGMENTS,
        max_bytes=max_bytes,
    )


def size_on_disk(path: Path) -> int:
    return sum(each.stat().st_size for each in path.glob("*.kv"))


def abandon(store: SegmentStore) -> None:
    """Close the files as a kill does: nothing is sealed."""
    store._current = None
    store.close()


def payload_in(store: SegmentStore, number: int) -> bytes | None:
    """Return the payload of a block as a reader takes it: checked; None when it is not there."""
    form = store._form
    found = store.find([digest_of(number)], 1)
    if not found:
        return None
    run = found[0]
    memory = memoryview(mmap.mmap(-1, form.record_bytes))
    num_read = run.segment.read_at(memory, form.offset_of(run.slot))
    digest = form.unseal(memory, run.slot, run.segment.cipher)
    is_whole = num_read == len(memory) and digest == digest_of(number)
    if not is_whole:
        store.forget(run, 0)
    store.unpin(run, int(is_whole))
    return bytes(memory[HEAD_BYTES : HEAD_BYTES + form.payload_bytes]) if is_whole else None


def test_finds_what_lies_side_by_side_in_one_run(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(records_of(range(6)), [digest_of(n) for n in range(6)])
    runs = store.find([digest_of(n) for n in (0, 1, 2, 3, 4, 5, 99, 0)], 3)
    assert [(run.segment.number, run.slot, len(run.digests)) for run in runs] == [
        (1, 0, 3),
        (1, 3, 1),
        (2, 0, 2),
    ]
    for run in runs:
        store.unpin(run, len(run.digests))
    store.close()


def test_the_first_records_come_alone_and_more_at_once_from_there_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity=40, max_bytes=MAX_SEGMENTS * FORM.sealed_bytes(40))
    digests = [digest_of(n) for n in range(20)]
    store.append(records_of(range(20)), digests)
    runs = store.find(digests, 5, 2)
    assert [len(run.digests) for run in runs] == [1, 1, 2, 2, 4, 4, 5, 1]
    for run in runs:
        store.unpin(run, 0)
    store.close()


def test_a_folder_has_one_engine(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(FolderInUse):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


def test_another_layout_finds_nothing_and_gets_the_room(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(records_of([1]), [digest_of(1)])
    store.close()
    (tmp_path / "notes.txt").write_text("not ours")
    other = open_store(tmp_path, SegmentFormat(b"M" * 32, FORM.payload_bytes))
    assert len(other) == 0 and other.num_bytes == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "notes.txt"]
    other.close()


@pytest.mark.parametrize(("capacity", "num_segments"), [(1, 3), (2, 5), (4, 2)])
def test_less_room_than_before_is_kept_to_from_the_start(
    tmp_path: Path, capacity: int, num_segments: int
) -> None:
    store = open_store(tmp_path)
    for number in range(20):
        store.append(records_of([number]), [digest_of(number)])
    store.close()
    max_bytes = num_segments * FORM.sealed_bytes(capacity)
    assert size_on_disk(tmp_path) > max_bytes
    store = open_store(tmp_path, capacity=capacity, max_bytes=max_bytes)
    assert size_on_disk(tmp_path) <= max_bytes
    for number in range(100, 120):
        store.append(records_of([number]), [digest_of(number)])
        store.check_integrity()
        assert digest_of(number) in store
        assert size_on_disk(tmp_path) <= max_bytes
    store.close()


def test_more_room_than_before_is_filled(tmp_path: Path) -> None:
    store = open_store(tmp_path, capacity=1)
    for number in range(20):
        store.append(records_of([number]), [digest_of(number)])
    store.close()
    store = open_store(tmp_path, capacity=4)
    for number in range(100, 120):
        store.append(records_of([number]), [digest_of(number)])
        store.check_integrity()
    assert len(store) == (MAX_SEGMENTS - 1) * 4
    store.close()


def test_files_leave_the_disk_while_a_step_may_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the name of a segment nor its bytes are removed under the lock."""
    store = open_store(tmp_path)
    asked: list[str] = []

    def ask(what: str) -> None:
        assert not store._lock.locked()
        asked.append(what)

    unlink, close = Path.unlink, os.close

    def unlink_unlocked(path: Path, *, missing_ok: bool) -> None:
        ask("unlink")
        unlink(path, missing_ok=missing_ok)

    def close_unlocked(fd: int) -> None:
        ask("close")
        close(fd)

    monkeypatch.setattr(Path, "unlink", unlink_unlocked)
    monkeypatch.setattr(os, "close", close_unlocked)
    store.append(records_of([0]), [digest_of(0)])
    [run] = store.find([digest_of(0)], 1)
    for number in range(1, CAPACITY * MAX_SEGMENTS + 1):
        store.append(records_of([number]), [digest_of(number)])
    assert "unlink" in asked and run.segment.fd >= 0, "somebody reads it"
    asked.clear()
    store.unpin(run, 1)
    assert asked == ["close"]
    monkeypatch.undo()
    store.close()


def test_what_was_read_outlives_its_segment(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    number = 0
    while number < CAPACITY * MAX_SEGMENTS * 3:
        store.append(records_of([number]), [digest_of(number)])
        assert payload_in(store, 0) in (None, payload_of(0))
        number += 1
    store.check_integrity()
    store.close()


def test_a_removed_segment_is_read_to_the_end(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.append(records_of([0]), [digest_of(0)])
    [run] = store.find([digest_of(0)], 1)
    for number in range(1, CAPACITY * MAX_SEGMENTS + 1):
        store.append(records_of([number]), [digest_of(number)])
    assert digest_of(0) not in store and not run.segment.path.exists()
    memory = memoryview(mmap.mmap(-1, FORM.record_bytes))
    assert run.segment.read_at(memory, FORM.offset_of(run.slot)) == len(memory)
    assert FORM.unseal(memory, run.slot, None) == digest_of(0)
    store.unpin(run, 0)
    assert run.segment.fd == -1
    store.close()


@pytest.mark.parametrize("form", [FORM, ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_file_cut_anywhere_keeps_its_whole_records(
    tmp_path: Path, is_sealed: bool, form: SegmentFormat
) -> None:
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    store = open_store(origin, form)
    store.append(records_of(range(3)), [digest_of(n) for n in range(3)])
    (store.close if is_sealed else lambda: abandon(store))()
    whole = (origin / "0000000001.kv").read_bytes()
    edges = {FORM.offset_of(slot) + off for slot in range(4) for off in (-1, 0, 1, HEAD_BYTES)}
    cuts = range(len(whole)) if NIGHTLY else {*range(0, len(whole), 1009), *edges}
    copy.mkdir()
    for cut in sorted(each for each in cuts if each < len(whole)):
        (copy / "0000000001.kv").write_bytes(whole[:cut])
        store = open_store(copy, form)
        num_whole = sum(FORM.offset_of(slot + 1) <= cut for slot in range(3))
        assert len(store) == num_whole, cut
        assert all(payload_in(store, n) == payload_of(n) for n in range(num_whole)), cut
        abandon(store)


@pytest.mark.parametrize("form", [FORM, ENCRYPTED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_flipped_byte_is_never_read(tmp_path: Path, is_sealed: bool, form: SegmentFormat) -> None:
    origin, copy = tmp_path / "origin", tmp_path / "copy"
    store = open_store(origin, form)
    store.append(records_of(range(3)), [digest_of(n) for n in range(3)])
    (store.close if is_sealed else lambda: abandon(store))()
    whole = (origin / "0000000001.kv").read_bytes()
    heads = {FORM.offset_of(slot) + byte for slot in range(3) for byte in range(0, 100, 5)}
    flips = range(len(whole)) if NIGHTLY else {*range(0, len(whole), 709), *heads, *range(0, 64, 3)}
    copy.mkdir()
    for flip in sorted(flips):
        damaged = bytearray(whole)
        damaged[flip] ^= 0x10
        (copy / "0000000001.kv").write_bytes(damaged)
        store = open_store(copy, form)
        for number in range(3):
            start = FORM.offset_of(number)
            is_hit = start <= flip < start + HEAD_BYTES + FORM.payload_bytes
            found = payload_in(store, number)
            assert found in (None, payload_of(number)), flip
            if is_sealed and not is_hit and flip >= FORM.offset_of(0):
                assert found == payload_of(number), flip
        abandon(store)


class StoreMachine(RuleBasedStateMachine):
    """Checks that a block that is read is the one that was written, whatever the files suffer."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="tiers-"))
        self.form = FORM
        self.store = open_store(self.path)
        self.number = 0
        self.is_damaged = False

    @initialize(form=st.sampled_from([FORM, ENCRYPTED]))
    def choose(self, form: SegmentFormat) -> None:
        self.store.close()
        self.form, self.store = form, open_store(self.path, form)

    @rule(num=st.integers(1, 7))
    def append(self, num: int) -> None:
        numbers = range(self.number, self.number + num)
        self.store.append(records_of(numbers), [digest_of(n) for n in numbers])
        self.number += num
        for number in numbers[-CAPACITY:]:
            assert digest_of(number) in self.store, "the newest are there"

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.number - 1))
        was_there = digest_of(number) in self.store
        found = payload_in(self.store, number)
        assert found in (None, payload_of(number))
        assert self.is_damaged or (found is not None) == was_there

    @rule(is_killed=st.booleans())
    def reopen(self, is_killed: bool) -> None:
        there = {n for n in range(self.number) if digest_of(n) in self.store}
        (abandon if is_killed else SegmentStore.close)(self.store)
        self.store = open_store(self.path, self.form)
        again = {n for n in range(self.number) if digest_of(n) in self.store}
        assert self.is_damaged or again == there

    @rule(data=st.data(), is_cut=st.booleans())
    def damage(self, data: st.DataObject, is_cut: bool) -> None:
        abandon(self.store)
        files = sorted(self.path.glob("*.kv"))
        if files:
            path = data.draw(st.sampled_from(files))
            text = bytearray(path.read_bytes())
            at = data.draw(st.integers(0, max(0, len(text) - 1)))
            if is_cut:
                text = text[:at]
            elif text:
                text[at] ^= data.draw(st.integers(1, 255))
            path.write_bytes(text)
            self.is_damaged = True
        self.store = open_store(self.path, self.form)

    @invariant()
    def is_sound(self) -> None:
        self.store.check_integrity()
        assert len(list(self.path.glob("*.kv"))) < MAX_SEGMENTS
        assert self.store.num_bytes <= MAX_BYTES
        assert size_on_disk(self.path) <= MAX_BYTES

    def teardown(self) -> None:
        abandon(self.store)
        shutil.rmtree(self.path)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(60), stateful_step_count=20)
