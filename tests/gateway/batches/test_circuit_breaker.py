"""While a model is away its lines wait, and one at a time looks whether it is back. The clock
stands unless a test moves it."""

from __future__ import annotations

import asyncio
from typing import Any

import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.circuit_breaker import COOL_DOWN_S, MAX_COOL_DOWN_S, CircuitBreakers
from gateway.batches.runner import BatchRunner
from gateway.batches.tables import batch_lines
from gateway.fleet.errors import ReplicaUnavailable
from tests.gateway.batches.world import World
from tests.gateway.office import ScriptedReplica

NUM_LINES, NUM_RUNNING = 24, 4
SCOPE = ("org", "penny")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_while_nothing_answers_one_line_asks_after_each_cool_down(
    world: World, replica: ScriptedReplica
) -> None:
    clock = Clock()
    replica.refuses = ReplicaUnavailable("away")
    batch = await world.batch(NUM_LINES)
    runner = world.runner(max_running=NUM_RUNNING, clock=clock)
    await until_idle(runner)
    assert (await world.now(batch)).status == "in_progress"
    asked = []
    for cool_down_s in (COOL_DOWN_S, 2 * COOL_DOWN_S, 4 * COOL_DOWN_S):
        before = len(replica.attempts)
        for _ in range(3):
            await all_are_due(world)
            await until_idle(runner)
        asked.append(len(replica.attempts) - before)
        clock.now_s += cool_down_s
    assert asked[0] <= NUM_RUNNING  # whose lines had begun when the first was refused
    assert asked[1:] == [1, 1]
    replica.refuses = None
    for _ in range(2):  # the one that asks, then those that waited for it
        await all_are_due(world)
        await until_idle(runner)
    runner.start()
    done = await world.until(batch, "completed")
    await runner.close()
    assert (done.num_completed, done.num_failed) == (NUM_LINES, 0)
    assert len(await world.billed()) == NUM_LINES


async def all_are_due(world: World) -> None:
    async with world.db.begin() as conn:
        await conn.execute(sa.update(batch_lines).values(due_at=sa.func.now()))


async def until_idle(runner: BatchRunner) -> None:
    """All that there is to do has been done once."""
    ending = asyncio.create_task(runner._ender.end_forever())
    try:
        await runner.look()
        while tasks := [*runner._attended, *runner._running]:
            await asyncio.wait(tasks)
            await runner.look()
    finally:
        ending.cancel()


def test_what_is_refused_together_counts_once() -> None:
    clock = Clock()
    breakers = CircuitBreakers(clock)
    assert [breakers.refused(SCOPE, 0.0) for _ in range(16)] == [COOL_DOWN_S] * 16
    assert breakers.open_scopes() == [SCOPE] and breakers.wait_s(SCOPE) == COOL_DOWN_S
    assert breakers.wait_s(("other", "penny")) == 0.0
    clock.now_s += COOL_DOWN_S
    assert breakers.open_scopes() == []
    assert breakers.wait_s(SCOPE) == 0.0
    assert breakers.open_scopes() == [SCOPE] and breakers.wait_s(SCOPE) > 0
    breakers.tried(SCOPE)
    assert breakers.refused(SCOPE, 0.0) == 2 * COOL_DOWN_S
    assert breakers.wait_s(SCOPE) == 2 * COOL_DOWN_S


def test_it_waits_for_as_long_as_it_was_told_within_bounds() -> None:
    assert CircuitBreakers(Clock()).refused(SCOPE, 7.0) == 7.0
    assert CircuitBreakers(Clock()).refused(SCOPE, 1e9) == MAX_COOL_DOWN_S


@given(st.lists(st.sampled_from(["look", "refuse", "answer", "later"]), max_size=60))
def test_one_at_a_time_asks_and_nobody_waits_for_ever(steps: list[Any]) -> None:
    """`asking`: lines that may ask, and have not said what became of it."""
    clock, asking = Clock(), 0
    breakers = CircuitBreakers(clock)
    breakers.refused(SCOPE, 0.0)
    for step in steps:
        match step:
            case "later":
                clock.now_s += COOL_DOWN_S
            case "look" if breakers.wait_s(SCOPE) == 0.0:
                asking += 1
            case "refuse" if asking:
                asking -= 1
                breakers.tried(SCOPE)
                assert 0 < breakers.refused(SCOPE, 0.0) <= MAX_COOL_DOWN_S
            case "answer" if asking:
                break
        assert asking <= 1
    if asking:
        breakers.tried(SCOPE)
        breakers.answered(SCOPE)
        assert breakers.wait_s(SCOPE) == 0.0 and breakers.open_scopes() == []
    else:
        clock.now_s += MAX_COOL_DOWN_S
        assert breakers.wait_s(SCOPE) == 0.0
