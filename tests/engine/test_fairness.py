"""Virtual token counters against a model that forgets nothing, and the paper's bound."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine import fairness
from engine.fairness import INPUT_COST, LANE_WEIGHTS, OUTPUT_COST, FairShare, QueueBound
from engine.protocol import Lane
from tests.budget import examples

LANES = tuple(LANE_WEIGHTS)
TENANTS = ("", "a", "b", "c")
Who = tuple[Lane, str]


@dataclass
class Naive:
    """A simple implementation of the paper, one level: counters that are never forgotten, who
    waits, who did so last.
    """

    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TENANTS + LANES, 0.0))
    waiting: Counter[str] = field(default_factory=Counter)
    last: str | None = None

    def wait(self, who: str) -> None:
        if self.waiting[who] == 0:
            active = [self.counters[other] for other in +self.waiting]
            last = 0.0 if self.last is None else self.counters[self.last]
            self.counters[who] = max(self.counters[who], min(active, default=last))
        self.waiting[who] += 1

    def unwait(self, who: str) -> None:
        self.waiting[who] -= 1
        if self.waiting[who] == 0:
            self.last = who


class FairnessMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.share = FairShare()
        self.lanes = Naive()
        self.tenants = {lane: Naive() for lane in LANES}
        self.waiting: list[Who] = []
        self.served: list[Who] = []

    @rule(lane=st.sampled_from(LANES), tenant=st.sampled_from(TENANTS))
    def arrive(self, lane: Lane, tenant: str) -> None:
        self.share.enter(lane, tenant)
        self.wait(lane, tenant)

    @precondition(lambda self: self.waiting)
    @rule(beside=st.sets(st.sampled_from(LANES), max_size=2))
    def serve_the_next(self, beside: set[Lane]) -> None:
        who = self.share.first(beside=beside)
        others = [lane for lane in +self.lanes.waiting if lane not in beside]
        assert (who is None) == (not others), "somebody waits, and somebody is served"
        if who is None:
            return
        lane, tenant = who
        lowest = min(self.lanes.counters[other] for other in others)
        assert self.lanes.counters[lane] == lowest
        assert all(
            self.lanes.counters[other] > lowest
            for other in others
            if LANES.index(other) < LANES.index(lane)
        ), "of two with one counter the higher lane"
        mine = self.tenants[lane]
        assert mine.counters[tenant] == min(mine.counters[other] for other in +mine.waiting)
        self.unwait(who)
        self.served.append(who)

    @precondition(lambda self: self.served)
    @rule(data=st.data(), weight=st.sampled_from([0.25, 1.0, 8.0]), tokens=st.integers(1, 64))
    def charge(self, data: st.DataObject, weight: float, tokens: int) -> None:
        lane, tenant = data.draw(st.sampled_from(self.served))
        self.share.charge(lane, tenant, weight, tokens)
        self.lanes.counters[lane] += tokens / LANE_WEIGHTS[lane]
        self.tenants[lane].counters[tenant] += tokens / weight

    @precondition(lambda self: self.served)
    @rule(data=st.data(), again=st.booleans())
    def served_one_ends_or_waits_again(self, data: st.DataObject, again: bool) -> None:
        who = data.draw(st.sampled_from(self.served))
        self.served.remove(who)
        if again:
            self.wait(*who)
        else:
            self.share.leave(*who)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def waiting_one_gives_up(self, data: st.DataObject) -> None:
        who = data.draw(st.sampled_from(self.waiting))
        self.unwait(who)
        self.share.leave(*who)

    @invariant()
    def counters_are_those_of_the_model(self) -> None:
        for lane in LANES:
            assert self.share.lane_counter(lane) == self.lanes.counters[lane]
            assert self.share.is_waiting(lane) == (self.lanes.waiting[lane] > 0)
        for lane, tenant in {*self.waiting, *self.served}:
            expected = self.tenants[lane].counters[tenant]
            assert self.share.place(lane, tenant)[-1] == expected

    def wait(self, lane: Lane, tenant: str) -> None:
        self.share.wait(lane, tenant)
        self.lanes.wait(lane)
        self.tenants[lane].wait(tenant)
        self.waiting.append((lane, tenant))

    def unwait(self, who: Who) -> None:
        self.share.unwait(*who)
        self.lanes.unwait(who[0])
        self.tenants[who[0]].unwait(who[1])
        self.waiting.remove(who)


TestFairnessMachine = FairnessMachine.TestCase
TestFairnessMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None
)


# The paper's bound


@dataclass
class Request:
    who: Who
    input_tokens: int
    output_tokens: int


class Machine:
    """Continuous batching in a memory of `room` tokens: whoever is next starts when it fits, and
    everybody that runs generates a token a step."""

    def __init__(self, room: int, weights: dict[Who, float]) -> None:
        self.share, self.room, self.weights = FairShare(), room, weights
        self.queues: dict[Who, deque[Request]] = {who: deque() for who in weights}
        self.running: list[Request] = []
        self.service: Counter[Who] = Counter()

    def add(self, asked: Request) -> None:
        self.queues[asked.who].append(asked)
        self.share.enter(*asked.who)
        self.share.wait(*asked.who)

    def step(self) -> None:
        while (who := self.share.first()) is not None:
            asked = self.queues[who][0]
            held = sum(other.input_tokens + other.output_tokens for other in self.running)
            if held + asked.input_tokens + asked.output_tokens > self.room:
                break
            self.running.append(self.queues[who].popleft())
            self.share.unwait(*who)
            self.serve(who, INPUT_COST * asked.input_tokens)
        assert self.running or not any(self.queues.values()), "idle while somebody waits"
        for asked in list(self.running):
            self.serve(asked.who, OUTPUT_COST)
            asked.output_tokens -= 1
            asked.input_tokens += 1  # what it holds stays the same
            if asked.output_tokens == 0:
                self.running.remove(asked)
                self.share.leave(*asked.who)

    def serve(self, who: Who, tokens: int) -> None:
        self.service[who] += tokens
        self.share.charge(*who, self.weights[who], tokens)


@given(
    seed=st.integers(0, 2**32),
    room=st.integers(60, 200),
    longest=st.integers(1, 40),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 2.0, 4.0])] * 2),
)
@settings(max_examples=examples(60), deadline=None)
def test_two_that_always_wait_are_served_alike(
    seed: int, room: int, longest: int, weights: tuple[float, float]
) -> None:
    """In every window of time, whatever others do."""
    rng = random.Random(seed)
    always: list[Who] = [("batch", "a"), ("batch", "b")]
    visitor: Who = ("batch", "c")
    machine = Machine(room, dict(zip(always, weights, strict=True)) | {visitor: 1.0})

    def asked(who: Who) -> Request:
        # "a" asks briefly and is told much, "b" the other way round.
        inputs, outputs = (5, 20) if who == always[0] else (longest, 3)
        return Request(who, rng.randint(1, inputs), rng.randint(1, outputs))

    longest_input = max(5, longest)
    bound = 2 * max(INPUT_COST * longest_input, OUTPUT_COST * room) / min(weights)
    lead: list[float] = []
    for _ in range(300):
        for who in always:
            while len(machine.queues[who]) <= room // 2:  # more than a step can start
                machine.add(asked(who))
        if rng.random() < 0.1:
            for _ in range(rng.randint(1, 20)):
                machine.add(asked(visitor))
        machine.step()
        a, b = (machine.service[who] / machine.weights[who] for who in always)
        lead.append(a - b)
    assert max(lead) - min(lead) <= bound
    assert machine.service[always[0]] and machine.service[always[1]]


def test_lanes_that_always_wait_share_by_their_weights() -> None:
    weights: dict[Who, float] = {(lane, tenant): 1.0 for lane in LANES for tenant in ("a", "b")}
    machine = Machine(200, weights)
    rng = random.Random(1)
    for _ in range(6000):
        for who in weights:
            while len(machine.queues[who]) <= 100:
                machine.add(Request(who, rng.randint(1, 20), rng.randint(1, 20)))
        machine.step()
    bound = 2 * OUTPUT_COST * 200
    per_weight = {
        lane: sum(machine.service[lane, tenant] for tenant in ("a", "b")) / weight
        for lane, weight in LANE_WEIGHTS.items()
    }
    for one, other in combinations(LANES, 2):
        assert abs(per_weight[one] - per_weight[other]) <= bound
    assert per_weight["batch"] > 3 * bound, "for long enough to tell"
    for lane in LANES:
        assert abs(machine.service[lane, "a"] - machine.service[lane, "b"]) <= bound


# Coming back, and being forgotten


def served(share: FairShare, who: Who, tokens: float) -> None:
    """One request from its arrival to its end."""
    share.enter(*who)
    share.wait(*who)
    share.unwait(*who)
    share.charge(*who, 1.0, tokens)
    share.leave(*who)


def test_who_was_away_saved_nothing_up() -> None:
    share = FairShare()
    share.enter("batch", "busy")
    share.wait("batch", "busy")
    share.charge("batch", "busy", 1.0, 1000)
    share.enter("batch", "back")
    share.wait("batch", "back")
    assert share.place("batch", "back") == share.place("batch", "busy")


def test_with_nobody_waiting_the_last_one_that_did_sets_the_level() -> None:
    share = FairShare()
    share.enter("batch", "running")
    share.wait("batch", "running")
    share.unwait("batch", "running")
    share.charge("batch", "running", 1.0, 700)
    for lane, tenant in (("batch", "new"), ("interactive", "new")):
        share.enter(lane, tenant)  # type: ignore[arg-type]
        share.wait(lane, tenant)  # type: ignore[arg-type]
    assert share.place("batch", "new")[-1] == 700
    assert share.lane_counter("interactive") == share.lane_counter("batch") == 700
    assert share.first() == ("interactive", "new"), "of lanes with one counter the higher"


def test_tenants_without_requests_are_forgotten_once_the_level_has_passed_them() -> None:
    share = FairShare()
    share.enter("batch", "always")
    share.wait("batch", "always")
    for number in range(50):
        served(share, ("batch", f"t{number}"), 100)
    assert share.num_tenants == 51, "they are ahead of it, and that is not forgotten"
    share.charge("batch", "always", 1.0, 5000)
    served(share, ("batch", "another"), 1)
    assert share.num_tenants == 2


def test_more_idle_tenants_than_anybody_has_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_IDLE_TENANTS", 10)
    share = FairShare()
    share.enter("batch", "always")
    share.wait("batch", "always")
    for number in range(500):
        served(share, ("batch", f"t{number}"), 1 + number)
    assert share.num_tenants == 11
    kept = {f"t{number}" for number in range(490, 500)}
    assert set(share._tenants["batch"].accounts) == kept | {"always"}, "those far ahead are kept"


def test_heaps_do_not_grow_with_what_happened() -> None:
    share = FairShare()
    share.enter("batch", "always")
    share.wait("batch", "always")
    for _ in range(2000):
        served(share, ("batch", "often"), 1)
    counters = share._tenants["batch"]
    assert len(counters._waiting) + len(counters._idle) < 200


@given(
    most=st.integers(0, 40),
    said=st.lists(st.tuples(st.sampled_from(TENANTS), st.booleans()), max_size=120),
)
def test_a_bounded_queue_has_room_for_whoever_has_none_in_it(
    most: int, said: list[tuple[str, bool]]
) -> None:
    bound, queued = QueueBound(most), list[str]()
    for tenant, comes in said:
        if comes:
            left, own = most - len(queued), queued.count(tenant)
            assert bound.has_room(tenant) == (left > 0 and (not tenant or own < 3 * left))
            if own == 0:
                assert bound.has_room(tenant) == (left > 0), "refused for others' sake"
            if bound.has_room(tenant):
                bound.take(tenant)
                queued.append(tenant)
        elif tenant in queued:
            bound.give_back(tenant)
            queued.remove(tenant)
        bound.check_integrity(queued)


@pytest.mark.parametrize(("num_tenants", "each", "left"), [(1, 768, 256), (2, 439, 146)])
def test_tenants_that_flood_a_queue_share_it_and_leave_a_part(
    num_tenants: int, each: int, left: int
) -> None:
    bound, has = QueueBound(1024), Counter[str]()
    for number in range(5000):
        tenant = str(number % num_tenants)
        if bound.has_room(tenant):
            bound.take(tenant)
            has[tenant] += 1
    assert set(has.values()) == {each} and bound.most - bound.num_taken == left
