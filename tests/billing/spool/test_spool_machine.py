"""The spool against a model: whatever crashes at any byte, each closed event ships exactly once
and each attempt left open is billed once, at its last checkpoint that reached the disk.

The disk is real. Postgres is a dict that refuses a second event of other content under one id.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)
from msgspec import UNSET, UnsetType

from billing.events import Attempt, DisputedUsage, Quantities, UsageEvent
from billing.spool.directory import Batch
from billing.spool.format import Checkpoint, CloseRecord, OpenRecord, Record, VoidRecord, frame
from billing.spool.spool import Spool
from billing.spool.sync_policy import SyncPolicy
from tests.billing.samples import NOON, an_attempt, an_event, quantities
from tests.budget import examples

T = TypeVar("T")
SEGMENT_BYTES = 3000
COUNTS = st.integers(0, 2**63 - 1)


class Entry(NamedTuple):
    """One thing that was asked of the spool, and the bytes it takes."""

    verb: str
    attempt: Attempt
    detail: Checkpoint | UsageEvent | None
    size: int


class SpoolMachine(RuleBasedStateMachine):
    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(prefix="spool-"))
        self.postgres: dict[str, UsageEvent] = {}
        self.committed: set[str] = set()
        self.history: list[Entry] = []
        self.on_disk = 0  # how many of `history` are known to be
        self.policy: SyncPolicy = "before_answer"

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize(policy=st.sampled_from(["group", "before_answer"]))
    def first_start(self, policy: SyncPolicy) -> None:
        self.policy = policy
        self.start()

    def note_kept(self) -> None:
        """Under `group` what was closed may not be synced yet: `kept` finds out by its bytes."""
        if self.policy == "before_answer":
            self.on_disk = len(self.history)

    def start(self) -> None:
        path = self.root / "worker-0"
        sizes = {"segment_bytes": SEGMENT_BYTES, "lock_wait_s": 0}
        self.spool = self.run(Spool.open(path, policy=self.policy, **sizes))
        self.note_recovery()

    def note(self, attempt: Attempt, record: Record, event: UsageEvent | None = None) -> None:
        verb, detail = type(record).__name__, record if isinstance(record, Checkpoint) else event
        self.history.append(Entry(verb, attempt, detail, len(frame(record))))

    def kept(self, held: int) -> int:
        """How many entries are on disk, when the newest ones, `held` bytes, are not."""
        position = len(self.history)
        while position > self.on_disk and held >= self.history[position - 1].size:
            position -= 1
            held -= self.history[position].size
        return position

    def note_recovery(self) -> None:
        """Note what recovery must have billed, from our own account of what was on disk."""
        open_attempts: dict[str, UsageEvent] = {}
        for verb, attempt, detail, _ in self.history:
            if verb == "OpenRecord":
                bill = an_event(attempt, Quantities(), finish="recovered")
                open_attempts[attempt.id] = msgspec.structs.replace(
                    bill, occurred_at=attempt.admitted_at
                )
            elif verb == "Checkpoint" and attempt.id in open_attempts:
                assert isinstance(detail, Checkpoint)
                open_attempts[attempt.id] = msgspec.structs.replace(
                    open_attempts[attempt.id],
                    quantities=detail.quantities,
                    estimated=detail.estimated,
                    disputed=detail.disputed,
                )
            elif verb in ("CloseRecord", "VoidRecord", "Recovered"):
                open_attempts.pop(attempt.id, None)
        found = {event.id: event for event in self.spool.recovered}
        assert found.keys() == open_attempts.keys()
        for event_id, event in found.items():
            expected = open_attempts[event_id]
            assert event.quantities == expected.quantities
            assert (event.attempt, event.finish) == (expected.attempt, "recovered")
            assert (event.estimated, event.disputed) == (expected.estimated, expected.disputed)
            self.history.append(Entry("Recovered", event.attempt, event, 0))
        self.on_disk = len(self.history)

    @rule(target=attempts, count=st.integers(1, 3))
    def open_attempt(self, count: int) -> Any:
        made = [an_attempt() for _ in range(count)]
        for attempt in made:
            self.spool.attempt_opened(attempt)
            self.note(attempt, OpenRecord(attempt))
        return multiple(*made)

    def is_open(self, attempt: Attempt) -> bool:
        return attempt.id in self.spool._open

    @rule(
        attempt=attempts,
        used=quantities,
        disputed=st.just(UNSET) | st.builds(DisputedUsage, st.just("up/0"), COUNTS, COUNTS),
    )
    def checkpoint(
        self, attempt: Attempt, used: Quantities, disputed: DisputedUsage | UnsetType
    ) -> None:
        if self.is_open(attempt):
            self.spool.checkpoint(attempt.id, used, True, disputed)
            self.note(attempt, Checkpoint(attempt.id, used, True, NOON, disputed))

    @rule(target=attempts, used=quantities, waits=st.booleans())
    def begin(self, used: Quantities, waits: bool) -> Attempt:
        """In the file when that returns, and on disk for who waits."""
        attempt = an_attempt()
        on_disk = self.run(self.spool.attempt_begun(attempt, used))
        self.note(attempt, OpenRecord(attempt))
        self.note(attempt, Checkpoint(attempt.id, used, False, NOON))
        if waits:
            self.loop.run_until_complete(on_disk)
            self.note_kept()
        return attempt

    @rule(attempt=consumes(attempts), used=quantities)
    def close(self, attempt: Attempt, used: Quantities) -> None:
        if self.is_open(attempt):
            event = an_event(attempt, used)
            self.run(self.spool.close(event))
            self.note(attempt, CloseRecord(event), event)
            self.note_kept()

    @rule(count=st.integers(2, 6))
    def several_at_once(self, count: int) -> None:
        """Opened and closed in one breath: they share a sync."""
        events = [an_event() for _ in range(count)]
        for event in events:
            self.spool.attempt_opened(event.attempt)
            self.note(event.attempt, OpenRecord(event.attempt))
        for event in events:
            self.note(event.attempt, CloseRecord(event), event)

        async def close_all() -> None:
            await asyncio.gather(*map(self.spool.close, events))

        self.run(close_all())
        self.note_kept()

    @rule(attempt=consumes(attempts), used=quantities)
    def begin_close(self, attempt: Attempt, used: Quantities) -> None:
        """The record is queued and nobody has been told anything."""
        if self.is_open(attempt):
            event = an_event(attempt, used)
            self.spool.close_buffered(event)
            self.note(attempt, CloseRecord(event), event)

    @rule(attempt=consumes(attempts))
    def void(self, attempt: Attempt) -> None:
        if self.is_open(attempt):
            waits = self.spool._open[attempt.id].has_usage
            self.run(self.spool.void(attempt.id))
            self.note(attempt, VoidRecord(attempt.id))
            if waits:
                self.on_disk = len(self.history)

    @rule(survival=st.floats(0, 1), is_power_cut=st.booleans())
    def crash(self, survival: float, is_power_cut: bool) -> None:
        """In the middle of a write, at any byte; then a new start."""
        self.crash_at(survival, is_power_cut)
        self.start()

    @rule(survival=st.floats(0, 1), is_power_cut=st.booleans())
    def crash_and_be_adopted(self, survival: float, is_power_cut: bool) -> None:
        self.crash_at(survival, is_power_cut)
        self.start()
        self.ship_everything()
        path = self.spool.directory
        self.run(self.spool.remove())
        assert not path.exists()
        self.start()

    def crash_at(self, survival: float, is_power_cut: bool) -> None:
        """A part of `survival` made it to the disk: of what was buffered, as a kill -9 amid a write
        leaves it, or of all that was not synced."""
        self.spool._flusher.cancel()
        self.run(asyncio.wait([self.spool._flusher]))
        for timer in (self.spool._write_timer, self.spool._sync_timer):
            if timer is not None:
                timer.cancel()
        self.spool._background.close()
        self.spool._threads.shutdown()
        held, unsynced = bytes(self.spool._buffer), bytes(self.spool._files.unsynced)
        segment = self.spool._files._segment_path(self.spool._files.durable_end.segment)
        self.spool._files.release()
        del self.spool
        with segment.open("r+b") as file:
            if is_power_cut:
                file.truncate(segment.stat().st_size - len(unsynced))
                held = unsynced + held
            self.on_disk = self.kept(len(held))
            survived = int(len(held) * survival)
            file.seek(0, os.SEEK_END)
            file.write(held[:survived])
        while self.on_disk < len(self.history):
            survived -= self.history[self.on_disk].size
            if survived < 0:
                break
            self.on_disk += 1
        del self.history[self.on_disk :]

    @rule()
    def restart(self) -> None:
        self.run(self.spool.shutdown())
        self.start()

    @rule(limit=st.integers(1, 5), outcome=st.sampled_from(["done", "refused", "lost answer"]))
    def ship(self, limit: int, outcome: str) -> None:
        batch = self.run(self.spool.read_closed(limit))
        assert len(batch.events) <= limit and not batch.lost
        if outcome != "refused":
            self.ingest(batch.events)
        if outcome == "done":
            self.commit(batch)

    def ingest(self, events: list[UsageEvent]) -> None:
        for event in events:
            assert self.postgres.setdefault(event.id, event) == event

    def commit(self, batch: Batch) -> None:
        self.run(self.spool.commit(batch))
        self.committed |= {event.id for event in batch.events}

    def ship_everything(self) -> None:
        while self.spool.backlog:
            batch = self.run(self.spool.read_closed(4))
            assert batch.events
            self.ingest(batch.events)
            self.commit(batch)
        assert not self.run(self.spool.read_closed(1)).events

    @invariant()
    def the_backlog_is_known(self) -> None:
        if not hasattr(self, "spool"):
            return
        billed = {e.attempt.id for e in self.history if e.verb in ("CloseRecord", "Recovered")}
        assert self.spool.backlog == len(billed - self.committed)

    def teardown(self) -> None:
        if hasattr(self, "spool"):
            self.run(self.spool.shutdown())
            self.on_disk = len(self.history)
            self.start()
            self.ship_everything()
            closed = {e.attempt.id: e.detail for e in self.history if e.verb == "CloseRecord"}
            closed |= {e.attempt.id: e.detail for e in self.history if e.verb == "Recovered"}
            assert self.postgres == closed
            assert not (self.root / "quarantine").exists()
            # What has shipped takes no room: only the segment of the cursor and later ones stay.
            batch = self.run(self.spool.read_closed(1))
            self.run(self.spool.commit(batch))
            assert len(list(self.spool.directory.glob("*.log"))) == 1
            self.run(self.spool.shutdown())
        self.loop.close()
        shutil.rmtree(self.root)


SpoolMachine.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=30, deadline=None
)
TestSpool = pytest.mark.slow(SpoolMachine.TestCase)
