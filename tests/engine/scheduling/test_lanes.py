"""Lanes and tenants in the scheduler: whose turn it is, what each lane may have, who gives way."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineOverloaded
from engine.fairness import LANE_WEIGHTS
from engine.protocol import Lane, LaneStatus
from engine.scheduling.lanes import LaneLimits, queues_of
from engine.scheduling.scheduler import Scheduler
from engine.sequence import SequenceStatus
from tests.engine.scheduling.scheduling import (
    Clock,
    add,
    drain,
    execute,
    make,
    plan,
    request,
    sequence_of,
    step,
)

LANES: tuple[Lane, ...] = tuple(LANE_WEIGHTS)


def starts(scheduler: Scheduler) -> list[str]:
    """Requests in the order in which they are begun, until all have ended."""
    found: list[str] = []
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        found += [s.seq.request_id for s in output.scheduled if s.start == 0]
        execute(scheduler, output)
    return found


# Who may wait


def test_a_flood_of_one_lane_gets_nobody_refused_in_another() -> None:
    scheduler = make(max_num_seqs=1, max_waiting={"interactive": 2, "agentic": 3, "batch": 4})
    for lane, most in (("batch", 4), ("agentic", 3), ("interactive", 2)):
        for number in range(most):
            add(scheduler, f"{lane}{number}", 4, lane)
        with pytest.raises(EngineOverloaded, match=f"{most} requests wait in lane {lane}"):
            add(scheduler, "one too many", 4, lane)
    status = scheduler.lanes()
    assert [(status[lane].num_queued, status[lane].max_queued) for lane in LANES] == [
        (2, 2),
        (3, 3),
        (4, 4),
    ]
    step(scheduler)  # of the lane above the first begins, and leaves its place
    add(scheduler, "next", 4, "interactive")
    with pytest.raises(EngineOverloaded, match="lane batch"):
        add(scheduler, "not yet", 4, "batch")
    assert scheduler.abort("batch2")
    add(scheduler, "now", 4, "batch")
    scheduler.check_integrity()
    drain(scheduler)
    assert all(status.num_queued == 0 for status in scheduler.lanes().values())


def test_a_lane_has_the_queue_of_all_where_it_has_none_of_its_own() -> None:
    asked = EngineConfig(model=Path("m"), max_waiting=7, batch_max_waiting=900)
    assert queues_of(asked) == {"interactive": 7, "agentic": 7, "batch": 900}
    with pytest.raises(ConfigError, match="batch_max_waiting is 0"):
        EngineConfig(model=Path("m"), batch_max_waiting=0)


# Whose turn it is


def test_a_lane_above_goes_first_and_none_has_to_wait_for_the_end_of_another() -> None:
    scheduler = make(max_num_batched_tokens=4, max_num_seqs=1)
    for number in range(3):
        for lane in reversed(LANES):
            add(scheduler, f"{lane[0]}{number}", 4, lane, max_tokens=1)
    # Each takes 4 + 2: an interactive one costs its lane 6/16, an agentic one 6/4, a batch one 6.
    assert starts(scheduler) == ["i0", "a0", "b0", "i1", "i2", "a1", "a2", "b1", "b2"]


def test_tenants_of_a_lane_take_turns_however_many_one_of_them_sends() -> None:
    scheduler = make(max_num_batched_tokens=4, max_num_seqs=1)
    for number in range(4):
        add(scheduler, f"flood{number}", 4, tenant="flood", max_tokens=1)
    for number in range(2):
        add(scheduler, f"other{number}", 4, tenant="other", max_tokens=1)
    assert starts(scheduler) == ["flood0", "other0", "flood1", "other1", "flood2", "flood3"]


def test_a_priority_orders_what_one_tenant_has_waiting_in_one_lane_and_nothing_else() -> None:
    scheduler = make(max_num_batched_tokens=4, max_num_seqs=1)
    for number, priority in enumerate((5, 0, -7, 0)):
        add(scheduler, f"a{number}", 4, tenant="a", priority=priority, max_tokens=1)
    for number, priority in enumerate((9, 8)):
        add(scheduler, f"b{number}", 4, tenant="b", priority=priority, max_tokens=1)
    scheduler.check_integrity()
    assert scheduler.abort("a3")
    assert starts(scheduler) == ["a2", "b1", "a1", "b0", "a0"]


def test_tenants_take_turns_within_one_step_too() -> None:
    scheduler = make(max_num_batched_tokens=16)
    for number in range(4):
        add(scheduler, f"a{number}", 4, tenant="a", max_tokens=1)
    for number in range(4):
        add(scheduler, f"b{number}", 4, tenant="b", max_tokens=1)
    output = scheduler.schedule()
    assert [entry[0] for entry in plan(output)] == ["a0", "b0", "a1", "b1"]
    execute(scheduler, output)
    drain(scheduler)


def test_a_tenant_of_twice_the_weight_is_served_twice_as_much() -> None:
    scheduler = make(max_num_batched_tokens=4, max_num_seqs=1)
    for number in range(6):
        add(scheduler, f"x{number}", 4, tenant="x", weight=2.0, max_tokens=1)
        add(scheduler, f"y{number}", 4, tenant="y", weight=1.0, max_tokens=1)
    assert Counter(name[0] for name in starts(scheduler)[:9]) == {"x": 6, "y": 3}


def test_the_chunks_of_running_prompts_take_turns() -> None:
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "long", 60, tenant="a", max_tokens=1)
    step(scheduler)
    add(scheduler, "other", 60, tenant="b", max_tokens=1)
    served: Counter[str] = Counter()
    for _ in range(6):
        output = scheduler.schedule()
        served.update({name: tokens for name, _, tokens in plan(output)})
        execute(scheduler, output)
    assert abs(served["long"] - served["other"]) <= 8, "a step's budget"
    assert served.total() == 48


def test_a_prompt_in_a_lane_above_passes_a_long_one_at_once() -> None:
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "batch", 60, "batch", max_tokens=1)
    step(scheduler)
    add(scheduler, "chat", 20, max_tokens=1)
    took = 0
    while not any(o.request_id == "chat" for o in step(scheduler)):
        took += 1
    assert took == 3, "one step of the chunk that was first, two of its own"


def test_what_is_in_the_cache_is_not_charged() -> None:
    scheduler = make()
    add(scheduler, "a", 33, tenant="a", max_tokens=1)
    drain(scheduler)
    add(scheduler, "again", list(request("a", 33).prompt_token_ids), tenant="a", max_tokens=1)  # type: ignore[arg-type]
    before = scheduler._share.lane_counter("interactive")
    drain(scheduler)
    # 32 tokens were found; one was computed and one was said.
    assert scheduler._share.lane_counter("interactive") - before == (1 + 2) / 16


def test_what_is_computed_again_is_not_charged() -> None:
    scheduler = make(5, max_model_len=20, max_num_batched_tokens=8, enabled=False)
    add(scheduler, "a", 4, max_tokens=12)
    add(scheduler, "b", 3, max_tokens=10)
    drain(scheduler)
    assert scheduler.num_preemptions > 0
    assert scheduler._share.lane_counter("interactive") == (4 + 3 + 2 * (12 + 10)) / 16


# What a lane may have


LIMITED: dict[Lane, LaneLimits] = {"batch": LaneLimits(max_share=0.5, kv_headroom=0.25)}


def test_a_lane_has_at_most_its_share_of_those_that_run() -> None:
    scheduler = make(max_num_seqs=4, lane_limits=LIMITED)
    for number in range(4):
        add(scheduler, f"b{number}", 1, "batch")
    step(scheduler)
    assert scheduler.lanes()["batch"].num_running == 2
    for number in range(3):
        add(scheduler, f"i{number}", 1)
    step(scheduler)
    lanes = scheduler.lanes()
    assert (lanes["interactive"].num_running, lanes["batch"].num_running) == (2, 2)
    drain(scheduler)


def test_a_lane_below_has_its_share_of_a_step_and_alone_all_of_it() -> None:
    scheduler = make(max_num_batched_tokens=16, lane_limits=LIMITED)
    add(scheduler, "b", 60, "batch", max_tokens=1)
    output = scheduler.schedule()
    assert plan(output) == [("b", 0, 16)]
    execute(scheduler, output)
    add(scheduler, "i", 1)
    step(scheduler)
    output = scheduler.schedule()  # the other one decodes
    assert plan(output)[-1][2] == 8
    execute(scheduler, output)


def test_a_lane_below_leaves_blocks_for_those_above() -> None:
    # 20 blocks of 4; headroom is capped to 4
    scheduler = make(20, lane_limits=LIMITED, max_num_batched_tokens=64)
    for number in range(4):
        add(scheduler, f"b{number}", 20, "batch", max_tokens=1)
    for _ in range(3):
        output = scheduler.schedule()
        assert scheduler.num_free_blocks >= 4
        execute(scheduler, output)
    add(scheduler, "i", 16, max_tokens=1)
    assert "i" in [entry[0] for entry in plan(scheduler.schedule())]


def test_a_lane_that_is_behind_need_not_leave_any() -> None:
    scheduler = make(20, max_model_len=16, max_num_seqs=16, lane_limits=LIMITED)
    share = scheduler._share
    add(scheduler, "i0", 1)
    step(scheduler)
    add(scheduler, "b0", 1, "batch")
    add(scheduler, "i1", 1)
    assert scheduler._lanes.headroom("batch") == 5, "nobody above is ahead"
    share.charge("interactive", "", 1.0, 1000)
    assert scheduler._lanes.headroom("batch") == 0
    drain(scheduler)


# Who gives way


def crowded(**changes: Any) -> Scheduler:
    """Ten blocks of 4, nine of them held by two batch sequences."""
    scheduler = make(10, max_model_len=40, max_num_batched_tokens=40, **changes)
    add(scheduler, "b0", 16, "batch", tenant="x", max_tokens=24)
    add(scheduler, "b1", 16, "batch", tenant="y", max_tokens=24)
    step(scheduler)
    step(scheduler)
    assert scheduler.num_free_blocks == 0
    return scheduler


def test_the_latest_of_a_lane_below_gives_way_to_one_that_waits() -> None:
    scheduler = crowded()
    add(scheduler, "i", 8, max_tokens=2)
    output = scheduler.schedule()
    assert output.preempted == [], "it was away and comes back level"
    execute(scheduler, output)
    output = scheduler.schedule()
    assert [s.request_id for s in output.preempted] == ["b1"]
    assert [entry[0] for entry in plan(output)] == ["b0", "i"]
    execute(scheduler, output)
    answers = drain(scheduler)
    for name, said in (("b0", 20), ("b1", 21), ("i", 1)):
        assert sum(len(o.token_ids) for o in answers if o.request_id == name) == said


def test_nobody_gives_way_to_a_lane_that_is_ahead() -> None:
    scheduler = crowded()
    add(scheduler, "i", 8, max_tokens=2)
    scheduler._share.charge("interactive", "", 1.0, 16 * 10_000)
    step(scheduler)
    output = scheduler.schedule()
    assert output.preempted == [] and [entry[0] for entry in plan(output)] == ["b0", "b1"]


def test_nobody_gives_way_to_a_lane_below_nor_to_an_equal() -> None:
    scheduler = make(10, max_model_len=40, max_num_batched_tokens=40)
    add(scheduler, "i0", 16, max_tokens=3)
    add(scheduler, "i1", 16, max_tokens=3)
    step(scheduler)
    for lane in LANES:
        add(scheduler, lane, 12, lane, tenant="z")
    output = scheduler.schedule()
    assert output.preempted == []
    execute(scheduler, output)
    drain(scheduler)


def test_nobody_gives_way_in_vain() -> None:
    scheduler = make(10, max_model_len=40, max_num_batched_tokens=40)
    add(scheduler, "i", 28, max_tokens=12)
    add(scheduler, "b", 4, "batch", max_tokens=12)
    step(scheduler)
    add(scheduler, "big", 32, tenant="z", max_tokens=2)
    for _ in range(3):
        output = scheduler.schedule()
        assert output.preempted == []
        execute(scheduler, output)
    drain(scheduler)


def test_one_that_grows_takes_from_the_lane_that_is_ahead_most() -> None:
    scheduler = make(12, max_model_len=40, max_num_batched_tokens=40)
    add(scheduler, "i", 11, max_tokens=20)
    add(scheduler, "a", 11, "agentic", max_tokens=20)
    add(scheduler, "b", 11, "batch", max_tokens=20)
    while not (output := scheduler.schedule()).preempted:
        execute(scheduler, output)
    assert [s.request_id for s in output.preempted] == ["b"]
    execute(scheduler, output)
    drain(scheduler)


# Nobody waits for ever


@pytest.mark.parametrize("lane", ["agentic", "batch"])
def test_a_flood_of_the_lane_above_does_not_starve_a_lane(lane: Lane) -> None:
    """With all that a lane's limits keep from it, and a request that needs most of the blocks."""
    tight = {lane: LaneLimits(max_share=0.25, kv_headroom=0.5)}
    scheduler = make(16, max_num_batched_tokens=16, max_num_seqs=4, lane_limits=tight)
    add(scheduler, "poor", 40, lane, tenant="poor", max_tokens=8)
    ended, number = False, 0
    for _ in range(3000):
        while scheduler.lanes()["interactive"].num_waiting < 3:
            add(scheduler, f"i{number}", 12, tenant=f"t{number % 3}", max_tokens=4)
            number += 1
        ended = any(o.request_id == "poor" and o.finished for o in step(scheduler)) or ended
        if ended:
            break
    assert ended, f"{number} others were served meanwhile"
    # Its 40 + 8 tokens weigh as much as 16 times as many of the lane above, of which each has 20.
    assert number < 60 * 16 / LANE_WEIGHTS[lane]


