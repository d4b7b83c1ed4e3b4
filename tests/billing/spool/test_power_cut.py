"""A power cut loses nothing that was answered, or what was answered within five milliseconds, as
the policy has it, and never a customer's money.

The disk drops what was not synced, on virtual time (`power_cut`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from billing.errors import SpoolBroken, SpoolFull
from billing.events import Attempt, Quantities, UsageEvent
from billing.spool.directory import SpoolDirectory
from billing.spool.spool import NUM_TIMED, QUICK_SYNC_S, RETRY_INTERVAL_S, Spool
from billing.spool.sync_policy import MAX_UNSYNCED_S, SyncPolicy
from tests.billing.samples import an_attempt, an_event, quantities
from tests.billing.spool.power_cut import (
    BAD_BLOCK,
    NO_SPACE,
    NOTHING,
    STEP_S,
    Disk,
    InlineExecutor,
    Survival,
    VirtualLoop,
    VirtualSync,
)
from tests.budget import examples

SEGMENT_BYTES = 6000
POLICIES: tuple[SyncPolicy, ...] = ("group", "before_answer")
SHARES = st.floats(0, 1)
SPEEDS = st.sampled_from([STEP_S, QUICK_SYNC_S, 0.02, 0.2])
GAPS = st.lists(st.integers(0, 25), min_size=1, max_size=12)
SURVIVALS = st.builds(Survival, SHARES, SHARES, st.just(0.0) | SHARES)


class Host:
    """A machine with a disk, on which a spool runs at a time."""

    def __init__(self, policy: SyncPolicy) -> None:
        self.policy = policy
        self.root = Path(tempfile.mkdtemp(prefix="power-"))
        self.folder = self.root / "worker-0"
        self.folder.mkdir()
        self.loop, self.disk = VirtualLoop(), Disk(self.folder)
        self.spool: Spool
        self.running: list[Any] = []
        self._patches = ExitStack()
        self._patches.enter_context(self.disk.listening())
        self._patches.enter_context(
            patch("billing.spool.spool.BackgroundSync", lambda _: VirtualSync(self.disk))
        )

    def start(self) -> None:
        async def open_spool() -> Spool:
            return Spool(
                SpoolDirectory(self.folder, lock_wait_s=0),
                InlineExecutor(),
                policy=self.policy,
                segment_bytes=SEGMENT_BYTES,
                max_bytes=2**30,
                clock=self.loop.time,
            )

        self.spool = self.loop.run_until_complete(open_spool())
        self.spool._sync_times_s.extend([STEP_S] * NUM_TIMED)  # its disk is known to be quick

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Begin a coroutine, which goes on as time passes."""
        task = self.loop.create_task(work)
        self.running.append(task)
        self.loop.settle()
        return task

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = self.spawn(work)
        while not task.done():
            self.loop.advance(STEP_S)
        return task.result()

    def die(self) -> None:
        """Kill the process: nothing of it is done any more."""
        for timer in (self.spool._write_timer, self.spool._sync_timer):
            if timer is not None:
                timer.cancel()
        self.spool._background.close()
        for task in (self.spool._flusher, *self.running):
            task.cancel()
        self._reap()
        self.spool._files.release()

    def _reap(self) -> None:
        self.loop.settle()
        for task in self.running:
            if not task.cancelled():
                task.exception()
        self.running = []

    def ship(self, limit: int = 4) -> list[UsageEvent]:
        batch = self.run(self.spool.read_closed(limit))
        self.run(self.spool.commit(batch))
        return list(batch.events)

    def close(self) -> None:
        for task in self.running:
            task.cancel()
        self._reap()
        self._patches.close()
        self.loop.close()
        shutil.rmtree(self.root)


