"""The scheduler's rules of order, room and sharing, one by one."""

from __future__ import annotations

import pytest

from engine.protocol import EngineOutput, TokenLogprob, TokenLogprobs
from engine.scheduling.pace import Pace
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FREED, SequenceStatus
from tests.engine.scheduling.scheduling import (
    drain,
    execute,
    make,
    plan,
    request,
    sequence_of,
    step,
)

# One budget, in order


def test_a_long_prompt_is_chunked_and_never_holds_up_decodes() -> None:
    scheduler = make()
    scheduler.add(request("a", 3))
    scheduler.add(request("b", 2))
    step(scheduler)
    scheduler.add(request("long", 40, max_tokens=1))
    plans = []
    for _ in range(3):
        output = scheduler.schedule()
        plans.append(plan(output))
        assert output.num_tokens <= 16
        execute(scheduler, output)
    assert plans == [
        [("a", 3, 1), ("b", 2, 1), ("long", 0, 14)],
        [("a", 4, 1), ("b", 3, 1), ("long", 14, 14)],
        [("a", 5, 1), ("b", 4, 1), ("long", 28, 12)],
    ]


def test_decodes_come_first_even_when_the_prompt_is_older() -> None:
    # With two choices the second of "a" starts after "b", and is older.
    scheduler = make(max_num_batched_tokens=4, max_num_seqs=2, enabled=True)
    scheduler.cache.match = lambda seq: []  # type: ignore[method-assign]
    scheduler.add(request("a", 7, n=2, max_tokens=1))
    scheduler.add(request("b", 1))
    step(scheduler)  # three tokens of "a", and "b", which is shorter
    step(scheduler)
    step(scheduler)
    output = scheduler.schedule()
    assert plan(output) == [("b", 3, 1), ("a", 0, 3)]
    assert [s.samples for s in output.scheduled] == [True, False]
    execute(scheduler, output)
    assert plan(scheduler.schedule()) == [("b", 4, 1), ("a", 3, 3)]


