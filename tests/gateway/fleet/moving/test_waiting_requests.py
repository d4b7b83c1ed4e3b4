"""Requests that wait are moved once each, in turn and few at a time, whoever waits where."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.fairness import LANE_RANKS
from engine.fake.engine import FakeCore
from engine.protocol import Lane, LaneStatus, StepCosts
from gateway.fleet.engine_view import EngineView
from gateway.fleet.moving.waiting_requests import (
    LEAST_GAIN_S,
    LOOK_S,
    MOST_ASKED,
    MOST_SAVED,
    MOVES_PER_S,
    UNDERCUT,
    WaitingRequest,
    WaitingRequests,
    undercuts,
)
from gateway.fleet.predicted_time import Prompt
from gateway.fleet.sent_work import SentWork
from tests.budget import examples

LANES = st.sampled_from(sorted(LANE_RANKS))
IDLE = msgspec.structs.replace(FakeCore().status(), costs=StepCosts(prompt_token_s=1e-3))
Request = WaitingRequest[int]


class MovesMachine(RuleBasedStateMachine):
    """Requests wait at either of two engines, which say now and then what they have to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.views = [EngineView(SentWork(), clock=lambda: self.now_s) for _ in range(2)]
        self.waiting: WaitingRequests[int] = WaitingRequests(lambda: self.now_s, random.Random(1))
        self.open: list[Request] = []
        self.numbers = itertools.count()
        self.moved: list[tuple[Request, float]] = []
        for view in self.views:
            view.heard(IDLE)

    @rule(
        at=st.integers(0, 1),
        lane=LANES,
        tenant=st.sampled_from("abc"),
        tokens=st.integers(1, 5000),
        times=st.integers(1, 4),
    )
    def come(self, at: int, lane: Lane, tenant: str, tokens: int, times: int) -> None:
        for _ in range(times):
            place = self.views[at].send(Prompt(tokens), lane)
            entered = WaitingRequest(next(self.numbers), self.views[at], lane, tenant, place)
            self.waiting.enter(entered)
            self.open.append(entered)

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(at=st.integers(0, 1), lane=LANES, tokens=st.integers(0, 20_000))
    def say(self, at: int, lane: Lane, tokens: int) -> None:
        told = LaneStatus(num_running=0, num_waiting=1, waiting_tokens=tokens)
        self.views[at].heard(msgspec.structs.replace(IDLE, lanes=IDLE.lanes | {lane: told}))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        begun = data.draw(st.sampled_from(self.open))
        for _ in range(2):
            self.waiting.leave(begun)
        self.open.remove(begun)

    @rule(at=st.integers(0, 1), there_s=st.floats(0, 10), moves=st.booleans())
    def look(self, at: int, there_s: float, moves: bool) -> None:
        asked: list[Request] = []
        for found in self.waiting.look(self.views[at], lambda _: there_s):
            assert found in self.open and found.view is self.views[at]
            assert not found.is_asked, "it was moved before"
            assert found.left_s > UNDERCUT * there_s and found.left_s - there_s > LEAST_GAIN_S
            asked.append(found)
            if moves:
                self.waiting.move(found)
                self.moved.append((found, self.now_s))
        assert len(asked) <= MOST_ASKED
        ranks = [LANE_RANKS[each.lane] for each in asked]
        assert ranks == sorted(ranks), "a lane above goes first"
        for lane in LANE_RANKS:
            turns = [each.key for each in asked if each.lane == lane]
            assert turns == sorted(turns), "in the order in which they came"
        if moves:
            most = Counter((each.lane, each.tenant) for each in asked)
            assert max(most.values(), default=0) <= 1, "one of each tenant"
        if asked:
            assert not list(self.waiting.look(self.views[at], lambda _: 0.0)), "too soon"

    @invariant()
    def few_move_at_a_time(self) -> None:
        assert len({id(each) for each, _ in self.moved}) == len(self.moved), "each once"
        for number, (_, since_s) in enumerate(self.moved):
            allowed = MOST_SAVED + MOVES_PER_S * (self.now_s - since_s)
            assert len(self.moved) - number <= allowed + 1

    @invariant()
    def nothing_is_kept_of_who_left(self) -> None:
        kept = [each for here in self.waiting._at.values() for each in here]
        assert len(kept) == len(self.open) and set(kept) == set(self.open)
        assert set(self.waiting._looks_at) <= set(self.waiting._at)


TestMovesMachine = MovesMachine.TestCase
TestMovesMachine.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None
)


def test_what_is_left_falls_as_the_engine_works_and_not_by_who_comes_later() -> None:
    now_s = 0.0
    view = EngineView(SentWork(), clock=lambda: now_s)
    view.heard(IDLE)
    view.send(Prompt(3000), "interactive")
    place = view.send(Prompt(2000), "interactive")
    rank = LANE_RANKS["interactive"]
    first_s = view.left_s(rank, place)
    view.send(Prompt(4000), "interactive")
    assert math.isclose(view.left_s(rank, place), first_s)
    now_s = 1.0
    assert math.isclose(view.left_s(rank, place), first_s - 1.0)
    now_s = 100.0
    assert view.left_s(rank, place) == 0.0


def test_a_little_sooner_is_no_reason() -> None:
    assert undercuts(1.0, 2.1) and not undercuts(1.0, 1.9)
    assert not undercuts(0.0, LEAST_GAIN_S)
    assert LOOK_S < LEAST_GAIN_S, "a look costs less than a move brings"