class PowerCutMachine(RuleBasedStateMachine):
    attempts = Bundle("attempts")

    def __init__(self) -> None:
        super().__init__()
        self.host: Host | None = None
        self.asked: dict[str, Attempt] = {}
        self.closed: dict[str, UsageEvent] = {}
        """Asked to be closed so."""
        self.checkpoints: dict[str, list[Quantities]] = {}
        self.answered: dict[str, float] = {}
        """When each went out that is in nobody's books yet."""
        self.free: set[str] = set()
        """Attempts of which somebody was told that they cost nothing."""
        self.postgres: dict[str, UsageEvent] = {}
        self.ended: set[str] = set()

    policy: SyncPolicy

    @initialize()
    def begin(self) -> None:
        self.host = Host(self.policy)
        self.spool_starts()
        self.was_slow = False

    def spool_starts(self) -> None:
        assert self.host is not None
        self.host.start()
        found = {event.id for event in self.host.spool.recovered}
        assert found <= self.asked.keys()
        assert not self.host.spool._open, "whatever was reserved for them is let go"
        self.ended |= self.asked.keys()

    @rule(sync_s=SPEEDS)
    def change_the_disk(self, sync_s: float) -> None:
        assert self.host is not None
        self.host.disk.sync_s = sync_s
        self.was_slow |= sync_s > QUICK_SYNC_S

    @rule(steps=st.integers(1, 30) | st.integers(30, 120))
    def pass_time(self, steps: int) -> None:
        assert self.host is not None
        self.host.loop.advance(steps * STEP_S)

    def make(self) -> Attempt:
        attempt = an_attempt()
        self.asked[attempt.id] = attempt
        self.checkpoints[attempt.id] = [Quantities()]
        return attempt

    @rule(target=attempts)
    def open_attempt(self) -> Attempt:
        assert self.host is not None
        attempt = self.make()
        self.host.spool.attempt_opened(attempt)
        return attempt

    @rule(attempt=attempts, used=quantities)
    def checkpoint(self, attempt: Attempt, used: Quantities) -> None:
        assert self.host is not None
        if attempt.id in self.host.spool._open:
            self.checkpoints[attempt.id].append(used)
            self.host.spool.checkpoint(attempt.id, used, False)

    @rule(attempt=consumes(attempts), used=quantities)
    def answer(self, attempt: Attempt, used: Quantities) -> None:
        assert self.host is not None
        if attempt.id in self.host.spool._open:
            self.host.spawn(self.close(self.host, an_event(attempt, used)))

    async def close(self, host: Host, event: UsageEvent) -> None:
        self.closed[event.id] = event
        await host.spool.close(event)
        self.answered[event.id] = host.loop.time()

    @rule(count=st.integers(2, 8), used=quantities)
    def answer_several_at_once(self, count: int, used: Quantities) -> None:
        assert self.host is not None
        for _ in range(count):
            attempt = self.make()
            self.host.spool.attempt_opened(attempt)
            self.host.spawn(self.close(self.host, an_event(attempt, used)))

    @rule(used=quantities, steps=st.integers(0, 12), fails=st.booleans())
    def call_a_tool(self, used: Quantities, steps: int, fails: bool) -> None:
        """Billed from its beginning on, unless the caller hears that it failed."""
        assert self.host is not None
        attempt, host = self.make(), self.host
        self.checkpoints[attempt.id].append(used)

        async def call() -> None:
            kept = await host.spool.attempt_begun(attempt, used)
            begun_at = host.loop.time()
            for _ in range(steps):
                await an_iteration(host)
            if fails:
                await host.spool.void(attempt.id)
                self.free.add(attempt.id)
                return
            await kept
            self.closed[attempt.id] = an_event(attempt, used)
            host.spool.close_buffered(self.closed[attempt.id])
            if used != Quantities():
                self.answered[attempt.id] = begun_at

        host.spawn(call())

    @rule(attempt=consumes(attempts))
    def void(self, attempt: Attempt) -> None:
        assert self.host is not None
        host = self.host

        async def void() -> None:
            await host.spool.void(attempt.id)
            self.free.add(attempt.id)

        if attempt.id in host.spool._open:
            host.spawn(void())

    @rule(limit=st.integers(1, 5), is_refused=st.booleans())
    def ship(self, limit: int, is_refused: bool) -> None:
        assert self.host is not None
        if is_refused:
            self.host.run(self.host.spool.read_closed(limit))
        else:
            self.book(self.host.ship(limit))

    def book(self, events: list[UsageEvent]) -> None:
        for event in events:
            assert self.postgres.setdefault(event.id, event) == event
            self.answered.pop(event.id, None)

    @rule()
    def kill(self) -> None:
        """The process alone: whoever was answered is in the books."""
        assert self.host is not None
        self.host.die()
        self.spool_starts()
        self.ship_everything()
        assert self.lost() == []

    @rule(gaps=GAPS, sync_s=SPEEDS, used=quantities, survival=st.just(NOTHING) | SURVIVALS)
    def answer_and_lose_power(
        self, gaps: list[int], sync_s: float, used: Quantities, survival: Survival
    ) -> None:
        """`gaps`: steps after each answer."""
        self.change_the_disk(sync_s)
        for gap in gaps:
            self.answer_several_at_once(1, used)
            self.pass_time(gap)
        self.cut_power(survival)

    @rule(survival=st.just(NOTHING) | SURVIVALS)
    def cut_power(self, survival: Survival) -> None:
        assert self.host is not None
        cut_at = self.host.loop.time()
        self.host.die()
        self.host.disk.cut_power(survival)
        self.spool_starts()
        self.ship_everything()
        lost = self.lost()
        if self.host.policy == "before_answer":
            assert lost == []
        elif lost:
            assert max(lost) - min(lost) < MAX_UNSYNCED_S
            assert self.was_slow or cut_at - min(lost) <= MAX_UNSYNCED_S
        self.was_slow = self.host.disk.sync_s > QUICK_SYNC_S

    def ship_everything(self) -> None:
        assert self.host is not None
        while self.host.spool.backlog:
            self.book(self.host.ship())

    def lost(self) -> list[float]:
        """Return when that was answered which is not in the books, and forget it."""
        lost = [
            at
            for id_, at in self.answered.items()
            if self.postgres.get(id_) is None or not self.is_whole(id_)
        ]
        self.answered.clear()
        return lost

    def is_whole(self, id_: str) -> bool:
        """Tell whether an answer is billed in full: a tool call is so by its checkpoint, too."""
        return self.postgres[id_].quantities == self.closed[id_].quantities

    @invariant()
    def nobody_is_billed_what_was_not_asked(self) -> None:
        for id_, event in self.postgres.items():
            assert event.attempt == self.asked[id_]
            if event.finish == "recovered":
                assert event.quantities in self.checkpoints[id_]
            else:
                assert event == self.closed[id_]
            assert id_ not in self.free or event.quantities == Quantities()

    def teardown(self) -> None:
        if self.host is not None:
            self.host.run(self.host.spool.shutdown())
            self.spool_starts()
            self.ship_everything()
            assert self.lost() == []
            self.nobody_is_billed_what_was_not_asked()
            self.host.run(self.host.spool.shutdown())
            self.host.close()


