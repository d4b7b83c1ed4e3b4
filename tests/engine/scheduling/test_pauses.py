"""Pauses and deadlines in the scheduler."""

from __future__ import annotations

from engine.scheduling.queues import Deadlines
from tests.engine.scheduling.scheduling import (
    Clock,
    add,
    drain,
    execute,
    make,
    plan,
    sequence_of,
    step,
)

# Pauses


def test_a_paused_one_takes_no_step_and_keeps_its_blocks() -> None:
    scheduler = make()
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    step(scheduler)
    scheduler.pause("a")
    held = sequence_of(scheduler, "a").num_held_blocks
    for _ in range(3):
        output = scheduler.schedule()
        assert [entry[0] for entry in plan(output)] == ["b"]
        execute(scheduler, output)
    assert sequence_of(scheduler, "a").num_held_blocks == held > 0
    assert scheduler.num_running == 2
    scheduler.resume("a")
    output = scheduler.schedule()
    assert plan(output) == [("a", 5, 1), ("b", 8, 1)], "nothing is computed again"
    execute(scheduler, output)
    drain(scheduler)


def test_a_paused_one_that_waits_is_passed_and_keeps_its_place() -> None:
    scheduler = make(max_num_seqs=1)
    for name in ("a", "b", "c"):
        add(scheduler, name, 5, max_tokens=1)
    scheduler.pause("a")
    assert [o.request_id for o in step(scheduler)] == ["b"]
    scheduler.resume("a")
    assert [o.request_id for o in drain(scheduler)] == ["a", "c"]


def test_with_everything_paused_there_is_nothing_to_do() -> None:
    scheduler = make()
    for name in ("a", "b"):
        add(scheduler, name, 5, n=2)
        scheduler.pause(name)
    assert scheduler.has_unfinished() and not scheduler.has_work()
    assert not scheduler.schedule().scheduled
    scheduler.resume("b")
    assert scheduler.has_work()
    answers = step(scheduler)
    assert {o.request_id for o in answers} == {"b"}
    scheduler.abort("a")
    drain(scheduler)


def test_somebody_who_needs_its_blocks_or_its_place_gets_them() -> None:
    scheduler = make(10, max_model_len=40, max_num_batched_tokens=40, max_num_seqs=2)
    add(scheduler, "paused", 30, max_tokens=4)
    step(scheduler)
    scheduler.pause("paused")
    add(scheduler, "b", 30, "batch", max_tokens=4)
    output = scheduler.schedule()
    assert [s.request_id for s in output.preempted] == ["paused"], "even to a lane below"
    execute(scheduler, output)
    drained = []
    while scheduler.has_work():
        drained += step(scheduler)
    assert {o.request_id for o in drained} == {"b"}
    scheduler.resume("paused")
    assert sum(len(o.token_ids) for o in drain(scheduler)) == 3, "one was said before"


def test_choices_of_a_paused_request_wait_for_its_end() -> None:
    scheduler = make(max_steps_in_flight=2)
    add(scheduler, "a", 9, n=3, max_tokens=2)
    output = scheduler.schedule()
    scheduler.pause("a")
    execute(scheduler, output)  # its first token comes all the same
    assert not scheduler.has_work() and not scheduler.schedule().scheduled
    scheduler.resume("a")
    assert len([o for o in drain(scheduler) if o.finish_reason]) == 3


def test_pausing_what_is_unknown_or_ended_changes_nothing() -> None:
    scheduler = make()
    scheduler.pause("a")
    scheduler.resume("a")
    add(scheduler, "a", 5)
    scheduler.resume("a")
    drain(scheduler)
    scheduler.pause("a")
    scheduler.check_integrity()
    assert not scheduler.has_unfinished()


# Deadlines


def test_what_was_not_begun_in_time_goes_and_what_was_runs_on() -> None:
    clock = Clock()
    scheduler = make(clock=clock, max_num_seqs=1)
    add(scheduler, "runs", 4, deadline_s=1.0, max_tokens=30)
    step(scheduler)
    add(scheduler, "late", 4, deadline_s=2.0)
    add(scheduler, "paused", 4, deadline_s=3.0)
    add(scheduler, "patient", 4, deadline_s=100.0)
    scheduler.pause("paused")
    clock.now = 1.9
    assert scheduler.expire() == []
    clock.now = 2.0
    assert scheduler.expire() == ["late"]
    clock.now = 50.0
    assert scheduler.expire() == ["paused"]
    scheduler.check_integrity()
    assert {o.request_id for o in drain(scheduler)} == {"runs", "patient"}


def test_deadlines_of_what_has_ended_are_not_kept() -> None:
    scheduler = make()
    for number in range(1000):
        add(scheduler, f"r{number}", 1, deadline_s=1000.0, max_tokens=1)
        drain(scheduler)
    assert len(scheduler._deadlines) < 150


def test_an_id_that_is_used_again_has_its_own_deadline() -> None:
    waits = {("r", 5.0)}
    deadlines = Deadlines(lambda request_id, deadline_s: (request_id, deadline_s) in waits)
    deadlines.add(2.0, "r", 1)
    deadlines.add(5.0, "r", 1)
    assert deadlines.passed(4.0) == []
    assert deadlines.passed(5.0) == ["r"] and len(deadlines) == 0