@pytest.mark.parametrize("seed", range(3))
def test_two_that_always_wait_are_served_alike_within_the_papers_bound(seed: int) -> None:
    """Tenants of one lane, of two weights, one with long prompts and one with long answers; others
    come and go, and blocks are short. Service is what was computed of prompts, once, and twice
    what was said."""
    rng = random.Random(seed)
    scheduler = make(24, max_num_batched_tokens=16, max_num_seqs=6, enabled=False)
    weights = {"prompts": 1.0, "answers": 2.0, "visitor": 1.0}
    service: Counter[str] = Counter()
    lead: list[float] = []
    number = 0

    def ask(tenant: str) -> None:
        nonlocal number
        number += 1
        prompt, said = (40, 4) if tenant == "prompts" else (4, 30)
        lengths = rng.randint(1, prompt), rng.randint(1, said)
        name = f"{tenant}-{number}"
        add(scheduler, name, lengths[0], "batch", tenant, weight=weights[tenant],
            max_tokens=lengths[1])  # fmt: skip

    for _ in range(3000):
        waiting = Counter(seq.tenant for seq in scheduler._waiting)
        for tenant in ("prompts", "answers"):
            for _ in range(7 - waiting[tenant]):  # more than run at once
                ask(tenant)
        if rng.random() < 0.02:
            ask("visitor")
        output = scheduler.schedule()
        for entry in output.scheduled:
            if entry.seq.num_preemptions == 0 and entry.start < entry.seq.num_prompt_tokens:
                service[entry.seq.tenant] += entry.num_new_tokens
        for answer in execute(scheduler, output):
            service[answer.request_id.partition("-")[0]] += 2 * len(answer.token_ids)
        lead.append(service["prompts"] / 1.0 - service["answers"] / 2.0)
    bound = 2 * max(40, 2 * 24 * 4)
    assert max(lead) - min(lead) <= bound
    assert service["prompts"] > 10 * bound, "for long enough to tell"