class Group(PowerCutMachine):
    policy = "group"


class BeforeAnswer(PowerCutMachine):
    policy = "before_answer"


BUDGET = settings(max_examples=examples(80), stateful_step_count=20, deadline=None)
Group.TestCase.settings = BeforeAnswer.TestCase.settings = BUDGET
TestGroup = pytest.mark.slow(Group.TestCase)
TestBeforeAnswer = pytest.mark.slow(BeforeAnswer.TestCase)


def test_no_answer_goes_out_beside_one_that_waits_for_a_second_sync() -> None:
    """It was written while the first one ran, which does not cover it."""
    machine = Group()
    machine.begin()
    machine.answer_and_lose_power(
        gaps=[4, 15, 25], sync_s=0.02, used=Quantities(), survival=Survival(0.0, 0.0, 0.0)
    )
    machine.teardown()


async def an_iteration(host: Host) -> None:
    """Let one step of virtual time pass."""
    done = host.loop.create_future()
    timer = host.loop.call_later(STEP_S, done.set_result, None)
    try:
        await done
    finally:
        timer.cancel()


@contextmanager
def hosting(policy: SyncPolicy) -> Iterator[Host]:
    host = Host(policy)
    host.start()
    try:
        yield host
    finally:
        host.close()


def answer(host: Host) -> UsageEvent:
    event = an_event()
    host.spool.attempt_opened(event.attempt)
    task = host.spawn(host.spool.close(event))
    assert task.done() and task.result() is None
    return event


def after_restart(host: Host) -> dict[str, UsageEvent]:
    host.start()
    found: dict[str, UsageEvent] = {}
    while host.spool.backlog:
        found |= {event.id: event for event in host.ship()}
    return found


