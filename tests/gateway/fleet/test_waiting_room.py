"""Requests wait for an upstream's slots: never with one free, never more served than there are,
and whatever comes and goes leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane
from gateway.fleet.errors import NoSlot
from gateway.fleet.waiting_room import QueueTicket, WaitingRoom
from gateway.generation_events import MeteredUsage
from gateway.lanes import Priority
from tests.budget import examples

LANES = tuple(LANE_WEIGHTS)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def joined(room: WaitingRoom, lane: Lane, tenant: str = "a", **changes: Any) -> QueueTicket:
    return room.join(Priority(lane=lane, tenant=tenant, **changes), 10)


def used(output: int) -> MeteredUsage:
    return MeteredUsage(uncached_input=10, output=output)


class RoomMachine(RuleBasedStateMachine):
    @initialize(max_concurrency=st.integers(1, 5))
    def open(self, max_concurrency: int) -> None:
        self.clock = Clock()
        self.room = WaitingRoom(max_concurrency, clock=self.clock)
        self.here: list[QueueTicket] = []

    @rule(
        lane=st.sampled_from(LANES),
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from([0.25, 1.0, 2.0]),
        tokens=st.integers(0, 100),
    )
    def come(self, lane: Lane, tenant: str, weight: float, tokens: int) -> None:
        priority = Priority(lane=lane, tenant=tenant, weight=weight)
        predicted, is_free = self.room.predicted_ttft_s(priority), self.room.backlog == 0.0
        ticket = self.room.join(priority, tokens)
        assert ticket.served.is_set() == is_free, "at once, and only then"
        assert predicted is None or predicted >= 0.0
        self.here.append(ticket)

    @precondition(lambda self: self.here)
    @rule(data=st.data(), output=st.integers(0, 100), took_s=st.floats(0, 10))
    def leave(self, data: st.DataObject, output: int, took_s: float) -> None:
        """One that is served, or waits no longer."""
        self.clock.now += took_s
        ticket = self.here.pop(data.draw(st.integers(0, len(self.here) - 1)))
        if ticket.served.is_set():
            self.room.began(ticket)
            self.room.used(ticket, used(output))
        self.room.leave(ticket)

    @invariant()
    def is_whole(self) -> None:
        if not hasattr(self, "room"):
            return
        self.room.check_integrity()
        served = [ticket for ticket in self.here if ticket.served.is_set()]
        assert len(served) == min(len(self.here), self.room.max_concurrency)
        for lane in LANES:
            of_lane = [ticket for ticket in self.here if ticket.priority.lane == lane]
            assert self.room.num_served[lane] == sum(ticket in served for ticket in of_lane)
            assert self.room.num_waiting[lane] == sum(ticket not in served for ticket in of_lane)
            for tenant in "abc":
                mine = [
                    ticket.served.is_set() for ticket in of_lane if ticket.priority.tenant == tenant
                ]
                assert mine == sorted(mine, reverse=True), "of one tenant in the order they came"

    def teardown(self) -> None:
        if not hasattr(self, "room"):
            return
        for ticket in self.here[::-1]:
            self.room.leave(ticket)
        self.room.check_integrity()
        assert self.room.backlog == 0.0
        accounts = [*self.room._share._lanes.accounts.values()]
        assert all(account.num_open == 1 for account in accounts), "but for the lane itself"
        for tenants in self.room._share._tenants.values():
            assert all(account.num_open == 0 for account in tenants.accounts.values())


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)


def serve_next(
    room: WaitingRoom, served: QueueTicket, waiting: list[QueueTicket], output: int = 0
) -> QueueTicket:
    """Let `served` leave, and return the one that is served next."""
    room.used(served, used(output))
    room.leave(served)
    (after,) = [ticket for ticket in waiting if ticket.served.is_set()]
    waiting.remove(after)
    return after


def test_who_comes_back_has_saved_nothing_up() -> None:
    room = WaitingRoom(1)
    last = joined(room, "interactive", "busy")
    for _ in range(50):
        waiting = [joined(room, "interactive", "busy")]
        last = serve_next(room, last, waiting, output=100)
    waiting = [joined(room, "interactive", tenant) for tenant in ("busy", "idle") for _ in range(5)]
    order = []
    for _ in range(6):
        last = serve_next(room, last, waiting, output=100)
        order.append(last.priority.tenant)
    assert 2 <= order.count("idle") <= 4, order


def test_output_is_charged_as_it_comes() -> None:
    """The same number of requests, one tenant's a hundred times as long: it is served less."""
    room = WaitingRoom(1)
    last = joined(room, "batch", "long")
    waiting = [joined(room, "batch", tenant) for tenant in ("long", "short") for _ in range(20)]
    order = []
    for _ in range(20):
        last = serve_next(room, last, waiting, output=500 if last.priority.tenant == "long" else 5)
        order.append(last.priority.tenant)
    assert order.count("short") >= 18


def test_a_tenant_that_floods_a_lane_leaves_room_in_it() -> None:
    room = WaitingRoom(1, max_waiting=100)
    joined(room, "batch", "busy")
    with pytest.raises(NoSlot):
        for _ in range(100):
            joined(room, "batch", "busy")
    assert room.num_waiting["batch"] == 75
    for _ in range(10):
        joined(room, "batch", "other")
    with pytest.raises(NoSlot):
        joined(room, "batch", "busy")
    joined(room, "interactive", "busy")
    room.check_integrity()


def test_a_full_lane_takes_nobody_and_others_do() -> None:
    clock = Clock()
    room = WaitingRoom(1, max_waiting=3, clock=clock)
    first = joined(room, "interactive")
    clock.now = 7.0
    room.leave(first)
    for _ in range(4):
        joined(room, "batch")
    with pytest.raises(NoSlot) as refused:
        joined(room, "batch", "b")
    assert refused.value.retry_after_s == pytest.approx(7.0), "as long as a slot is taken, lately"
    joined(room, "agentic")
    room.check_integrity()


def test_the_wait_is_predicted_from_what_waits_and_its_weights() -> None:
    clock = Clock()
    room = WaitingRoom(2, clock=clock)
    priority = Priority(lane="interactive", tenant="a")
    assert room.predicted_ttft_s(priority) == 0.0
    first = joined(room, "interactive")
    clock.now = 4.0
    room.leave(first)  # a slot is taken for 4 s
    batch = [joined(room, "batch", "b") for _ in range(2)]
    assert room.predicted_ttft_s(priority) == pytest.approx(2.0), "the next of two slots"
    batch += [joined(room, "batch", "b") for _ in range(64)]
    assert room.predicted_ttft_s(priority) == pytest.approx((1 + 1 / 16) * 2.0)
    behind = Priority(lane="batch", tenant="b")
    assert room.predicted_ttft_s(behind) == pytest.approx(65 * 2.0)
    other = Priority(lane="batch", tenant="c")
    assert room.predicted_ttft_s(other) == pytest.approx(2 * 2.0), "one of each in turn"
    heavy = Priority(lane="batch", tenant="c", weight=2.0)
    assert room.predicted_ttft_s(heavy) == pytest.approx(1.5 * 2.0)
    for ticket in batch:
        room.leave(ticket)
    assert room.predicted_ttft_s(priority) == 0.0


def test_while_nothing_is_known_nothing_is_predicted() -> None:
    room = WaitingRoom(1)
    joined(room, "interactive")
    assert room.predicted_ttft_s(Priority()) is None and room.backlog == 1.0