@pytest.mark.parametrize("seed", range(5))
def test_no_flood_of_other_tenants_and_lanes_starves_a_tenant(seed: int) -> None:
    """Others always wait, in all lanes, with more weight, shorter prompts and pauses."""
    rng = random.Random(seed)
    tight = {"batch": LaneLimits(max_share=0.25, kv_headroom=0.5)}
    scheduler = make(16, max_num_batched_tokens=16, max_num_seqs=4, lane_limits=tight)
    names: list[str] = []
    for steps in range(20_000):
        if steps == 200:
            add(scheduler, "poor", 40, "batch", tenant="poor", weight=0.25, max_tokens=8)
        while scheduler.num_waiting < 8:
            names.append(f"f{len(names)}")
            lane = rng.choice(LANES)
            add(scheduler, names[-1], rng.randint(1, 20), lane, rng.choice("ab"), max_tokens=4)
        if rng.random() < 0.2:
            name = rng.choice(names[-20:])
            (scheduler.pause if rng.random() < 0.5 else scheduler.resume)(name)
        if steps % 50 == 0:
            for name in names[-200:]:
                scheduler.resume(name)
        if any(o.request_id == "poor" and o.finished for o in step(scheduler)):
            return
    raise AssertionError(f"{len(names)} others were served meanwhile")


