"""Cells pass no more than the stated bound, whatever is lost, paused, cut off or dead.

The machine follows the proof in `gateway.limits.cells.shares`: the parts in force are never more
than the limit and what cut-off cells use; shares move no more than stated; and what passes is no
more than content, refill and the content that moves have made.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.limits.cells.shares import MOVE_S, TAKEN_OVER_S
from tests.budget import examples
from tests.gateway.limits.cells.world_of_cells import BURST, LIMIT, STEP_S, Gateway, World

CELLS = ("ap", "eu", "us")
LATE_S = 2 * TAKEN_OVER_S
"""After which nothing comes any more of what has been disturbed."""
NUMBERS = st.integers(0, 1_000)


@dataclass
class Interval:
    """One step: until when, the most that may have refilled, and how far parts have grown."""

    at_s: float
    refilled: float
    grown: float
    disturbances: int


class CellsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        for cell in ("eu", "us"):
            self.world.add(cell)
            self.world.add(cell)
        self.intervals: list[Interval] = []
        self.limits = dict.fromkeys(CELLS, 0)
        self.disturbances = 0
        self.were_stale: set[int] = set()
        self.advance(60)

    def teardown(self) -> None:
        self.world.close()

    def gateway(self, number: int) -> Gateway:
        return self.world.gateways[number % len(self.world.gateways)]

    @rule(steps=st.integers(1, 80))
    def advance(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
            self.measure()

    def measure(self) -> None:
        """Note what the parts in force are, and that they are no more than they may be."""
        limits = {cell: self.world.limit_of(cell) for cell in CELLS}
        stale = [each for each in self.world.gateways if each.is_stale and not each.is_paused]
        of_stale = {each.cell: limits[each.cell] for each in stale}
        beyond = sum(of_stale.values())
        assert sum(limits.values()) <= LIMIT + beyond + len(CELLS)
        are_stale = {id(each) for each in stale}
        self.disturbances += len(are_stale ^ self.were_stale)
        self.were_stale = are_stale
        grown = sum(max(0, limits[cell] - self.limits[cell]) for cell in CELLS) / LIMIT
        highest = sum(max(limits[cell], self.limits[cell]) for cell in CELLS)
        self.limits = limits
        self.intervals.append(
            Interval(self.world.now_s, highest * STEP_S / 60, grown, self.disturbances)
        )

    @rule(number=NUMBERS, tokens=st.integers(1, BURST), times=st.integers(1, 20))
    def ask(self, number: int, tokens: int, times: int) -> None:
        gateway = self.gateway(number)
        for _ in range(times):
            if not gateway.is_paused:
                self.world.ask(gateway, tokens)

    @rule(number=NUMBERS, tokens=st.integers(1, BURST // 4), steps=st.integers(4, 60))
    def flood(self, number: int, tokens: int, steps: int) -> None:
        """Ask of one gateway all the time."""
        for _ in range(steps):
            gateway = self.gateway(number)
            while not gateway.is_paused and self.world.ask(gateway, tokens):
                pass
            self.advance(1)

    @rule(number=NUMBERS)
    def pause(self, number: int) -> None:
        gateway = self.gateway(number)
        gateway.is_paused = not gateway.is_paused
        self.disturbances += 1

    @rule(number=NUMBERS, is_deaf=st.booleans())
    def cut(self, number: int, is_deaf: bool) -> None:
        link = self.gateway(number).link
        link.is_cut, link.is_deaf = not link.is_cut and not is_deaf, not link.is_deaf and is_deaf

    @rule(number=NUMBERS, steps=st.integers(1, 5))
    def slow(self, number: int, steps: int) -> None:
        """Its next answer comes late."""
        gateway = self.gateway(number)
        if gateway.pending is None and not gateway.is_paused:
            gateway.link.answers = asyncio.Event()
            gateway.next_tick_s = self.world.now_s
            gateway.answer_at_s = self.world.now_s + (steps + 1) * STEP_S

    @precondition(lambda self: len(self.world.cells) > 1)
    @rule(number=NUMBERS)
    def kill_cell(self, number: int) -> None:
        for each in self.world.of(self.gateway(number).cell):
            self.world.kill(each)
        self.disturbances += 1

    @rule(cell=st.sampled_from(CELLS))
    def start(self, cell: str) -> None:
        if len(self.world.of(cell)) < 2:
            self.world.add(cell)
            self.disturbances += 1

    @invariant()
    def no_more_passes_than_stated(self) -> None:
        end_s = self.world.now_s
        for seconds in (2.0, 10.0, 60.0, 300.0):
            start_s = end_s - seconds
            passed = sum(tokens for at, tokens in self.world.passed if at >= start_s)
            within = [each for each in self.intervals if each.at_s >= start_s]
            grown = sum(each.grown for each in within)
            refilled = sum(each.refilled for each in within)
            begun = max(sum(self.limits.values()), LIMIT) / LIMIT
            assert passed <= BURST * (begun + 1 + grown) + refilled + len(CELLS)
            disturbances = self.disturbances - self.disturbances_before(start_s - LATE_S)
            assert grown <= 1 + seconds / MOVE_S + disturbances + 0.01
            if not disturbances:
                assert passed <= BURST * (1 + grown) + LIMIT * seconds / 60 + len(CELLS)

    def disturbances_before(self, moment_s: float) -> int:
        return max(
            (each.disturbances for each in self.intervals if each.at_s < moment_s), default=0
        )


TestCells = CellsMachine.TestCase
TestCells.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None)