def test_waiting_requests_start_in_order_within_all_bounds() -> None:
    scheduler = make(max_num_seqs=2, max_num_batched_tokens=8)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 3, max_tokens=2))
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    output = scheduler.schedule()
    assert plan(output) == [("a", 0, 3), ("b", 0, 3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    execute(scheduler, output)
    step(scheduler)
    assert plan(scheduler.schedule()) == [("c", 0, 3)]


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    scheduler = make(16)
    scheduler.add(request("a", 15))
    step(scheduler)
    scheduler.add(request("big", 60, max_tokens=1))
    scheduler.add(request("small", 1))
    assert plan(scheduler.schedule()) == [("a", 15, 1)]


def test_admission_leaves_each_running_sequence_a_block() -> None:
    scheduler = make(16)
    scheduler.add(request("a", 4, max_tokens=3))
    step(scheduler)
    step(scheduler)
    assert scheduler.num_free_blocks == 14, "a has two blocks and room in the second"
    scheduler.add(request("b", 56, max_tokens=1))
    assert [s[0] for s in plan(scheduler.schedule())] == ["a"], "b would need all 14"


def test_admission_counts_the_cached_blocks_that_it_revives() -> None:
    scheduler = make(16)
    scheduler.add(request("a", 56, max_tokens=1))
    drain(scheduler)
    scheduler.add(request("b", 4, max_tokens=8))
    step(scheduler)
    assert scheduler.num_free_blocks == 15
    # 14 of its 15 blocks are found, none of them held by anyone: all 15 count, one too many.
    scheduler.add(request("c", request("a", 56).prompt_token_ids + [1, 2], max_tokens=1))
    assert [s[0] for s in plan(scheduler.schedule())] == ["b"]


def test_the_step_that_catches_up_samples() -> None:
    scheduler = make(max_num_batched_tokens=4)
    scheduler.add(request("a", 6))
    output = scheduler.schedule()
    assert [s.samples for s in output.scheduled] == [False]
    assert execute(scheduler, output) == []
    output = scheduler.schedule()
    assert [s.samples for s in output.scheduled] == [True]
    (answer,) = execute(scheduler, output, token=5)
    assert answer.token_ids == [5] and not answer.finished and answer.finish_reason is None
    assert plan(scheduler.schedule()) == [("a", 6, 1)]


def test_logprobs_travel_with_their_token() -> None:
    scheduler = make()
    scheduler.add(request("a", 2, logprobs=1))
    logprobs = TokenLogprobs(TokenLogprob(5, -0.5), [TokenLogprob(6, -0.4)])
    (answer,) = scheduler.update(scheduler.schedule(), {("a", 0): [(5, logprobs)]})
    assert answer.logprobs == [logprobs]


def test_update_refuses_what_does_not_fit_the_schedule_and_changes_nothing() -> None:
    scheduler = make()
    scheduler.add(request("a", 2))
    output = scheduler.schedule()
    for sampled in ({}, {("a", 0): [(1, None)], ("b", 0): [(1, None)]}):
        with pytest.raises(AssertionError, match="against the schedule"):
            scheduler.update(output, sampled)
    assert sequence_of(scheduler, "a").num_computed_tokens == 0
    execute(scheduler, output)


# Prompts of different lengths, and decodes that must not wait


def test_a_long_prompt_leaves_a_part_to_shorter_ones_behind() -> None:
    scheduler = make(max_num_batched_tokens=8, max_model_len=256, num_blocks=200)
    scheduler.add(request("long", 100, max_tokens=1))
    scheduler.add(request("short", 3, max_tokens=1))
    assert plan(scheduler.schedule()) == [("long", 0, 6), ("short", 0, 2)]


def test_a_prompt_takes_all_when_nobody_shorter_waits() -> None:
    scheduler = make(max_num_batched_tokens=8, max_model_len=256, num_blocks=200)
    scheduler.add(request("a", 100, max_tokens=1))
    scheduler.add(request("b", 100, max_tokens=1))
    assert plan(scheduler.schedule()) == [("a", 0, 8)]


def test_what_the_shorter_one_cannot_use_goes_back_to_the_long_one() -> None:
    scheduler = make(max_num_batched_tokens=8, max_model_len=256, num_blocks=200)
    scheduler.add(request("long", 100, max_tokens=1))
    scheduler.add(request("short", 1, max_tokens=1))
    assert plan(scheduler.schedule()) == [("short", 0, 1), ("long", 0, 7)]


def test_prompt_chunks_beside_decodes_keep_the_pace() -> None:
    pace = Pace(0.1)
    scheduler = make(max_num_batched_tokens=64, max_model_len=256, num_blocks=200, pace=pace)
    pace.observe(0, 50, 0.1)  # 2 ms a token
    pace.observe(1, 0, 0.06)
    scheduler.add(request("a", 2))
    step(scheduler)
    scheduler.add(request("long", 100))
    assert plan(scheduler.schedule()) == [("a", 2, 1), ("long", 0, 20)]


# The prefix cache


def test_a_repeated_prompt_is_cached_up_to_its_last_token() -> None:
    scheduler = make()
    scheduler.add(request("a", list(range(10, 22)), max_tokens=1))
    drain(scheduler)
    scheduler.add(request("b", list(range(10, 22)), max_tokens=1))
    output = scheduler.schedule()
    assert plan(output) == [("b", 8, 4)]
    (answer,) = execute(scheduler, output)
    assert answer.usage.cached_tokens == 8 and answer.usage.prompt_tokens == 12
    assert (scheduler.prefix_cache_query_tokens, scheduler.prefix_cache_hit_tokens) == (24, 8)


def test_an_answer_is_cached_for_the_next_turn() -> None:
    scheduler = make()
    scheduler.add(request("a", [10, 11], max_tokens=7))
    drain(scheduler, token=3)
    # The last token was never computed, so 8 of 9 tokens are in full blocks.
    scheduler.add(request("b", [10, 11, *[3] * 7, 12], max_tokens=1))
    assert plan(scheduler.schedule()) == [("b", 8, 2)]


def test_another_salt_finds_nothing() -> None:
    scheduler = make()
    scheduler.add(request("a", list(range(10, 22)), max_tokens=1, salt="org-1"))
    drain(scheduler)
    scheduler.add(request("b", list(range(10, 22)), max_tokens=1, salt="org-2"))
    assert plan(scheduler.schedule()) == [("b", 0, 12)]


def test_with_the_cache_off_nothing_is_found_or_counted() -> None:
    scheduler = make(enabled=False)
    for name in ("a", "b"):
        scheduler.add(request(name, list(range(10, 22)), max_tokens=1))
        (answer,) = drain(scheduler)
        assert answer.usage.cached_tokens == 0
    assert scheduler.prefix_cache_query_tokens == 0


# Preemption


def preempting() -> tuple[Scheduler, list[EngineOutput]]:
    """ "a" and "b" decode in 5 blocks of 4 until "a" has to take one from "b"."""
    scheduler = make(5, max_model_len=20, max_num_batched_tokens=8)
    scheduler.add(request("a", 4, max_tokens=12))
    scheduler.add(request("b", 3, max_tokens=10))
    outputs = []
    for _ in range(20):
        output = scheduler.schedule()
        if output.preempted:
            assert [s.request_id for s in output.preempted] == ["b"]
            assert plan(output) == [("a", 12, 1)]
            outputs += execute(scheduler, output)
            return scheduler, outputs
        outputs += execute(scheduler, output)
    raise AssertionError("nothing was preempted")


def test_the_latest_gives_way_and_keeps_its_output() -> None:
    scheduler, outputs = preempting()
    victim = sequence_of(scheduler, "b")
    assert victim.status is SequenceStatus.WAITING and victim.num_preemptions == 1
    assert victim.num_computed_tokens == 0 and victim.block_table == []
    assert len(victim.output_token_ids) == sum(o.request_id == "b" for o in outputs) > 0
    assert scheduler.num_preemptions == 1
    outputs += drain(scheduler)
    for name, max_tokens in (("a", 12), ("b", 10)):
        mine = [o for o in outputs if o.request_id == name]
        assert sum(len(o.token_ids) for o in mine) == max_tokens
        assert [o.finished for o in mine] == [False] * (max_tokens - 1) + [True]


def test_a_preempted_sequence_is_first_in_the_queue() -> None:
    scheduler, _ = preempting()
    scheduler.add(request("c", 1, max_tokens=1))
    started = []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        started += [s.seq.request_id for s in output.scheduled if s.seq.request_id != "a"]
        execute(scheduler, output)
    assert started[:2] == ["b", "c"]


def test_recomputing_from_the_cache_changes_no_usage() -> None:
    scheduler, _ = preempting()
    before = sequence_of(scheduler, "b").num_cached_tokens
    starts = []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        starts += [s.start for s in output.scheduled if s.seq.request_id == "b"]
        for answer in execute(scheduler, output):
            assert answer.usage.cached_tokens == 0
    assert before == 0 and starts[0] > 0, "the recompute began with a hit"


def test_the_latest_sits_out_rather_than_preempting_itself() -> None:
    scheduler = make(4, max_model_len=16)
    scheduler.add(request("a", 3, max_tokens=13))
    scheduler.add(request("b", 4, max_tokens=12))
    for _ in range(5):
        step(scheduler)
    # Each holds two blocks. "b" needs a third one now, "a" only in the next step.
    output = scheduler.schedule()
    assert plan(output) == [("a", 7, 1)] and output.preempted == []
    assert sequence_of(scheduler, "b").num_held_blocks == 2
    execute(scheduler, output)
    output = scheduler.schedule()
    assert plan(output) == [("a", 8, 1)]
    assert [s.request_id for s in output.preempted] == ["b"]
    execute(scheduler, output)
    assert [o.request_id for o in drain(scheduler) if o.finished] == ["a", "b"]


def test_a_victim_that_was_scheduled_leaves_the_step() -> None:
    # "a"'s second choice is older than "b", finds nothing cached and computes a token a step
    # beside "b", which takes the last block just before "a" needs it.
    scheduler = make(7, max_model_len=16, max_num_batched_tokens=2, max_num_seqs=2)
    scheduler.cache.match = lambda seq: []  # type: ignore[method-assign]
    scheduler.add(request("a", 15, n=2, max_tokens=1))
    scheduler.add(request("b", 1, max_tokens=15))
    for _ in range(60):
        output = scheduler.schedule()
        if output.preempted:
            break
        execute(scheduler, output)
    assert [s.request_id for s in output.preempted] == ["b"]
    assert plan(output) == [("a", 12, 1)] and output.num_tokens == 1
    execute(scheduler, output)
    assert sum(len(o.token_ids) for o in drain(scheduler)) > 0


# n > 1


def test_choices_wait_for_the_first_and_share_its_prompt() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", list(range(10, 22)), n=3, max_tokens=2))
    output = scheduler.schedule()
    assert plan(output) == [("a", 0, 8)]
    assert scheduler.num_waiting == 2
    assert execute(scheduler, output) == []
    output = scheduler.schedule()
    assert plan(output) == [("a", 8, 4)], "the others still wait"
    execute(scheduler, output)
    output = scheduler.schedule()
    assert plan(output) == [("a", 12, 1), ("a", 8, 4), ("a", 8, 3)]
    tables = [sequence_of(scheduler, "a", index).block_table for index in range(3)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3, "the block of the last token is each one's own"
    execute(scheduler, output)
    drain(scheduler)


def test_waiting_choices_do_not_hold_up_other_requests() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", 9, n=2))
    scheduler.add(request("b", 9, max_tokens=1))
    step(scheduler)
    assert plan(scheduler.schedule()) == [("a", 8, 1), ("b", 0, 7)]


def test_with_the_cache_off_choices_simply_run() -> None:
    scheduler = make(enabled=False)
    scheduler.add(request("a", 4, n=3, max_tokens=1))
    output = scheduler.schedule()
    assert plan(output) == [("a", 0, 4)] * 3
    assert [s.seq.index for s in output.scheduled] == [0, 1, 2]


# The sliding window


@pytest.mark.parametrize("enabled", [True, False])
def test_a_window_bounds_the_blocks_of_a_long_sequence(enabled: bool) -> None:
    # 9 visible before + 8 new tokens touch at most 5 blocks of 4.
    scheduler = make(8, window=10, enabled=enabled, max_model_len=1000, max_num_batched_tokens=8)
    assert scheduler.max_blocks_per_seq == 5
    scheduler.add(request("a", 100, max_tokens=100))
    seq = sequence_of(scheduler, "a")
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        assert seq.num_held_blocks <= 5
        assert len(seq.block_table) == -(-(seq.num_computed_tokens + output.num_tokens) // 4)
        execute(scheduler, output)
    assert seq.num_output_tokens == 100 and scheduler.num_preemptions == 0
    assert scheduler.num_free_blocks == 8


def test_a_window_that_is_not_reached_changes_nothing() -> None:
    scheduler = make(window=500)
    assert scheduler.max_blocks_per_seq == make().max_blocks_per_seq == 16
    scheduler.add(request("a", 20))
    step(scheduler)
    assert FREED not in sequence_of(scheduler, "a").block_table


def test_a_hit_beyond_the_window_takes_only_visible_blocks() -> None:
    scheduler = make(window=5)
    scheduler.add(request("a", list(range(10, 22)), max_tokens=1))
    drain(scheduler)
    scheduler.add(request("b", [*range(10, 22), 30], max_tokens=1))
    output = scheduler.schedule()
    assert plan(output) == [("b", 12, 1)]
    table = sequence_of(scheduler, "b").block_table
    assert table[:2] == [FREED, FREED] and FREED not in table[2:] and len(table) == 4
    (answer,) = execute(scheduler, output)
    assert answer.usage.cached_tokens == 12


@pytest.mark.parametrize(
    ("num_blocks", "window", "holds"), [(16, None, True), (15, None, False), (8, 8, True)]
)
def test_the_blocks_must_hold_one_longest_sequence(
    num_blocks: int, window: int | None, holds: bool
) -> None:
    if holds:
        make(num_blocks, window=window)
    else:
        with pytest.raises(AssertionError, match="15 blocks cannot hold a sequence that takes 16"):
            make(num_blocks, window=window)


def test_counters_tell_what_is_held() -> None:
    scheduler = make(16)
    scheduler.add(request("a", 16))
    assert (scheduler.num_free_blocks, scheduler.kv_cache_usage) == (16, 0.0)
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    assert (scheduler.num_free_blocks, scheduler.kv_cache_usage) == (12, 0.25)
    drain(scheduler)
    assert (scheduler.num_free_blocks, scheduler.kv_cache_usage) == (16, 0.0)


# Alone, after a step that failed


def on_trial(prompt: int) -> Scheduler:
    """ "a", of so many tokens, is computed alone next, and "b" then."""
    scheduler = make(16, max_num_batched_tokens=32)
    scheduler.add(request("a", prompt, max_tokens=2))
    scheduler.add(request("b", 3, max_tokens=2))
    output = scheduler.schedule()
    assert len(output.scheduled) == 2
    assert scheduler.try_alone(output) == []
    scheduler.check_integrity()
    return scheduler


def test_each_sequence_of_a_failed_step_has_a_step_of_its_own() -> None:
    scheduler = on_trial(24)
    scheduler.add(request("c", 3, max_tokens=2))
    plans = []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        plans.append(plan(output))
        execute(scheduler, output)
    assert plans[:2] == [[("a", 0, 24)], [("b", 0, 3)]]
    assert sorted(name for name, _, _ in plans[2]) == ["a", "b", "c"]


def test_who_is_to_be_alone_waits_for_blocks_that_a_read_from_a_tier_has() -> None:
    scheduler = on_trial(24)
    read = [scheduler.cache.allocate() for _ in range(12)]
    assert plan(scheduler.schedule()) == []
    scheduler.cache.unhold(read)
    assert [o.request_id for o in drain(scheduler) if o.finished] == ["a", "b"]


def test_who_is_alone_waits_for_more_blocks_where_nobody_has_any_to_give() -> None:
    scheduler = on_trial(20)
    scheduler.max_num_batched_tokens = scheduler._planner._max_num_batched_tokens = 8
    step(scheduler)
    read = [scheduler.cache.allocate() for _ in range(14)]
    output = scheduler.schedule()
    assert plan(output) == [] and output.preempted == []
    scheduler.cache.unhold(read)
    assert [o.request_id for o in drain(scheduler) if o.finished] == ["a", "b"]