def test_a_flood_of_batch_does_not_move_who_is_interactive() -> None:
    """Steps to the first token with a thousand batch requests waiting, and with none."""

    def steps_to_answer(num_batch: int) -> list[int]:
        limits = {"batch": LaneLimits(max_share=0.5, kv_headroom=0.2)}
        scheduler = make(
            400, max_num_batched_tokens=32, max_num_seqs=16, max_waiting=2000, lane_limits=limits
        )
        for number in range(num_batch):
            add(scheduler, f"b{number}", 30, "batch", tenant=f"t{number % 7}", max_tokens=20)
        for _ in range(50):
            step(scheduler)
        took = []
        for number in range(20):
            add(scheduler, f"i{number}", 16, tenant="chat", max_tokens=1)
            for steps in range(1, 10):
                if any(o.request_id == f"i{number}" for o in step(scheduler)):
                    took.append(steps)
                    break
        return took

    assert steps_to_answer(0) == [1] * 20
    assert max(steps_to_answer(1000)) <= 2


# What is told


def test_status_tells_what_waits_and_how_fast_it_goes() -> None:
    clock = Clock()
    scheduler = make(clock=clock, max_num_batched_tokens=16)
    assert scheduler.lanes() == dict.fromkeys(LANES, LaneStatus(max_queued=100))
    add(scheduler, "a", 40, "batch", max_tokens=2)
    add(scheduler, "b", 20, "batch", n=2, max_tokens=2)
    assert scheduler.lanes()["batch"] == LaneStatus(
        num_waiting=3, waiting_tokens=60, waiting_pairs=1000, num_queued=2, max_queued=100
    )
    for left in (44, 28):
        output = scheduler.schedule()
        clock.now += 0.5
        execute(scheduler, output)
        batch = scheduler.lanes()["batch"]
        assert batch.waiting_tokens == left
        assert batch.prefill_tokens_per_s == pytest.approx(32.0)
    assert scheduler.lanes()["interactive"] == LaneStatus(max_queued=100)
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        clock.now += 0.1
        execute(scheduler, output)
    batch = scheduler.lanes()["batch"]
    assert batch.waiting_tokens == batch.num_waiting == batch.num_running == 0
    assert batch.prefill_tokens_per_s == pytest.approx(32.0), "nobody waited since"