def test_under_group_answers_are_out_before_their_sync_which_follows_in_five_milliseconds() -> None:
    with hosting("group") as host:
        host.loop.advance(0.02)
        syncs = host.disk.num_syncs
        early = answer(host)
        host.loop.advance(MAX_UNSYNCED_S)
        assert host.disk.num_syncs == syncs + 1
        assert host.spool.unsynced_s == 0
        late = answer(host)
        host.die()
        host.disk.cut_power(NOTHING)
        found = after_restart(host)
        assert early.id in found and late.id not in found
        host.die()


def test_under_group_a_disk_that_hangs_costs_a_power_cut_no_more() -> None:
    """All but those who come within five milliseconds of the first wait for the disk."""
    with hosting("group") as host:
        host.disk.sync_s = 10.0
        for _ in range(2 * round(MAX_UNSYNCED_S / STEP_S)):
            event = an_event()
            host.spool.attempt_opened(event.attempt)
            host.spawn(host.spool.close(event))
            host.loop.advance(STEP_S)
        answered = [task.done() for task in host.running]
        assert answered == [True] * 10 + [False] * 10
        assert host.spool.unsynced_s == pytest.approx(2 * MAX_UNSYNCED_S)
        waiting = host.running[10:]
        host.disk.sync_s = STEP_S
        host.loop.advance(10.0 + 2 * STEP_S)
        assert all(task.done() for task in waiting)
        host.die()


@pytest.mark.parametrize("failure", [BAD_BLOCK, NO_SPACE])
def test_under_group_a_failed_sync_loses_no_answer_that_is_out(failure: int) -> None:
    """They are written and synced once more: the kernel holds for written what failed. No request
    is taken meanwhile, nor ever again by a worker whose disk failed."""
    with hosting("group") as host:
        running = an_attempt()
        host.spool.attempt_opened(running)
        host.disk.failures = [failure]
        event = answer(host)
        host.loop.advance(2 * MAX_UNSYNCED_S)
        assert not host.spool.healthy
        with pytest.raises((SpoolFull, SpoolBroken)):
            host.spool.attempt_opened(an_attempt())
        with pytest.raises(SpoolBroken) if failure == BAD_BLOCK else nullcontext():
            host.run(host.spool.close(an_event(running)))
        assert host.spool.healthy is (failure == NO_SPACE)
        assert host.spool.broken.is_set() is (failure == BAD_BLOCK)
        host.die()
        host.disk.cut_power(NOTHING)
        assert event.id in after_restart(host)
        host.die()


def test_under_group_what_cannot_be_synced_is_in_the_file_for_the_next_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with hosting("group") as host:
        host.disk.failures = [BAD_BLOCK] * 3
        event = answer(host)
        host.loop.advance(2 * MAX_UNSYNCED_S)
        assert "may not survive a power cut" in caplog.text
        host.die()
        host.disk.failures = []
        assert after_restart(host).keys() == {event.id}
        host.die()


def test_on_a_full_disk_an_answer_that_is_out_survives_a_kill_before_there_is_room() -> None:
    with hosting("group") as host:
        host.disk.failures = [NO_SPACE] * 100
        event = answer(host)
        host.loop.advance(MAX_UNSYNCED_S)
        withheld = an_event()
        waiting = host.spawn(host.spool.close(withheld))
        host.loop.advance(2 * RETRY_INTERVAL_S)
        with pytest.raises(SpoolFull):
            waiting.result()
        host.die()
        host.disk.failures = []
        assert after_restart(host).keys() == {event.id}
        host.die()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_of_one_answer_is_one_write_and_a_share_of_a_sync(policy: SyncPolicy) -> None:
    """The OPEN of one that takes long is written by itself, and never synced so."""
    with hosting(policy) as host:
        host.loop.advance(0.1)
        before = host.spool.counts
        event = an_event()
        host.spool.attempt_opened(event.attempt)
        host.loop.advance(0.03)
        host.run(host.spool.close(event))
        host.loop.advance(0.1)
        assert host.spool.counts.writes == before.writes + 1
        assert host.spool.counts.syncs == before.syncs + 1
        slow = an_event()
        host.spool.attempt_opened(slow.attempt)
        host.loop.advance(0.5)
        assert host.spool.counts.writes == before.writes + 2
        assert host.spool.counts.syncs == before.syncs + 1
        host.run(host.spool.close(slow))
        host.loop.advance(0.1)
        assert host.spool.counts.writes == before.writes + 3
        assert host.spool.counts.syncs == before.syncs + 2
        host.die()