def test_what_was_cached_when_a_request_came_does_not_count_as_waiting() -> None:
    scheduler = make()
    scheduler.add(request("first", [7] * 41))
    assert waiting(scheduler) == (41, 41**2 / 2), "nothing is cached yet"
    drain(scheduler)
    scheduler.add(request("again", [7] * 41))
    assert waiting(scheduler) == (1, (41**2 - 40**2) / 2)
    scheduler.add(request("longer", [7] * 61))
    assert waiting(scheduler)[0] == 1 + 21
    scheduler.abort("again")
    scheduler.abort("longer")
    assert waiting(scheduler) == (0, 0.0)


def waiting(scheduler: Scheduler) -> tuple[int, float]:
    lane = scheduler.lanes()["interactive"]
    return lane.waiting_tokens, lane.waiting_pairs


def test_preempted_ones_wait_in_their_lane() -> None:
    scheduler = crowded()
    add(scheduler, "i", 8, max_tokens=2)
    step(scheduler)
    step(scheduler)
    lanes = scheduler.lanes()
    victim = sequence_of(scheduler, "b1")
    assert victim.status is SequenceStatus.WAITING
    assert (lanes["batch"].num_running, lanes["batch"].num_waiting) == (1, 1)
    assert victim.num_found == 16, "nobody has taken its blocks yet"
    assert lanes["batch"].waiting_tokens == victim.num_tokens - victim.num_found
